/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* The part of NVML's binary interface that the simulation answers: codes and structures that
 * callers compiled against the real library expect. */
#ifndef FAKENVML_ABI_H
#define FAKENVML_ABI_H

#include <stdint.h>

typedef int nvmlReturn_t;
typedef struct device_handle *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
};

enum {
    NVML_VALUE_TYPE_DOUBLE = 0,
    NVML_VALUE_TYPE_UNSIGNED_INT = 1,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
};

/* Version word of a versioned structure: its size, and the version in the top byte. */
#define STRUCT_VERSION(type, version) ((uint32_t)(sizeof(type) | ((uint32_t)(version) << 24)))

typedef struct { uint64_t total, free, used; } nvmlMemory_t;
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { uint64_t total, free, used; } nvmlBAR1Memory_t;
typedef struct { uint32_t gpu, memory; } nvmlUtilization_t;
typedef struct { uint32_t pid; uint64_t used; } nvmlProcessInfo_v1_t;
typedef struct {
    uint32_t pid;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
} nvmlProcessInfo_t;
typedef struct {
    uint32_t pid;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
    uint64_t used_protected;
} nvmlProcessDetail_v1_t;
typedef struct {
    uint32_t version, mode, entries;
    nvmlProcessDetail_v1_t *array;
} nvmlProcessDetailList_t;
typedef struct {
    uint32_t pid;
    uint64_t timestamp;
    uint32_t sm, memory, encoder, decoder;
} nvmlProcessUtilizationSample_t;
typedef struct {
    uint64_t timestamp;
    uint32_t pid, sm, memory, encoder, decoder, jpeg, ofa;
} nvmlProcessUtilizationInfo_v1_t;
typedef struct {
    uint32_t version, entries;
    uint64_t last_seen;
    nvmlProcessUtilizationInfo_v1_t *array;
} nvmlProcessesUtilizationInfo_t;
typedef struct {
    char bus_id_legacy[16];
    uint32_t domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;
typedef struct { uint32_t version, sensor; int32_t temperature; } nvmlTemperature_t;
typedef union { double d; uint32_t ui; uint64_t ull; } nvmlValue_t;
typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    uint32_t value_type;
    nvmlReturn_t result;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct { uint64_t timestamp; nvmlValue_t value; } nvmlSample_t;
typedef struct {
    nvmlDevice_t device;
    uint64_t type, data;
    uint32_t gpu_instance, compute_instance;
} nvmlEventData_t;
typedef struct { uint64_t reference_time, violation_time; } nvmlViolationTime_t;
typedef struct { uint32_t max, high, partial, low, none; } nvmlRowRemapperHistogramValues_t;
typedef struct { uint32_t version, type; char text[41]; } nvmlUUID_t;

_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "layout");
_Static_assert(sizeof(nvmlProcessInfo_v1_t) == 16, "layout");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "layout");
_Static_assert(sizeof(nvmlProcessDetail_v1_t) == 32, "layout");
_Static_assert(sizeof(nvmlProcessDetailList_t) == 24, "layout");
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "layout");
_Static_assert(sizeof(nvmlProcessUtilizationInfo_v1_t) == 40, "layout");
_Static_assert(sizeof(nvmlProcessesUtilizationInfo_t) == 24, "layout");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "layout");
_Static_assert(sizeof(nvmlTemperature_t) == 12, "layout");
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "layout");
_Static_assert(sizeof(nvmlSample_t) == 16, "layout");
_Static_assert(sizeof(nvmlEventData_t) == 32, "layout");

#endif
