/* SPDX-FileCopyrightText: The GPUMonitor authors */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The frame around each exported call: the mapped state file, initialisation, visibility,
 * counting, delays, hangs and injected errors. A state file that may only be read works too:
 * then nothing is counted, and `skip` and `limit` of faults count within this process.
 */
#define _GNU_SOURCE
#include "fake.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t setup = PTHREAD_MUTEX_INITIALIZER;
static struct fake_state *mapped;
static struct fake_client *client;
static uint64_t client_started_at; /* tells whether `client` is still this process's record */
static int mapped_fd = -1;
static bool writable;
static ino_t mapped_inode;
static dev_t mapped_device;
static int references; /* initialisations without their shutdown */

static struct device_handle handles[MAX_GPUS];
static uint32_t visible[MAX_GPUS];
static uint32_t visible_number;

static uint32_t inside;
static __thread uint64_t counted_in; /* start and epoch of the client that counted this thread */
static uint32_t call_slots[FN_COUNT]; /* 1 + index into state->calls; 0: not looked up yet */
static uint64_t local_matched[MAX_FAULTS];

struct fake_state *state(void) { return mapped; }
bool state_writable(void) { return writable; }
int state_fd(void) { return mapped_fd; }
uint32_t visible_count(void) { return visible_number; }
struct fake_gpu *gpu_of(nvmlDevice_t device) { return &mapped->gpus[device->gpu]; }

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_ns(uint64_t nanoseconds)
{
    struct timespec t = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    while (nanosleep(&t, &t) != 0) {
    }
}

/* A driver that polls its device burns the caller's CPU time, whoever else runs meanwhile. */
static void spin_ns(uint64_t nanoseconds)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    uint64_t start = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec, now = start;
    while (now - start < nanoseconds) {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
}

/* Sleep until the state changes from `seen`, or the time is over. */
void wait_for_change(uint32_t seen, uint64_t nanoseconds)
{
    struct timespec t = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    if (syscall(SYS_futex, &mapped->change, FUTEX_WAIT, seen, &t, NULL, 0) != 0 && !writable)
        sleep_ns(nanoseconds < 20000000u ? nanoseconds : 20000000u); /* no futex on this mapping */
}

static uint64_t hash_of(const char *text, size_t length)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
    return hash;
}

static uint64_t function_hash(int function)
{
    return hash_of(symbol_names[function], strlen(symbol_names[function]));
}

/* The hash of a function's name without its version suffix. */
static uint64_t family_hash(int function)
{
    const char *name = symbol_names[function];
    size_t length = strlen(name);
    bool suffixed = length > 3 && name[length - 3] == '_' && name[length - 2] == 'v';
    return hash_of(name, suffixed ? length - 3 : length);
}

/* ---- counting ---- */

static uint32_t find_call_slot(int function)
{
    uint64_t hash = function_hash(function);
    for (uint32_t i = 0; i < MAX_CALLS; i++) {
        uint32_t slot = (uint32_t)((hash + i) % MAX_CALLS);
        struct fake_call *call = &mapped->calls[slot];
        uint64_t found = 0;
        if (__atomic_compare_exchange_n(&call->hash, &found, hash, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE)) {
            strncpy(call->name, symbol_names[function], sizeof call->name - 1);
            return slot;
        }
        if (found == hash) return slot;
    }
    return 0;
}

