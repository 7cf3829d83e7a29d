/* libcudart: devices, memory, streams, capture. Kernels do nothing; what is not written here answers "done". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <cuda_runtime_api.h>
#include "machine.h"
#include "memory.h"
#undef cudaGetDeviceProperties

typedef cudaError_t error;

static __thread int current; /* as this process counts */
static __thread error last_error;
static char symbols[1 << 20]; /* where every device symbol is */
static long next_handle = 0x1000;

static error fail(error e) { return last_error = e; }
static void *fresh(void) { return (void *)__sync_fetch_and_add(&next_handle, 16); }
static int here(void) { return use(current); }
#define MULTIPROCESSORS 132 /* those of an H100: some kernels' workspaces grow with them */
#define WORKS if (broken()) return fail(broken())

/* -- errors -- */

static const struct { error code; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};
static int row(error e) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == e) return i;
    return -1;
}
API const char *cudaGetErrorName(error e) { return row(e) < 0 ? "cudaErrorUnknown" : errors[row(e)].name; }
API const char *cudaGetErrorString(error e) { return row(e) < 0 ? "unknown error" : errors[row(e)].text; }
API error cudaPeekAtLastError(void) { return broken() ? broken() : last_error; }
API error cudaGetLastError(void) {
    error e = cudaPeekAtLastError();
    last_error = 0;
    return e;
}
API long simulated_state(void) { return broken() ? fail(broken()) : 0; } /* what every generated function answers */

/* -- devices -- */

API error cudaGetDeviceCount(int *n) {
    WORKS;
    *n = device_count();
    return *n ? 0 : fail(cudaErrorNoDevice);
}
API error cudaGetDevice(int *d) {
    WORKS;
    *d = current;
    return 0;
}
API error cudaSetDevice(int d) {
    WORKS;
    if (d < 0 || d >= device_count()) return fail(cudaErrorInvalidDevice);
    current = d;
    here();
    return 0;
}
API error cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
API error cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return 0; }
static int capability(int part) { /* SIM_CAPABILITY=90 is 9.0, a Hopper's */
    int value = setting("SIM_CAPABILITY", 90);
    return part ? value % 10 : value / 10;
}
API error cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    WORKS;
    int card = place_of(device) % MAX_CARDS;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Simulated GPU");
    memset(p->uuid.bytes, uuid_byte(card), sizeof p->uuid.bytes); /* a slice has that of its card */
    p->totalGlobalMem = place_bytes();
    p->pciBusID = card + 1;
    p->major = capability(0);
    p->minor = capability(1);
    p->warpSize = 32;
    p->multiProcessorCount = MULTIPROCESSORS;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->textureAlignment = 512;
    p->l2CacheSize = 50 << 20;
    p->unifiedAddressing = 1;
    return 0;
}
API error cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr which, int device) {
    WORKS;
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *v = capability(0); break;
    case cudaDevAttrComputeCapabilityMinor: *v = capability(1); break;
    case cudaDevAttrMultiProcessorCount: *v = MULTIPROCESSORS; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    default: *v = 0;
    }
    return 0;
}
API error cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
API error cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return fail(cudaErrorPeerAccessUnsupported); }
API error cudaDeviceGetPCIBusId(char *text, int n, int device) {
    snprintf(text, n, "0000:%02x:00.0", place_of(device) % MAX_CARDS + 1);
    return 0;
}

/* -- streams and their capture into graphs -- */

typedef struct { unsigned long long capture; int priority; } stream;
typedef struct { unsigned long long capture; } event;

#define MOST_CAPTURES 16
static struct { unsigned long long id; int invalid, kernels, mode; void *thread; } captures[MOST_CAPTURES]; /* those underway */
static unsigned long long next_capture = 1;
static __thread enum cudaStreamCaptureMode capture_mode; /* of this thread; its address tells the thread from others */

