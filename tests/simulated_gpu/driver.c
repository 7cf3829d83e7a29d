/* libcuda: what torch asks the driver itself. Expandable segments reserve addresses first and map memory to them later. */
#define _GNU_SOURCE
#include <cuda.h>
#include "machine.h"
#include "memory.h"

typedef struct { size_t bytes; int place; } part; /* memory that has no address yet */

API CUresult cuGetErrorString(CUresult e, const char **text) {
    *text = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : e == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported" : e ? "unknown error" : "no error";
    return 0;
}
API CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return ordinal < device_count() ? 0 : CUDA_ERROR_INVALID_DEVICE; }
API CUresult cuDeviceGetCount(int *n) { *n = device_count(); return 0; }
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return 0;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = self()->context[place_of(device)];
    return 0;
}
API CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return 0; }

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *how, CUmemAllocationGranularity_flags which) { *bytes = 2 * MIB; return 0; }
API CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    void *found = mmap(0, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *start = (CUdeviceptr)found;
    return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : 0;
}
API CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) { munmap((void *)start, bytes); return 0; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *how, unsigned long long flags) {
    if (broken()) return broken();
    if (how->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
    int place = use(how->location.id);
    if (!count(place, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    part *made = malloc(sizeof *made);
    *made = (part){bytes, place};
    *handle = (CUmemGenericAllocationHandle)made;
    return 0;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    part *p = (part *)handle;
    count(p->place, -(long)p->bytes);
    free(p);
    return 0;
}
API CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    map((void *)start, bytes, ((part *)handle)->place);
    return 0;
}
API CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *who, size_t n) { return 0; }
API CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) { unmap((void *)start, bytes); return 0; }
