/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* Process lists and the share of each process, as far as the caller may see them. */
#define _GNU_SOURCE
#include "fake.h"

#include <math.h>

#define NOT_AVAILABLE 0xffffffffffffffffULL
#define NO_INSTANCE 0xffffffffu
#define MAX_ENTRIES (MAX_CONTEXTS * 4)

struct entry { uint32_t pid; uint64_t memory_bytes; double busy, memory_busy; };

static uint32_t pid_shown(const struct fake_context *context)
{
    return state()->process_mode == PROCESSES_HOST ? context->host_pid : context->pid;
}

/* Drivers since 535 may list a process of a container more than once; how often can be set. */
static uint32_t collect(uint32_t gpu, uint32_t kind, struct entry *entries)
{
    uint32_t count = 0, copies = 1 + state()->duplicate_processes;
    struct fake_context context;
    for (uint32_t slot = 0; slot < contexts_limit(); slot++) {
        if (state()->contexts[slot].gpu != gpu || !context_alive(slot, &context)) continue;
        if (!(context.kind & kind) || !context_visible(&context)) continue;
        struct entry entry = {.pid = pid_shown(&context), .memory_bytes = context.memory_bytes,
                              .busy = context_busy(&context, now_ns())};
        entry.memory_busy = entry.busy > 0 ? context.memory_utilization : 0.0;
        if (state()->process_mode == PROCESSES_NAMESPACE_NO_MEMORY) entry.memory_bytes = NOT_AVAILABLE;
        for (uint32_t copy = 0; copy < copies && count < MAX_ENTRIES; copy++) entries[count++] = entry;
    }
    return count;
}

/* Both calls of the protocol: tell the number where there is too little room. */
static nvmlReturn_t enough_room(uint32_t found, uint32_t *count)
{
    if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    uint32_t room = *count;
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t list(nvmlDevice_t device, uint32_t kind, uint32_t *count,
                         nvmlProcessInfo_t *processes)
{
    struct entry entries[MAX_ENTRIES];
    uint32_t found = collect(device->gpu, kind, entries);
    TRY(enough_room(found, count));
    if (found > 0 && processes == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < found; i++)
        processes[i] = (nvmlProcessInfo_t){.pid = entries[i].pid, .used = entries[i].memory_bytes,
                                           .gpu_instance = NO_INSTANCE,
                                           .compute_instance = NO_INSTANCE};
    return NVML_SUCCESS;
}

static nvmlReturn_t list_v1(nvmlDevice_t device, uint32_t kind, uint32_t *count,
                            nvmlProcessInfo_v1_t *processes)
{
    struct entry entries[MAX_ENTRIES];
    uint32_t found = collect(device->gpu, kind, entries);
    TRY(enough_room(found, count));
    if (found > 0 && processes == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < found; i++)
        processes[i] = (nvmlProcessInfo_v1_t){.pid = entries[i].pid, .used = entries[i].memory_bytes};
    return NVML_SUCCESS;
}

#define LIST_CALL(name, kind, type, function)                                                    \
    DEVICE_CALL(name, (nvmlDevice_t device, uint32_t * count, type * processes),                 \
                (device, count, processes))                                                      \
    {                                                                                            \
        return function(device, kind, count, processes);                                         \
    }

LIST_CALL(nvmlDeviceGetComputeRunningProcesses, CONTEXT_COMPUTE, nvmlProcessInfo_v1_t, list_v1)
LIST_CALL(nvmlDeviceGetComputeRunningProcesses_v2, CONTEXT_COMPUTE, nvmlProcessInfo_t, list)
LIST_CALL(nvmlDeviceGetComputeRunningProcesses_v3, CONTEXT_COMPUTE, nvmlProcessInfo_t, list)
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses, CONTEXT_GRAPHICS, nvmlProcessInfo_v1_t, list_v1)
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses_v2, CONTEXT_GRAPHICS, nvmlProcessInfo_t, list)
LIST_CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, CONTEXT_GRAPHICS, nvmlProcessInfo_t, list)
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses, CONTEXT_MPS, nvmlProcessInfo_v1_t, list_v1)
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v2, CONTEXT_MPS, nvmlProcessInfo_t, list)
LIST_CALL(nvmlDeviceGetMPSComputeRunningProcesses_v3, CONTEXT_MPS, nvmlProcessInfo_t, list)

/* Modes: 0 compute, 1 graphics, 2 MPS. */
DEVICE_CALL(nvmlDeviceGetRunningProcessDetailList,
            (nvmlDevice_t device, nvmlProcessDetailList_t *details), (device, details))
{
    struct entry entries[MAX_ENTRIES];
    if (details == NULL || details->mode > 2) return NVML_ERROR_INVALID_ARGUMENT;
    if (details->version != STRUCT_VERSION(nvmlProcessDetailList_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    uint32_t found = collect(device->gpu, 1u << details->mode, entries);
    TRY(enough_room(found, &details->entries));
    if (found > 0 && details->array == NULL) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < found; i++)
        details->array[i] = (nvmlProcessDetail_v1_t){
            .pid = entries[i].pid, .used = entries[i].memory_bytes, .gpu_instance = NO_INSTANCE,
            .compute_instance = NO_INSTANCE}; /* no confidential computing: none protected */
    return NVML_SUCCESS;
}

static uint32_t percent(double share) { return (uint32_t)lround(share * 100.0); }

/* No process: success with none, which nvidia-ml-py turns into an exception of value 0. */
DEVICE_CALL(nvmlDeviceGetProcessUtilization,
            (nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, uint32_t *count,
             uint64_t last_seen),
            (device, samples, count, last_seen))
{
    struct entry entries[MAX_ENTRIES];
    uint32_t found = collect(device->gpu, ~0u, entries);
    TRY(enough_room(found, count));
    if (found > 0 && samples == NULL) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < found; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){
            .pid = entries[i].pid, .timestamp = now_ns() / 1000, .sm = percent(entries[i].busy),
            .memory = percent(entries[i].memory_busy)};
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetProcessesUtilizationInfo,
            (nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info), (device, info))
{
    struct entry entries[MAX_ENTRIES];
    if (info == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != STRUCT_VERSION(nvmlProcessesUtilizationInfo_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    uint32_t found = collect(device->gpu, ~0u, entries);
    TRY(enough_room(found, &info->entries));
    if (found > 0 && info->array == NULL) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < found; i++)
        info->array[i] = (nvmlProcessUtilizationInfo_v1_t){
            .timestamp = now_ns() / 1000, .pid = entries[i].pid, .sm = percent(entries[i].busy),
            .memory = percent(entries[i].memory_busy)};
    return NVML_SUCCESS;
}
