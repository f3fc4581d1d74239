/* A recording CUDA driver: it launches nothing. Triton's own launcher loads it as libcuda.so.1. */
#include <cuda.h>
#include <string.h>

enum { MOST = 96, LARGEST = 128 };

struct record {
  int launches;
  unsigned int numbers[7]; /* grid, block, shared memory */
  const void *stream;
  int allowed; /* requested shared memory */
  char symbol[64];
  const void *image;
  int sizes[MOST + 1]; /* set by the test: parameter sizes of the binary, ended by 0 */
  unsigned char values[MOST][LARGEST];
  int driver_version; /* set by the test */
  unsigned long long set[4]; /* address, value, count and stream of the last memset */
} record;

/* Stored in place of a tensor map: the arguments of its creation. */
struct map {
  cuuint64_t address;
  unsigned char rank, type, always, interleave, swizzle, promotion, fill, unused; /* always: bit 85 of the map is set */
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4];
};

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  record.image = image;
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
  if (hmod != (CUmodule)1)
    return CUDA_ERROR_NOT_FOUND;
  strncpy(record.symbol, name, sizeof record.symbol - 1);
  *hfunc = (CUfunction)2;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  if (hfunc != (CUfunction)2 || attrib != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return CUDA_ERROR_INVALID_VALUE;
  record.allowed = value;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *driverVersion) {
  *driverVersion = record.driver_version;
  return CUDA_SUCCESS;
}

CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
  record.set[0] = dstDevice;
  record.set[1] = ui;
  record.set[2] = N;
  record.set[3] = (size_t)hStream;
  return CUDA_SUCCESS;
}

/* Checks the requirements that cuda.h lists. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank,
                                void *globalAddress, const cuuint64_t *globalDim, const cuuint64_t *globalStrides,
                                const cuuint32_t *boxDim, const cuuint32_t *elementStrides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill) {
  const cuuint64_t bytes = tensorDataType == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  struct map map;
  memset(&map, 0, sizeof map);
  if ((size_t)tensorMap % 128 || (size_t)globalAddress % 16 || tensorRank != 4 || boxDim[0] * bytes > 128)
    return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 4; ++i) {
    map.sizes[i] = globalDim[i];
    map.box[i] = boxDim[i];
    map.steps[i] = elementStrides[i];
    if (globalDim[i] < 1 || globalDim[i] >> 32 || boxDim[i] < 1 || boxDim[i] > 256)
      return CUDA_ERROR_INVALID_VALUE;
    if (i == 3)
      continue;
    map.strides[i] = globalStrides[i];
    if (globalStrides[i] % 16 || globalStrides[i] >> 40)
      return CUDA_ERROR_INVALID_VALUE;
  }
  map.address = (cuuint64_t)(size_t)globalAddress;
  map.rank = (unsigned char)tensorRank;
  map.type = (unsigned char)tensorDataType;
  map.always = 1 << 5;
  map.interleave = (unsigned char)interleave;
  map.swizzle = (unsigned char)swizzle;
  map.promotion = (unsigned char)l2Promotion;
  map.fill = (unsigned char)oobFill;
  memset(tensorMap, 0, sizeof *tensorMap);
  memcpy(tensorMap, &map, sizeof map);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                        unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                        unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra) {
  unsigned int numbers[7] = {gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes};
  if (f != (CUfunction)2 || extra != 0)
    return CUDA_ERROR_INVALID_VALUE;
  memcpy(record.numbers, numbers, sizeof numbers);
  record.stream = hStream;
  for (int i = 0; record.sizes[i]; ++i)
    memcpy(record.values[i], kernelParams[i], (size_t)record.sizes[i]);
  ++record.launches;
  return CUDA_SUCCESS;
}

/* Further functions that Triton's launcher calls. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra) {
  if (config->numAttrs)
    return CUDA_ERROR_NOT_SUPPORTED;
  return cuLaunchKernel(f, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY,
                        config->blockDimZ, config->sharedMemBytes, config->hStream, kernelParams, extra);
}

CUresult cuCtxGetCurrent(CUcontext *pctx) {
  *pctx = (CUcontext)3;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    return CUDA_ERROR_NOT_SUPPORTED;
  *(CUdeviceptr *)data = ptr;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **pStr) {
  *pStr = error == CUDA_SUCCESS ? "none" : "an error of the driver that records";
  return CUDA_SUCCESS;
}
