/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* System calls, enumeration, identity and the simple readings of a device. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

/* ---- system ---- */

EXPORT const char *nvmlErrorString(nvmlReturn_t code)
{
    static const char *const texts[] = {
        [0] = "Success", [1] = "Uninitialized", [2] = "Invalid Argument", [3] = "Not Supported",
        [4] = "Insufficient Permissions", [5] = "Already Initialized", [6] = "Not Found",
        [7] = "Insufficient Size", [8] = "Insufficient External Power",
        [9] = "Driver Not Loaded", [10] = "Timeout", [11] = "Interrupt Request Issue",
        [12] = "NVML Shared Library Not Found", [13] = "Function Not Found",
        [14] = "Corrupted infoROM", [15] = "GPU is lost", [16] = "GPU requires reset",
        [17] = "Operating System Error", [18] = "Driver/library version mismatch",
        [19] = "In use by another client", [20] = "Insufficient Memory", [21] = "No data",
        [22] = "vGPU ECC not supported", [23] = "Insufficient Resources",
        [24] = "Frequency not supported", [25] = "Argument version mismatch",
        [26] = "Deprecated", [27] = "Not ready", [28] = "GPU not found", [29] = "Invalid state",
        [30] = "Reset type not supported",
    };
    if (code >= 0 && (size_t)code < sizeof texts / sizeof *texts && texts[code]) return texts[code];
    return "Unknown Error";
}

SYSTEM_CALL(nvmlSystemGetDriverVersion, (char *version, uint32_t length), (version, length))
{
    return copy_text(version, length, state()->driver_version);
}

SYSTEM_CALL(nvmlSystemGetNVMLVersion, (char *version, uint32_t length), (version, length))
{
    return copy_text(version, length, state()->nvml_version);
}

SYSTEM_CALL(nvmlSystemGetCudaDriverVersion, (int *version), (version))
{
    if (version == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)state()->cuda_version;
    return NVML_SUCCESS;
}

SYSTEM_CALL(nvmlSystemGetCudaDriverVersion_v2, (int *version), (version))
{
    return answer_nvmlSystemGetCudaDriverVersion(version);
}

SYSTEM_CALL(nvmlSystemGetProcessName, (uint32_t pid, char *name, uint32_t length),
            (pid, name, length))
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) return NVML_ERROR_NOT_FOUND;
    char text[64] = "";
    if (fgets(text, sizeof text, file) != NULL) text[strcspn(text, "\n")] = 0;
    fclose(file);
    return copy_text(name, length, text);
}

/* ---- enumeration ---- */

SYSTEM_CALL(nvmlDeviceGetCount, (uint32_t *count), (count))
{
    if (count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *count = visible_count();
    return NVML_SUCCESS;
}

SYSTEM_CALL(nvmlDeviceGetCount_v2, (uint32_t *count), (count))
{
    return answer_nvmlDeviceGetCount(count);
}

/* A GPU that is off the bus has no handle to give either. */
static nvmlReturn_t give_handle(int function, uint32_t index, nvmlDevice_t *device)
{
    if (device == NULL || index >= visible_count()) return NVML_ERROR_INVALID_ARGUMENT;
    nvmlDevice_t found = visible_device(index);
    TRY(apply_faults(function, (int)found->gpu));
    if (!gpu_of(found)->present) return NVML_ERROR_GPU_IS_LOST;
    *device = found;
    return NVML_SUCCESS;
}

SYSTEM_CALL(nvmlDeviceGetHandleByIndex, (uint32_t index, nvmlDevice_t *device), (index, device))
{
    return give_handle(FN_nvmlDeviceGetHandleByIndex, index, device);
}

SYSTEM_CALL(nvmlDeviceGetHandleByIndex_v2, (uint32_t index, nvmlDevice_t *device), (index, device))
{
    return give_handle(FN_nvmlDeviceGetHandleByIndex_v2, index, device);
}

static nvmlReturn_t handle_by_uuid(int function, const char *uuid, nvmlDevice_t *device)
{
    if (uuid == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < visible_count(); i++)
        if (strcmp(gpu_of(visible_device(i))->uuid, uuid) == 0) return give_handle(function, i, device);
    return NVML_ERROR_NOT_FOUND;
}

SYSTEM_CALL(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), (uuid, device))
{
    return handle_by_uuid(FN_nvmlDeviceGetHandleByUUID, uuid, device);
}

