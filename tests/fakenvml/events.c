/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* Event sets. Events stand in a ring of the state file; each set remembers what it has seen. */
#define _GNU_SOURCE
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

#define SUPPORTED_EVENTS 0x1bULL /* single- and double-bit ECC, XID, clock */
#define RECHECK_NS 1000000000ULL

struct event_set {
    pthread_mutex_t lock;
    uint64_t types[MAX_GPUS]; /* registered event types of each GPU */
    uint64_t seen;            /* number of the last event looked at */
};

SYSTEM_CALL(nvmlEventSetCreate, (nvmlEventSet_t * set), (set))
{
    if (set == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    if (*set == NULL) return NVML_ERROR_MEMORY;
    pthread_mutex_init(&(*set)->lock, NULL);
    (*set)->seen = __atomic_load_n(&state()->event_sequence, __ATOMIC_ACQUIRE);
    return NVML_SUCCESS;
}

SYSTEM_CALL(nvmlEventSetFree, (nvmlEventSet_t set), (set))
{
    if (set == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetSupportedEventTypes, (nvmlDevice_t device, uint64_t *types),
            (device, types))
{
    if (types == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *types = SUPPORTED_EVENTS;
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceRegisterEvents, (nvmlDevice_t device, uint64_t types, nvmlEventSet_t set),
            (device, types, set))
{
    if (set == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&set->lock);
    set->types[device->gpu] |= types;
    pthread_mutex_unlock(&set->lock);
    return NVML_SUCCESS;
}

/* The next event that the set registered for. Events that the ring has overwritten are lost, as
 * they are with the driver. */
static bool next_event(nvmlEventSet_t set, nvmlEventData_t *data, bool with_instances)
{
    uint64_t newest = __atomic_load_n(&state()->event_sequence, __ATOMIC_ACQUIRE);
    if (newest < set->seen) set->seen = 0; /* the state was reset */
    if (newest > set->seen + MAX_EVENTS) set->seen = newest - MAX_EVENTS;
    while (set->seen < newest) {
        const struct fake_event *event = &state()->events[set->seen++ % MAX_EVENTS];
        if (event->gpu >= MAX_GPUS || !(set->types[event->gpu] & event->type)) continue;
        if (visible_index(event->gpu) < 0) continue;
        data->device = visible_device((uint32_t)visible_index(event->gpu));
        data->type = event->type;
        data->data = event->data;
        if (with_instances) data->gpu_instance = event->gpu_instance;
        if (with_instances) data->compute_instance = event->compute_instance;
        return true;
    }
    return false;
}

static bool take_event(nvmlEventSet_t set, nvmlEventData_t *data, bool with_instances)
{
    pthread_mutex_lock(&set->lock);
    bool taken = next_event(set, data, with_instances);
    pthread_mutex_unlock(&set->lock);
    return taken;
}

static nvmlReturn_t wait_for_event(nvmlEventSet_t set, nvmlEventData_t *data, uint32_t timeout_ms,
                                   bool with_instances)
{
    if (set == NULL || data == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    uint64_t end = now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        uint32_t change = __atomic_load_n(&state()->change, __ATOMIC_ACQUIRE);
        if (take_event(set, data, with_instances)) return NVML_SUCCESS;
        uint64_t now = now_ns();
        if (now >= end) return NVML_ERROR_TIMEOUT;
        wait_for_change(change, end - now < RECHECK_NS ? end - now : RECHECK_NS);
    }
}

SYSTEM_CALL(nvmlEventSetWait_v2, (nvmlEventSet_t set, nvmlEventData_t *data, uint32_t timeout_ms),
            (set, data, timeout_ms))
{
    return wait_for_event(set, data, timeout_ms, true);
}

/* The older structure ends before the instances. */
SYSTEM_CALL(nvmlEventSetWait, (nvmlEventSet_t set, nvmlEventData_t *data, uint32_t timeout_ms),
            (set, data, timeout_ms))
{
    return wait_for_event(set, data, timeout_ms, false);
}
