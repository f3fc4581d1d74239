"""C header and launcher of exported kernels, which encode TMA descriptors as Triton's launcher does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

from .config import ExportConfig
from .kernels import BYTES, DATA_TYPES, FIXED, KEY_GRID_KERNELS, LICENCE, SWIZZLES, Argument, ExportedKernel

C_TYPES = {"i32": "int32_t", "i64": "int64_t", "fp32": "float"}

ARGUMENT_MEANING = {
    "q": "queries [B, Sq, H, D]",
    "k": "keys [B, Sk, Hkv, D]",
    "v": "values [B, Sk, Hkv, Dv]",
    "out": "output [B, Sq, H, Dv]",
    "dout": "gradient of out [B, Sq, H, Dv]",
    "state": "out of the previous shards, [B, Sq, H, Dv]",
    "lse": "natural log of the sum of exponentials, [B, H, Sq], contiguous",
    "delta": "rowsum(dout * out), [B, H, Sq], contiguous",
    "dq_in": "dq of the previous shards, [B, Sq, H, D]",
    "dk_in": "dk of the previous shards, [B, Sk, Hkv, D]",
    "dv_in": "dv of the previous shards, [B, Sk, Hkv, Dv]",
    "dq_out": "gradient of q, [B, Sq, H, D]",
    "dk_out": "gradient of k, [B, Sk, Hkv, D]",
    "dv_out": "gradient of v, [B, Sk, Hkv, Dv]",
    "dq": "accumulator for the gradient of q, [B, Sq, H, D]: zeros, or dq of the previous shards",
    "turns_gates": "workspace for B * H * ceil(Sq / BLOCK_Q) int32, initialised by the launch",
    "turns_numbers": "int32 [ceil(Sk / BLOCK_K), ceil(Sq / BLOCK_Q)], filled by the function above",
    "softmax_scale": "factor of q k^T, usually 1 / sqrt(D)",
    "group": "query heads per key head",
}
KEY_GRID_WORDS = ("Sk", "Sq", "Hkv", "query of each key")
QUERY_GRID_WORDS = ("Sq", "Sk", "H", "key of each query")


def render_template(template: str, config: ExportConfig, kernels: Sequence[ExportedKernel]) -> str:
    """Render a template of this folder to the text of ``<prefix>.h`` or ``<prefix>.c``."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=False, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["as_c"] = to_c_expression
    return environment.from_string(files(__package__).joinpath(template).read_text()).render(
        config=config, kernels=kernels, licence=LICENCE, field=struct_field, refusals=refusal_conditions,
        fixed=FIXED, bytes=BYTES, data_types=DATA_TYPES, swizzles=SWIZZLES,
    )  # fmt: skip


def struct_field(kernel: ExportedKernel, argument: Argument) -> str:
    """Return the declaration of a field of the arguments struct, with a comment."""
    rows, columns, heads, bound = KEY_GRID_WORDS if kernel.name in KEY_GRID_KERNELS else QUERY_GRID_WORDS
    meanings = {"rows": rows, "columns": columns, "heads": heads}
    meanings["lo"] = f"first {bound}, int32 [{rows}], never decreasing"
    meanings["hi"] = meanings["lo"].replace("first", "one past the last", 1)
    meaning = meanings.get(argument.name) or ARGUMENT_MEANING.get(argument.name) or "in elements"
    for side in ("q", "k"):
        meaning = meaning.replace(f"BLOCK_{side.upper()}", str(getattr(kernel.tile, f"block_{side}")))
    kind = "CUdeviceptr" if argument.type.startswith("*") else C_TYPES[argument.type]
    dtype = f"{argument.type[1:]}, " if argument.type.startswith("*") and argument.type != "*i32" else ""
    multiple = f"; a multiple of {argument.multiple}" if argument.multiple > 1 else ""
    return f"{kind} {argument.name}; /* {dtype}{meaning}{multiple} */"


def refusal_conditions(kernel: ExportedKernel) -> list[str]:
    """Return the C conditions under which a launch returns CUDA_ERROR_INVALID_VALUE."""
    names = {argument.name for argument in kernel.inputs}
    conditions = ["batch < 0", *(f"args->{name} < 0" for name in ("rows", "columns", "heads") if name in names)]
    if "group" in names:
        conditions.append("args->group < 1")
        if kernel.name not in KEY_GRID_KERNELS:  # with a grid over keys `heads` counts key heads
            conditions.append("args->heads % args->group")
    if "softmax_scale" in names:
        conditions.append("!(args->softmax_scale > 0)")  # also true for NaN
    if kernel.name == "gradients":  # offsets within a tile of queries are 32-bit
        limit = (2**31 - 1) // kernel.tile.block_q
        by_map = {tensor.tensor for tensor in kernel.maps if not tensor.by_pointer}  # maps have 64-bit strides
        strides = [f"args->{name}_stride_s" for name in ("q", "dout", "dq") if name not in by_map]
        conditions += [f"{stride} > {limit} || {stride} < -{limit}" for stride in strides]
        conditions += ["(int64_t)args->heads * args->group > INT32_MAX"] if "group" in names else []
    return conditions


def to_c_expression(words: str | int) -> str:
    """Convert ``heads / group`` to the C expression ``args->heads / args->group``; numbers stay as they are."""
    return re.sub(r"[a-z]\w*", lambda match: match[0] if match[0] == "batch" else f"args->{match[0]}", str(words))