static void raise_to(uint32_t *maximum, uint32_t value)
{
    uint32_t seen = __atomic_load_n(maximum, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(maximum, &seen, value, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

/* This process's record; NULL once another process needed the place. */
static struct fake_client *own_client(void)
{
    return client != NULL && client->started_at_ns == client_started_at ? client : NULL;
}

static void count_call(int function, uint32_t now_inside)
{
    if (!writable || mapped == NULL) return;
    uint32_t slot = __atomic_load_n(&call_slots[function], __ATOMIC_RELAXED);
    if (slot == 0) {
        slot = find_call_slot(function) + 1;
        __atomic_store_n(&call_slots[function], slot, __ATOMIC_RELAXED);
    }
    __atomic_add_fetch(&mapped->calls[slot - 1].count, 1, __ATOMIC_RELAXED);
    raise_to(&mapped->max_concurrency, now_inside);
    struct fake_client *own = own_client();
    if (own == NULL) return;
    __atomic_store_n(&own->last_call_at_ns, now_ns(), __ATOMIC_RELAXED);
    __atomic_add_fetch(&own->calls, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&own->inside, now_inside, __ATOMIC_RELAXED);
    raise_to(&own->max_inside, now_inside);
    if (counted_in != client_started_at + mapped->epoch) {
        counted_in = client_started_at + mapped->epoch;
        __atomic_add_fetch(&own->threads, 1, __ATOMIC_RELAXED);
    }
}

/* ---- faults ---- */

static bool init_function(int function)
{
    return function == FN_nvmlInit || function == FN_nvmlInit_v2 ||
           function == FN_nvmlInitWithFlags;
}

static bool fault_applies(const struct fake_fault *fault, int function, int gpu)
{
    if (__atomic_load_n(&fault->active, __ATOMIC_ACQUIRE) == 0 || fault->gpu != gpu) return false;
    if (fault->scope == SCOPE_INIT) return init_function(function);
    if (fault->scope == SCOPE_FAMILY) return fault->function_hash == family_hash(function);
    return fault->scope == SCOPE_ANY || fault->function_hash == function_hash(function);
}

/* Whether this matching call is past `skip` and within `limit`. */
static bool fault_is_due(uint32_t index)
{
    struct fake_fault *fault = &mapped->faults[index];
    uint64_t *counter = writable ? &fault->matched : &local_matched[index];
    uint64_t before = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    if (before < fault->skip) return false;
    return fault->limit == 0 || before < fault->skip + fault->limit;
}

static void hang(const struct fake_fault *fault)
{
    uint64_t serial = fault->serial;
    for (;;) {
        uint32_t seen = __atomic_load_n(&mapped->change, __ATOMIC_ACQUIRE);
        if (!__atomic_load_n(&fault->active, __ATOMIC_ACQUIRE) || fault->serial != serial) return;
        wait_for_change(seen, 200000000u);
    }
}

/* Apply what was injected for this function: with `gpu` -1 the entries that name no GPU, else
 * those that name it. Delays and hangs come first, then the first error. */
nvmlReturn_t apply_faults(int function, int gpu)
{
    nvmlReturn_t error = NVML_SUCCESS;
    if (mapped == NULL || __atomic_load_n(&mapped->faults_active, __ATOMIC_ACQUIRE) == 0)
        return NVML_SUCCESS;
    for (uint32_t i = 0; i < MAX_FAULTS; i++) {
        struct fake_fault *fault = &mapped->faults[i];
        if (!fault_applies(fault, function, gpu) || !fault_is_due(i)) continue;
        if (fault->kind == FAULT_SLEEP) sleep_ns(fault->argument * 1000u);
        if (fault->kind == FAULT_SPIN) spin_ns(fault->argument * 1000u);
        if (fault->kind == FAULT_HANG) hang(fault);
        if (fault->kind == FAULT_ERROR && error == NVML_SUCCESS) error = (nvmlReturn_t)fault->argument;
    }
    return error;
}

/* ---- the frame ---- */

static bool is_handle(nvmlDevice_t device)
{
    return device >= handles && device < handles + MAX_GPUS && visible_index(device->gpu) >= 0;
}

static nvmlReturn_t check_device(int function, nvmlDevice_t device)
{
    if (!is_handle(device)) return NVML_ERROR_INVALID_ARGUMENT;
    TRY(apply_faults(function, (int)device->gpu));
    return gpu_of(device)->present ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
}

/* Each begin has its call_end, also when it answers an error. */
nvmlReturn_t call_begin(int function, bool needs_init, bool on_device, nvmlDevice_t device)
{
    count_call(function, __atomic_add_fetch(&inside, 1, __ATOMIC_RELAXED));
    if (needs_init && __atomic_load_n(&references, __ATOMIC_ACQUIRE) == 0)
        return NVML_ERROR_UNINITIALIZED;
    TRY(apply_faults(function, -1));
    return on_device ? check_device(function, device) : NVML_SUCCESS;
}

void call_end(void)
{
    uint32_t left = __atomic_sub_fetch(&inside, 1, __ATOMIC_RELAXED);
    struct fake_client *own = own_client();
    if (writable && own != NULL) __atomic_store_n(&own->inside, left, __ATOMIC_RELAXED);
}

/* What every symbol without an own answer does. Only its first argument is looked at, and that
 * only to tell whether it is one of our handles: so faults of one GPU reach these calls too. */
nvmlReturn_t stub(int function, void *first)
{
    nvmlReturn_t result = call_begin(function, true, false, NULL);
    if (result == NVML_SUCCESS && is_handle(first)) result = check_device(function, first);
    call_end();
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : result;
}

/* ---- state file and visibility ---- */

static const char *state_path(void)
{
    const char *path = getenv("FAKENVML_STATE");
    return path != NULL && *path ? path : FAKENVML_DEFAULT_PATH;
}

static bool environment_has_gpu_choice(void)
{
    extern char **environ;
    for (char **entry = environ; entry != NULL && *entry != NULL; entry++)
        if (strncmp(*entry, "FAKENVML_GPU_", strlen("FAKENVML_GPU_")) == 0) return true;
    return false;
}

static bool variable_is_set(const char *name)
{
    const char *value = getenv(name);
    return value != NULL && *value && strcmp(value, "0") != 0;
}

static bool chosen(uint32_t gpu)
{
    char name[32] = "FAKENVML_GPU_";
    size_t length = strlen(name);
    if (gpu >= 10) name[length++] = (char)('0' + gpu / 10);
    name[length] = (char)('0' + gpu % 10);
    return variable_is_set(name);
}

static void choose_visible(void)
{
    bool all = variable_is_set("FAKENVML_ALL") || !environment_has_gpu_choice();
    visible_number = 0;
    for (uint32_t gpu = 0; gpu < mapped->gpu_count && gpu < MAX_GPUS; gpu++) {
        handles[gpu].gpu = gpu;
        if (mapped->gpus[gpu].present && (all || chosen(gpu))) visible[visible_number++] = gpu;
    }
}

nvmlDevice_t visible_device(uint32_t index) { return &handles[visible[index]]; }

int visible_index(uint32_t gpu)
{
    for (uint32_t i = 0; i < visible_number; i++)
        if (visible[i] == gpu) return (int)i;
    return -1;
}

static nvmlReturn_t map_state(int fd, bool may_write, const struct stat *info)
{
    if ((size_t)info->st_size < sizeof(struct fake_state)) return NVML_ERROR_DRIVER_NOT_LOADED;
    void *memory = mmap(NULL, sizeof(struct fake_state), may_write ? PROT_READ | PROT_WRITE : PROT_READ,
                        MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return NVML_ERROR_MEMORY;
    struct fake_state *candidate = memory;
    if (candidate->magic != FAKENVML_MAGIC || candidate->version != FAKENVML_VERSION ||
        candidate->size != sizeof(struct fake_state)) {
        munmap(memory, sizeof(struct fake_state));
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    /* The former mapping stays: other threads may still be within a call on it. */
    mapped = candidate;
    mapped_fd = fd;
    writable = may_write;
    mapped_inode = info->st_ino;
    mapped_device = info->st_dev;
    client = NULL;
    memset(call_slots, 0, sizeof call_slots);
    return NVML_SUCCESS;
}

/* Open the state file, or take a new one that stands at its path by now. */
static nvmlReturn_t open_state(void)
{
    struct stat info;
    if (references > 0) return NVML_SUCCESS;
    if (mapped != NULL && stat(state_path(), &info) == 0 && info.st_ino == mapped_inode &&
        info.st_dev == mapped_device)
        return NVML_SUCCESS;
    bool may_write = true;
    int fd = open(state_path(), O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        may_write = false;
        fd = open(state_path(), O_RDONLY | O_CLOEXEC);
    }
    if (fd < 0 || fstat(fd, &info) != 0) return NVML_ERROR_DRIVER_NOT_LOADED;
    nvmlReturn_t result = map_state(fd, may_write, &info);
    if (result != NVML_SUCCESS) close(fd);
    return result;
}

static uint64_t own_pid_namespace(void)
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

static struct fake_client *longest_silent(void)
{
    struct fake_client *found = &mapped->clients[0];
    for (uint32_t i = 1; i < MAX_CLIENTS; i++)
        if (mapped->clients[i].last_call_at_ns < found->last_call_at_ns) found = &mapped->clients[i];
    return found;
}

/* Register this process among the clients. */
static void register_client(void)
{
    if (!writable) return;
    uint32_t pid = (uint32_t)getpid();
    if (own_client() != NULL && client->pid == pid) {
        __atomic_add_fetch(&client->inits, 1, __ATOMIC_RELAXED);
        return;
    }
    client = longest_silent();
    memset(client, 0, sizeof *client);
    client->pid_namespace = own_pid_namespace();
    client->pid = pid;
    client->inits = 1;
    client->started_at_ns = client->last_call_at_ns = client_started_at = now_ns();
}

/* One attempt to initialise. Injected faults of initialisation need the state file first. */
static nvmlReturn_t initialise(int function)
{
    pthread_mutex_lock(&setup);
    nvmlReturn_t result = open_state();
    if (result == NVML_SUCCESS && references == 0) register_client();
    pthread_mutex_unlock(&setup);
    nvmlReturn_t frame = call_begin(function, false, false, NULL); /* may hang: without the lock */
    if (result == NVML_SUCCESS) result = frame;
    if (result == NVML_SUCCESS) result = (nvmlReturn_t)mapped->init_error;
    if (result == NVML_SUCCESS) {
        pthread_mutex_lock(&setup);
        if (references == 0) choose_visible();
        __atomic_add_fetch(&references, 1, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&setup);
    }
    call_end();
    return result;
}

EXPORT nvmlReturn_t nvmlInit(void) { return initialise(FN_nvmlInit); }
EXPORT nvmlReturn_t nvmlInit_v2(void) { return initialise(FN_nvmlInit_v2); }
EXPORT nvmlReturn_t nvmlInitWithFlags(uint32_t flags)
{
    return initialise(FN_nvmlInitWithFlags);
}

SYSTEM_CALL(nvmlShutdown, (void), ())
{
    pthread_mutex_lock(&setup);
    if (references > 0) __atomic_sub_fetch(&references, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&setup);
    return NVML_SUCCESS;
}
