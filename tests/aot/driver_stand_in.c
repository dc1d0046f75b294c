/* A CUDA driver for machines without one: it notes what the last launch was given. The sizes of a kernel's parameters
   are told by `expect_parameters`; a function handle does not carry them. */
#include <stdint.h>
#include <string.h>
#include "cuda.h"

#define MOST 256
static int count, sizes[MOST], launches;
static unsigned char noted[MOST][128];
static uint64_t shape[3];

void expect_parameters(int n, const int *bytes) {
  count = n;
  memcpy(sizes, bytes, n * sizeof(int));
}
int launches_so_far(void) { return launches; }
void noted_parameter(int i, void *out) { memcpy(out, noted[i], sizeof noted[i]); }
void noted_launch(uint64_t *out) { memcpy(out, shape, sizeof shape); } /* programs, threads of each, stream */

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  launches++;
  shape[0] = config->gridDimX, shape[1] = config->blockDimX, shape[2] = (uint64_t)config->hStream;
  for (int i = 0; i < count; i++) memcpy(noted[i], params[i], sizes[i]);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave i, CUtensorMapSwizzle w, CUtensorMapL2promotion p, CUtensorMapFloatOOBfill o) {
  memset(map, 0, sizeof *map);
  memcpy(map, &address, sizeof address); /* something to be recognised by */
  return CUDA_SUCCESS;
}

/* Copies at once, and refuses to on stream 13. */
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if ((uint64_t)stream == 13) return CUDA_ERROR_ILLEGAL_ADDRESS;
  shape[2] = (uint64_t)stream;
  memcpy((void *)to, (void *)from, bytes);
  return CUDA_SUCCESS;
}

/* What Triton asks when it loads a kernel. */
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { return *m = (CUmodule)16, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { return *f = (CUfunction)32, CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int n) { return *d = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { return *v = 227 * 1024, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return *c = (CUcontext)8, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { return *c = (CUcontext)8, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { return *v = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *v) { return *v = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char **s) { return *s = "stand-in", CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { return *n = 1, CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
  memcpy(out, &p, sizeof p);
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **out, CUdeviceptr p) {
  memcpy(out[0], &p, sizeof p);
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap *t, CUtensorMapDataType a, cuuint32_t b, void *c, const cuuint64_t *d,
    const cuuint64_t *e, const int *f, const int *g, cuuint32_t h, cuuint32_t i, const cuuint32_t *j,
    CUtensorMapInterleave k, CUtensorMapSwizzle l, CUtensorMapL2promotion m, CUtensorMapFloatOOBfill n) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
