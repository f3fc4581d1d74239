"""Kernels as other frameworks launch them: compiled for any lengths, heads and strides, with the list of arguments.

A launch by the kernels' own entry is compiled (``autotune.compile``), of tensors whose sizes and strides Triton makes
no constants of; its arguments are those that the binary takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import triton

from ... import __version__
from ...autotune.compile import HOPPER, META, Launch, Sizes, Variant, compiled, launches
from ...autotune.gate import read_with, threads_of
from ...bench.common.provenance import git, sources
from ...kernels import attention_delta
from ...kernels.config import Tile
from ...kernels.gpu import shared_limit
from ...kernels.tables import DTYPES, Options
from .config import ExportConfig, chosen_tiles

BY_KEYS = ("dkdv", "gradients")
"""Kernels whose programs are tiles of keys: their rows are keys, their columns queries, their heads key heads."""

ALIGNMENT = 16
"""Bytes of a pointer and elements of a stride: what lets a thread load 16 bytes at once."""

TYPES = {dtype: name for name, dtype in DTYPES.items()}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8}
"""Of an element, and of what is passed by value; a pointer has 8."""

MAP = "CUtensorMap"
MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Of a TMA descriptor that is passed by value, and what Triton aligns that parameter to."""

AXES = "bshd"

SIZES = Sizes(batch=7, queries=31_000_003, keys=31_000_013, heads=105, kv_heads=35)
UNGROUPED = SIZES._replace(kv_heads=SIZES.heads)
"""Of tensors without memory. No two alike, none 1 or a multiple of 16: Triton makes neither a constant nor an
assumption of them, and of strides alone that 16 divides them where it divides the head dim. A batch row may be 2^31
elements long, whose stride takes 64 bits."""


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel, in the order of its binary, or one field of what a caller fills in."""

    name: str
    type: str  # as Triton spells it: *bf16, i32, fp32; or MAP
    same_as: str | None = None  # not asked for: this argument is passed once more
    multiple: int = 1  # bytes that a pointer, or elements that a stride, must be a multiple of
    made_of: str | None = None  # not asked for: what the launcher makes it of
    at: str | None = None  # where the launcher then has it, in C

    @property
    def size(self) -> int:
        """Bytes."""
        return MAP_BYTES if self.type == MAP else 8 if self.type.startswith("*") else BYTES[self.type]

    @property
    def alignment(self) -> int:
        """Bytes that its offset among the parameters is a multiple of."""
        return MAP_ALIGNMENT if self.type == MAP else self.size


@dataclass(frozen=True)
class TensorMap:
    """A tensor ``[B, S, H, D]`` that a kernel takes by a TMA descriptor, as the driver encodes it."""

    tensor: str  # whose address and strides it has
    dtype: str
    sizes: tuple[str | int, ...]  # of the dimensions: an argument, the quotient or product of two, or a number
    box: tuple[int, ...]  # elements of a dimension that one load takes, the outermost first
    swizzle: int  # CUtensorMapSwizzle
    by_pointer: bool  # the kernel takes the tensor by its address, too

    @property
    def name(self) -> str:
        """In C."""
        return f"{self.tensor}_tensor"

    def parameters(self) -> Iterator[Argument]:
        """What Triton passes for it: the map, and although no kernel reads them its sizes and strides."""
        yield Argument(f"{self.tensor}_map", MAP, made_of=self.tensor, at=f"{self.name}.map")
        for i, (axis, size) in enumerate(zip(AXES, self.sizes, strict=True)):
            yield Argument(f"{self.tensor}_map_size_{axis}", "i32", made_of=str(size), at=f"&{self.name}.size[{i}]")
        for i, axis in enumerate(AXES):
            of = f"{self.tensor}_stride_{axis}" if axis != "d" else "1"
            yield Argument(f"{self.tensor}_map_stride_{axis}", "i64", made_of=of, at=f"&{self.name}.stride[{i}]")

    def inputs(self) -> Iterator[Argument]:
        """Address and strides, of which the copy engine takes multiples of 16 bytes."""
        yield Argument(self.tensor, f"*{self.dtype}", multiple=ALIGNMENT)
        for axis, kind in zip("bsh", ("i64", "i32", "i32"), strict=True):
            yield Argument(f"{self.tensor}_stride_{axis}", kind, multiple=ALIGNMENT // BYTES[self.dtype])


@dataclass(frozen=True)
class Exported:
    """A kernel as bytes, and what a launch of it takes."""

    name: str  # forward, delta, dq, dkdv or gradients
    symbol: str
    cubin: bytes
    arguments: tuple[Argument, ...]  # in the order of the binary
    inputs: tuple[Argument, ...]  # what a caller says
    maps: tuple[TensorMap, ...]
    layout: tuple[tuple[int, int], ...]  # (offset, bytes) of every parameter, those of SCRATCH last
    threads: int  # per program
    tile: Tile
    shared: int  # bytes

    def asks_for(self, name: str) -> bool:
        """Whether a caller says it."""
        return any(one.name == name for one in self.inputs)

    @property
    def block(self) -> int:
        """Rows per program."""
        return self.tile.block_k if self.name in BY_KEYS else self.tile.block_q


def export(config: ExportConfig, name: str) -> Exported:
    """Compile one kernel of a config.

    Raises:
        ValueError: a tile that does not fit the chip, or what the kernel does not take.
        RuntimeError: a binary that these launchers would not launch as Triton does.
    """
    tile, launch = chosen_tiles(config)[name][0], compiled_launch(config, name)
    made, limit = launch.binary, shared_limit(config.arch)
    metadata, cubin = made.metadata, made.asm["cubin"]
    if metadata.shared > limit:
        raise ValueError(
            f"the {name} kernel takes {metadata.shared} bytes of shared memory, sm_{config.arch} has {limit}"
        )
    passed, inputs, maps = arguments_of(launch, symbols_of(config, name))
    layout, threads = parameter_layout(cubin), threads_of(made.asm["ptx"])
    exported = Exported(
        name, metadata.name, cubin, passed, inputs, maps, tuple(layout.parameters), threads, tile, metadata.shared
    )
    if metadata.global_scratch_size or metadata.profile_scratch_size or getattr(metadata, "num_ctas", 1) != 1:
        raise RuntimeError(f"the {name} kernel wants scratch memory or a cluster, which its launcher does not give")
    expected = offsets(passed, layout.base)
    if layout.parameters != expected:
        raise RuntimeError(
            f"the {name} kernel takes parameters of (offset, bytes) {layout.parameters}, its launcher passes {expected}"
        )
    return exported


def compiled_launch(config: ExportConfig, name: str) -> Launch:
    """One kernel, without the path of every source line on this machine."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return compiled(launch_of(config, name), config.arch)


