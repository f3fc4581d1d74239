"""Kernels as other frameworks launch them: compiled for any lengths, heads and strides, with the list of arguments."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ...kernels.backward import delta_kernel, dkdv_kernel, dq_kernel
from ...kernels.config import Tile
from ...kernels.forward import forward_kernel
from ...kernels.modify import UNMODIFIED
from ...kernels.tiles import Interval, Shape, Strided
from ..inspect.compiled import DTYPES, ROLES, SHARED_LIMIT
from .tiles import BUILT_IN_TILES, Source, Tiles, tiles_of

KERNELS = {"forward": forward_kernel, "delta": delta_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
ALIGNMENT = 16
"""Bytes of a pointer and elements of a stride: what lets a thread load 16 bytes at once, and TMA at all."""

SIZES = {"fp32": 4, "i32": 4, "i64": 8}
"""Bytes of what is passed by value; a pointer has 8."""


@dataclass(frozen=True)
class Wish:
    """What to export."""

    arch: int  # compute capability without the dot
    dtype: str = "bf16"  # one of DTYPES
    head_dim: int = 128
    head_dim_v: int = 128
    bounded: bool = False  # an interval of keys per query, which every mask is
    grouped: bool = True  # any number of query heads per key head
    role: str = "only"  # one of ROLES
    source: Source = BUILT_IN_TILES

    @property
    def prefix(self) -> str:
        """Of every name in C and of every file."""
        dims = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = ["bounded" if self.bounded else "full", *([] if self.grouped else ["mha"])]
        words += [] if self.role == "only" else [self.role]
        return "_".join(["ringattn", f"sm{self.arch}", self.dtype, dims, *words])


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel, in the order of its binary."""

    name: str
    type: str  # as Triton spells it: *bf16, i32, fp32
    same_as: str | None = None  # not asked for: this argument is passed once more
    multiple: int = 1  # bytes that a pointer, or elements that a stride, must be a multiple of

    @property
    def size(self) -> int:
        """Bytes."""
        return 8 if self.type.startswith("*") else SIZES[self.type]


@dataclass(frozen=True)
class Exported:
    """A kernel as bytes, and what a launch of it takes."""

    name: str  # one of KERNELS
    symbol: str
    cubin: bytes
    arguments: tuple[Argument, ...]
    threads: int  # per program
    block: int  # rows per program
    shared: int  # bytes
    scratch: int = 2  # pointers that Triton appends, which these kernels do not use


def export(wish: Wish, name: str) -> Exported:
    """Compile one kernel.

    Raises:
        ValueError: the wish, or a tile that does not fit the chip.
        RuntimeError: a binary that these launchers would not launch as Triton does.
    """
    check(wish)
    kernel, tile = KERNELS[name], _tile(wish, name)
    values = launch_arguments(wish, name)
    signature, constants, attributes, flat = _flattened(kernel, values)
    # without the path of every source line on this machine
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        made = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", wish.arch, 32),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        )
    metadata, limit = made.metadata, SHARED_LIMIT[wish.arch]
    if metadata.shared > limit:
        raise ValueError(
            f"the {name} kernel takes {metadata.shared} bytes of shared memory, sm_{wish.arch} has {limit}"
        )
    if name == "delta":  # which has no keys
        flat = [replace(one, same_as="rows") if one.name == "columns" else one for one in flat]
    threads, block = 32 * metadata.num_warps, _block(name, tile)
    exported = Exported(name, metadata.name, made.asm["cubin"], tuple(flat), threads, block, metadata.shared)
    if metadata.global_scratch_size or metadata.profile_scratch_size or getattr(metadata, "num_ctas", 1) != 1:
        raise RuntimeError(f"the {name} kernel wants scratch memory or a cluster, which its launcher does not give")
    expected = [argument.size for argument in flat] + [8] * exported.scratch
    if (found := parameter_sizes(exported.cubin)) != expected:
        raise RuntimeError(f"the {name} kernel takes parameters of {found} bytes, its launcher passes {expected}")
    return exported


def check(wish: Wish) -> None:
    """Refuse what is not there: ValueError."""
    if not isinstance(forward_kernel, JITFunction):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted and there is nothing to compile, unset it")
    for what, got, known in (
        ("arch", wish.arch, SHARED_LIMIT),
        ("dtype", wish.dtype, DTYPES),
        ("role", wish.role, ROLES),
    ):
        if got not in known:
            raise ValueError(f"{what} is {got}: it must be one of {', '.join(map(str, known))}")
    for what, got in (("head_dim", wish.head_dim), ("head_dim_v", wish.head_dim_v)):
        if not 1 <= got <= 256:
            raise ValueError(f"{what} is {got}: it must be 1 to 256")


@lru_cache
def chosen_tiles(wish: Wish) -> Tiles:
    """By kernel: the tile, and in words where it comes from.

    Raises:
        ValueError: see :func:`export_tiles.tiles_of`.
    """
    return tiles_of(wish.source, wish.arch, wish.dtype, (wish.head_dim, wish.head_dim_v), bounded=wish.bounded)


