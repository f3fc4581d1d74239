"""The C header and launcher of exported kernels."""

from __future__ import annotations

from collections.abc import Sequence

from .kernels import ALIGNMENT, Argument, Exported, Wish

C_TYPES = {"i32": "int32_t", "i64": "int64_t", "fp32": "float"}

MEANING = {
    "q": "queries [B, Sq, H, D]",
    "k": "keys [B, Sk, Hkv, D]",
    "v": "values [B, Sk, Hkv, Dv]",
    "out": "output [B, Sq, H, Dv]",
    "dout": "gradient of out [B, Sq, H, Dv]",
    "state": "out of the shards before, [B, Sq, H, Dv]",
    "lse": "log of the sum of exponentials, natural, [B, H, Sq], contiguous",
    "delta": "rowsum(dout * out), [B, H, Sq], contiguous",
    "dq_in": "dq of the shards before, [B, Sq, H, D]",
    "dk_in": "dk of the shards before, [B, Sk, Hkv, D]",
    "dv_in": "dv of the shards before, [B, Sk, Hkv, Dv]",
    "dq_out": "gradient of q, [B, Sq, H, D]",
    "dk_out": "gradient of k, [B, Sk, Hkv, D]",
    "dv_out": "gradient of v, [B, Sk, Hkv, Dv]",
    "softmax_scale": "factor of q k^T, usually 1 / sqrt(D)",
    "group": "query heads per key head",
}
ROWS = {"dkdv": ("Sk", "Sq", "Hkv", "query of each key")}  # of the other kernels: Sq, Sk, H
OF_ROWS = ("Sq", "Sk", "H", "key of each query")


def header(wish: Wish, kernels: Sequence[Exported], licence: str) -> str:
    """``<prefix>.h``."""
    guard = f"{wish.prefix}_h".upper()
    dims = f"head dim {wish.head_dim}, of values {wish.head_dim_v}"
    parts = [
        _comment(
            f"Attention kernels of ringattn for sm_{wish.arch}: {wish.dtype}, {dims}. Written by `ringattn export`.",
            f"Licence: {licence}. Pointers are device addresses, strides count elements, the last one is 1.",
            "Made for any lengths, heads and batches. Offsets within a head are 64-bit.",
        ),
        f"#ifndef {guard}\n#define {guard}\n\n#include <stddef.h>\n#include <stdint.h>\n#include <cuda.h>",
        '#ifdef __cplusplus\nextern "C" {\n#endif',
        *(_declarations(wish, kernel) for kernel in kernels),
        *([CAUSAL] if wish.bounded else []),
        f"#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {guard} */\n",
    ]
    return "\n\n".join(parts)


def launcher(wish: Wish, kernels: Sequence[Exported], licence: str) -> str:
    """``<prefix>.c``."""
    top = _comment(f"Launchers of the kernels in {wish.prefix}.h. Licence: {licence}.")
    launches = (_launch(wish, kernel) for kernel in kernels)
    return "\n\n".join([top, f'#include "{wish.prefix}.h"', LOAD, *launches]) + "\n"


def _declarations(wish: Wish, kernel: Exported) -> str:
    name = f"{wish.prefix}_{kernel.name}"
    fields = [_field(kernel, argument) for argument in asked(kernel)]
    return "\n".join(
        [
            _comment(
                f"{kernel.name}: one program per {kernel.block} rows, batch row and head; {kernel.threads} "
                f"threads, {kernel.shared} bytes of shared memory.",
            ),
            f"typedef struct {name}_args {{",
            *fields,
            f"}} {name}_args;",
            "",
            _comment("`cubin` is the file of that name, in memory. Once per context."),
            f"CUresult {name}_load(const void *cubin, CUmodule *module, CUfunction *function);",
            "",
            _comment(
                "On `stream`. CUDA_ERROR_INVALID_VALUE where something is not aligned, a number makes no sense, or",
                "there are too many programs; nothing is launched where there are no rows.",
            ),
            f"CUresult {name}_launch(CUfunction function, const {name}_args *args,",
            "    int32_t batch, CUstream stream);",
        ]
    )


def asked(kernel: Exported) -> list[Argument]:
    """What a caller says; what is passed twice is asked for once."""
    return [argument for argument in kernel.arguments if argument.same_as is None]


