"""Compilation of kernels for export, for any lengths, heads and strides, and their lists of arguments.

The export compiles a launch of the kernel's host entry (``autotune.compile``). The sizes and strides of its tensors are
chosen such that Triton does not specialise them, so the arguments of the launch are those of the binary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton

from ... import __version__
from ...autotune.compile import HOPPER, META, CallSizes, KernelVariant, RecordedLaunch, compile_launch, record_launches
from ...autotune.gate import required_threads, run_binary_tool
from ...bench.common.provenance import git, source_digest
from ...kernels import attention_delta
from ...kernels.config import Tile
from ...kernels.gpu import shared_limit
from ...kernels.tables import DTYPES, OptionItems
from .config import ExportConfig, chosen_tiles

KEY_GRID_KERNELS = ("dkdv", "gradients")
"""Kernels with a grid over keys: their rows are keys, their columns queries, and their heads key heads."""

ALIGNMENT = 16
"""Alignment of pointers in bytes and of strides in elements, for loads of 16 bytes per thread."""

TYPES = {dtype: name for name, dtype in DTYPES.items()}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8}
"""Bytes of an element or of an argument passed by value."""

MAP = "CUtensorMap"
MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Bytes of a TMA descriptor passed by value, and Triton's alignment of that parameter."""

AXES = "bshd"

SIZES = CallSizes(batch=7, queries=31_000_003, keys=31_000_013, heads=105, kv_heads=35)
UNGROUPED = SIZES._replace(kv_heads=SIZES.heads)
"""Sizes of the meta tensors. They are distinct, and neither 1 nor multiples of 16, so that Triton does not specialise
them. Only strides count as multiples of 16 if the head dim is one. The batch stride exceeds 2^31 and is 64-bit."""


@dataclass(frozen=True)
class Argument:
    """Parameter of a binary, or field of the struct that a caller fills in."""

    name: str
    type: str  # as in Triton: *bf16, i32, fp32; or MAP
    same_as: str | None = None  # the argument whose value is passed again; not a field of the struct
    multiple: int = 1  # required alignment, of a pointer in bytes, of a stride in elements
    made_of: str | None = None  # the expression from which the launcher computes the value; not a field
    at: str | None = None  # C expression for the address of the computed value

    @property
    def size(self) -> int:
        return MAP_BYTES if self.type == MAP else 8 if self.type.startswith("*") else BYTES[self.type]

    @property
    def alignment(self) -> int:
        """Alignment in bytes among the kernel parameters."""
        return MAP_ALIGNMENT if self.type == MAP else self.size


