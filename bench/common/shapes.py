"""The flags that commands share: sizes like ``8k``, lists of them, what says a mask, devices, timers of rings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import torch
import typer

from ...comm.groups import PREFERENCE, TRANSPORTS
from ...kernels.checks import MAX_HEAD_DIM
from .timing import OF_RINGS, timer_on

SUFFIXES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


class LayoutName(StrEnum):
    """Layouts that have a name: equal shards."""

    contiguous = "contiguous"
    zigzag = "zigzag"
    striped = "striped"


def size(text: str) -> int:
    """``8192``, ``8k``, ``1m`` or ``2g`` (powers of 1024) as a number; a parser of typer options.

    Raises:
        typer.BadParameter: anything else.
    """
    match = re.fullmatch(r"(\d+)([kmg]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size: it must be a whole number, with k, m or g behind it or not")
    return int(match[1]) * SUFFIXES[match[2]]


def sizes(text: str) -> list[int]:
    """A comma list of sizes, as in ``8k,32k``; a parser of typer options.

    Raises:
        typer.BadParameter: one of them is not a size.
    """
    return [size(part) for part in text.split(",")]


def count(text: str) -> int:
    """A size of at least 1: there is nothing to measure of none; a parser of typer options.

    Raises:
        typer.BadParameter: no size, or 0.
    """
    found = size(text)
    if found < 1:
        raise typer.BadParameter(f"{text!r} is too small: it must be at least 1")
    return found


def counts(text: str) -> list[int]:
    """A comma list of sizes of at least 1; a parser of typer options.

    Raises:
        typer.BadParameter: one of them is no size, or 0.
    """
    return [count(part) for part in text.split(",")]


def head_dims(text: str) -> list[int]:
    """A comma list of head dims; a parser of typer options.

    Raises:
        typer.BadParameter: one of them is none that our kernels take.
    """
    found = sizes(text)
    for dim in found:
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise typer.BadParameter(f"{dim} is no head dim: it must be 1 to {MAX_HEAD_DIM}")
    return found


def window(text: str) -> tuple[int, int]:
    """``4k,0`` as (left, right), with -1 for a side without an end; a parser of typer options.

    Raises:
        typer.BadParameter: not two sizes.
    """
    sides = [-1 if part.strip() == "-1" else size(part) for part in text.split(",")]
    if len(sides) != 2:
        raise typer.BadParameter(f"{text!r} is no window: it must be left,right, two sizes, or -1 for no end")
    return sides[0], sides[1]


class Pattern(NamedTuple):
    """A block-sparse pattern by name, with the parameters of its builder."""

    name: str
    parameters: dict[str, int]


PATTERNS = {
    "strided": ("block", "stride"),
    "fixed": ("block", "stride", "summary"),
    "bigbird": ("block", "window", "global", "random"),
    "longformer": ("window", "global"),
}


def pattern(text: str) -> Pattern:
    """``strided,block=128,stride=4k`` as a :class:`Pattern`; a parser of typer options.

    Raises:
        typer.BadParameter: an unknown name, or another list of parameters than :data:`PATTERNS` has for it.
    """
    name, *given = [part.strip() for part in text.split(",")]
    if name not in PATTERNS:
        raise typer.BadParameter(f"{name!r} is no pattern: it must be one of {', '.join(PATTERNS)}")
    parameters = {key.strip(): size(value) for key, _, value in (one.partition("=") for one in given)}
    if {*parameters} - {"seed"} != {*PATTERNS[name]} or ("seed" in parameters and name != "bigbird"):
        wanted = ",".join(f"{key}=SIZE" for key in PATTERNS[name]) + ("[,seed=SIZE]" if name == "bigbird" else "")
        raise typer.BadParameter(f"{text!r} does not say all of {name}, or more: it must be {name},{wanted}")
    return Pattern(name, parameters)


Causal = Annotated[bool, typer.Option("--causal/--full", help="Keys up to the query's position, or all.")]
Window = Annotated[
    Any,
    typer.Option(parser=window, metavar="LEFT,RIGHT", help="Keys so far before and behind the query; -1: no end."),
]
CuSeqlens = Annotated[
    Any, typer.Option("--cu-seqlens", parser=sizes, metavar="0,SIZE,…", help="Boundaries of packed documents.")
]
DocumentsOfMean = Annotated[
    int | None,
    typer.Option(
        "--documents", parser=size, metavar="SIZE", help="Packed documents of exponential lengths with this mean."
    ),
]
DocumentsSeed = Annotated[
    int | None, typer.Option("--documents-seed", help="Of the lengths that --documents draws (0 where left out).")
]
SeqUsedK = Annotated[
    Any,
    typer.Option(
        "--seqused-k", parser=sizes, metavar="SIZE,…", help="Keys of each batch row; those from there on are padding."
    ),
]
PrefixLength = Annotated[
    int | None, typer.Option(parser=size, metavar="SIZE", help="Positions that --causal hides from nobody.")
]
BlockMaskPattern = Annotated[
    Any,
    typer.Option(
        "--block-mask",
        parser=pattern,
        metavar="NAME,KEY=SIZE,…",
        help="; ".join(",".join([name, *(f"{key}=…" for key in keys)]) for name, keys in PATTERNS.items()) + ".",
    ),
]


def refuse_beside(other: str, why: str, **given: object) -> None:
    """What another flag takes the place of is not given too.

    Raises:
        ValueError: one of them is.
    """
    if flag := _first(given):
        raise ValueError(f"{flag} and {other} are both given: {why}")


def refuse_without(other: str, why: str, **given: object) -> None:
    """What means nothing without another flag is not given without it.

    Raises:
        ValueError: one of them is.
    """
    if flag := _first(given):
        raise ValueError(f"{flag} is given without {other}: {why}")


def _first(given: Mapping[str, object]) -> str | None:
    """The first flag that was given."""
    return next((name.replace("_", "-") for name, value in given.items() if value is not None), None)


TimerOfRings = Annotated[
    str, typer.Option("--timer", metavar="|".join(OF_RINGS), help="Default: events; on the CPU clock.")
]


def timer_of_rings(device: str, timer: str) -> str:
    """What times a ring on a device of this kind.

    Raises:
        typer.BadParameter: no such timer, or not of rings, or not of this kind.
    """
    try:
        return timer_on(device, timer, OF_RINGS)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None


def human(count: float, unit: str = "") -> str:
    """A count in decimal thousands, three digits: ``67.1 MB``, ``1.02 T``; whole numbers below a thousand."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    power = 0
    while count >= 999.5 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 else 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {prefixes[power]}{unit}".rstrip()