static int capture_of(cudaStream_t s) {
    if ((long)s > 2) /* the default streams cannot be captured */
        for (int i = 0; i < MOST_CAPTURES; i++)
            if (captures[i].id && captures[i].id == ((stream *)s)->capture) return i;
    return -1;
}
/* What CUDA forbids beside a capture: 0, or the error, and the capture is invalid. In mode "global" of any thread. */
static error unsafe(void) {
    error e = 0;
    for (int i = 0; i < MOST_CAPTURES && capture_mode != cudaStreamCaptureModeRelaxed; i++) {
        if (!captures[i].id || captures[i].mode == cudaStreamCaptureModeRelaxed) continue;
        if (captures[i].mode != cudaStreamCaptureModeGlobal && captures[i].thread != &capture_mode) continue;
        captures[i].invalid = 1;
        e = fail(cudaErrorStreamCaptureUnsupported);
    }
    return e;
}
API error cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode earlier = capture_mode;
    capture_mode = *mode;
    *mode = earlier;
    return 0;
}
API error cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    WORKS;
    here();
    stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    *s = (cudaStream_t)made;
    return 0;
}
API error cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API error cudaStreamDestroy(cudaStream_t s) { free(s); return 0; }
API error cudaStreamGetPriority(cudaStream_t s, int *p) { *p = (long)s > 2 ? ((stream *)s)->priority : 0; return 0; }
API error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    here(); /* makes a context */
    *least = 0;
    *greatest = -5;
    return 0;
}
API error cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    WORKS;
    if ((long)s <= 2 || capture_of(s) >= 0) return fail(cudaErrorStreamCaptureUnsupported);
    for (int i = 0; i < MOST_CAPTURES; i++)
        if (!captures[i].id) {
            captures[i].id = ((stream *)s)->capture = next_capture++;
            captures[i].invalid = captures[i].kernels = 0;
            captures[i].mode = mode;
            captures[i].thread = &capture_mode;
            return 0;
        }
    return fail(cudaErrorStreamCaptureUnsupported);
}
API error cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    WORKS;
    int i = capture_of(s);
    if (i < 0) return fail(cudaErrorIllegalState);
    long *kernels = calloc(1, sizeof *kernels);
    *kernels = captures[i].kernels;
    *graph = (cudaGraph_t)kernels;
    captures[i].id = 0;
    return captures[i].invalid ? fail(cudaErrorStreamCaptureInvalidated) : 0;
}
API error cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    WORKS;
    int i = capture_of(s);
    *status = i < 0 ? cudaStreamCaptureStatusNone : captures[i].invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return 0;
}
API error cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    error failed = cudaStreamIsCapturing(s, status);
    if (id) *id = capture_of(s) < 0 ? 0 : captures[capture_of(s)].id;
    if (n) *n = 0;
    return failed;
}
API error cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n) { *n = *(long *)graph; return 0; }
API error cudaGraphInstantiateWithFlags(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long flags) { WORKS; *run = fresh(); return 0; }
API error cudaGraphDestroy(cudaGraph_t graph) { free(graph); return 0; }
static error wait(cudaStream_t s) {
    WORKS;
    int i = capture_of(s);
    if (i < 0) return 0;
    captures[i].invalid = 1;
    return fail(cudaErrorStreamCaptureUnsupported);
}
API error cudaStreamSynchronize(cudaStream_t s) { return wait(s); }
API error cudaStreamQuery(cudaStream_t s) { return wait(s); }
API error cudaDeviceSynchronize(void) { WORKS; return unsafe(); }
API error cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    WORKS;
    here();
    *e = calloc(1, sizeof(event));
    return 0;
}
API error cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API error cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
API error cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    WORKS;
    ((event *)e)->capture = capture_of(s) < 0 ? 0 : captures[capture_of(s)].id;
    return 0;
}
API error cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API error cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { /* a stream that waits joins the capture */
    WORKS;
    if ((long)s > 2 && ((event *)e)->capture) ((stream *)s)->capture = ((event *)e)->capture;
    return 0;
}
API error cudaEventQuery(cudaEvent_t e) {
    WORKS;
    return unsafe();
}
API error cudaEventSynchronize(cudaEvent_t e) { return cudaEventQuery(e); }
API error cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { WORKS; *ms = 0; return 0; }

/* -- memory -- */

