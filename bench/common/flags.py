"""Flags that several commands share: sizes such as ``8k``, masks, devices and files.

This module does not import torch, so that ``--help`` is fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from ...validators import Validator, integer_between, word_choice
from .output import check_writable
from .ranks import cores, launched_rank, ranks_here

if TYPE_CHECKING:
    import torch

    from ...ring import Layout

T = TypeVar("T")

MOST_SIZE = 10**18 * 1024**3
SUFFIXES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
PREFIXES = ("", "k", "M", "G", "T", "P", "E")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
WIRE_DTYPES = ("bfloat16", "float8_e4m3fn")
GRAD_WIRE_DTYPES = ("float32", "bfloat16")
MAX_HEAD_DIM = 512  # of the Triton kernels
KV_SLOTS = 3  # default of Ring
MAX_CHUNKS = 1024  # of Ring
TIMERS = ("events", "graph", "clock")
"""Ways to time a run: CUDA events, events around the replay of a CUDA graph, or the host's clock.

A graph's time contains no host launches. The host's clock contains all of them: the device is idle before and after."""
RING_TIMERS = ("events", "clock")
"""Timers for a whole ring. Its transfers are posted by the host, so a CUDA graph cannot capture them."""


class LayoutName(StrEnum):
    """Layouts with equal shards, by name."""

    contiguous = "contiguous"
    zigzag = "zigzag"
    striped = "striped"


def parse_size_text(text: str) -> int:
    """Parse a size such as ``8192``, ``8k``, ``1m`` or ``2g`` (powers of 1024)."""
    match = re.fullmatch(r"(\d{1,18})([kmg]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a size: it must be an integer below 10^18, optionally followed by k, m or g."
        )
    return int(match[1]) * SUFFIXES[match[2]]


def value_parser(kind: Validator, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a typer parser that calls ``parse`` and checks the value by ``kind``; BadParameter if either fails."""

    def parser(text: str) -> Any:
        try:
            return kind.convert(parse(text))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not valid: it must be {kind.expected}") from None

    return parser