SYSTEM_CALL(nvmlDeviceGetHandleByUUIDV, (const nvmlUUID_t *uuid, nvmlDevice_t *device),
            (uuid, device))
{
    if (uuid == NULL || uuid->type != 1 /* text */) return NVML_ERROR_INVALID_ARGUMENT;
    return handle_by_uuid(FN_nvmlDeviceGetHandleByUUIDV, uuid->text, device);
}

SYSTEM_CALL(nvmlDeviceGetHandleBySerial, (const char *serial, nvmlDevice_t *device),
            (serial, device))
{
    if (serial == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < visible_count(); i++)
        if (strcmp(gpu_of(visible_device(i))->serial, serial) == 0)
            return give_handle(FN_nvmlDeviceGetHandleBySerial, i, device);
    return NVML_ERROR_NOT_FOUND;
}

/* Accepts 4 or 8 digits of domain, as the real one does. */
static nvmlReturn_t handle_by_pci(int function, const char *bus_id, nvmlDevice_t *device)
{
    unsigned domain = 0, bus = 0, slot = 0;
    if (bus_id == NULL || sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < visible_count(); i++) {
        const struct fake_gpu *gpu = gpu_of(visible_device(i));
        if (gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == slot)
            return give_handle(function, i, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

SYSTEM_CALL(nvmlDeviceGetHandleByPciBusId, (const char *bus_id, nvmlDevice_t *device),
            (bus_id, device))
{
    return handle_by_pci(FN_nvmlDeviceGetHandleByPciBusId, bus_id, device);
}

SYSTEM_CALL(nvmlDeviceGetHandleByPciBusId_v2, (const char *bus_id, nvmlDevice_t *device),
            (bus_id, device))
{
    return handle_by_pci(FN_nvmlDeviceGetHandleByPciBusId_v2, bus_id, device);
}

/* ---- identity ---- */

static nvmlReturn_t put(uint32_t *target, uint32_t value)
{
    if (target == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *target = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t put_pair(uint32_t *first, uint32_t *second, uint32_t a, uint32_t b)
{
    TRY(put(first, a));
    return put(second, b);
}

DEVICE_CALL(nvmlDeviceGetIndex, (nvmlDevice_t device, uint32_t *index), (device, index))
{
    return put(index, (uint32_t)visible_index(device->gpu));
}

DEVICE_CALL(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, uint32_t *minor), (device, minor))
{
    return put(minor, gpu_of(device)->minor);
}

DEVICE_CALL(nvmlDeviceGetName, (nvmlDevice_t device, char *name, uint32_t length),
            (device, name, length))
{
    return copy_text(name, length, gpu_of(device)->name);
}

DEVICE_CALL(nvmlDeviceGetUUID, (nvmlDevice_t device, char *uuid, uint32_t length),
            (device, uuid, length))
{
    return copy_text(uuid, length, gpu_of(device)->uuid);
}

DEVICE_CALL(nvmlDeviceGetSerial, (nvmlDevice_t device, char *serial, uint32_t length),
            (device, serial, length))
{
    return copy_text(serial, length, gpu_of(device)->serial);
}

static nvmlReturn_t pci_info(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    if (info == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    const struct fake_gpu *gpu = gpu_of(device);
    memset(info, 0, sizeof *info);
    info->domain = gpu->pci_domain;
    info->bus = gpu->pci_bus;
    info->device = gpu->pci_device;
    info->pci_device_id = gpu->pci_device_id;
    info->pci_subsystem_id = gpu->pci_subsystem_id;
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0",
             gpu->pci_domain & 0xffff, gpu->pci_bus & 0xff, gpu->pci_device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus,
             gpu->pci_device);
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetPciInfo, (nvmlDevice_t device, nvmlPciInfo_t *info), (device, info))
{
    return pci_info(device, info);
}

DEVICE_CALL(nvmlDeviceGetPciInfo_v2, (nvmlDevice_t device, nvmlPciInfo_t *info), (device, info))
{
    return pci_info(device, info);
}

DEVICE_CALL(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *info), (device, info))
{
    return pci_info(device, info);
}

DEVICE_CALL(nvmlDeviceGetBrand, (nvmlDevice_t device, uint32_t *brand), (device, brand))
{
    return put(brand, 14); /* NVIDIA */
}

DEVICE_CALL(nvmlDeviceGetArchitecture, (nvmlDevice_t device, uint32_t *architecture),
            (device, architecture))
{
    return put(architecture, 7); /* Ampere */
}

DEVICE_CALL(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor),
            (device, major, minor))
{
    return put_pair((uint32_t *)major, (uint32_t *)minor, 8, 0);
}

DEVICE_CALL(nvmlDeviceGetNumGpuCores, (nvmlDevice_t device, uint32_t *cores), (device, cores))
{
    return put(cores, 6912);
}

DEVICE_CALL(nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, uint32_t *is_mig), (device, is_mig))
{
    return put(is_mig, 0);
}

DEVICE_CALL(nvmlDeviceGetMigMode, (nvmlDevice_t device, uint32_t *current, uint32_t *pending),
            (device, current, pending))
{
    TRY(read_u32(device, READING_mig_mode, current));
    return read_u32(device, READING_mig_mode, pending);
}

DEVICE_CALL(nvmlDeviceGetMaxMigDeviceCount, (nvmlDevice_t device, uint32_t *count),
            (device, count))
{
    return put(count, 7);
}

/* ---- memory ---- */

/* The first version has no word for driver-reserved memory: it counts it as used. */
DEVICE_CALL(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory), (device, memory))
{
    uint64_t reserved = 0;
    if (memory == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    TRY(read_u64(device, READING_memory_total_bytes, &memory->total));
    TRY(read_u64(device, READING_memory_free_bytes, &memory->free));
    TRY(read_u64(device, READING_memory_used_bytes, &memory->used));
    TRY(read_u64(device, READING_memory_reserved_bytes, &reserved));
    if (memory->used < (1ULL << 62)) memory->used += reserved; /* sentinels stay as they are */
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory),
            (device, memory))
{
    if (memory == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != STRUCT_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(read_u64(device, READING_memory_total_bytes, &memory->total));
    TRY(read_u64(device, READING_memory_reserved_bytes, &memory->reserved));
    TRY(read_u64(device, READING_memory_free_bytes, &memory->free));
    return read_u64(device, READING_memory_used_bytes, &memory->used);
}

DEVICE_CALL(nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t device, nvmlBAR1Memory_t *memory),
            (device, memory))
{
    if (memory == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    memory->total = 128ULL << 30;
    TRY(read_u64(device, READING_bar1_used_bytes, &memory->used));
    memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetMemoryBusWidth, (nvmlDevice_t device, uint32_t *bits), (device, bits))
{
    return put(bits, 5120);
}

/* ---- load ---- */

DEVICE_CALL(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *utilization),
            (device, utilization))
{
    if (utilization == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    TRY(read_u32(device, READING_gpu_utilization_percent, &utilization->gpu));
    return read_u32(device, READING_memory_utilization_percent, &utilization->memory);
}

DEVICE_CALL(nvmlDeviceGetEncoderUtilization,
            (nvmlDevice_t device, uint32_t *utilization, uint32_t *period_us),
            (device, utilization, period_us))
{
    TRY(put(period_us, 167000));
    return read_u32(device, READING_encoder_utilization_percent, utilization);
}

DEVICE_CALL(nvmlDeviceGetDecoderUtilization,
            (nvmlDevice_t device, uint32_t *utilization, uint32_t *period_us),
            (device, utilization, period_us))
{
    TRY(put(period_us, 167000));
    return read_u32(device, READING_decoder_utilization_percent, utilization);
}

DEVICE_CALL(nvmlDeviceGetSamples,
            (nvmlDevice_t device, uint32_t type, uint64_t last_seen, uint32_t *value_type,
             uint32_t *count, nvmlSample_t *samples),
            (device, type, last_seen, value_type, count, samples))
{
    static const enum reading readings[] = {
        READING_power_milliwatts, READING_gpu_utilization_percent,
        READING_memory_utilization_percent, READING_encoder_utilization_percent,
        READING_decoder_utilization_percent, READING_sm_clock_mhz, READING_memory_clock_mhz};
    /* One sample, of this moment. */
    if (value_type == NULL || count == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (type >= sizeof readings / sizeof *readings) return NVML_ERROR_NOT_SUPPORTED;
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (samples != NULL && *count < 1) return NVML_ERROR_INSUFFICIENT_SIZE;
    *count = 1;
    if (samples == NULL) return NVML_SUCCESS;
    samples[0].timestamp = now_ns() / 1000;
    samples[0].value.ull = 0;
    return read_u32(device, readings[type], &samples[0].value.ui);
}

/* ---- temperature, fan ---- */

DEVICE_CALL(nvmlDeviceGetTemperature, (nvmlDevice_t device, uint32_t sensor, uint32_t *value),
            (device, sensor, value))
{
    if (sensor != 0) return NVML_ERROR_INVALID_ARGUMENT;
    return read_u32(device, READING_temperature_celsius, value);
}

DEVICE_CALL(nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_t *temperature),
            (device, temperature))
{
    if (temperature == NULL || temperature->sensor != 0) return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != STRUCT_VERSION(nvmlTemperature_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return read_u32(device, READING_temperature_celsius, (uint32_t *)&temperature->temperature);
}

DEVICE_CALL(nvmlDeviceGetTemperatureThreshold,
            (nvmlDevice_t device, uint32_t threshold, uint32_t *value), (device, threshold, value))
{
    static const uint32_t celsius[] = {92, 89, 95, 85}; /* shutdown, slowdown, memory, GPU */
    if (threshold >= sizeof celsius / sizeof *celsius) return NVML_ERROR_NOT_SUPPORTED;
    return put(value, celsius[threshold]);
}

DEVICE_CALL(nvmlDeviceGetFanSpeed, (nvmlDevice_t device, uint32_t *percent), (device, percent))
{
    return read_u32(device, READING_fan_speed_percent, percent);
}

DEVICE_CALL(nvmlDeviceGetFanSpeed_v2, (nvmlDevice_t device, uint32_t fan, uint32_t *percent),
            (device, fan, percent))
{
    return fan == 0 ? read_u32(device, READING_fan_speed_percent, percent)
                    : NVML_ERROR_INVALID_ARGUMENT;
}

/* ---- power, clocks ---- */

DEVICE_CALL(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, uint32_t *milliwatts),
            (device, milliwatts))
{
    return read_u32(device, READING_power_milliwatts, milliwatts);
}

DEVICE_CALL(nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t device, uint32_t *milliwatts),
            (device, milliwatts))
{
    return read_u32(device, READING_power_limit_milliwatts, milliwatts);
}

