"""Kernels as other frameworks launch them: compiled for any lengths, heads and strides, with the list of arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...autotune.inspect.compiled import SHARED_LIMIT
from ...autotune.inspect.variant import ROLES
from ...kernels.config import Tile
from ...kernels.device.backward import delta_kernel, dkdv_kernel, dq_kernel
from ...kernels.device.forward import forward_kernel
from ...kernels.device.modify import UNMODIFIED
from ...kernels.device.tiles import Interval, Shape
from ...kernels.experimental.dq_sum import Turns
from ...kernels.experimental.single_pass import single_pass_kernel
from ...kernels.launch import COPY_ENGINE_ARCH, fills_boxes
from .arguments import Argument, Described, Flat, flattened, offsets, strided
from .binary import parameter_layout
from .wish import Wish, check, check_hopper, chosen_tiles

KERNELS = {
    "forward": forward_kernel,
    "delta": delta_kernel,
    "dq": dq_kernel,
    "dkdv": dkdv_kernel,
    "gradients": single_pass_kernel,
}
BY_KEYS = ("dkdv", "gradients")
"""Kernels whose programs are tiles of keys: their rows are keys, their columns queries, their heads key heads."""


class TensorMap(NamedTuple):
    """A descriptor as the driver encodes it."""

    of: Described
    box: tuple[int, ...]  # elements of a dimension that one load takes, the outermost first
    swizzle: int  # CUtensorMapSwizzle


@dataclass(frozen=True)
class Exported:
    """A kernel as bytes, and what a launch of it takes."""

    name: str  # one of KERNELS
    symbol: str
    cubin: bytes
    arguments: tuple[Argument, ...]  # in the order of the binary
    asked: tuple[Argument, ...]  # what a caller says
    maps: tuple[TensorMap, ...]
    layout: tuple[tuple[int, int], ...]  # (offset, bytes) of every parameter, those of `scratch` last
    threads: int  # per program
    tile: Tile
    shared: int  # bytes
    scratch: int = 2  # pointers that Triton appends, which these kernels do not use

    @property
    def block(self) -> int:
        """Rows per program."""
        return self.tile.block_k if self.name in BY_KEYS else self.tile.block_q


def export(wish: Wish, name: str) -> Exported:
    """Compile one kernel of a wish that is ``settled``.

    Raises:
        ValueError: the wish, or a tile that does not fit the chip.
        RuntimeError: a binary that these launchers would not launch as Triton does.
    """
    flat, made = compiled(wish, name)
    metadata, limit = made.metadata, SHARED_LIMIT[wish.arch]
    if metadata.shared > limit:
        raise ValueError(
            f"the {name} kernel takes {metadata.shared} bytes of shared memory, sm_{wish.arch} has {limit}"
        )
    passed, asked = flat.arguments, flat.asked
    if name == "delta":  # which has no keys
        passed = [replace(one, same_as="rows") if one.name == "columns" else one for one in passed]
        asked = [one for one in asked if one.name != "columns"]
    tile, threads = chosen_tiles(wish)[name][0], 32 * metadata.num_warps
    maps = tuple(tensor_maps(flat.described, getattr(metadata, "tensordesc_meta", None) or []))
    layout = parameter_layout(cubin := made.asm["cubin"])
    exported = Exported(
        name, metadata.name, cubin, (*passed,), (*asked,), maps, (*layout.parameters,), threads, tile, metadata.shared
    )
    if metadata.global_scratch_size or metadata.profile_scratch_size or getattr(metadata, "num_ctas", 1) != 1:
        raise RuntimeError(f"the {name} kernel wants scratch memory or a cluster, which its launcher does not give")
    if (found := threads_of(made.asm["ptx"])) != threads:
        raise RuntimeError(f"the {name} kernel wants {found} threads, its launcher starts {threads}")
    expected = offsets(passed, exported.scratch, layout.base)
    if layout.parameters != expected:
        raise RuntimeError(
            f"the {name} kernel takes parameters of (offset, bytes) {layout.parameters}, its launcher passes {expected}"
        )
    return exported


def compiled(wish: Wish, name: str) -> tuple[Flat, Any]:
    """(the arguments of a kernel, what Triton made of it).

    Raises:
        ValueError: the wish.
    """
    check(wish)
    check_hopper(wish)
    tile, kernel = chosen_tiles(wish)[name][0], KERNELS[name]
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    source, values = ASTSource, launch_arguments(wish, name)
    if name in wish.of_hopper:
        # a while to import, and only these kernels need it
        from triton.experimental.gluon._runtime import GluonASTSource

        from ...kernels.experimental.hopper_launch import REGISTERS
        from . import hopper

        source, options = GluonASTSource, {"num_warps": 4, "maxnreg": REGISTERS}
        kernel, values = hopper.KERNELS[name], hopper.arguments(wish, name, tile, values)
    flat = flattened(kernel.arg_names, {parameter: values[parameter] for parameter in kernel.arg_names})
    # without the path of every source line on this machine
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        made = triton.compile(
            source(kernel, flat.signature, flat.constants, flat.attributes),
            target=GPUTarget("cuda", wish.arch, 32),
            options=options,
        )
    return flat, made


def threads_of(ptx: str) -> int:
    """Of a program: what the compiler requires, all partitions of a specialised kernel together."""
    found = re.search(r"\.(?:reqntid|maxntid) (\d+)", ptx)
    assert found is not None
    return int(found[1])


def tensor_maps(described: list[Described], metadata: list[dict[str, Any]]) -> list[TensorMap]:
    """What the compiler wants of each descriptor.

    Raises:
        RuntimeError: what no launcher here encodes.
    """
    if len(described) != len(metadata) or any(one.get("fp4_padded") or one.get("is_im2col") for one in metadata):
        raise RuntimeError(f"{len(described)} descriptors, of which the compiler says {metadata}")
    found = []
    for one, told in zip(described, metadata, strict=True):
        if told["elem_size"] != one.element_size or len(told["block_size"]) != len(one.sizes):
            raise RuntimeError(f"{one.tensor} is a {one.type}, of which the compiler says {told}")
        found.append(TensorMap(one, tuple(told["block_size"]), told["swizzle"]))
    return found


def launch_arguments(wish: Wish, name: str) -> dict[str, Any]:
    """By parameter: a type for what is passed at run time, a plain value for a constant, a name for a repetition."""
    role, tile = ROLES[wish.role], chosen_tiles(wish)[name][0]
    model, sums = strided(wish.dtype, wish.head_dim), strided("fp32", wish.head_dim)
    model_v, sums_v = strided(wish.dtype, wish.head_dim_v), strided("fp32", wish.head_dim_v)
    # only a state or sums that stay where they were, or that do not exist, are the result itself
    in_place = role.in_place or (role.carried and wish.dtype == "fp32" and name == "forward")
    separate = role.carried and not in_place
    result, result_v = (model, model_v) if role.final else (sums, sums_v)
    return {
        "q": model, "k": model, "v": model_v, "dout": model_v, "lse": "*fp32", "delta": "*fp32",
        "softmax_scale": "fp32", "modifiers": UNMODIFIED,
        "bounds": Interval(*(("*i32", "*i32") if wish.bounded else (None, None))),
        "shape": Shape("i32", "i32", "i32", "i32" if wish.grouped and name != "delta" else 1),
        "state": sums_v if separate else "out", "out": model_v if name == "delta" else result_v,
        "dq_in": sums if separate else "dq_out", "dq_out": result,
        "dk_in": sums if separate else "dk_out", "dk_out": result,
        "dv_in": sums_v if separate else "dv_out", "dv_out": result_v, "dlse": None,
        "dq": sums, "box": box(wish, tile), "turns": turns(wish), "RAGGED": not wish.bounded,
        "HEAD_DIM": wish.head_dim, "HEAD_DIM_V": wish.head_dim_v, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
        "HAS_STATE": role.carried, "HAS_SUM": role.carried, "IN_PLACE": in_place,
    }  # fmt: skip


def box(wish: Wish, tile: Tile) -> Described | None:
    """dQ of a single pass where the copy engine adds to it, as ``gradients.box_of`` has it of what is aligned."""
    if wish.arch < COPY_ENGINE_ARCH or not fills_boxes(wish.head_dim):
        return None
    heads = "heads * group" if wish.grouped else "heads"
    return Described("dq", "fp32", ("batch", "columns", heads, wish.head_dim), tile.block_q)


def turns(wish: Wish) -> Turns:
    """Who waits for whom in a single pass."""
    if wish.backward != "single_pass_deterministic":
        return Turns(None, None, None)
    return Turns("*i32", 0, "*i32") if wish.bounded else Turns(None, None, "*i32")
