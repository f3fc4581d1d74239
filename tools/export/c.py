"""The C header and launcher of exported kernels; TMA descriptors are made as Triton's own launcher makes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .config import ExportConfig
from .kernels import BY_KEYS, BYTES, DATA_TYPES, FIXED, SWIZZLES, Argument, Exported

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
    "dq": "what the gradient of q is added to, [B, Sq, H, D]: zeros, or that of the shards before",
    "turns_gates": "room for B * H * ceil(Sq / BLOCK_Q) int32, which the launch fills",
    "turns_numbers": "int32 [ceil(Sk / BLOCK_K), ceil(Sq / BLOCK_Q)], as the function above fills it",
    "softmax_scale": "factor of q k^T, usually 1 / sqrt(D)",
    "group": "query heads per key head",
}
OF_KEYS = ("Sk", "Sq", "Hkv", "query of each key")
OF_QUERIES = ("Sq", "Sk", "H", "key of each query")


def header(config: ExportConfig, kernels: Sequence[Exported], licence: str) -> str:
    """``<prefix>.h``."""
    guard = f"{config.prefix}_h".upper()
    dims = f"head dim {config.head_dim}, of values {config.head_dim_v}"
    parts = [
        _comment(
            f"Attention kernels of ringattn for sm_{config.arch}: {config.dtype}, {dims}. "
            "Written by `ringattn export`.",
            f"Licence: {licence}. Pointers are device addresses, strides count elements, the last one is 1.",
            "Made for any lengths, heads and batches. Offsets within a head are 64-bit.",
        ),
        f"#ifndef {guard}\n#define {guard}\n\n#include <stddef.h>\n#include <stdint.h>\n#include <cuda.h>",
        '#ifdef __cplusplus\nextern "C" {\n#endif',
        *(part for kernel in kernels for part in _declarations(config, kernel)),
        *([CAUSAL] if config.bounded else []),
        f"#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {guard} */\n",
    ]
    return "\n\n".join(parts)


def launcher(config: ExportConfig, kernels: Sequence[Exported], licence: str) -> str:
    """``<prefix>.c``."""
    top = _comment(f"Launchers of the kernels in {config.prefix}.h. Licence: {licence}.")
    launches = (_launch(config, kernel) for kernel in kernels)
    helpers = [HELPERS] if any(kernel.maps for kernel in kernels) else []
    return "\n\n".join([top, f'#include "{config.prefix}.h"', LOAD, *helpers, *launches]) + "\n"


def _declarations(config: ExportConfig, kernel: Exported) -> Iterator[str]:
    name = f"{config.prefix}_{kernel.name}"
    fields = [_field(kernel, argument) for argument in kernel.asked]
    needs = [
        f"{kernel.name}: one program per {kernel.block} rows, batch row and head; {kernel.threads} "
        f"threads, {kernel.shared} bytes of shared memory.",
        *(MAPS.format(", ".join(one.tensor for one in kernel.maps)).splitlines() if kernel.maps else []),
        *(SUMS.splitlines() if kernel.name == "gradients" else []),
    ]
    if has_turns(kernel):
        yield TURNS.format(name=name, block_q=kernel.tile.block_q, block_k=kernel.tile.block_k)
    yield "\n".join(
        [
            _comment(*needs),
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


def has_turns(kernel: Exported) -> bool:
    """Whether the caller says whose turn it is."""
    return any(one.name == "turns_numbers" for one in kernel.asked)


def _field(kernel: Exported, argument: Argument) -> str:
    rows, columns, heads, of = OF_KEYS if kernel.name in BY_KEYS else OF_QUERIES
    own = {"rows": rows, "columns": columns, "heads": heads, "lo": f"first {of}, int32 [{rows}], never decreasing"}
    own["hi"] = own["lo"].replace("first", "one past the last", 1)
    meaning = own.get(argument.name) or MEANING.get(argument.name) or "in elements"
    for side in ("q", "k"):
        meaning = meaning.replace(f"BLOCK_{side.upper()}", str(getattr(kernel.tile, f"block_{side}")))
    kind = "CUdeviceptr" if argument.type.startswith("*") else C_TYPES[argument.type]
    dtype = f"{argument.type[1:]}, " if argument.type.startswith("*") and argument.type != "*i32" else ""
    multiple = f"; a multiple of {argument.multiple}" if argument.multiple > 1 else ""
    return f"  {kind} {argument.name}; /* {dtype}{meaning}{multiple} */"


def _launch(config: ExportConfig, kernel: Exported) -> str:
    name = f"{config.prefix}_{kernel.name}"
    passed = [f"(void *){a.at or f'&args->{a.same_as or a.name}'}" for a in kernel.arguments]
    lines = [
        f"CUresult {name}_load(const void *cubin, CUmodule *module, CUfunction *function) {{",
        f'  return load(cubin, "{kernel.symbol}", {kernel.shared}, module, function);',
        "}",
        "",
        f"CUresult {name}_launch(CUfunction function, const {name}_args *args,",
        "    int32_t batch, CUstream stream) {",
        "  CUdeviceptr scratch = 0; /* Triton's two last parameters, which this kernel does not read */",
        *(["  int32_t zero = 0;"] if any(one.at == "&zero" for one in kernel.arguments) else []),
        f"  int64_t tiles = ((int64_t)args->rows + {kernel.block - 1}) / {kernel.block};",
        "  int64_t programs = tiles * args->heads; /* of one batch row */",
        *_alignments(kernel),
        f"  if ({senseless(kernel)})",
        "    return CUDA_ERROR_INVALID_VALUE;",
        "  if (programs > INT32_MAX || (programs *= batch) > INT32_MAX)",
        "    return CUDA_ERROR_INVALID_VALUE;",
        "  if (programs == 0)",
        "    return CUDA_SUCCESS;",
        *declarations(kernel),
        "  void *parameters[] = {",
        *(f"    {one}," for one in [*passed, *["&scratch"] * kernel.scratch]),
        "  };",
        *encodings(kernel),
        *_gates(kernel),
        f"  return cuLaunchKernel(function, (unsigned)programs, 1, 1, {kernel.threads}, 1, 1,",
        f"                        {kernel.shared}, stream, parameters, NULL);",
        "}",
    ]
    return "\n".join(lines)


def _alignments(kernel: Exported) -> Iterator[str]:
    for multiple in sorted({one.multiple for one in kernel.asked} - {1}):
        checked = "\n      | ".join(f"(uint64_t)args->{one.name}" for one in kernel.asked if one.multiple == multiple)
        yield f"  if (({checked}) % {multiple})"
        yield "    return CUDA_ERROR_INVALID_VALUE;"


def _gates(kernel: Exported) -> Iterator[str]:
    """Nobody has added to dQ yet."""
    names = {one.name for one in kernel.asked}
    if "turns_gates" not in names:
        return
    heads = "args->heads * args->group" if "group" in names else "args->heads"
    tiles = f"(((size_t)args->columns + {kernel.tile.block_q - 1}) / {kernel.tile.block_q})"
    if not kernel.maps:
        yield "  CUresult result;"
    yield f"  result = cuMemsetD32Async(args->turns_gates, 0, (size_t)batch * (size_t)({heads}) * {tiles}, stream);"
    yield "  if (result != CUDA_SUCCESS)"
    yield "    return result;"


def senseless(kernel: Exported) -> str:
    """The condition in C under which a launch is refused for its numbers."""
    known = {argument.name for argument in kernel.asked}
    found = ["batch < 0", *(f"args->{name} < 0" for name in ("rows", "columns", "heads") if name in known)]
    if "group" in known:
        found.append("args->group < 1")
        if kernel.name not in BY_KEYS:  # whose heads are those of the keys
            found.append("args->heads % args->group")
    if "softmax_scale" in known:
        found.append("!(args->softmax_scale > 0)")  # NaN too
    if kernel.name == "gradients":  # 32 bits reach from one end of a tile of queries to the other
        far = (2**31 - 1) // kernel.tile.block_q
        described = {one.tensor for one in kernel.maps if not one.by_pointer}  # any map reaches
        strides = [f"args->{name}_stride_s" for name in ("q", "dout", "dq") if name not in described]
        found += [f"{stride} > {far} || {stride} < -{far}" for stride in strides]
        found += ["(int64_t)args->heads * args->group > INT32_MAX"] if "group" in known else []
    return "\n      || ".join(found)


def _comment(*lines: str) -> str:
    return "/* " + "\n * ".join(lines) + " */"


MAPS = """By tensor maps: {}. The launch makes them, anew each time, by cuTensorMapEncodeTiled (CUDA 12.0), and
returns what that returns: at least one row and one column, strides positive where a dimension has more
than one element."""

SUMS = """Adds to dq, in fp32; batch rows, heads and head dim of dk_out and dv_out are those of the keys."""

TURNS = """/* turns_numbers, int32 [ceil(keys / {block_k}), ceil(queries / {block_q})], on the host: how many later
 * tiles of keys add to a tile of queries before this one does. lo and hi by key, as the launch takes them, but on the
 * host. A table that is not of these lo and hi makes the kernel wait forever. */
