/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* nvmlDeviceGetFieldValues: many readings in one call, each with a result of its own. */
#define _GNU_SOURCE
#include "fake.h"

#include <time.h>

#define HIGHEST_FIELD 310

enum width { U32 = NVML_VALUE_TYPE_UNSIGNED_INT, U64 = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG };
struct field { uint32_t id; enum width width; int reading; uint64_t constant; };

#define READS(id, width, name) {id, width, READING_##name, 0}
#define IS(id, width, value) {id, width, -1, value}

static const struct field fields[] = {
    IS(1, U32, 1), /* ECC on */
    READS(3, U64, ecc_corrected_volatile),
    READS(4, U64, ecc_uncorrected_volatile),
    READS(5, U64, ecc_corrected_aggregate),
    READS(6, U64, ecc_uncorrected_aggregate),
    READS(29, U64, retired_pages_corrected),
    READS(30, U64, retired_pages_uncorrected),
    READS(31, U32, retired_pages_pending),
    READS(38, U64, nvlink_crc_errors),
    READS(45, U64, nvlink_crc_errors),
    READS(52, U64, nvlink_replay_errors),
    READS(59, U64, nvlink_recovery_errors),
    IS(74, U64, 0), /* nanoseconds held down by power, thermal, sync boost, board, ... */
    IS(75, U64, 0),
    IS(76, U64, 0),
    IS(77, U64, 0),
    IS(78, U64, 0),
    IS(79, U64, 0),
    READS(82, U32, memory_temperature_celsius),
    READS(83, U64, energy_millijoules),
    IS(90, U32, 25000), /* Mbit/s of each NVLink */
    READS(91, U32, nvlink_links),
    READS(94, U32, pcie_replays),
    READS(138, U64, nvlink_tx_kibibytes), /* data */
    READS(139, U64, nvlink_rx_kibibytes),
    READS(140, U64, nvlink_tx_kibibytes), /* raw */
    READS(141, U64, nvlink_rx_kibibytes),
    READS(142, U32, remapped_rows_correctable),
    READS(143, U32, remapped_rows_uncorrectable),
    READS(144, U32, remapped_rows_pending),
    READS(145, U32, remapped_rows_failure),
    IS(160, U64, 0),
    READS(161, U64, nvlink_replay_errors),
    READS(162, U64, nvlink_recovery_errors),
    READS(163, U64, nvlink_crc_errors),
    IS(164, U32, 25000),
    IS(165, U32, 1), /* link is up */
    READS(185, U32, power_milliwatts),
    READS(186, U32, power_milliwatts),
    IS(187, U32, 100000),
    READS(188, U32, power_limit_milliwatts),
    READS(189, U32, power_limit_milliwatts),
    READS(190, U32, power_limit_milliwatts),
    READS(191, U64, energy_millijoules),
    READS(192, U32, power_limit_milliwatts),
    READS(197, U64, pcie_tx_bytes),
    READS(198, U64, pcie_rx_bytes),
    IS(230, U32, 0), /* no recovery action */
    IS(269, U64, 0),
    IS(270, U64, 0),
    IS(271, U64, 0),
    READS(308, U32, temperature_celsius),
};

static const struct field *find(uint32_t id)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].id == id) return &fields[i];
    return NULL;
}

static void store(nvmlFieldValue_t *target, enum width width, uint64_t raw, bool is_double)
{
    target->value.ull = raw;
    target->value_type = is_double ? NVML_VALUE_TYPE_DOUBLE : (uint32_t)width;
    if (!is_double && width == U32) target->value.ull = (uint32_t)raw;
}

static nvmlReturn_t answer_field(nvmlDevice_t device, nvmlFieldValue_t *target)
{
    if (target->field == 0 || target->field >= HIGHEST_FIELD) return NVML_ERROR_INVALID_ARGUMENT;
    const struct field *field = find(target->field);
    if (field == NULL) return NVML_ERROR_NOT_SUPPORTED;
    uint64_t raw = field->constant;
    bool is_double = false;
    if (field->reading >= 0)
        TRY(read_raw(device->gpu, (enum reading)field->reading, &raw, &is_double));
    store(target, field->width, raw, is_double);
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceGetFieldValues,
            (nvmlDevice_t device, int count, nvmlFieldValue_t *values), (device, count, values))
{
    struct timespec t;
    if (count < 1 || values == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    clock_gettime(CLOCK_REALTIME, &t);
    for (int i = 0; i < count; i++) {
        values[i].timestamp = (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
        values[i].latency = 1;
        values[i].result = answer_field(device, &values[i]);
    }
    return NVML_SUCCESS;
}

DEVICE_CALL(nvmlDeviceClearFieldValues,
            (nvmlDevice_t device, int count, nvmlFieldValue_t *values), (device, count, values))
{
    return count < 1 || values == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}
