/* libnvidia-ml: what pynvml, and torch's own out-of-memory message, ask the driver. */
#define _GNU_SOURCE
#include "machine.h"

typedef void *handle; /* a place + 1, and for a slice SLICE besides */
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } running;
enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
enum { SLICE = 0x1000 };

#define NEED_INIT if (!opened) return UNINITIALIZED
static int opened;
static int is_slice(handle h) { return (long)h & SLICE; }
static int place_of(handle h) { return (int)((long)h & ~SLICE) - 1; }
static int card_of(handle h) { return place_of(h) % MAX_CARDS; }
static handle handle_of(int place) { return (handle)(long)(place + 1); }
static handle slice_of(int card, int slice) { return (handle)(long)((card + slice * MAX_CARDS + 1) | SLICE); }
static int says(const char *value) {
    const char *text = getenv("SIM_PROCESSES"); /* hidden, unknown or refused; else they are listed */
    return text && !strcmp(text, value);
}

API int nvmlInit_v2(void) { opened++; return OK; }
API int nvmlInitWithFlags(unsigned flags) { opened++; return OK; }
API int nvmlShutdown(void) { NEED_INIT; opened--; return OK; }
API const char *nvmlErrorString(int e) {
    return e == NOT_SUPPORTED ? "Not Supported" : e == NOT_FOUND ? "Not Found" : e == UNINITIALIZED ? "Uninitialized" : e == NO_PERMISSION ? "Insufficient Permissions" : "Simulated Error";
}
API int nvmlSystemGetDriverVersion(char *text, unsigned n) { NEED_INIT; snprintf(text, n, "580.00 (simulated)"); return OK; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
API int nvmlDeviceGetCount_v2(unsigned *n) { NEED_INIT; *n = cards(); return OK; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *h) {
    NEED_INIT;
    if (i >= (unsigned)cards()) return INVALID_ARGUMENT;
    *h = handle_of(i);
    return OK;
}
API int nvmlDeviceGetUUID(handle h, char *text, unsigned n) {
    NEED_INIT;
    uuid(card_of(h), is_slice(h) ? place_of(h) / MAX_CARDS : -1, text, n);
    return OK;
}
API int nvmlDeviceGetHandleByUUID(const char *text, handle *h) {
    NEED_INIT;
    char own[80];
    for (int card = 0; card < cards(); card++)
        for (int slice = -1; slice < (mig() ? SLICES : 0); slice++) {
            uuid(card, slice, own, sizeof own);
            if (strcmp(own, text)) continue;
            *h = slice < 0 ? handle_of(card) : slice_of(card, slice);
            return OK;
        }
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *text, handle *h) {
    NEED_INIT;
    unsigned domain, bus, device;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) < 2 || bus < 1 || (int)bus > cards()) return NOT_FOUND;
    *h = handle_of(bus - 1);
    return OK;
}
API int nvmlDeviceGetIndex(handle h, unsigned *i) { NEED_INIT; *i = card_of(h); return OK; }
API int nvmlDeviceGetName(handle h, char *text, unsigned n) { NEED_INIT; snprintf(text, n, "Simulated GPU"); return OK; }

static unsigned long used_by(handle h, const process *p) {
    int card = card_of(h);
    if (is_slice(h) || !mig()) return held(p, place_of(h));
    return held(p, card) + held(p, card + MAX_CARDS);
}
static unsigned long used(handle h) {
    if (is_slice(h) || !mig()) return used_at(place_of(h));
    return used_at(card_of(h)) + used_at(card_of(h) + MAX_CARDS);
}
static unsigned long total(handle h) {
    return (is_slice(h) ? place_bytes() : card_bytes()) + setting("SIM_NVML_MORE_MIB", 0) * MIB;
}
API int nvmlDeviceGetMemoryInfo(handle h, memory *m) {
    NEED_INIT;
    *m = (memory){total(h), total(h) - used(h), used(h)};
    return OK;
}
API int nvmlDeviceGetMemoryInfo_v2(handle h, memory_v2 *m) {
    NEED_INIT;
    *m = (memory_v2){m->version, total(h), DRIVER_BYTES, total(h) - used(h), used(h) - DRIVER_BYTES};
    return OK;
}
API int nvmlDeviceGetMigMode(handle h, unsigned *now, unsigned *pending) {
    *now = *pending = mig();
    return setting("SIM_MIG", 2) == 2 ? NOT_SUPPORTED : OK; /* 0 is a card that could be split, and is not */
}
API int nvmlDeviceGetMaxMigDeviceCount(handle h, unsigned *n) { *n = mig() ? SLICES : 0; return OK; }
API int nvmlDeviceGetMigDeviceHandleByIndex(handle h, unsigned i, handle *found) {
    if (!mig() || i >= SLICES) return NOT_FOUND;
    *found = slice_of(card_of(h), i);
    return OK;
}
API int nvmlDeviceIsMigDeviceHandle(handle h, unsigned *is) { *is = is_slice(h) != 0; return OK; }
API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle h, handle *card) { *card = handle_of(card_of(h)); return OK; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(handle h, unsigned link, void *type) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle h, unsigned link, void *info) { return NOT_SUPPORTED; }

API int nvmlDeviceGetComputeRunningProcesses_v3(handle h, unsigned *n, running *out) {
    NEED_INIT;
    if (says("refused")) return NO_PERMISSION;
    unsigned found = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        process *p = table() + i;
        if (!used_by(h, p) || !alive(p) || says("hidden")) continue;
        unsigned long long bytes = says("unknown") ? -1ull : used_by(h, p);
        if (found < *n && out) out[found] = (running){p->pid, bytes, -1u, -1u};
        found++;
    }
    int small = found > *n;
    *n = found;
    return small ? INSUFFICIENT_SIZE : OK;
}
API int nvmlDeviceGetComputeRunningProcesses(handle h, unsigned *n, running *out) { return nvmlDeviceGetComputeRunningProcesses_v3(h, n, out); }
API int nvmlDeviceGetGraphicsRunningProcesses_v3(handle h, unsigned *n, running *out) { NEED_INIT; *n = 0; return OK; }
API int nvmlDeviceGetGraphicsRunningProcesses(handle h, unsigned *n, running *out) { NEED_INIT; *n = 0; return OK; }
