"""What a variant is launched with, by types: the signature for which Triton compiles it ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.compiler import ASTSource

from ...kernels.attention import REDUCE_BLOCK
from ...kernels.device.modify import UNMODIFIED, Modifiers
from ...kernels.device.tiles import BlockRuns, Interval, Order, Shape, Strided
from ...kernels.experimental.dq_sum import Turns
from ...kernels.launch import COPY_ENGINE_ARCH, fills_boxes
from ...kernels.quantize import SCALE_TOKENS
from .variant import KERNELS, ROLES, Variant


def ast_source(variant: Variant) -> ASTSource:
    """The signature that a launch with 16-aligned pointers, strides and lengths specialises to."""
    arguments = launch_arguments(variant)
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(KERNELS[variant.kernel].arg_names):
        signature[name] = specialise(arguments[name], (index,), constexprs, attributes)
    return ASTSource(KERNELS[variant.kernel], signature, constexprs, attributes)


def specialise(
    value: Any, path: tuple[int, ...], constexprs: dict[tuple[int, ...], Any], attributes: dict[tuple[int, ...], Any]
) -> Any:
    """Type of one argument as Triton spells it; constants and alignments go to their tables under its path."""
    if isinstance(value, tuple):
        parts = [specialise(part, (*path, i), constexprs, attributes) for i, part in enumerate(value)]
        return type(value)(*parts)
    if value is None or isinstance(value, int):
        constexprs[path] = value
        return "constexpr"
    if value != "fp32" and not value.startswith("tensordesc"):
        attributes[path] = [["tt.divisibility", 16]]
    return value


def launch_arguments(variant: Variant) -> dict[str, Any]:
    """By argument name: a type for what is passed at run time, a plain value for a constexpr."""
    role = ROLES[variant.role]
    model, sums = strided(variant.dtype), strided("fp32")
    codes = strided("u8")
    result = codes if variant.kernel == "quantize" else model if role.final else sums
    carried = sums if role.carried else result
    in_place = role.in_place or (role.carried and variant.dtype == "fp32" and variant.kernel == "forward")
    if "dkdv_splits" in dict(variant.options):  # leaves its parts, and what they are added to is the reduction's
        role, result, carried = replace(role, carried=False), sums, sums
    dk, dv = (box_types(variant, dim, result, carried) for dim in (variant.head_dim, variant.head_dim_v))
    common = {
        "q": model, "k": model, "v": model, "dout": model, "lse": "*fp32", "delta": "*fp32", "dlse": "*fp32",
        "softmax_scale": "fp32",
        "bounds": interval(variant), "modifiers": modifiers(variant.features),
        "shape": shape(variant), "dk_parts": sums, "dv_parts": sums,
        "state": carried, "out": result, "dq_in": carried, "dq_out": result,
        "dk_in": dk[1], "dv_in": dv[1], "dk_out": dk[0], "dv_out": dv[0],
        "HEAD_DIM": variant.head_dim, "HEAD_DIM_V": variant.head_dim_v,
        "BLOCK_Q": variant.tile.block_q, "BLOCK_K": variant.tile.block_k,
        "x": codes if variant.kernel == "dequantize" else model, "scale": "*fp32", "BLOCK": SCALE_TOKENS,
        "BLOCK_ROWS": REDUCE_BLOCK,
        "HAS_STATE": role.carried, "HAS_SUM": role.carried, "IN_PLACE": in_place,
        "dq": sums, "turns": turns(variant), "box": box(variant), "RAGGED": False,
    }  # fmt: skip
    return {name: common[name] for name in KERNELS[variant.kernel].arg_names}


def shape(variant: Variant) -> Shape:
    """Of the launch, and the order of its tiles."""
    options = dict(variant.options)
    l2_group = "i32" if options.get("order") == "longest" else None
    order = Order(l2_group, l2_group, "i32" if options.get("persistent") else None)
    packed = "i32" if options.get("pack_gqa") else None
    group = "i32" if variant.grouped and packed is None else 1
    splits = "i32" if "dkdv_splits" in options or variant.kernel == "reduce" else None
    return Shape("i32", "i32", "i32", group, order, packed, splits)


def turns(variant: Variant) -> Turns:
    """Who waits for whom in a single pass."""
    if variant.kernel != "single_pass_deterministic":
        return Turns(None, None, None)
    has_numbers = not variant.full or {"used", "runs"} & {*variant.features}
    if not has_numbers:
        return Turns(None, None, "*i32")
    return Turns("*i32", "i32", "*i32")  # also where all batch rows share them: of integers a launch makes 1 a constant


def box_types(variant: Variant, head_dim: int, *kept: Strided) -> list[Strided | str]:
    """Of what dK/dV leave or continue, with such a head dim: tensors, or their descriptors."""
    if dict(variant.options).get("dkdv_epilogue") != "descriptors":
        return [*kept]
    return [described(one.ptr[1:], variant.tile.block_k, head_dim) for one in kept]


def box(variant: Variant) -> str | None:
    """The type of dQ's descriptor where the copy engine adds to it."""
    adds = variant.arch >= COPY_ENGINE_ARCH and fills_boxes(variant.head_dim)
    return described("fp32", variant.tile.block_q, variant.head_dim) if adds else None


def described(dtype: str, rows: int, columns: int) -> str:
    """The type of a TMA descriptor of tiles of ``rows`` rows, to the blank as a launch spells it: it is hashed."""
    return f"tensordesc<{dtype}{[1, rows, 1, columns]}>"


def interval(variant: Variant) -> Interval:
    lo, hi = (None, None) if variant.full else ("*i32", "*i32")
    runs = BlockRuns("*i32", "*i32", "*i32", "i32") if "runs" in variant.features else None
    return Interval(lo, hi, "*i32" if "used" in variant.features else None, runs)


def modifiers(features: tuple[str, ...]) -> Modifiers:
    made = UNMODIFIED
    if "softcap" in features:
        made = made._replace(softcap="fp32")
    if {"alibi", "dropout"} & set(features):
        made = made._replace(rows="*i32", columns="*i32")
    if "alibi" in features:
        made = made._replace(slopes="*fp32", slopes_stride="i32")
    if "dropout" in features:
        made = made._replace(counter="*i64", threshold="i32", kept="fp32")
    return made


def strided(dtype: str) -> Strided:
    return Strided(f"*{dtype}", "i32", "i32", "i32")