def _field(kernel: Exported, argument: Argument) -> str:
    rows, columns, heads, of = ROWS.get(kernel.name, OF_ROWS)
    own = {"rows": rows, "columns": columns, "heads": heads, "lo": f"first {of}, int32 [{rows}], never decreasing"}
    own["hi"] = own["lo"].replace("first", "one past the last", 1)
    meaning = own.get(argument.name) or MEANING.get(argument.name) or "in elements"
    kind = "CUdeviceptr" if argument.type.startswith("*") else C_TYPES[argument.type]
    dtype = f"{argument.type[1:]}, " if argument.type.startswith("*") and argument.type != "*i32" else ""
    multiple = f"; a multiple of {argument.multiple}" if argument.multiple > 1 else ""
    return f"  {kind} {argument.name}; /* {dtype}{meaning}{multiple} */"


def _launch(wish: Wish, kernel: Exported) -> str:
    name = f"{wish.prefix}_{kernel.name}"
    checked = [a.name for a in asked(kernel) if a.multiple > 1]
    passed = [f"(void *)&args->{a.same_as or a.name}" for a in kernel.arguments] + ["&scratch"] * kernel.scratch
    all_of = "\n    | ".join(f"(uint64_t)args->{one}" for one in checked)
    lines = [
        f"CUresult {name}_load(const void *cubin, CUmodule *module, CUfunction *function) {{",
        f'  return load(cubin, "{kernel.symbol}", {kernel.shared}, module, function);',
        "}",
        "",
        f"CUresult {name}_launch(CUfunction function, const {name}_args *args,",
        "    int32_t batch, CUstream stream) {",
        "  CUdeviceptr scratch = 0; /* Triton's two last parameters, which this kernel does not read */",
        f"  int64_t tiles = ((int64_t)args->rows + {kernel.block - 1}) / {kernel.block};",
        "  int64_t programs = tiles * args->heads; /* of one batch row */",
        "  void *parameters[] = {",
        *(f"    {one}," for one in passed),
        "  };",
        f"  uint64_t all = {all_of};",
        f"  if (all % {ALIGNMENT})",
        "    return CUDA_ERROR_INVALID_VALUE;",
        f"  if ({senseless(kernel)})",
        "    return CUDA_ERROR_INVALID_VALUE;",
        "  if (programs > INT32_MAX || (programs *= batch) > INT32_MAX)",
        "    return CUDA_ERROR_INVALID_VALUE;",
        "  if (programs == 0)",
        "    return CUDA_SUCCESS;",
        f"  return cuLaunchKernel(function, (unsigned)programs, 1, 1, {kernel.threads}, 1, 1,",
        f"                        {kernel.shared}, stream, parameters, NULL);",
        "}",
    ]
    return "\n".join(lines)


def senseless(kernel: Exported) -> str:
    """The condition in C under which a launch is refused for its numbers."""
    known = {argument.name for argument in asked(kernel)}
    found = ["batch < 0", *(f"args->{name} < 0" for name in ("rows", "columns", "heads") if name in known)]
    if "group" in known:
        found.append("args->group < 1")
        if kernel.name != "dkdv":  # whose heads are those of the keys
            found.append("args->heads % args->group")
    if "softmax_scale" in known:
        found.append("!(args->softmax_scale > 0)")  # NaN too
    return "\n      || ".join(found)


def _comment(*lines: str) -> str:
    return "/* " + "\n * ".join(lines) + " */"


LOAD = """static CUresult load(const void *cubin, const char *symbol, int shared, CUmodule *module,
                     CUfunction *function) {
  CUresult result = cuModuleLoadData(module, cubin);
  if (result == CUDA_SUCCESS)
    result = cuModuleGetFunction(function, *module, symbol);
  if (result == CUDA_SUCCESS && shared > 48 * 1024) /* more than any kernel has without asking */
    result = cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
  return result;
}"""

CAUSAL = """#ifndef RINGATTN_CAUSAL_BOUNDS
#define RINGATTN_CAUSAL_BOUNDS
/* Host arrays for lo and hi: query i sees the keys up to i + offset, which is 0, or Sk - Sq where the last
 * query sees all keys. */
static inline void ringattn_causal_bounds(int32_t *lo, int32_t *hi, int32_t queries, int32_t keys, int32_t offset) {
  for (int32_t i = 0; i < queries; ++i) {
    int64_t end = (int64_t)i + offset + 1;
    lo[i] = 0;
    hi[i] = end < 0 ? 0 : end > keys ? keys : (int32_t)end;
  }
}
/* The same by key, for dkdv: key j is seen by the queries from j - offset on. */
static inline void ringattn_causal_bounds_by_key(int32_t *lo, int32_t *hi, int32_t queries, int32_t keys,
                                                 int32_t offset) {
  for (int32_t j = 0; j < keys; ++j) {
    int64_t begin = (int64_t)j - offset;
    lo[j] = begin < 0 ? 0 : begin > queries ? queries : (int32_t)begin;
    hi[j] = queries;
  }
}
#endif"""