def binary(count: int) -> str:
    """A count of tokens the way it is typed: ``8k``, ``1m``, and ``1000`` where no suffix divides it."""
    for suffix, unit in (("m", 1024**2), ("k", 1024)):
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def grouped(heads: int, kv_heads: int | None) -> int:
    """The number of key/value heads that ``--heads`` and ``--kv-heads`` mean: as many as query heads where left out.

    Raises:
        typer.BadParameter: the query heads are not a multiple of them.
    """
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise typer.BadParameter(f"--kv-heads is {kv_heads}: --heads, {heads}, must be a multiple of it")
    return kv_heads


def check_chunks(chunks: Sequence[int], kv_heads: int) -> None:
    """Refuse runs of heads that hold none: typer.BadParameter."""
    if max(chunks) > kv_heads or min(chunks) < 1:
        told = ",".join(map(str, chunks))
        raise typer.BadParameter(f"--chunks is {told}: a chunk is at least one of the {kv_heads} key heads")


def dtype_name(text: str) -> str:
    """A dtype by its long or its short name; a parser of typer options.

    Raises:
        typer.BadParameter: anything else.
    """
    name = SHORT_DTYPES.get(text, text)
    if name not in DTYPE_BYTES:
        raise typer.BadParameter(f"{text!r} is no dtype: it takes {', '.join([*SHORT_DTYPES, *DTYPE_BYTES])}")
    return name


def device_name(text: str) -> str:
    """``cpu`` or ``cuda``.

    Raises:
        typer.BadParameter: another one, or one that is not here.
    """
    if text not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"--device is {text!r}: it takes cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device is cuda, and torch sees no CUDA device here")
    return text or ("cuda" if torch.cuda.is_available() else "cpu")


def check_transport(name: str, device: str, world: int) -> None:
    """Refuse what carries nothing between so many processes on a device of this kind, as far as flags tell.

    Raises:
        typer.BadParameter: no such transport, or one of GPUs on the CPU, or ``local`` between processes.
    """
    if name not in TRANSPORTS:
        raise typer.BadParameter(f"--transport is {name!r}: it takes {', '.join(TRANSPORTS)}")
    if device == "cpu" and name in {*PREFERENCE["cuda"]} - {*PREFERENCE["cpu"]}:
        raise typer.BadParameter(f"--transport is {name}, of GPUs, and the device is cpu: take process_group")
    if name == "local" and world > 1:
        raise typer.BadParameter(f"--transport is local, of one process, and {world} are to run: take auto")


def device_here(name: str | None) -> torch.device:
    """The device to measure.

    Raises:
        typer.BadParameter: there is none of that name.
    """
    kind = device_name(name or "")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