DEVICE_CALL(nvmlDeviceGetPowerManagementLimit, (nvmlDevice_t device, uint32_t *milliwatts),
            (device, milliwatts))
{
    return read_u32(device, READING_power_limit_milliwatts, milliwatts);
}

DEVICE_CALL(nvmlDeviceGetPowerManagementDefaultLimit, (nvmlDevice_t device, uint32_t *milliwatts),
            (device, milliwatts))
{
    return put(milliwatts, gpu_of(device)->power_limit_milliwatts);
}

DEVICE_CALL(nvmlDeviceGetPowerManagementLimitConstraints,
            (nvmlDevice_t device, uint32_t *lowest, uint32_t *highest), (device, lowest, highest))
{
    return put_pair(lowest, highest, 100000, gpu_of(device)->power_limit_milliwatts);
}

DEVICE_CALL(nvmlDeviceGetPowerManagementMode, (nvmlDevice_t device, uint32_t *mode),
            (device, mode))
{
    return put(mode, 1);
}

DEVICE_CALL(nvmlDeviceGetTotalEnergyConsumption, (nvmlDevice_t device, uint64_t *millijoules),
            (device, millijoules))
{
    return read_u64(device, READING_energy_millijoules, millijoules);
}

/* Clock types: 0 graphics, 1 SM, 2 memory, 3 video. */
static const enum reading clock_readings[] = {READING_sm_clock_mhz, READING_sm_clock_mhz,
                                              READING_memory_clock_mhz, READING_video_clock_mhz};

