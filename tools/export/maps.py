"""The part of a C launcher that makes TMA descriptors, as Triton's own launcher does (``backends/nvidia/driver.c``)."""

from __future__ import annotations

from collections.abc import Iterator

from .arguments import as_c
from .kernels import Exported, TensorMap

DATA_TYPES = {
    "bf16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "fp16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "fp32": "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
}
SWIZZLES = ("NONE", "32B", "64B", "128B")
FIXED = {
    "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
    "l2_promotion": "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    "oob_fill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
}
"""What is the same for all: rows past the end are zeros."""


def swizzle_of(one: TensorMap) -> str:
    return f"CU_TENSOR_MAP_SWIZZLE_{SWIZZLES[one.swizzle]}"


def declarations(kernel: Exported) -> Iterator[str]:
    """The tensors of a launch, and room for their maps."""
    if not kernel.maps:
        return
    yield f"  CUtensorMap room[{len(kernel.maps) + 1}], *maps = aligned(room);"
    for i, one in enumerate(kernel.maps):
        of = one.of
        sizes = ", ".join(as_c(str(size)) for size in of.sizes)
        strides = ", ".join(f"args->{of.tensor}_stride_{axis}" for axis in "bsh")
        box = ", ".join(map(str, one.box))
        yield f"  tensor {of.name} = {{maps + {i}, {{{sizes}}},"
        yield f"    {{{strides}, 1}}, {{{box}}}}};"


def encodings(kernel: Exported) -> Iterator[str]:
    """Make the maps; return what the driver returns where it does not."""
    if not kernel.maps:
        return
    yield "  CUresult result;"
    for one in kernel.maps:
        of = one.of
        yield f"  result = describe(&{of.name}, args->{of.tensor}, {of.element_size},"
        yield f"                    {DATA_TYPES[of.dtype]}, {swizzle_of(one)});"
        yield "  if (result != CUDA_SUCCESS)"
        yield "    return result;"


HELPERS = f"""#if CUDA_VERSION < 12000
#error "tensor maps need the headers of CUDA 12.0 or later"
#endif

typedef struct {{
  CUtensorMap *map;
  int32_t size[4];   /* [B, S, H, D] */
  int64_t stride[4]; /* in elements */
  int32_t box[4];    /* elements that one load takes */
}} tensor;

/* The driver wants 64 bytes, the type of CUDA 13 has 128; C99 cannot say so in a declaration. */
static CUtensorMap *aligned(CUtensorMap *room) {{
  return (CUtensorMap *)(((uintptr_t)room + 127) / 128 * 128);
}}

/* The map of a tensor at `base`. It is passed by value: nothing of it outlives the launch. */
static CUresult describe(tensor *x, CUdeviceptr base, int element_size, CUtensorMapDataType type,
                         CUtensorMapSwizzle swizzle) {{
  const cuuint32_t steps[4] = {{1, 1, 1, 1}};
  cuuint64_t sizes[4], strides[4]; /* the innermost dimension first, strides in bytes */
  cuuint32_t box[4];
  double reach = 0; /* bytes from the first element to the last: exact where it is small */
  int driver = 0;
  CUresult result;
  for (int i = 0; i < 4; ++i) {{
    /* the stride of a dimension of one element says nothing, and need not be one that the copy engine takes */
    if (x->size[i] == 1)
      x->stride[i] = i < 3 ? x->size[3] : 1;
    if (x->size[i] < 1 || x->stride[i] < 1 || x->stride[i] >= ((int64_t)1 << 40) / element_size)
      return CUDA_ERROR_INVALID_VALUE;
    sizes[3 - i] = (cuuint64_t)x->size[i];
    strides[3 - i] = (cuuint64_t)(x->stride[i] * element_size);
    box[3 - i] = (cuuint32_t)x->box[i];
    reach += (double)(x->size[i] - 1) * (double)strides[3 - i];
  }}
  result = cuTensorMapEncodeTiled(x->map, type, 4, (void *)(uintptr_t)base, sizes, strides + 1, box, steps,
                                  {FIXED["interleave"]}, swizzle,
                                  {FIXED["l2_promotion"]},
                                  {FIXED["oob_fill"]});
  if (result == CUDA_SUCCESS)
    result = cuDriverGetVersion(&driver);
  /* Drivers of CUDA 13.1 and before set this bit wrongly for tensors of less than 128 KB, which faults on Blackwell
   * (known issue of driver 595.71.05); CUTLASS and Triton clear it on every chip. */
  if (result == CUDA_SUCCESS && driver <= 13010 && reach + 1 < 128 * 1024)
    x->map->opaque[1] &= ~((cuuint64_t)1 << 21);
  return result;
}}"""