def launch_of(config: ExportConfig, name: str) -> Launch:
    """One kernel's launch, of tensors of which only the alignment is fixed."""
    sizes = SIZES if config.grouped else UNGROUPED
    if name == "delta":  # without a gradient of lse
        shape = sizes.batch, sizes.queries, sizes.heads, config.head_dim_v
        out, dout = (torch.empty(shape, dtype=DTYPES[config.dtype], device=META) for _ in range(2))
        return launches(attention_delta, config.arch, dout, out)[0]
    return variant_of(config, name, sizes).launch


def variant_of(config: ExportConfig, name: str, sizes: Sizes) -> Variant:
    """One kernel but delta."""
    options: Options = ()
    kernel = config.backward if name == "gradients" else name
    if (name, config.forward_kernel) == ("forward", "hopper"):
        kernel, options = HOPPER["hopper"]
    elif kernel == "hopper":
        kernel, options = HOPPER["hopper_backward"]
    return Variant(
        kernel, config.arch, config.dtype, config.head_dim, config.head_dim_v, chosen_tiles(config)[name][0],
        config.role, not config.bounded, config.grouped, options=options, sizes=sizes,
    )  # fmt: skip


def symbols_of(config: ExportConfig, name: str) -> dict[int, str]:
    """By its value what a number of a launch is, in words of the launcher's arguments."""
    sizes = SIZES if config.grouped else UNGROUPED
    by_keys = name in BY_KEYS
    heads = ("heads * group", "heads") if by_keys else ("heads", "heads / group")
    named = {sizes.batch: "batch", sizes.queries: "columns" if by_keys else "rows"}
    named |= {sizes.keys: "rows" if by_keys else "columns", sizes.heads // sizes.kv_heads: "group"}
    return named | ({sizes.heads: heads[0], sizes.kv_heads: heads[1]} if config.grouped else {sizes.heads: "heads"})


def arguments_of(
    launch: Launch, symbols: Mapping[int, str]
) -> tuple[tuple[Argument, ...], tuple[Argument, ...], tuple[TensorMap, ...]]:
    """(what is passed, in order; what a caller is asked for; tensor maps), as Triton specialised the launch."""
    source, metadata = launch.binary.src, getattr(launch.binary.metadata, "tensordesc_meta", None) or []
    names = [one.name for one in launch.kernel.params]
    # what is passed twice is asked for under its last name: a state that is continued in place under that of the result
    given = [*zip(names, launch.arguments, strict=False)]
    owners = {id(value.ptr): name for name, value in given if hasattr(value, "ptr")}
    numbers: dict[int, str] = {}
    passed: list[Argument] = []
    inputs: list[Argument] = []
    maps: list[TensorMap] = []

    def walk(value: Any, kind: Any, path: tuple[int, ...], name: str, tensor: str | None) -> None:
        same_as: str | None
        if kind == "constexpr":
            return
        if isinstance(value, tuple):
            own = owners[id(value.ptr)] if hasattr(value, "ptr") else None
            names_of: tuple[str, ...] = value._fields  # type: ignore[attr-defined]
            for i, (field, part, of) in enumerate(zip(names_of, value, kind, strict=True)):
                walk(part, of, (*path, i), field_name(name, field), own and field_name(own, field))
        elif hasattr(value, "block_shape"):
            made = _map_of(value, name, symbols, metadata[len(maps)], by_pointer=id(value.base) in owners)
            maps.append(made)
            passed.extend(made.parameters())
            inputs.extend(() if made.by_pointer else made.inputs())
        else:
            aligned = ["tt.divisibility", ALIGNMENT] in source.attrs.get(path, [])
            is_number = isinstance(value, int) and tensor is None
            made_of = "0" if is_number and value == 0 else None
            same_as = numbers.setdefault(value, name) if is_number else tensor or name
            same_as = None if same_as == name or made_of else same_as
            at = "&zero" if made_of else None
            passed.append(Argument(name, kind, same_as, ALIGNMENT if aligned and not made_of else 1, made_of, at))
            inputs.extend(passed[-1:] if same_as is None and made_of is None else ())

    for index, (name, value) in enumerate(given):
        walk(value, source.signature[name], (index,), name, None)
    if len(maps) != len(metadata) or any(one.get("fp4_padded") or one.get("is_im2col") for one in metadata):
        raise RuntimeError(f"{len(maps)} descriptors, of which the compiler says {metadata}")
    return tuple(passed), tuple(inputs), tuple(maps)


def _map_of(
    value: Any, name: str, symbols: Mapping[int, str], metadata: Mapping[str, Any], *, by_pointer: bool
) -> TensorMap:
    """What the compiler wants of a descriptor.

    Raises:
        RuntimeError: what no launcher here encodes.
    """
    dtype = TYPES[value.base.dtype]
    if metadata["elem_size"] != BYTES[dtype] or len(metadata["block_size"]) != len(AXES):
        raise RuntimeError(f"{name} is a descriptor of {dtype}, of which the compiler says {metadata}")
    tensor = "dq" if by_pointer else name
    sizes = *(symbols[size] for size in value.shape[:3]), value.shape[3]
    return TensorMap(tensor, dtype, sizes, tuple(metadata["block_size"]), metadata["swizzle"], by_pointer)


def field_name(name: str, field: str) -> str:
    """``q`` and ``stride_b``: q_stride_b; a pointer has the tensor's name; what is not a tensor names its fields."""
    if field == "ptr":
        return name
    return field if name in ("shape", "bounds") else f"{name}_{field}"


def offsets(arguments: tuple[Argument, ...], base: int) -> list[tuple[int, int]]:
    """(offset, bytes) of every parameter, those of SCRATCH after them, as the compiler lays them out.

    ``base`` is where parameters begin in their constant bank: a map is aligned there, and not from the first parameter.
    """
    starts, end = [], base
    for alignment, size in [*((one.alignment, one.size) for one in arguments), *[(8, 8)] * len(SCRATCH)]:
        begin = -(-end // alignment) * alignment
        starts.append((begin - base, size))
        end = begin + size
    return starts


PARAMETER = re.compile(
    r"EIATTR_KPARAM_INFO.*?Ordinal\s*:\s*0x([0-9a-f]+)\s+Offset\s*:\s*0x([0-9a-f]+)\s+Size\s*:\s*0x([0-9a-f]+)",
    re.DOTALL,
)
BANK = re.compile(r"EIATTR_PARAM_CBANK.*?Value:\s*0x[0-9a-f]+ 0x([0-9a-f]+)", re.DOTALL)


class Layout(NamedTuple):
    """Of the parameters of a binary."""

    base: int  # where they begin in their constant bank
    parameters: list[tuple[int, int]]  # (offset, bytes), in their order


def parameter_layout(cubin: bytes) -> Layout:
    """What a binary says that it takes."""
    text = read_with("cuobjdump", "-elf", cubin=cubin)
    bank = BANK.search(text)
    assert bank is not None
    layout = sorted(tuple(int(number, 16) for number in one) for one in PARAMETER.findall(text))
    # of that word the low half is where they begin, the high half how many bytes they take
    return Layout(int(bank[1], 16) & 0xFFFF, [(offset, size) for _, offset, size in layout])


# the manifest

SCHEMA = 2  # 1 had no tensor maps: all parameters that were not repeated were asked for
LICENCE = "MIT"
SCRATCH = [{"name": "scratch", "size": 8, "value": 0}] * 2  # pointers that Triton appends, which no kernel here uses

DATA_TYPES = {
    "bf16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "fp16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "fp32": "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
}
SWIZZLES = tuple(f"CU_TENSOR_MAP_SWIZZLE_{one}" for one in ("NONE", "32B", "64B", "128B"))
FIXED = {
    "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
    "l2_promotion": "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    "oob_fill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
}
"""What is the same for all maps: rows past the end are zeros."""


def manifest(config: ExportConfig, kernels: list[Exported], hashes: dict[str, str]) -> dict[str, Any]:
    """What the files are, with these SHA-256 sums by name, whence, and what a launcher of one's own needs."""
    return {
        "schema": SCHEMA,
        "name": config.prefix,
        "licence": LICENCE,
        "versions": {"ringattn": __version__, "triton": triton.__version__, "sources": sources(), **git()},
        "arch": f"sm_{config.arch}",
        "dtype": config.dtype,
        "head_dim": [config.head_dim, config.head_dim_v],
        **{name: getattr(config, name) for name in ("bounded", "grouped", "role", "forward_kernel", "backward")},
        "run": "not on a GPU by whoever wrote this file",
        "sha256": hashes,
        "kernels": [_entry(config, kernel) for kernel in kernels],
    }


def _entry(config: ExportConfig, kernel: Exported) -> dict[str, Any]:
    tile, whence = chosen_tiles(config)[kernel.name]
    parameters = [*map(_parameter, kernel.arguments), *SCRATCH]
    maps = {f"{one.tensor}_map": _map(one) for one in kernel.maps}
    return {
        "name": kernel.name,
        "cubin": f"{config.prefix}_{kernel.name}.cubin",
        "symbol": kernel.symbol,
        "grid": [f"ceil(rows / {kernel.block}) * batch * heads", 1, 1],
        "threads": kernel.threads,
        "shared_memory": kernel.shared,
        "tile": {one.name: getattr(tile, one.name) for one in fields(Tile)},
        "tile_from": whence,
        "arguments": [_parameter(one) for one in kernel.inputs],
        "parameters": [
            {**one, "offset": begin, **({"tensor_map": maps[one["name"]]} if one["name"] in maps else {})}
            for one, (begin, _) in zip(parameters, kernel.layout, strict=True)
        ],
    }


def _parameter(argument: Argument) -> dict[str, Any]:
    data: dict[str, Any] = {"name": argument.name, "type": argument.type, "size": argument.size}
    data |= {"alignment": argument.alignment} if argument.type == MAP else {}
    data |= {name: value for name in ("same_as", "made_of") if (value := getattr(argument, name))}
    return data | ({"multiple_of": argument.multiple} if argument.multiple > 1 else {})


def _map(one: TensorMap) -> dict[str, Any]:
    """Arguments of cuTensorMapEncodeTiled but for address, sizes and strides; dimensions as it has them."""
    return {
        "data_type": DATA_TYPES[one.dtype],
        "rank": len(one.box),
        "sizes": [str(size) for size in one.sizes[::-1]],
        "strides": [f"{one.tensor}_stride_{axis} * {BYTES[one.dtype]}" for axis in "hsb"],
        "box": [*one.box[::-1]],
        "element_strides": [1] * len(one.box),
        "swizzle": SWIZZLES[one.swizzle],
        **FIXED,
    }