def dtype_parser(dtype_names: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of dtypes by long or short name."""
    words = word_choice(*(short for short, long in SHORT_DTYPES.items() if long in dtype_names), *dtype_names)
    return value_parser(words, lambda text: SHORT_DTYPES.get(text.strip(), text.strip()))


def comma_list(parser: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of a comma-separated list such as ``8k,32k``."""

    def parse_list(text: str) -> list[T]:
        return [parser(part) for part in text.split(",")]

    return parse_list


count = value_parser(integer_between(1, MOST_SIZE), parse_size_text)
head_dim = value_parser(integer_between(1, MAX_HEAD_DIM), parse_size_text)
sizes, counts, head_dims = comma_list(parse_size_text), comma_list(count), comma_list(head_dim)
dtype_name = dtype_parser([*DTYPE_BYTES])
wire_dtype, grad_wire_dtype = dtype_parser(WIRE_DTYPES), dtype_parser(GRAD_WIRE_DTYPES)
dtype_names = comma_list(dtype_name)
_LAYOUTS = f"{', '.join(LayoutName)} or the name of a .json file"
layout = value_parser(Validator(_LAYOUTS, lambda text: Path(text) if text.endswith(".json") else LayoutName(text)), str)


def parse_window(text: str) -> tuple[int, int]:
    """Parse ``4k,0`` as (left, right); -1 means no limit on that side."""
    sides = [-1 if part.strip() == "-1" else parse_size_text(part) for part in text.split(",")]
    if len(sides) != 2:
        raise typer.BadParameter(f"{text!r} is not a window: it must be LEFT,RIGHT, each a size or -1 for no limit.")
    return sides[0], sides[1]


class PatternFlag(NamedTuple):
    """Name of a block-sparse pattern in :data:`PATTERNS`, and the parameters of the function that builds it."""

    name: str
    parameters: dict[str, int]


PATTERNS = {
    "strided": ("block", "stride"),
    "fixed": ("block", "stride", "summary"),
    "bigbird": ("block", "window", "global", "random"),
    "longformer": ("window", "global"),
}


def parse_pattern(text: str) -> PatternFlag:
    """Parse ``strided,block=128,stride=4k`` as a :class:`PatternFlag` with the parameters in :data:`PATTERNS`."""
    name, *pairs = [part.strip() for part in text.split(",")]
    if name not in PATTERNS:
        raise typer.BadParameter(f"{name!r} is not a pattern: it must be one of {', '.join(PATTERNS)}")
    parameters = {key.strip(): parse_size_text(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    if {*parameters} - {"seed"} != {*PATTERNS[name]} or ("seed" in parameters and name != "bigbird"):
        wanted = ",".join(f"{key}=SIZE" for key in PATTERNS[name]) + ("[,seed=SIZE]" if name == "bigbird" else "")
        raise typer.BadParameter(f"{text!r} has the wrong parameters for {name}. Write {name},{wanted}.")
    return PatternFlag(name, parameters)


def _target(value: Path | None) -> Path | None:
    """Return ``value``; raise typer.BadParameter if the file cannot be written. Typer calls it before any work."""
    check_writable(value)
    return value


def _stream(context: typer.Context, value: str | None) -> str | None:
    """Return the target of --json or --csv; raise typer.BadParameter if it cannot be written or both are ``-``."""
    if value != "-":
        check_writable(value)
    elif "-" in context.params.values():
        raise typer.BadParameter("--json and --csv are both -. Only one of them can go to standard output.")
    return value


def check_folder(flag: str, folder: Path) -> None:
    """Raise typer.BadParameter if files cannot be written to ``folder``, the value of ``flag``; leave no file."""
    created: list[Path] = []
    try:
        for part in reversed([folder, *folder.parents]):
            if not part.is_dir():
                part.mkdir()
                created.append(part)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"{flag} is {folder}: cannot write to this folder: {error.strerror}") from None
    finally:
        with suppress(OSError):  # another process may have written there by now
            for part in reversed(created):
                part.rmdir()


Batch = Annotated[int, typer.Option(min=1, help="Batch size.")]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Key/value heads; default: --heads.")]
HeadDim = Annotated[int, typer.Option(min=1, max=MAX_HEAD_DIM, help="Dimension of a head.")]
Dtype = Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")]
DeviceDtype = Annotated[
    str | None,
    typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16; default: bf16, on the CPU fp32."),
]
CHUNKS_HELP = "Parts of a hop that are sent and computed separately: groups of heads, then runs of tokens."
Chunks = Annotated[int, typer.Option(min=1, max=MAX_CHUNKS, help=CHUNKS_HELP)]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs of each candidate; the median is reported.")]
Seed = Annotated[int, typer.Option(help="Seed of the random inputs.")]
LayoutFlag = Annotated[LayoutName, typer.Option(help="How tokens are split over the ranks.")]
LayoutOrFile = Annotated[
    Any,
    typer.Option(
        parser=layout,
        metavar="|".join([*LayoutName, "FILE.json"]),
        autocompletion=lambda: [*LayoutName],
        help="How tokens are split over the ranks; a file must have a Layout's spans_per_rank.",
    ),
]
TokensPerRank = Annotated[Any, typer.Option(parser=count, metavar="SIZE", help="Tokens per rank.")]
DeviceFlag = Annotated[str, typer.Option(help="cpu or cuda; default: cuda if available.")]
Timer = Annotated[str, typer.Option(metavar="|".join(TIMERS), help="Default: events; on the CPU, clock.")]
RingTimer = Annotated[str, typer.Option(metavar="|".join(RING_TIMERS), help="Default: events; on the CPU, clock.")]
WireDtype = Annotated[
    str | None,
    typer.Option(parser=wire_dtype, metavar="DTYPE", help=f"Send K/V as {' or '.join(WIRE_DTYPES)}."),
]
GradWireDtype = Annotated[
    str | None,
    typer.Option(parser=grad_wire_dtype, metavar="DTYPE", help=f"Send dK/dV as {' or '.join(GRAD_WIRE_DTYPES)}."),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", callback=_stream, help="Write rows, notes and provenance as JSON."),
]
Csv = Annotated[str | None, typer.Option("--csv", metavar="FILE|-", callback=_stream, help="Write the rows as CSV.")]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", callback=_target, help="Write the timeline of every rank, for Perfetto."),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", callback=_target, help="Write a picture.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", callback=_target, help="Plot the losses to a file.")]

