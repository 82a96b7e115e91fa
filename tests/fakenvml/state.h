/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The state file of the simulated GPUs: one fixed layout, shared by the C library, by programs
 * that use the GPUs and by tests (simgpu.py holds the same layout; a test compares the two).
 *
 * The file is memory-mapped, native byte order, every member on its natural alignment. A change
 * of any offset or meaning raises FAKENVML_VERSION, and readers refuse other versions.
 *
 * Locks are open-file-description locks on bytes far behind the end of the file, so that the
 * kernel gives them back when a process dies, even by SIGKILL:
 *   LOCK_CHANGE        held while simgpu.py changes contexts, values or faults
 *   LOCK_FOLD + gpu    held while the integrated readings of one GPU are brought up to date
 *   LOCK_CONTEXT + n   held by the owner of context n as long as it lives; a context whose byte
 *                      is not locked is dead, whatever its record says
 */
#ifndef FAKENVML_STATE_H
#define FAKENVML_STATE_H

#include <stdint.h>

#define FAKENVML_MAGIC 0x4c4d564e454b4146ULL /* "FAKENVML" */
#define FAKENVML_VERSION 1u
#define FAKENVML_DEFAULT_PATH "/run/fakenvml/state"

#define MAX_GPUS 32
#define MAX_READINGS 64
#define MAX_CONTEXTS 256
#define MAX_FAULTS 64
#define MAX_EVENTS 256
#define MAX_CALLS 1024
#define MAX_CLIENTS 64

#define LOCK_CHANGE (1LL << 40)
#define LOCK_FOLD ((1LL << 40) + 256)
#define LOCK_CONTEXT ((1LL << 40) + 4096)

/* What a GPU reports. Order and names are part of the layout. */
#define READINGS(X)                                                                              \
    X(gpu_utilization_percent) X(memory_utilization_percent) X(memory_used_bytes)                \
    X(memory_free_bytes) X(memory_total_bytes) X(memory_reserved_bytes) X(bar1_used_bytes)       \
    X(power_milliwatts) X(power_limit_milliwatts) X(energy_millijoules) X(temperature_celsius)   \
    X(memory_temperature_celsius) X(sm_clock_mhz) X(memory_clock_mhz) X(video_clock_mhz)         \
    X(performance_state) X(fan_speed_percent) X(encoder_utilization_percent)                     \
    X(decoder_utilization_percent) X(pcie_tx_kilobytes_per_second)                               \
    X(pcie_rx_kilobytes_per_second) X(pcie_tx_bytes) X(pcie_rx_bytes) X(pcie_replays) X(clocks_event_reasons)                      \
    X(ecc_corrected_volatile) X(ecc_uncorrected_volatile) X(ecc_corrected_aggregate)             \
    X(ecc_uncorrected_aggregate) X(remapped_rows_correctable) X(remapped_rows_uncorrectable)     \
    X(remapped_rows_pending) X(remapped_rows_failure) X(retired_pages_corrected)                 \
    X(retired_pages_uncorrected) X(retired_pages_pending) X(nvlink_tx_kibibytes)                 \
    X(nvlink_rx_kibibytes) X(nvlink_crc_errors) X(nvlink_replay_errors)                          \
    X(nvlink_recovery_errors) X(nvlink_links) X(compute_mode) X(persistence_mode) X(mig_mode)

#define READING_ENUM(name) READING_##name,
enum reading { READINGS(READING_ENUM) READING_COUNT };

/* How a reading is answered. */
enum reading_mode {
    MODE_SIMULATED = 0, /* from contexts and load */
    MODE_FIXED = 1,     /* `value`, cut to the width of the caller's type */
    MODE_DOUBLE = 2,    /* `value` is a double's bits: field values answer a double, others cut it */
    MODE_ERROR = 3,     /* `value` is the NVML error code of every call and field that reports it */
};

struct fake_gpu {
    char uuid[80];
    char name[96];
    char serial[32];
    uint32_t present; /* 0: not listed; handles held by programs answer GPU_IS_LOST */
    uint32_t minor;
    uint32_t pci_domain, pci_bus, pci_device, pci_device_id, pci_subsystem_id;
    uint32_t power_idle_milliwatts;
    uint32_t power_limit_milliwatts;
    uint32_t sm_clock_idle_mhz, sm_clock_max_mhz;
    uint32_t memory_clock_mhz, video_clock_mhz;
    uint32_t fold_sequence; /* odd while the integrated readings are being written */
    uint64_t memory_total_bytes;
    uint64_t memory_reserved_bytes;
    /* Integrated up to `folded_at_ns` (CLOCK_MONOTONIC). */
    uint64_t folded_at_ns;
    double energy_millijoules;
    double temperature_celsius;
    double nvlink_tx_kibibytes;
    double nvlink_rx_kibibytes;
    uint32_t mode[MAX_READINGS];
    uint64_t value[MAX_READINGS];
};