static error allocate(void **out, size_t bytes, enum kind kind) {
    WORKS;
    *out = take(here(), bytes, kind);
    return *out ? 0 : fail(cudaErrorMemoryAllocation);
}
API error cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    WORKS;
    unsigned long used = used_at(here());
    *total = place_bytes();
    *free_bytes = used < *total ? *total - used : 0;
    return 0;
}
API error cudaMalloc(void **out, size_t bytes) {
    error e = unsafe();
    return e ? e : allocate(out, bytes, PLAIN);
}
API error cudaFree(void *start) {
    WORKS;
    error e = unsafe();
    if (!e && start) give_back(start, PLAIN);
    return e;
}
API error cudaMallocAsync(void **out, size_t bytes, cudaStream_t s) { return allocate(out, bytes, POOLED); }
API error cudaFreeAsync(void *start, cudaStream_t s) { WORKS; give_back(start, POOLED); return 0; }
API error cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { WORKS; *pool = (cudaMemPool_t)(long)(place_of(device) + 1); return 0; }
static pool *pool_of(cudaMemPool_t handle) { return pool_at((int)(long)handle - 1); }
API error cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep) { WORKS; trim((int)(long)handle - 1, keep); return 0; }
API error cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr which, void *value) {
    WORKS;
    pool *p = pool_of(handle);
    *(unsigned long *)value = which == cudaMemPoolAttrUsedMemCurrent ? p->used
        : which == cudaMemPoolAttrReservedMemCurrent ? p->reserved
        : which == cudaMemPoolAttrUsedMemHigh ? p->used_high
        : which == cudaMemPoolAttrReservedMemHigh ? p->reserved_high : 0;
    return 0;
}
API error cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr which, void *value) {
    WORKS;
    pool *p = pool_of(handle);
    if (which == cudaMemPoolAttrUsedMemHigh) p->used_high = p->used;
    if (which == cudaMemPoolAttrReservedMemHigh) p->reserved_high = p->reserved;
    return 0;
}
API error cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    error e = unsafe();
    return e ? e : allocate(out, bytes, PINNED);
}
API error cudaFreeHost(void *start) {
    WORKS;
    error e = unsafe();
    if (!e && give_back(start, PINNED)) free(start);
    return e;
}
API error cudaHostRegister(void *start, size_t bytes, unsigned flags) { WORKS; here(); return pin(start, bytes); }
API error cudaHostUnregister(void *start) { WORKS; give_back(start, PINNED); return 0; }
API error cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) {
    WORKS;
    range found;
    memset(a, 0, sizeof *a);
    if (!find(pointer, &found)) return 0;
    a->devicePointer = (void *)pointer;
    if (found.kind == PINNED) {
        a->type = cudaMemoryTypeHost;
        a->hostPointer = (void *)pointer;
        return 0;
    }
    a->type = cudaMemoryTypeDevice;
    for (int device = 0; device < device_count(); device++)
        if (place_of(device) == found.place) a->device = device;
    return 0;
}
API error cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) { WORKS; memmove(to, from, bytes); return 0; }
static long reported;
/* The switch of the tests: from now on a single number that is copied to the host is this count, and a truth value is
   true, as if kernels had counted. 0: both are what the memory contains. */
API void simulate_count(long count) { reported = count; }
API error cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
    WORKS;
    if (reported && kind == cudaMemcpyDeviceToHost && (bytes == 1 || bytes == 4 || bytes == 8)) {
        long value = bytes == 1 ? 1 : reported;
        memcpy(to, &value, bytes);
        return 0;
    }
    if (kind != cudaMemcpyDeviceToDevice || bytes <= 64 * MIB) memmove(to, from, bytes); /* large ones would take real memory */
    return 0;
}
API error cudaMemset(void *start, int value, size_t bytes) { WORKS; if (value) memset(start, value, bytes); return 0; }
API error cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t s) { return cudaMemset(start, value, bytes); }
API error cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *start) { return fail(cudaErrorNotSupported); }
API error cudaIpcOpenMemHandle(void **start, cudaIpcMemHandle_t handle, unsigned flags) { return fail(cudaErrorNotSupported); }
API error cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t e) { return fail(cudaErrorNotSupported); }
API error cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t handle) { return fail(cudaErrorNotSupported); }

/* -- kernels -- */

static error launched(cudaStream_t s) {
    WORKS;
    here();
    if (capture_of(s) >= 0) captures[capture_of(s)].kernels++;
    return 0;
}
API error cudaLaunchKernel(const void *f, dim3 grid, dim3 threads, void **arguments, size_t shared, cudaStream_t s) { return launched(s); }
API error cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 threads, void **arguments, size_t shared, cudaStream_t s) { return launched(s); }
API error cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *f, void **arguments) { return launched(how->stream); }
API error cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { WORKS; f(data); return 0; }
API error cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    WORKS;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = setting("SIM_CAPABILITY", 90);
    return 0;
}
API error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared) { *n = 2; return 0; }
API error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads, size_t shared, unsigned flags) { *n = 2; return 0; }
API error cudaGetSymbolAddress(void **p, const void *symbol) { *p = symbols; return 0; }
API void **__cudaRegisterFatBinary(void *binary) { return fresh(); }
static __thread struct { dim3 grid, threads; size_t shared; void *stream; } launch; /* between <<< and >>> */
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared, void *stream) {
    launch.grid = grid;
    launch.threads = threads;
    launch.shared = shared;
    launch.stream = stream;
    return 0;
}
API unsigned __cudaPopCallConfiguration(dim3 *grid, dim3 *threads, size_t *shared, void *stream) {
    *grid = launch.grid;
    *threads = launch.threads;
    *shared = launch.shared;
    *(void **)stream = launch.stream;
    return 0;
}
API error __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return 0; }
API char __cudaInitModule(void **handle) { return 1; }

/* -- the driver's functions: those that driver.c has; for all others "not supported" -- */

static int not_supported(void) { return cudaErrorNotSupported; }
API error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
    *function = library ? dlsym(library, name) : 0;
    if (!*function) *function = not_supported;
    if (found) *found = cudaDriverEntryPointSuccess;
    return 0;
}
