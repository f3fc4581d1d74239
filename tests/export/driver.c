/* A driver that launches nothing and writes down what it was asked for. */
#include <cuda.h>
#include <string.h>

enum { MOST = 64 };

struct record {
  int launches;
  unsigned int numbers[7]; /* grid, block, shared memory */
  const void *stream;
  int allowed; /* shared memory asked for */
  char symbol[64];
  const void *image;
  int sizes[MOST + 1]; /* set beforehand, as the binary says, up to a 0 */
  unsigned char values[MOST][8];
} record;

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
