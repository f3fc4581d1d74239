"""From the arguments of a kernel as Triton has them to parameters one after the other, and to what a caller says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...kernels.device.tiles import Strided

ALIGNMENT = 16
"""Bytes of a pointer and elements of a stride: what lets a thread load 16 bytes at once."""

SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "i64": 8}
"""Bytes of an element, and of what is passed by value; a pointer has 8."""

MAP = "CUtensorMap"
MAP_SIZE, MAP_ALIGNMENT = 128, 64
"""Bytes of a TMA descriptor that is passed by value, and what Triton aligns that parameter to."""

AXES = "bshd"


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
        if self.type == MAP:
            return MAP_SIZE
        return 8 if self.type.startswith("*") else SIZES[self.type]

    @property
    def alignment(self) -> int:
        """Bytes that its offset among the parameters is a multiple of."""
        return MAP_ALIGNMENT if self.type == MAP else self.size


@dataclass(frozen=True)
class Described:
    """A tensor ``[B, S, H, D]`` that a kernel takes by a TMA descriptor, in tiles of one head."""

    tensor: str  # whose address and strides it has
    dtype: str
    sizes: tuple[str, str, str, int]  # of the dimensions: an argument or the quotient or product of two, and D
    rows: int  # of a tile
    asked: Strided | None = None  # types of address and strides where the kernel takes them in no other way
    layout: str | None = None  # in shared memory, as Gluon spells it
    columns: int | None = None  # of a tile that has not all of a row

    @property
    def type(self) -> str:
        """As Triton spells it."""
        block = [1, self.rows, 1, self.columns or self.sizes[3]]
        return f"tensordesc<{self.dtype}{block}{f',{self.layout}' if self.layout else ''}>"

    @property
    def element_size(self) -> int:
        """Bytes."""
        return SIZES[self.dtype]

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


def strided(dtype: str, head_dim: int) -> Strided:
    """Types of a tensor's address and strides; ``!`` marks a stride that is a multiple of ALIGNMENT elements."""
    aligned = "" if head_dim % ALIGNMENT else "!"  # rows of such heads can begin on 16 bytes
    # a batch row may be 2^31 elements long
    return Strided(f"*{dtype}", f"i64{aligned}", f"i32{aligned}", f"i32{aligned}")


class Flat(NamedTuple):
    """Triton's signature, constants and attributes by path; parameters in order; what a caller is asked for."""

    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    arguments: list[Argument]
    asked: list[Argument]
    described: list[Described]


def flattened(names: list[str], values: dict[str, Any]) -> Flat:
    """The parameters ``names`` of a kernel one after the other.

    Args:
        values: of each a type for what is passed at run time, :class:`Described` for a descriptor, a plain value for a
            constant, the name of another one for a repetition, or a named tuple of these.
    """
    flat = Flat({}, {}, {}, [], [], [])

    def walk(value: Any, path: tuple[int, ...], name: str, same_as: str | None) -> Any:
        if isinstance(value, tuple):
            fields = zip(getattr(type(value), "_fields", ()), value, strict=True)
            return type(value)(
                *(
                    walk(part, (*path, i), field_name(name, field), same_as and field_name(same_as, field))
                    for i, (field, part) in enumerate(fields)
                )
            )
        if isinstance(value, Described):
            flat.described.append(value)
            flat.arguments.extend(value.parameters())
            if value.asked is not None:
                flat.asked.extend(_asked_for(value.tensor, value.asked, ALIGNMENT // value.element_size))
            return value.type
        if value is None or isinstance(value, int):
            flat.constants[path] = value
            return "constexpr"
        plain = value.rstrip("!")
        aligned = value.endswith("!") or value.startswith("*")
        if aligned:
            flat.attributes[path] = [["tt.divisibility", ALIGNMENT]]
        one = Argument(name, plain, same_as, ALIGNMENT if aligned else 1)
        flat.arguments.append(one)
        if same_as is None:
            flat.asked.append(one)
        return plain

    for index, name in enumerate(names):
        value, same_as = values[name], None
        if isinstance(value, str) and value in values:
            value, same_as = values[value], value
        flat.signature[name] = walk(value, (index,), name, same_as)
    return flat


def _asked_for(name: str, types: Strided, unit: int) -> Iterator[Argument]:
    """Address and strides of a tensor; the copy engine takes strides of ``unit`` elements, 16 bytes."""
    yield Argument(name, types.ptr, multiple=ALIGNMENT)
    for field, kind in zip(types._fields[1:], types[1:], strict=True):
        yield Argument(f"{name}_{field}", kind.rstrip("!"), multiple=unit)


def field_name(name: str, field: str) -> str:
    """``q`` and ``stride_b``: q_stride_b; a pointer has the tensor's name; what is not a tensor names its fields."""
    if field == "ptr":
        return name
    return field if name in ("shape", "bounds") else f"{name}_{field}"


def offsets(arguments: list[Argument], scratch: int, base: int) -> list[tuple[int, int]]:
    """(offset, bytes) of every parameter, ``scratch`` pointers after them, as the compiler lays them out.

    ``base`` is where parameters begin in their constant bank: a map is aligned there, and not from the first parameter.
    """
    found, end = [], base
    for alignment, size in [*((one.alignment, one.size) for one in arguments), *[(8, 8)] * scratch]:
        begin = -(-end // alignment) * alignment
        found.append((begin - base, size))
        end = begin + size
    return found


def as_c(words: str) -> str:
    """An expression of arguments in C: ``heads / group`` as args->heads / args->group."""
    return re.sub(r"[a-z]\w*", lambda found: found[0] if found[0] == "batch" else f"args->{found[0]}", words)