enum context_kind { CONTEXT_COMPUTE = 1, CONTEXT_GRAPHICS = 2, CONTEXT_MPS = 4 };

/* One process on one GPU. `sequence` is odd while the record is being written. */
struct fake_context {
    uint32_t sequence;
    uint32_t used;
    uint32_t gpu;
    uint32_t kind;
    uint32_t pid;      /* in its own PID namespace */
    uint32_t host_pid; /* in the outermost namespace its /proc shows */
    uint64_t pid_namespace;
    uint64_t started_at_ns;
    uint64_t memory_bytes;
    uint64_t busy_until_ns; /* 0: until changed */
    double utilization;     /* 0..1 */
    double memory_utilization;
    double power_watts; /* board power while only this context is on it; negative: from load */
};

enum fault_kind { FAULT_ERROR = 1, FAULT_SLEEP = 2, FAULT_SPIN = 3, FAULT_HANG = 4 };
/* A family is a function in all its versions: _v2, _v3 and without. */
enum fault_scope { SCOPE_ANY = 0, SCOPE_FUNCTION = 1, SCOPE_INIT = 2, SCOPE_FAMILY = 3 };

struct fake_fault {
    uint32_t active;
    uint32_t kind;
    uint32_t scope;
    int32_t gpu;            /* -1: any call; else only calls with that GPU */
    uint64_t function_hash; /* FNV-1a, 64 bits; of a family: of the name without _v<n> */
    uint64_t argument;      /* error code, or microseconds */
    uint64_t skip;          /* this many matching calls pass first */
    uint64_t limit;         /* then so many are hit; 0: all */
    uint64_t matched;       /* matching calls so far; counted by the library */
    uint64_t serial;        /* another one for each fault: a cleared one is over for good */
    char function[72];
};

struct fake_event {
    uint64_t sequence; /* number of this event, from 1; written last */
    uint64_t type;
    uint64_t data;
    uint32_t gpu;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t reserved;
};

struct fake_call {
    uint64_t hash; /* 0: free */
    uint64_t count;
    char name[72];
};

/* One process that initialised the library. */
struct fake_client {
    uint64_t pid_namespace;
    uint32_t pid;
    uint32_t inits;
    uint64_t started_at_ns;
    uint64_t last_call_at_ns; /* the record of the longest silent process is taken first */
    uint64_t calls;
    uint32_t inside;     /* calls within the library at this moment */
    uint32_t max_inside; /* the most there ever were at once */
    uint32_t threads;    /* distinct threads that made a call */
    uint32_t reserved;
};

/* What a process list shows: drivers differ. */
enum process_mode {
    PROCESSES_NAMESPACE = 0,           /* 565 and newer: own namespace, with memory */
    PROCESSES_NAMESPACE_NO_MEMORY = 1, /* 535.113 to 560: own namespace, memory not available */
    PROCESSES_HOST = 2,                /* older: all processes, host pids */
};

struct fake_state {
    uint64_t magic;
    uint32_t version;
    uint32_t size;
    uint32_t gpu_count;
    uint32_t init_error; /* NVML code that initialisation answers; 0: none; 9: driver not loaded */
    uint32_t process_mode;
    uint32_t duplicate_processes; /* each process is listed this many times more */
    uint32_t faults_active;       /* entries of `faults` in use; lets calls skip the table */
    uint32_t change;              /* raised at each change; waiting calls sleep on it (futex) */
    uint32_t max_concurrency;     /* the most calls that any one process had inside at once */
    uint32_t cuda_version;        /* 12080 means 12.8 */
    uint32_t epoch;               /* another one whenever counters start anew */
    uint32_t contexts_limit;      /* no context from this number on was ever used */
    char driver_version[80];
    char nvml_version[80];
    uint64_t event_sequence; /* number of the newest event */
    struct fake_gpu gpus[MAX_GPUS];
    struct fake_context contexts[MAX_CONTEXTS];
    struct fake_fault faults[MAX_FAULTS];
    struct fake_event events[MAX_EVENTS];
    struct fake_call calls[MAX_CALLS];
    struct fake_client clients[MAX_CLIENTS];
};

#endif