@dataclass(frozen=True)
class TensorMap:
    """TMA descriptor of a tensor ``[B, S, H, D]``."""

    name: str
    tensor: str  # name of the tensor; a second map for the rest of its head dim has another name
    dtype: str
    sizes: tuple[str | int, ...]  # an argument, the quotient or product of two arguments, or a number
    box: tuple[int, ...]  # elements per load along each dimension, outermost first
    swizzle: int  # CUtensorMapSwizzle
    by_pointer: bool  # the kernel also takes the address of the tensor

    @property
    def variable(self) -> str:
        """Name of the C variable."""
        return f"{self.name}_tensor"

    def parameters(self) -> Iterator[Argument]:
        """Yield the parameters that Triton passes: the map, then sizes and strides, which no kernel reads."""
        name, variable = f"{self.name}_map", self.variable
        yield Argument(name, MAP, made_of=self.tensor, at=f"{variable}.map")
        for i, (axis, size) in enumerate(zip(AXES, self.sizes, strict=True)):
            yield Argument(f"{name}_size_{axis}", "i32", made_of=str(size), at=f"&{variable}.size[{i}]")
        for i, axis in enumerate(AXES):
            stride = f"{self.tensor}_stride_{axis}" if axis != "d" else "1"
            yield Argument(f"{name}_stride_{axis}", "i64", made_of=stride, at=f"&{variable}.stride[{i}]")

    def inputs(self) -> Iterator[Argument]:
        """Yield the fields that a caller fills in: address and strides. TMA requires multiples of 16 bytes."""
        yield Argument(self.tensor, f"*{self.dtype}", multiple=ALIGNMENT)
        for axis, kind in zip("bsh", ("i64", "i32", "i32"), strict=True):
            yield Argument(f"{self.tensor}_stride_{axis}", kind, multiple=ALIGNMENT // BYTES[self.dtype])


@dataclass(frozen=True)
class ExportedKernel:
    """Compiled kernel with everything that a launch needs."""

    name: str  # forward, delta, dq, dkdv or gradients
    symbol: str
    cubin: bytes
    arguments: tuple[Argument, ...]  # parameters in the order of the binary
    inputs: tuple[Argument, ...]  # fields of the struct that a caller fills in
    maps: tuple[TensorMap, ...]
    layout: tuple[tuple[int, int], ...]  # (offset, bytes) of every parameter, with SCRATCH last
    threads: int  # per program
    tile: Tile
    shared: int  # bytes

    def needs_input(self, name: str) -> bool:
        """Return True if the caller must set the field ``name`` of the argument struct."""
        return any(argument.name == name for argument in self.inputs)

    @property
    def block(self) -> int:
        """Rows per program."""
        return self.tile.block_k if self.name in KEY_GRID_KERNELS else self.tile.block_q


def export(config: ExportConfig, name: str) -> ExportedKernel:
    """Compile one kernel of a config.

    Raises:
        ValueError: The tile does not fit the GPU, or the kernel does not support the config.
        RuntimeError: The exported launcher would pass other parameters than Triton's.
    """
    tile, launch = chosen_tiles(config)[name][0], compiled_launch(config, name)
    binary, limit = launch.binary, shared_limit(config.arch)
    metadata, cubin = binary.metadata, binary.asm["cubin"]
    if metadata.shared > limit:
        raise ValueError(
            f"the {name} kernel needs {metadata.shared} bytes of shared memory, but sm_{config.arch} has {limit}"
        )
    arguments, inputs, maps = split_arguments(launch, size_symbols(config, name))
    base, layout = read_parameter_layout(cubin)
    if metadata.global_scratch_size or metadata.profile_scratch_size or getattr(metadata, "num_ctas", 1) != 1:
        raise RuntimeError(f"the {name} kernel needs scratch memory or a cluster, which the launcher does not support")
    expected = parameter_offsets(arguments, base)
    if layout != expected:
        raise RuntimeError(
            f"the {name} kernel takes parameters at (offset, bytes) {layout}, but its launcher would pass {expected}"
        )
    return ExportedKernel(
        name, metadata.name, cubin, arguments, inputs, maps, tuple(layout), required_threads(binary.asm["ptx"]), tile,
        metadata.shared,
    )  # fmt: skip


def compiled_launch(config: ExportConfig, name: str) -> RecordedLaunch:
    """Compile the launch of one kernel, without line info, which has paths of this machine."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return compile_launch(export_launch(config, name), config.arch)


def export_launch(config: ExportConfig, name: str) -> RecordedLaunch:
    """Return the uncompiled launch of one kernel. Triton specialises it for the alignment of its tensors only."""
    sizes = SIZES if config.grouped else UNGROUPED
    if name == "delta":  # the exported kernel has no dlse
        shape = sizes.batch, sizes.queries, sizes.heads, config.head_dim_v
        out, dout = (torch.empty(shape, dtype=DTYPES[config.dtype], device=META) for _ in range(2))
        return record_launches(attention_delta, config.arch, dout, out)[0]
    return export_variant(config, name, sizes).launch


def export_variant(config: ExportConfig, name: str, sizes: CallSizes) -> KernelVariant:
    """Return the variant of one kernel except delta."""
    options: OptionItems = ()
    kernel = config.backward if name == "gradients" else name
    if (name, config.forward_kernel) == ("forward", "hopper"):
        kernel, options = HOPPER["hopper"]
    elif kernel == "hopper":
        kernel, options = HOPPER["hopper_backward"]
    return KernelVariant(
        kernel, config.arch, config.dtype, config.head_dim, config.head_dim_v, chosen_tiles(config)[name][0],
        config.role, not config.bounded, config.grouped, options=options, sizes=sizes,
    )  # fmt: skip


def size_symbols(config: ExportConfig, name: str) -> dict[int, str]:
    """Return the C-like expression for each size of the recorded launch, such as ``{7: "batch"}`` for `SIZES`."""
    sizes = SIZES if config.grouped else UNGROUPED
    by_keys = name in KEY_GRID_KERNELS
    heads = ("heads * group", "heads") if by_keys else ("heads", "heads / group")
    symbols = {sizes.batch: "batch", sizes.queries: "columns" if by_keys else "rows"}
    symbols |= {sizes.keys: "rows" if by_keys else "columns", sizes.heads // sizes.kv_heads: "group"}
    return symbols | ({sizes.heads: heads[0], sizes.kv_heads: heads[1]} if config.grouped else {sizes.heads: "heads"})


def split_arguments(
    launch: RecordedLaunch, symbols: Mapping[int, str]
) -> tuple[tuple[Argument, ...], tuple[Argument, ...], tuple[TensorMap, ...]]:
    """Return the parameters of the binary, the fields that a caller fills in, and the tensor maps.

    ``symbols`` has the expression for each size of the launch; see :func:`size_symbols`.

    Raises:
        RuntimeError: The launcher cannot encode a descriptor of the launch.
    """
    source, metadata = launch.binary.src, getattr(launch.binary.metadata, "tensordesc_meta", None) or []
    names = [param.name for param in launch.kernel.params]
    # a tensor that is passed twice gets its last name, so a state that is updated in place has the result's name
    values = [*zip(names, launch.arguments, strict=False)]
    owners = {id(value.ptr): name for name, value in values if hasattr(value, "ptr")}
    first_map = {id(value.base): name for name, value in reversed(values) if hasattr(value, "block_shape")}
    numbers: dict[int, str] = {}
    parameters: list[Argument] = []
    inputs: list[Argument] = []
    maps: list[TensorMap] = []

    def walk(value: Any, kind: Any, path: tuple[int, ...], name: str, tensor: str | None) -> None:
        same_as: str | None
        if kind == "constexpr":
            return
        if isinstance(value, tuple):
            owner = owners[id(value.ptr)] if hasattr(value, "ptr") else None
            field_names: tuple[str, ...] = value._fields  # type: ignore[attr-defined]
            for i, (field, part, part_kind) in enumerate(zip(field_names, value, kind, strict=True)):
                walk(part, part_kind, (*path, i), field_name(name, field), owner and field_name(owner, field))
        elif hasattr(value, "block_shape"):
            by_pointer, tensor = id(value.base) in owners, owners.get(id(value.base), first_map[id(value.base)])
            name = tensor if by_pointer else name
            tensor_map = _tensor_map(value, name, tensor, symbols, metadata[len(maps)], by_pointer=by_pointer)
            maps.append(tensor_map)
            parameters.extend(tensor_map.parameters())
            inputs.extend(tensor_map.inputs() if name == first_map[id(value.base)] else ())
        else:
            is_aligned = ["tt.divisibility", ALIGNMENT] in source.attrs.get(path, [])
            is_number = isinstance(value, int) and tensor is None
            made_of = "0" if is_number and value == 0 else None
            same_as = numbers.setdefault(value, name) if is_number else tensor or name
            same_as = None if same_as == name or made_of else same_as
            multiple, at = ALIGNMENT if is_aligned and not made_of else 1, "&zero" if made_of else None
            parameters.append(Argument(name, kind, same_as, multiple, made_of, at))
            inputs.extend(parameters[-1:] if same_as is None and made_of is None else ())

    for index, (name, value) in enumerate(values):
        walk(value, source.signature[name], (index,), name, None)
    if len(maps) != len(metadata):
        raise RuntimeError(f"{launch.name} has {len(maps)} descriptors, but Triton's metadata has {len(metadata)}")
    return tuple(parameters), tuple(inputs), tuple(maps)


def _tensor_map(
    value: Any, name: str, tensor: str, symbols: Mapping[int, str], metadata: Mapping[str, Any], *, by_pointer: bool
) -> TensorMap:
    """Return the tensor map of a descriptor.

    Raises:
        RuntimeError: The launcher cannot encode the descriptor.
    """
    dtype = TYPES[value.base.dtype]
    for field, found, supported in (
        ("elem_size", metadata["elem_size"], BYTES[dtype]),
        ("number of dimensions", len(metadata["block_size"]), len(AXES)),
        ("fp4_padded", bool(metadata.get("fp4_padded")), False),
        ("is_im2col", bool(metadata.get("is_im2col")), False),
    ):
        if found != supported:
            raise RuntimeError(f"the descriptor of {name} has {field} {found}; the launcher supports only {supported}")
    sizes = *(symbols[size] for size in value.shape[:3]), value.shape[3]
    return TensorMap(name, tensor, dtype, sizes, tuple(metadata["block_size"]), metadata["swizzle"], by_pointer)


def field_name(name: str, field: str) -> str:
    """Return the argument name of a field, such as q_stride_b; a pointer has the tensor's name."""
    if field == "ptr":
        return name
    return field if name in ("shape", "bounds") else f"{name}_{field}"


def parameter_offsets(arguments: tuple[Argument, ...], base: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of every parameter and of SCRATCH in the compiler's layout.

    ``base`` is the start of the parameters in their constant bank. Maps are aligned in the bank, not relative to
    ``base``.
    """
    layout, end = [], base
    for alignment, size in [*((it.alignment, it.size) for it in arguments), *[(8, 8)] * len(SCRATCH)]:
        start = -(-end // alignment) * alignment
        layout.append((start - base, size))
        end = start + size
    return layout


PARAMETER = re.compile(
    r"EIATTR_KPARAM_INFO.*?Ordinal\s*:\s*0x([0-9a-f]+)\s+Offset\s*:\s*0x([0-9a-f]+)\s+Size\s*:\s*0x([0-9a-f]+)",
    re.DOTALL,
)
BANK = re.compile(r"EIATTR_PARAM_CBANK.*?Value:\s*0x[0-9a-f]+ 0x([0-9a-f]+)", re.DOTALL)


def read_parameter_layout(cubin: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Return the start of a kernel's parameters in their constant bank, and (offset, bytes) of each parameter."""
    text = run_binary_tool("cuobjdump", "-elf", cubin=cubin)
    bank = BANK.search(text)
    assert bank is not None
    layout = sorted(tuple(int(number, 16) for number in entry) for entry in PARAMETER.findall(text))
    # the low half of the word is the start, the high half the number of bytes
    return int(bank[1], 16) & 0xFFFF, [(offset, size) for _, offset, size in layout]


# the manifest

SCHEMA = 2  # 1 had no tensor maps
LICENCE = "MIT"
SCRATCH = [{"name": "scratch", "size": 8, "value": 0}] * 2  # pointers that Triton appends; no exported kernel uses them

DATA_TYPES = {
    "bf16": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    "fp16": "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    "fp32": "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
}
SWIZZLES = tuple(f"CU_TENSOR_MAP_SWIZZLE_{mode}" for mode in ("NONE", "32B", "64B", "128B"))
FIXED = {
    "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
    "l2_promotion": "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
    "oob_fill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
}
"""Settings of all maps; with this ``oob_fill`` rows past the end are zeros."""


def manifest(config: ExportConfig, kernels: list[ExportedKernel], hashes: dict[str, str]) -> dict[str, Any]:
    """Return the manifest: files with SHA-256 ``hashes``, versions, and everything that another launcher needs."""
    return {
        "schema": SCHEMA,
        "name": config.prefix,
        "licence": LICENCE,
        "versions": {"ringattn": __version__, "triton": triton.__version__, "sources": source_digest(), **git()},
        "arch": f"sm_{config.arch}",
        "dtype": config.dtype,
        "head_dim": [config.head_dim, config.head_dim_v],
        **{name: getattr(config, name) for name in ("bounded", "grouped", "role", "forward_kernel", "backward")},
        "run": "never on a GPU by this export",
        "sha256": hashes,
        "kernels": [_entry(config, kernel) for kernel in kernels],
    }


def _entry(config: ExportConfig, kernel: ExportedKernel) -> dict[str, Any]:
    """Return the manifest's data of one kernel."""
    tile, origin = chosen_tiles(config)[kernel.name]
    parameters = [*map(_parameter, kernel.arguments), *SCRATCH]
    maps = {f"{tensor_map.name}_map": _map(tensor_map) for tensor_map in kernel.maps}
    return {
        "name": kernel.name,
        "cubin": f"{config.prefix}_{kernel.name}.cubin",
        "symbol": kernel.symbol,
        "grid": [f"ceil(rows / {kernel.block}) * batch * heads", 1, 1],
        "threads": kernel.threads,
        "shared_memory": kernel.shared,
        "tile": {field.name: getattr(tile, field.name) for field in fields(Tile)},
        "tile_from": origin,
        "arguments": [*map(_parameter, kernel.inputs)],
        "parameters": [
            {**data, "offset": offset, **({"tensor_map": maps[data["name"]]} if data["name"] in maps else {})}
            for data, (offset, _) in zip(parameters, kernel.layout, strict=True)
        ],
    }


def _parameter(argument: Argument) -> dict[str, Any]:
    """Return the manifest's data of one parameter or field."""
    data: dict[str, Any] = {"name": argument.name, "type": argument.type, "size": argument.size}
    data |= {"alignment": argument.alignment} if argument.type == MAP else {}
    data |= {name: value for name in ("same_as", "made_of") if (value := getattr(argument, name))}
    return data | ({"multiple_of": argument.multiple} if argument.multiple > 1 else {})


def _map(one: TensorMap) -> dict[str, Any]:
    """Return the arguments of cuTensorMapEncodeTiled except the address, innermost dimension first."""
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