static inline void {name}_turns(int32_t *numbers, const int32_t *lo, const int32_t *hi,
    int32_t queries, int32_t keys) {{
  int64_t across = ((int64_t)queries + {block_q} - 1) / {block_q}, down = ((int64_t)keys + {block_k} - 1) / {block_k};
  for (int64_t column = 0; column < across; ++column) {{
    int32_t before = 0;
    for (int64_t tile = down - 1; tile >= 0; --tile) {{
      int64_t first = tile * {block_k}, end = first + {block_k} < keys ? first + {block_k} : keys;
      int64_t query = column * {block_q}, low = lo[first], high = hi[end - 1];
      numbers[tile * across + column] = before;
      before += high > low && query >= low / {block_q} * {block_q} && query < high;
    }}
  }}
}}"""

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

# tensor maps


def declarations(kernel: Exported) -> Iterator[str]:
    """The tensors of a launch, and room for their maps."""
    if not kernel.maps:
        return
    yield f"  CUtensorMap room[{len(kernel.maps) + 1}], *maps = aligned(room);"
    for i, one in enumerate(kernel.maps):
        sizes = ", ".join(as_c(str(size)) for size in one.sizes)
        strides = ", ".join(f"args->{one.tensor}_stride_{axis}" for axis in "bsh")
        box = ", ".join(map(str, one.box))
        yield f"  tensor {one.name} = {{maps + {i}, {{{sizes}}},"
        yield f"    {{{strides}, 1}}, {{{box}}}}};"


def as_c(words: str) -> str:
    """An expression of arguments in C: ``heads / group`` as args->heads / args->group."""
    return re.sub(r"[a-z]\w*", lambda found: found[0] if found[0] == "batch" else f"args->{found[0]}", words)


def encodings(kernel: Exported) -> Iterator[str]:
    """Make the maps; return what the driver returns where it does not."""
    if not kernel.maps:
        return
    yield "  CUresult result;"
    for one in kernel.maps:
        yield f"  result = describe(&{one.name}, args->{one.tensor}, {BYTES[one.dtype]},"
        yield f"                    {DATA_TYPES[one.dtype]}, {SWIZZLES[one.swizzle]});"
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