DEVICE_CALL(nvmlDeviceGetClockInfo, (nvmlDevice_t device, uint32_t type, uint32_t *mhz),
            (device, type, mhz))
{
    if (type > 3) return NVML_ERROR_INVALID_ARGUMENT;
    return read_u32(device, clock_readings[type], mhz);
}

static nvmlReturn_t highest_clock(nvmlDevice_t device, uint32_t type, uint32_t *mhz)
{
    const struct fake_gpu *gpu = gpu_of(device);
    if (type > 3) return NVML_ERROR_INVALID_ARGUMENT;
    if (type == 2) return put(mhz, gpu->memory_clock_mhz);
    return put(mhz, type == 3 ? gpu->video_clock_mhz : gpu->sm_clock_max_mhz);
}

DEVICE_CALL(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, uint32_t type, uint32_t *mhz),
            (device, type, mhz))
{
    return highest_clock(device, type, mhz);
}

DEVICE_CALL(nvmlDeviceGetClock, (nvmlDevice_t device, uint32_t type, uint32_t id, uint32_t *mhz),
            (device, type, id, mhz))
{
    if (type > 3) return NVML_ERROR_INVALID_ARGUMENT;
    return id == 0 ? read_u32(device, clock_readings[type], mhz) : highest_clock(device, type, mhz);
}

