/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From live contexts to readings. simgpu.py has the same formulas (class Load there): change both.
 *
 *   busy            1 - product(1 - u_i) over the contexts: the share of time in which at least
 *                   one of several independent programs has a kernel resident
 *   power           idle + sum(p_i - idle), at most the limit; p_i defaults to
 *                   idle + u_i * (0.9 * limit - idle)
 *   temperature     follows 28 + 50 * power / limit degrees with a time constant of 10 s
 *   NVLink          busy * 20 GiB/s sent, 0.75 of it received
 *   PCIe            busy * 1.2 GB/s sent and 2.6 GB/s received, apart from a trickle
 */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEMPERATURE_SECONDS 10.0
#define NVLINK_TX_KIBIBYTES_PER_SECOND (20.0 * 1024 * 1024)
#define NVLINK_RX_SHARE 0.75
#define PCIE_TX_KILOBYTES_PER_SECOND 1200000.0
#define PCIE_RX_KILOBYTES_PER_SECOND 2600000.0

/* Some process holds the lock of this context: it lives. Works through a read-only descriptor. */
static bool context_locked(uint32_t slot)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET,
                         .l_start = LOCK_CONTEXT + slot, .l_len = 1};
    return fcntl(state_fd(), F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

uint32_t contexts_limit(void)
{
    uint32_t limit = __atomic_load_n(&state()->contexts_limit, __ATOMIC_ACQUIRE);
    return limit < MAX_CONTEXTS ? limit : MAX_CONTEXTS;
}

/* Copy a context that is in use by a live process. A writer that died half-way leaves an odd
 * sequence for ever, so the attempts are few. */
bool context_alive(uint32_t slot, struct fake_context *copy)
{
    struct fake_context *context = &state()->contexts[slot];
    if (__atomic_load_n(&context->used, __ATOMIC_ACQUIRE) == 0) return false;
    for (int attempt = 0; attempt < 100; attempt++) {
        uint32_t before = __atomic_load_n(&context->sequence, __ATOMIC_ACQUIRE);
        memcpy(copy, context, sizeof *copy);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (before % 2 == 0 && before == __atomic_load_n(&context->sequence, __ATOMIC_RELAXED)) break;
    }
    return copy->used && context_locked(slot);
}

/* As drivers since 565 do: only processes of the caller's own PID namespace. */
bool context_visible(const struct fake_context *context)
{
    struct stat info;
    if (state()->process_mode == PROCESSES_HOST) return true;
    return stat("/proc/self/ns/pid", &info) == 0 && info.st_ino == context->pid_namespace;
}

static bool busy_at(const struct fake_context *context, uint64_t now)
{
    return context->busy_until_ns == 0 || now < context->busy_until_ns;
}

double context_busy(const struct fake_context *context, uint64_t now)
{
    return busy_at(context, now) ? context->utilization : 0.0;
}

/* The share of [since, now] in which the context's load lasted. */
static double lasted(const struct fake_context *context, uint64_t since, uint64_t now)
{
    if (busy_at(context, now) || now <= since) return busy_at(context, now) ? 1.0 : 0.0;
    if (context->busy_until_ns <= since) return 0.0;
    return (double)(context->busy_until_ns - since) / (double)(now - since);
}

static double context_power(const struct fake_gpu *gpu, const struct fake_context *context)
{
    double idle = gpu->power_idle_milliwatts;
    if (context->power_watts >= 0) return context->power_watts * 1000.0 - idle;
    return context->utilization * (0.9 * gpu->power_limit_milliwatts - idle);
}

/* The load of this moment, and its average power since `since`. */
static struct load load_since(uint32_t index, uint64_t since)
{
    const struct fake_gpu *gpu = &state()->gpus[index];
    uint64_t now = now_ns();
    double idle_share = 1.0, memory_idle_share = 1.0;
    double idle = gpu->power_idle_milliwatts, limit = gpu->power_limit_milliwatts;
    struct load load = {.power_milliwatts = idle, .average_power_milliwatts = idle};
    struct fake_context context;
    for (uint32_t slot = 0; slot < contexts_limit(); slot++) {
        if (state()->contexts[slot].gpu != index || !context_alive(slot, &context)) continue;
        load.memory_bytes += context.memory_bytes;
        double power = context_power(gpu, &context);
        load.average_power_milliwatts += power * lasted(&context, since, now);
        if (!busy_at(&context, now)) continue;
        idle_share *= 1.0 - context.utilization;
        memory_idle_share *= 1.0 - context.memory_utilization;
        load.power_milliwatts += power;
    }
    load.busy = 1.0 - idle_share;
    load.memory_busy = 1.0 - memory_idle_share;
    load.power_milliwatts = fmax(0.0, fmin(load.power_milliwatts, limit));
    load.average_power_milliwatts = fmax(0.0, fmin(load.average_power_milliwatts, limit));
    return load;
}

struct load load_of(uint32_t index) { return load_since(index, now_ns()); }

/* The integrated readings as last written, all of one moment. */
static struct fake_gpu folded(const struct fake_gpu *gpu)
{
    struct fake_gpu copy;
    for (int attempt = 0; attempt < 100; attempt++) {
        uint32_t before = __atomic_load_n(&gpu->fold_sequence, __ATOMIC_ACQUIRE);
        memcpy(&copy, gpu, offsetof(struct fake_gpu, mode));
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (before % 2 == 0 && before == __atomic_load_n(&gpu->fold_sequence, __ATOMIC_RELAXED)) break;
    }
    return copy;
}

static void write_folded(struct fake_gpu *gpu, const struct integrated *values, uint64_t now)
{
    __atomic_store_n(&gpu->fold_sequence, gpu->fold_sequence | 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    gpu->energy_millijoules = values->energy_millijoules;
    gpu->temperature_celsius = values->temperature_celsius;
    gpu->nvlink_tx_kibibytes = values->tx_kibibytes;
    gpu->nvlink_rx_kibibytes = values->rx_kibibytes;
    gpu->folded_at_ns = now;
    __atomic_store_n(&gpu->fold_sequence, gpu->fold_sequence + 1, __ATOMIC_RELEASE);
}

static struct integrated integrate_until(const struct fake_gpu *gpu, const struct load *load,
                                         uint64_t now)
{
    double seconds = now > gpu->folded_at_ns ? (double)(now - gpu->folded_at_ns) / 1e9 : 0.0;
    double target = 28.0 + 50.0 * load->average_power_milliwatts / gpu->power_limit_milliwatts;
    double sent = load->busy * NVLINK_TX_KIBIBYTES_PER_SECOND * seconds;
    return (struct integrated){
        .energy_millijoules = gpu->energy_millijoules + load->average_power_milliwatts * seconds,
        .temperature_celsius =
            target + (gpu->temperature_celsius - target) * exp(-seconds / TEMPERATURE_SECONDS),
        .tx_kibibytes = gpu->nvlink_tx_kibibytes + sent,
        .rx_kibibytes = gpu->nvlink_rx_kibibytes + sent * NVLINK_RX_SHARE,
    };
}

static bool fold_lock(uint32_t gpu, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = LOCK_FOLD + gpu, .l_len = 1};
    return fcntl(state_fd(), F_OFD_SETLK, &lock) == 0;
}

/* What this process was told never runs back, though a load that died unseen makes the next sum
 * smaller. A reset starts anew. */
static void keep_monotonic(uint32_t gpu, struct integrated *values)
{
    static struct integrated highest[MAX_GPUS];
    static uint32_t epoch[MAX_GPUS];
    struct integrated *top = &highest[gpu];
    if (epoch[gpu] != state()->epoch) memset(top, 0, sizeof *top);
    epoch[gpu] = state()->epoch;
    values->energy_millijoules = fmax(top->energy_millijoules, values->energy_millijoules);
    values->tx_kibibytes = fmax(top->tx_kibibytes, values->tx_kibibytes);
    values->rx_kibibytes = fmax(top->rx_kibibytes, values->rx_kibibytes);
    *top = *values;
}

/* Bring the integrated readings of one GPU up to date and, where we may write and nobody else is
 * at it, keep the result. Never waits. */
struct integrated integrate(uint32_t index)
{
    static pthread_mutex_t folding = PTHREAD_MUTEX_INITIALIZER; /* file locks do not part threads */
    struct fake_gpu *gpu = &state()->gpus[index];
    pthread_mutex_lock(&folding);
    bool keep = state_writable() && fold_lock(index, F_WRLCK);
    struct fake_gpu past = folded(gpu);
    uint64_t now = now_ns();
    struct load load = load_since(index, past.folded_at_ns);
    struct integrated values = integrate_until(&past, &load, now);
    if (keep) {
        write_folded(gpu, &values, now);
        fold_lock(index, F_UNLCK);
    }
    keep_monotonic(index, &values);
    pthread_mutex_unlock(&folding);
    return values;
}

static uint64_t rounded(double value) { return value <= 0 ? 0 : (uint64_t)(value + 0.5); }

static uint64_t memory_value(uint32_t index, enum reading reading)
{
    struct fake_gpu *gpu = &state()->gpus[index];
    uint64_t total = 0, reserved = 0, used = 0;
    if (reading == READING_memory_used_bytes) return load_of(index).memory_bytes;
    if (reading == READING_memory_total_bytes) return gpu->memory_total_bytes;
    if (reading == READING_memory_reserved_bytes) return gpu->memory_reserved_bytes;
    read_raw(index, READING_memory_total_bytes, &total, NULL);
    read_raw(index, READING_memory_reserved_bytes, &reserved, NULL);
    read_raw(index, READING_memory_used_bytes, &used, NULL);
    return total > reserved && total - reserved > used ? total - reserved - used : 0;
}

static uint64_t event_reasons(uint32_t index)
{
    struct load load = load_of(index);
    if (load.busy <= 0) return 0x1;                                                   /* idle */
    if (load.power_milliwatts >= state()->gpus[index].power_limit_milliwatts) return 0x4; /* cap */
    return 0;
}

static uint64_t clock_value(uint32_t index, enum reading reading)
{
    struct fake_gpu *gpu = &state()->gpus[index];
    if (reading == READING_memory_clock_mhz) return gpu->memory_clock_mhz;
    if (reading == READING_video_clock_mhz) return gpu->video_clock_mhz;
    return load_of(index).busy > 0 ? gpu->sm_clock_max_mhz : gpu->sm_clock_idle_mhz;
}

/* Both run with the busy time, so the NVLink counter tells that time. */
static uint64_t pcie_bytes(uint32_t index, double kilobytes_per_second)
{
    double busy_seconds = integrate(index).tx_kibibytes / NVLINK_TX_KIBIBYTES_PER_SECOND;
    return (uint64_t)(busy_seconds * kilobytes_per_second * 1000.0);
}

static uint64_t simulated(uint32_t index, enum reading reading)
{
    switch (reading) {
    case READING_gpu_utilization_percent: return rounded(load_of(index).busy * 100.0);
    case READING_memory_utilization_percent: return rounded(load_of(index).memory_busy * 100.0);
    case READING_memory_used_bytes:
    case READING_memory_free_bytes:
    case READING_memory_total_bytes:
    case READING_memory_reserved_bytes: return memory_value(index, reading);
    case READING_bar1_used_bytes: return 3u << 20;
    case READING_power_milliwatts: return rounded(load_of(index).power_milliwatts);
    case READING_power_limit_milliwatts: return state()->gpus[index].power_limit_milliwatts;
    case READING_energy_millijoules: return (uint64_t)integrate(index).energy_millijoules;
    case READING_temperature_celsius: return rounded(integrate(index).temperature_celsius);
    case READING_memory_temperature_celsius: return rounded(integrate(index).temperature_celsius + 6);
    case READING_sm_clock_mhz:
    case READING_memory_clock_mhz:
    case READING_video_clock_mhz: return clock_value(index, reading);
    case READING_pcie_tx_kilobytes_per_second:
        return 400 + rounded(load_of(index).busy * PCIE_TX_KILOBYTES_PER_SECOND);
    case READING_pcie_rx_kilobytes_per_second:
        return 700 + rounded(load_of(index).busy * PCIE_RX_KILOBYTES_PER_SECOND);
    case READING_pcie_tx_bytes: return pcie_bytes(index, PCIE_TX_KILOBYTES_PER_SECOND);
    case READING_pcie_rx_bytes: return pcie_bytes(index, PCIE_RX_KILOBYTES_PER_SECOND);
    case READING_clocks_event_reasons: return event_reasons(index);
    case READING_nvlink_tx_kibibytes: return (uint64_t)integrate(index).tx_kibibytes;
    case READING_nvlink_rx_kibibytes: return (uint64_t)integrate(index).rx_kibibytes;
    case READING_nvlink_links: return 12;
    case READING_persistence_mode: return 1;
    default: return 0;
    }
}

nvmlReturn_t read_raw(uint32_t index, enum reading reading, uint64_t *value, bool *is_double)
{
    struct fake_gpu *gpu = &state()->gpus[index];
    uint32_t mode = __atomic_load_n(&gpu->mode[reading], __ATOMIC_ACQUIRE);
    if (is_double != NULL) *is_double = mode == MODE_DOUBLE;
    if (mode == MODE_ERROR) return (nvmlReturn_t)gpu->value[reading];
    if (mode == MODE_SIMULATED && reading == READING_fan_speed_percent) return NVML_ERROR_NOT_SUPPORTED;
    *value = mode == MODE_SIMULATED ? simulated(index, reading) : gpu->value[reading];
    return NVML_SUCCESS;
}

nvmlReturn_t read_u64(nvmlDevice_t device, enum reading reading, uint64_t *value)
{
    if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    return read_raw(device->gpu, reading, value, NULL);
}

/* Cut to 32 bits, as a driver's garbage would be: 2^64-1 becomes 2^32-1. */
nvmlReturn_t read_u32(nvmlDevice_t device, enum reading reading, uint32_t *value)
{
    uint64_t wide = 0;
    if (value == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    TRY(read_raw(device->gpu, reading, &wide, NULL));
    *value = (uint32_t)wide;
    return NVML_SUCCESS;
}

nvmlReturn_t copy_text(char *target, uint32_t length, const char *text)
{
    if (target == NULL) return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(target, text);
    return NVML_SUCCESS;
}
