/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* The layout of the state file as this library was compiled, for the test that compares it with
 * simgpu.py: lines "structure.member offset size", "structure size", "reading number name". */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <string.h>

struct member { const char *name; size_t offset, size; };

#define M(type, member) {#type "." #member, offsetof(struct type, member), \
                         sizeof(((struct type *)0)->member)}
#define S(type) {#type, 0, sizeof(struct type)}

static const struct member members[] = {
    S(fake_gpu), S(fake_context), S(fake_fault), S(fake_event), S(fake_call), S(fake_client),
    S(fake_state),
    M(fake_gpu, uuid), M(fake_gpu, name), M(fake_gpu, serial), M(fake_gpu, present),
    M(fake_gpu, minor), M(fake_gpu, pci_domain), M(fake_gpu, pci_bus), M(fake_gpu, pci_device),
    M(fake_gpu, pci_device_id), M(fake_gpu, pci_subsystem_id), M(fake_gpu, power_idle_milliwatts),
    M(fake_gpu, power_limit_milliwatts), M(fake_gpu, sm_clock_idle_mhz),
    M(fake_gpu, sm_clock_max_mhz), M(fake_gpu, memory_clock_mhz), M(fake_gpu, video_clock_mhz),
    M(fake_gpu, fold_sequence), M(fake_gpu, memory_total_bytes), M(fake_gpu, memory_reserved_bytes),
    M(fake_gpu, folded_at_ns), M(fake_gpu, energy_millijoules), M(fake_gpu, temperature_celsius),
    M(fake_gpu, nvlink_tx_kibibytes), M(fake_gpu, nvlink_rx_kibibytes), M(fake_gpu, mode),
    M(fake_gpu, value),
    M(fake_context, sequence), M(fake_context, used), M(fake_context, gpu), M(fake_context, kind),
    M(fake_context, pid), M(fake_context, host_pid), M(fake_context, pid_namespace),
    M(fake_context, started_at_ns), M(fake_context, memory_bytes), M(fake_context, busy_until_ns),
    M(fake_context, utilization), M(fake_context, memory_utilization),
    M(fake_context, power_watts),
    M(fake_fault, active), M(fake_fault, kind), M(fake_fault, scope), M(fake_fault, gpu),
    M(fake_fault, function_hash), M(fake_fault, argument), M(fake_fault, skip),
    M(fake_fault, limit), M(fake_fault, matched), M(fake_fault, serial),
    M(fake_fault, function),
    M(fake_event, sequence), M(fake_event, type), M(fake_event, data), M(fake_event, gpu),
    M(fake_event, gpu_instance), M(fake_event, compute_instance), M(fake_event, reserved),
    M(fake_call, hash), M(fake_call, count), M(fake_call, name),
    M(fake_client, pid_namespace), M(fake_client, pid), M(fake_client, inits),
    M(fake_client, started_at_ns), M(fake_client, last_call_at_ns), M(fake_client, calls), M(fake_client, inside),
    M(fake_client, max_inside), M(fake_client, threads), M(fake_client, reserved),
    M(fake_state, magic), M(fake_state, version), M(fake_state, size), M(fake_state, gpu_count),
    M(fake_state, init_error), M(fake_state, process_mode), M(fake_state, duplicate_processes),
    M(fake_state, faults_active), M(fake_state, change), M(fake_state, max_concurrency),
    M(fake_state, cuda_version), M(fake_state, epoch), M(fake_state, contexts_limit),
    M(fake_state, driver_version), M(fake_state, nvml_version), M(fake_state, event_sequence),
    M(fake_state, gpus), M(fake_state, contexts), M(fake_state, faults), M(fake_state, events),
    M(fake_state, calls), M(fake_state, clients),
};

#define READING_NAME(name) #name,
static const char *const readings[] = {READINGS(READING_NAME)};

/* Fill `text` with the layout. Returns the length it needs, without the final zero. */
EXPORT size_t fakenvml_layout(char *text, size_t room)
{
    char line[160];
    size_t used = 0;
    if (room > 0) text[0] = 0;
    for (size_t i = 0; i < sizeof members / sizeof *members + READING_COUNT; i++) {
        size_t reading = i - sizeof members / sizeof *members;
        if (i < sizeof members / sizeof *members)
            snprintf(line, sizeof line, "%s %zu %zu\n", members[i].name, members[i].offset,
                     members[i].size);
        else
            snprintf(line, sizeof line, "reading %zu %s\n", reading, readings[reading]);
        used += strlen(line);
        if (used < room) strcat(text, line);
    }
    return used;
}