DEVICE_CALL(nvmlDeviceGetPerformanceState, (nvmlDevice_t device, uint32_t *state_number),
            (device, state_number))
{
    return read_u32(device, READING_performance_state, state_number);
}

DEVICE_CALL(nvmlDeviceGetPowerState, (nvmlDevice_t device, uint32_t *state_number),
            (device, state_number))
{
    return read_u32(device, READING_performance_state, state_number);
}

/* The same reading under its older and its newer name. */
DEVICE_CALL(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t device, uint64_t *reasons),
            (device, reasons))
{
    return read_u64(device, READING_clocks_event_reasons, reasons);
}

DEVICE_CALL(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t device, uint64_t *reasons),
            (device, reasons))
{
    return read_u64(device, READING_clocks_event_reasons, reasons);
}

static nvmlReturn_t supported_reasons(uint64_t *reasons)
{
    if (reasons == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *reasons = 0x1ff;
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetSupportedClocksThrottleReasons, (nvmlDevice_t device, uint64_t *reasons),
            (device, reasons))
{
    return supported_reasons(reasons);
}

DEVICE_CALL(nvmlDeviceGetSupportedClocksEventReasons, (nvmlDevice_t device, uint64_t *reasons),
            (device, reasons))
{
    return supported_reasons(reasons);
}

DEVICE_CALL(nvmlDeviceGetViolationStatus,
            (nvmlDevice_t device, uint32_t policy, nvmlViolationTime_t *time),
            (device, policy, time))
{
    if (time == NULL || policy > 11) return NVML_ERROR_INVALID_ARGUMENT;
    time->reference_time = now_ns() / 1000;
    time->violation_time = 0;
    return NVML_SUCCESS;
}

/* ---- PCIe, NVLink ---- */

DEVICE_CALL(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, uint32_t counter, uint32_t *value),
            (device, counter, value))
{
    if (counter > 1) return NVML_ERROR_INVALID_ARGUMENT;
    return read_u32(device,
                    counter == 0 ? READING_pcie_tx_kilobytes_per_second
                                 : READING_pcie_rx_kilobytes_per_second,
                    value);
}

DEVICE_CALL(nvmlDeviceGetPcieReplayCounter, (nvmlDevice_t device, uint32_t *value),
            (device, value))
{
    return read_u32(device, READING_pcie_replays, value);
}

DEVICE_CALL(nvmlDeviceGetCurrPcieLinkGeneration, (nvmlDevice_t device, uint32_t *value),
            (device, value))
{
    return put(value, 4);
}

DEVICE_CALL(nvmlDeviceGetMaxPcieLinkGeneration, (nvmlDevice_t device, uint32_t *value),
            (device, value))
{
    return put(value, 4);
}

DEVICE_CALL(nvmlDeviceGetCurrPcieLinkWidth, (nvmlDevice_t device, uint32_t *value),
            (device, value))
{
    return put(value, 16);
}

DEVICE_CALL(nvmlDeviceGetMaxPcieLinkWidth, (nvmlDevice_t device, uint32_t *value), (device, value))
{
    return put(value, 16);
}

DEVICE_CALL(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, uint32_t link, uint32_t *active),
            (device, link, active))
{
    uint32_t links = 0;
    TRY(read_u32(device, READING_nvlink_links, &links));
    return link < links ? put(active, 1) : NVML_ERROR_INVALID_ARGUMENT;
}

/* ---- ECC, rows, pages ---- */