Causal = Annotated[bool, typer.Option("--causal/--full", help="Causal mask, or full attention.")]
Window = Annotated[
    Any,
    typer.Option(
        parser=parse_window, metavar="LEFT,RIGHT", help="Keys visible left and right of the query; -1: no limit."
    ),
]
CuSeqlens = Annotated[Any, typer.Option(parser=sizes, metavar="0,SIZE,…", help="Boundaries of packed documents.")]
MeanDocumentLength = Annotated[
    int | None,
    typer.Option(
        parser=parse_size_text,
        metavar="SIZE",
        help="Pack documents with exponentially distributed lengths of this mean.",
    ),
]
DocumentsSeed = Annotated[int | None, typer.Option(help="Seed for the lengths of --documents; default: 0.")]
SeqUsedK = Annotated[
    Any,
    typer.Option(parser=sizes, metavar="SIZE,…", help="Valid keys of each batch row; the rest are padding."),
]
PrefixLength = Annotated[
    int | None,
    typer.Option(
        parser=parse_size_text, metavar="SIZE", help="First positions, which every query sees even with --causal."
    ),
]
BlockMaskPattern = Annotated[
    Any,
    typer.Option(
        parser=parse_pattern,
        metavar="NAME,KEY=SIZE,…",
        help="; ".join(f"{name}: {', '.join(keys)}" for name, keys in PATTERNS.items()) + ".",
    ),
]
MaskFile = Annotated[
    Path | None,
    typer.Option(
        "--mask",
        metavar="FILE.json",
        help="Islands, and intervals, slices or a prefix tree (lengths and parents): an object with arguments by name.",
    ),
]


def typed(context: typer.Context) -> dict[str, str]:
    """Return the flags that the command line has, by parameter name: ``{"kv_heads": "--kv-heads"}``."""
    sources = {name: context.get_parameter_source(name) for name in flag_spellings(context)}
    names = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {name: flag for name, flag in flag_spellings(context).items() if name in names}


def flag_spellings(context: typer.Context) -> dict[str, str]:
    """Return the flags that the command knows, by parameter name; of several spellings the longest."""
    options = [option for option in context.command.params if option.param_type_name == "option"]
    return {option.name or "": max(option.opts, key=len) for option in options}


def check_mode(context: typer.Context, mode: str, mode_parameters: Collection[str]) -> None:
    """Raise typer.BadParameter if a flag was given that has no effect in ``mode``, such as ``on the CPU``.

    ``mode_parameters`` names the parameters that have an effect.
    """
    effective = {*mode_parameters, "json", "csv"}
    unused = [flag for name, flag in typed(context).items() if name not in effective]
    if unused:
        raise typer.BadParameter(f"{', '.join(unused)} cannot be used {mode}.")


def check_needs(context: typer.Context, needs: Mapping[str, str]) -> None:
    """Raise typer.BadParameter if a flag was given without the flag it needs; ``needs`` maps their names."""
    given_flags, flags = typed(context), flag_spellings(context)
    for name, other in needs.items():
        if name in given_flags and other not in given_flags:
            raise typer.BadParameter(f"{given_flags[name]} has no effect without {flags[other]}.")


def check_exclusive(context: typer.Context, *names: str) -> None:
    """Raise typer.BadParameter if more than one of these parameters was given."""
    conflicting = [flag for name, flag in typed(context).items() if name in names]
    if len(conflicting) > 1:
        raise typer.BadParameter(f"{' and '.join(conflicting)} cannot be used together: pass only one")