def _tile(wish: Wish, name: str) -> Tile:
    return chosen_tiles(wish)[name][0]


def _block(name: str, tile: Tile) -> int:
    return tile.block_k if name == "dkdv" else tile.block_q


def launch_arguments(wish: Wish, name: str) -> dict[str, Any]:
    """By parameter: a type for what is passed at run time, a plain value for a constant, a name for a repetition."""
    role, tile = ROLES[wish.role], _tile(wish, name)
    model, sums = _strided(wish.dtype, wish.head_dim), _strided("fp32", wish.head_dim)
    model_v, sums_v = _strided(wish.dtype, wish.head_dim_v), _strided("fp32", wish.head_dim_v)
    # only a state or sums that stay where they were, or that do not exist, are the result itself
    in_place = role.in_place or (role.carried and wish.dtype == "fp32" and name == "forward")
    separate = role.carried and not in_place
    result, result_v = (model, model_v) if role.final else (sums, sums_v)
    common = {
        "q": model, "k": model, "v": model_v, "dout": model_v, "lse": "*fp32", "delta": "*fp32",
        "softmax_scale": "fp32", "modifiers": UNMODIFIED,
        "bounds": Interval(*(("*i32", "*i32") if wish.bounded else (None, None))),
        "shape": Shape("i32", "i32", "i32", "i32" if wish.grouped and name != "delta" else 1),
        "state": sums_v if separate else "out", "out": model_v if name == "delta" else result_v,
        "dq_in": sums if separate else "dq_out", "dq_out": result,
        "dk_in": sums if separate else "dk_out", "dk_out": result,
        "dv_in": sums_v if separate else "dv_out", "dv_out": result_v, "dlse": None,
        "HEAD_DIM": wish.head_dim, "HEAD_DIM_V": wish.head_dim_v, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k,
        "HAS_STATE": role.carried, "HAS_SUM": role.carried, "IN_PLACE": in_place,
    }  # fmt: skip
    return {parameter: common[parameter] for parameter in KERNELS[name].arg_names}


def _strided(dtype: str, head_dim: int) -> Strided:
    aligned = "" if head_dim % ALIGNMENT else "!"  # rows of such heads can begin on 16 bytes
    # a batch row may be 2^31 elements long
    return Strided(f"*{dtype}", f"i64{aligned}", f"i32{aligned}", f"i32{aligned}")


def signature_of(wish: Wish, name: str) -> dict[str, Any]:
    """Triton's signature of a kernel: types, nested as its arguments are."""
    return _flattened(KERNELS[name], launch_arguments(wish, name)).signature


class Flat(NamedTuple):
    """Triton's signature, constants and attributes by path, and the arguments one after the other."""

    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    arguments: list[Argument]


def _flattened(kernel: Any, values: dict[str, Any]) -> Flat:
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    flat: list[Argument] = []

    def walk(value: Any, path: tuple[int, ...], name: str, same_as: str | None) -> Any:
        if isinstance(value, tuple):
            fields = zip(getattr(type(value), "_fields", ()), value, strict=True)
            return type(value)(
                *(
                    walk(part, (*path, i), _field(name, field), same_as and _field(same_as, field))
                    for i, (field, part) in enumerate(fields)
                )
            )
        if value is None or isinstance(value, int):
            constants[path] = value
            return "constexpr"
        plain = value.rstrip("!")
        aligned = value.endswith("!") or value.startswith("*")
        if aligned:
            attributes[path] = [["tt.divisibility", ALIGNMENT]]
        flat.append(Argument(name, plain, same_as, ALIGNMENT if aligned else 1))
        return plain

    signature = {}
    for index, name in enumerate(kernel.arg_names):
        value, same_as = values[name], None
        if isinstance(value, str) and value in values:
            value, same_as = values[value], value
        signature[name] = walk(value, (index,), name, same_as)
    return Flat(signature, constants, attributes, flat)


def _field(name: str, field: str) -> str:
    """``q`` and ``stride_b``: q_stride_b; a pointer has the tensor's name; what is not a tensor names its fields."""
    if field == "ptr":
        return name
    return field if name in ("shape", "bounds") else f"{name}_{field}"


def parameter_sizes(cubin: bytes) -> list[int]:
    """Bytes of every parameter that a binary says it takes, in its order."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-elf", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(_parameters(text))
    return [found[ordinal] for ordinal in sorted(found)]


def _parameters(text: str) -> Iterator[tuple[int, int]]:
    pattern = r"EIATTR_KPARAM_INFO.*?Ordinal\s*:\s*0x([0-9a-f]+).*?Size\s*:\s*0x([0-9a-f]+)"
    for ordinal, size in re.findall(pattern, text, re.DOTALL):
        yield int(ordinal, 16), int(size, 16)