static nvmlReturn_t ecc_errors(nvmlDevice_t device, uint32_t type, uint32_t counter, uint64_t *count)
{
    static const enum reading readings[2][2] = {
        {READING_ecc_corrected_volatile, READING_ecc_corrected_aggregate},
        {READING_ecc_uncorrected_volatile, READING_ecc_uncorrected_aggregate}};
    if (type > 1 || counter > 1) return NVML_ERROR_INVALID_ARGUMENT;
    return read_u64(device, readings[type][counter], count);
}

DEVICE_CALL(nvmlDeviceGetTotalEccErrors,
            (nvmlDevice_t device, uint32_t type, uint32_t counter, uint64_t *count),
            (device, type, counter, count))
{
    return ecc_errors(device, type, counter, count);
}

/* All errors are those of the device's memory (location 2); the others count none. */
DEVICE_CALL(nvmlDeviceGetMemoryErrorCounter,
            (nvmlDevice_t device, uint32_t type, uint32_t counter, uint32_t location,
             uint64_t *count),
            (device, type, counter, location, count))
{
    TRY(ecc_errors(device, type, counter, count));
    if (location != 2) *count = 0;
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetEccMode, (nvmlDevice_t device, uint32_t *current, uint32_t *pending),
            (device, current, pending))
{
    return put_pair(current, pending, 1, 1);
}

DEVICE_CALL(nvmlDeviceGetRemappedRows,
            (nvmlDevice_t device, uint32_t *correctable, uint32_t *uncorrectable,
             uint32_t *pending, uint32_t *failure),
            (device, correctable, uncorrectable, pending, failure))
{
    TRY(read_u32(device, READING_remapped_rows_correctable, correctable));
    TRY(read_u32(device, READING_remapped_rows_uncorrectable, uncorrectable));
    TRY(read_u32(device, READING_remapped_rows_pending, pending));
    return read_u32(device, READING_remapped_rows_failure, failure);
}

DEVICE_CALL(nvmlDeviceGetRowRemapperHistogram,
            (nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values), (device, values))
{
    if (values == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    *values = (nvmlRowRemapperHistogramValues_t){.max = 640};
    return NVML_SUCCESS;
}

/* Two calls: the first tells the number. The addresses mean nothing. */
static nvmlReturn_t retired_pages(nvmlDevice_t device, uint32_t cause, uint32_t *count,
                                  uint64_t *addresses, uint64_t *timestamps)
{
    uint32_t pages = 0;
    if (count == NULL || cause > 1) return NVML_ERROR_INVALID_ARGUMENT;
    TRY(read_u32(device, cause == 0 ? READING_retired_pages_corrected
                                    : READING_retired_pages_uncorrected, &pages));
    uint32_t room = *count;
    *count = pages;
    if (pages > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (uint32_t i = 0; i < pages && addresses != NULL; i++) {
        addresses[i] = 0x1000u * (i + 1);
        if (timestamps != NULL) timestamps[i] = 1000000;
    }
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetRetiredPages,
            (nvmlDevice_t device, uint32_t cause, uint32_t *count, uint64_t *addresses),
            (device, cause, count, addresses))
{
    return retired_pages(device, cause, count, addresses, NULL);
}

DEVICE_CALL(nvmlDeviceGetRetiredPages_v2,
            (nvmlDevice_t device, uint32_t cause, uint32_t *count, uint64_t *addresses,
             uint64_t *timestamps),
            (device, cause, count, addresses, timestamps))
{
    return retired_pages(device, cause, count, addresses, timestamps);
}

DEVICE_CALL(nvmlDeviceGetRetiredPagesPendingStatus, (nvmlDevice_t device, uint32_t *pending),
            (device, pending))
{
    return read_u32(device, READING_retired_pages_pending, pending);
}

/* ---- modes ---- */

DEVICE_CALL(nvmlDeviceGetComputeMode, (nvmlDevice_t device, uint32_t *mode), (device, mode))
{
    return read_u32(device, READING_compute_mode, mode);
}

DEVICE_CALL(nvmlDeviceGetPersistenceMode, (nvmlDevice_t device, uint32_t *mode), (device, mode))
{
    return read_u32(device, READING_persistence_mode, mode);
}

DEVICE_CALL(nvmlDeviceGetDisplayActive, (nvmlDevice_t device, uint32_t *active), (device, active))
{
    return put(active, 0);
}

DEVICE_CALL(nvmlDeviceGetDisplayMode, (nvmlDevice_t device, uint32_t *mode), (device, mode))
{
    return put(mode, 0);
}
