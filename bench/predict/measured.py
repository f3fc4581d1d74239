"""A GPU's speed as ``ringattn bench kernels`` or ``bench suite`` measured it there: the rows nearest to a call."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.files import load, objects, positive, whole_number
from ..kernels.contender import BACKWARD, FORWARD, OURS
from .call import DTYPES, Call
from .launch import Area, whole
from .program import Form
from .speed import GPUS, H100, Speed, form_of

KERNELS = "ringattn bench kernels 1"
SUITE = "ringattn bench suite 1"
WRITERS = "`ringattn bench kernels --json FILE` or `ringattn bench suite`"
COPY = "copy, bytes read and written"  # of the suite's case of ceilings
SQUARE = ("full", "causal")
MOST_TOKENS = 1 << 40  # of a row: what a product of lengths can be made of


@dataclass(frozen=True)
class Row:
    """One measured launch of our kernels, as they run by default."""

    what: str
    """``forward``, or ``backward``: both of its kernels, counted as 2.5 forwards."""
    flops: float
    """FLOP/s on the visible area."""
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.what} {self.flops / 1e12:.4g} TFLOP/s of {self.dtype} D{self.head_dim} {mask}, "
            f"{self.seqlen:,} tokens, {self.heads}/{self.kv_heads} heads"
        )

    @property
    def launch(self) -> tuple[float, Area, Form]:
        """As :meth:`Speed.fitted` takes it."""
        form = form_of(
            tokens=self.seqlen, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype],
        )  # fmt: skip
        return self.flops, whole(self.seqlen, causal=self.causal), form

    def distance(self, call: Call) -> tuple[float, ...]:
        """How far it is from what a hop of the call computes: by head dim, mask, length, heads."""
        return (
            abs(math.log2(self.head_dim / call.head_dim)), self.causal != call.mask.causal,
            abs(math.log2(self.seqlen / call.tokens)), abs(math.log2(self.heads / call.heads)),
        )  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """What is known of one GPU."""

    rows: Sequence[Row]
    gpu: str
    """Its name, as the driver tells it."""
    multiprocessors: int
    capacity: float
    """Bytes of its memory."""
    copied: float | None = None
    """Bytes per second, read and written, of a large copy; None: not measured."""

    def nearest(self, call: Call, what: str) -> Row | None:
        """The row of a pass that is nearest to a call, of its dtype; None: there is none."""
        of_kind = [row for row in self.rows if row.what == what and row.dtype == call.dtype]
        return min(of_kind, key=lambda row: row.distance(call), default=None)


def kernels_of(path: Path) -> Kernels:
    """What a file of measured kernels says.

    Raises:
        ValueError: another schema, a damaged row, or no GPU: of a CPU other things than FLOP/s are measured.
    """
    data = load(path, (KERNELS, SUITE), WRITERS)
    about = data.get("provenance")
    gpu = about.get("gpu") if isinstance(about, dict) else None
    if not isinstance(gpu, dict):
        raise ValueError(
            f"{path} was not measured on a GPU: for a CPU `ringattn predict --calibrate` measures what it takes"
        )
    if data["schema"] == SUITE:
        cases = objects(data, "cases", str(path))
        found = [
            (f"{path}: cases[{place}].numbers[{index}]", number)
            for place, case in enumerate(cases)
            for index, number in enumerate(objects(case, "numbers", f"{path}: cases[{place}]"))
        ]
    else:
        found = [(f"{path}: numbers[{index}]", one) for index, one in enumerate(objects(data, "numbers", str(path)))]
    return of_numbers(found, gpu, f"{path}: provenance.gpu")


def of_numbers(numbers: Sequence[tuple[str, Mapping[str, Any]]], gpu: Mapping[str, Any], where: str) -> Kernels:
    """The same of numbers, each with the place it is named by in errors, and of what is told of the GPU.

    Raises:
        ValueError: a damaged row, or a GPU without a name and multiprocessors.
    """
    name = gpu.get("name")
    if not isinstance(name, str):
        raise ValueError(f"{where}: name is {name!r:.80}: it must be text")
    rows = [row for place, number in numbers if (row := _row(number, place)) is not None]
    copies = [positive(number, "value", place) for place, number in numbers if _is_copy(number)]
    return Kernels(
        rows, name, whole_number(gpu, "multiprocessors", where), positive(gpu, "memory_gib", where) * 2**30,
        max(copies) * 1e9 if copies else None,
    )  # fmt: skip


def _is_copy(number: Mapping[str, Any]) -> bool:
    return number.get("name") == COPY and number.get("unit") == "GB/s" and number.get("value") is not None


def _row(number: Mapping[str, Any], where: str) -> Row | None:
    """Our default kernels' speed; None: it is another number."""
    of = number.get("labels")
    if number.get("name") not in (FORWARD, BACKWARD) or number.get("unit") != "TFLOP/s" or not isinstance(of, dict):
        return None
    if of.get("by") != OURS or of.get("mask") not in SQUARE or "head_dim_v" in of or number.get("value") is None:
        return None
    if of.get("dtype") not in tuple(DTYPES):
        raise ValueError(f"{where}: dtype is {of.get('dtype')!r:.80}: it must be one of {', '.join(DTYPES)}")
    if "seqlen" not in of:
        return None  # a launch of other shapes, as the table of targets has them
    heads = _heads(of.get("heads"), where)
    sizes = {one: whole_number(of, one, where) for one in ("seqlen", "head_dim")}
    if max(sizes.values()) > MOST_TOKENS:
        raise ValueError(f"{where}: a length of {max(sizes.values()):,}: at most {MOST_TOKENS:,}")
    rate = positive(number, "value", where) * 1e12
    return Row(
        str(number["name"]), rate, of["dtype"], sizes["head_dim"], of["mask"] == "causal", sizes["seqlen"], *heads
    )


