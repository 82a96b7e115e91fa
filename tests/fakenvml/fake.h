/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/* What the parts of the library share: the frame around each exported call, and the simulation. */
#ifndef FAKENVML_FAKE_H
#define FAKENVML_FAKE_H

#include <stdbool.h>
#include <stddef.h>

#include "abi.h"
#include "state.h"
#include "symbols.h" /* generated: enum of FN_<name>, one for each exported symbol */

#define EXPORT __attribute__((visibility("default")))
#define TRY(call)                                                                                \
    do {                                                                                         \
        nvmlReturn_t try_result = (call);                                                        \
        if (try_result != NVML_SUCCESS) return try_result;                                       \
    } while (0)

struct device_handle { uint32_t gpu; };

extern const char *const symbol_names[FN_COUNT];

/* A call's frame: counting, delays, hangs and injected errors; see frame.c. */
nvmlReturn_t call_begin(int function, bool needs_init, bool on_device, nvmlDevice_t device);
void call_end(void);
nvmlReturn_t apply_faults(int function, int gpu);
nvmlReturn_t stub(int function, void *first);

/* An exported call whose first argument is `device`. The body follows the macro. */
#define DEVICE_CALL(name, parameters, arguments)                                                 \
    static nvmlReturn_t answer_##name parameters;                                                \
    EXPORT nvmlReturn_t name parameters {                                                        \
        nvmlReturn_t result = call_begin(FN_##name, true, true, device);                         \
        if (result == NVML_SUCCESS) result = answer_##name arguments;                            \
        call_end();                                                                              \
        return result;                                                                           \
    }                                                                                            \
    static nvmlReturn_t answer_##name parameters

/* An exported call that needs initialisation but no device. */
#define SYSTEM_CALL(name, parameters, arguments)                                                 \
    static nvmlReturn_t answer_##name parameters;                                                \
    EXPORT nvmlReturn_t name parameters {                                                        \
        nvmlReturn_t result = call_begin(FN_##name, true, false, NULL);                          \
        if (result == NVML_SUCCESS) result = answer_##name arguments;                            \
        call_end();                                                                              \
        return result;                                                                           \
    }                                                                                            \
    static nvmlReturn_t answer_##name parameters

/* Handles: the GPUs this process sees, in order. */
uint32_t visible_count(void);
nvmlDevice_t visible_device(uint32_t index);
int visible_index(uint32_t gpu); /* -1: not visible */

/* The mapped state file (NULL before the first initialisation). */
struct fake_state *state(void);
bool state_writable(void);
int state_fd(void);
struct fake_gpu *gpu_of(nvmlDevice_t device);
uint64_t now_ns(void);
void wait_for_change(uint32_t seen, uint64_t nanoseconds);

/* Simulation. */
struct load {
    double busy;        /* 0..1: share of time with at least one kernel */
    double memory_busy; /* 0..1 */
    double power_milliwatts;
    double average_power_milliwatts; /* since the readings were last folded */
    uint64_t memory_bytes;
};
struct integrated { double energy_millijoules, temperature_celsius, tx_kibibytes, rx_kibibytes; };

uint32_t contexts_limit(void);
bool context_alive(uint32_t slot, struct fake_context *copy);
bool context_visible(const struct fake_context *context);
double context_busy(const struct fake_context *context, uint64_t now);
struct load load_of(uint32_t gpu);
struct integrated integrate(uint32_t gpu);

/* One reading as an integer or, where a double was set, its bits; `is_double` may be NULL. */
nvmlReturn_t read_raw(uint32_t gpu, enum reading reading, uint64_t *value, bool *is_double);
nvmlReturn_t read_u32(nvmlDevice_t device, enum reading reading, uint32_t *value);
nvmlReturn_t read_u64(nvmlDevice_t device, enum reading reading, uint64_t *value);
nvmlReturn_t copy_text(char *target, uint32_t length, const char *text);

#endif