def read_layout(context: typer.Context, path: Path, *apart: str) -> Layout:
    """Return the layout in a JSON file, which holds an object with the argument ``spans_per_rank`` of `Layout`.

    Raise typer.BadParameter if a parameter named in ``apart`` was given too, or if the layout has gaps.
    """
    from ...kernels.json_files import read_object
    from ...ring import Layout

    for name in apart:
        check_exclusive(context, "layout", name)
    try:
        fields = read_object(path)
        if [*fields] != ["spans_per_rank"]:
            raise ValueError(f"it has {', '.join(fields) or 'no field'}, but must have only spans_per_rank")
        layout = Layout(**fields)
        if not 0 < layout.seqlen == layout.reach:
            token_text = f"{layout.seqlen} tokens up to position {layout.reach - 1}" if layout.seqlen else "no token"
            raise ValueError(f"it has {token_text}, but must have every position from 0 to the last")
    except ValueError as error:
        raise typer.BadParameter(f"--layout is {path}: {error}") from None
    return layout


def resolve_kv_heads(heads: int, kv_heads: int | None) -> int:
    """Return ``--kv-heads``, or else ``--heads``; raise typer.BadParameter if it does not divide ``--heads``."""
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise typer.BadParameter(f"--heads is {heads}: it must be a multiple of --kv-heads, {kv_heads}")
    return kv_heads


def check_transport_flag(name: str, device: str, world: int) -> None:
    """Raise typer.BadParameter if a transport is unknown or does not fit the device or the processes."""
    from ...comm.registry import AUTO, PROCESSES, find_transport, transport_names

    if name == AUTO:
        return
    if name not in transport_names():
        raise typer.BadParameter(f"--transport is {name!r}: it must be one of {', '.join([AUTO, *transport_names()])}")
    entry = find_transport(name)
    if device not in entry.devices:
        raise typer.BadParameter(f"--transport is {name}: it works on {' and '.join(entry.devices)}, not on {device}")
    if PROCESSES not in entry.ranks and world > 1:
        raise typer.BadParameter(
            f"--transport is {name}: it works only within one process. Use auto for {world} ranks."
        )


def resolve_world(requested: int | None, default: int) -> int:
    """Return the launcher's number of ranks; without a launcher, ``requested`` or else ``default``.

    Raise typer.BadParameter if ``requested``, the value of ``--world``, is not the launcher's number.
    """
    place = launched_rank()
    if place is None:
        return default if requested is None else requested
    if requested not in (None, place.world):
        raise typer.BadParameter(f"--world is {requested}: the launcher started {place.world} ranks; leave it out")
    return place.world


def rank_threads(world: int) -> int:
    """Return the CPU threads of each rank: this machine's cores divided by its ranks."""
    return max(1, cores() // ranks_here(world))


def parse_device_kind(text: str) -> str:
    """Return ``cpu`` or ``cuda``; an empty text means cuda if available. BadParameter for other texts."""
    import torch

    has_cuda = torch.cuda.is_available()
    if text not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"--device is {text!r}: it must be cpu or cuda")
    if text == "cuda" and not has_cuda:
        raise typer.BadParameter("--device is cuda, but torch finds no CUDA device")
    return text or ("cuda" if has_cuda else "cpu")


def resolve_device(name: str | None = None) -> torch.device:
    """Return the CPU or the current GPU for ``--device``; typer.BadParameter if it is not available."""
    import torch

    kind = parse_device_kind(name or "")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def resolve_timer(kind: str, timer: str, supported: Sequence[str] = TIMERS) -> str:
    """Return ``timer``, or if empty the default of ``kind`` (cpu or cuda); BadParameter if ``kind`` lacks it."""
    default = "events" if kind == "cuda" else "clock"
    known = supported if kind == "cuda" else (default,)
    if (timer or default) not in known:
        raise typer.BadParameter(f"--timer is {timer!r}: on {kind} it must be {' or '.join(known)}")
    return timer or default


def human_count(count: float, unit: str = "") -> str:
    """Format a number with three digits and a decimal prefix: ``67.1 MB``, ``1.02 T``."""
    power = 0
    while count >= 999.5 and power < len(PREFIXES) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {PREFIXES[power]}{unit}".rstrip()


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def size_text(count: int) -> str:
    """Format a number of tokens as it is typed: ``8k``, ``1m``, or ``1000`` if no suffix divides it."""
    for suffix, unit in (("m", 1024**2), ("k", 1024)):
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)