def _heads(text: object, where: str) -> tuple[int, int]:
    """``16/8``: query heads, and those of K and V."""
    parts = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", text, re.ASCII) if isinstance(text, str) else None
    if parts is None:
        raise ValueError(f"{where}: heads is {text!r:.80}: it must be two counts, as in 16/8")
    return int(parts[1]), int(parts[2])


def base_of(found: Kernels, gpu: str | None) -> Speed:
    """The constants that no row tells: of the GPU that ``gpu`` names, else of the one whose name the file has.

    Of one that is not known those of an H100; multiprocessors, memory and its speed as far as they were measured.
    """
    known = next((speed for name, speed in GPUS.items() if name in found.gpu.lower()), H100)
    base = GPUS[gpu] if gpu is not None else known
    memory = base.memory if found.copied is None else found.copied / base.passes
    return replace(base, multiprocessors=found.multiprocessors, capacity=found.capacity, memory=memory)


def speed_of(found: Kernels, call: Call, base: Speed, source: str) -> tuple[Speed, list[Row]]:
    """A speed at which the nearest rows take what they took, and these rows.

    Raises:
        ValueError: no forward of this dtype was measured, or a row is faster than its launch.
    """
    forward, backward = (found.nearest(call, what) for what in (FORWARD, BACKWARD))
    if forward is None:
        dtypes = sorted({row.dtype for row in found.rows if row.what == FORWARD})
        there = f"there are rows of {', '.join(dtypes)}" if dtypes else "there are none"
        raise ValueError(
            f"{source} has no forward of {OURS} in {call.dtype}, full or causal: {there}; "
            f"`ringattn bench kernels --dtype {call.dtype} --json FILE` measures it"
        )
    told = None if backward is None else backward.launch
    try:
        fitted = base.fitted(forward=forward.launch, backward=told)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{source}: {error}") from None
    return fitted, [row for row in (forward, backward) if row is not None]
