"""The flags that commands share: sizes like ``8k``, masks, devices, files; and the one refusal of flags without a say.

Nothing here imports torch: a command's ``--help`` is there at once.
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

from ...kinds import Kind, one_of, whole
from .output import check_targets
from .ranks import cores, member, ranks_here

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
MAX_HEAD_DIM = 256  # of our kernels
KV_SLOTS = 3  # of a ring where nothing is said
TIMERS = ("events", "graph", "clock")
"""CUDA events around a run; events around the replay of a CUDA graph of it; the host's clock, device idle at both ends.

A graph has no launches by the host in it, the host's clock has all of them."""
OF_RINGS = ("events", "clock")
"""Of them those that time a whole ring: its transfers are posted by the host, and no graph holds them."""


class LayoutName(StrEnum):
    """Layouts that have a name: equal shards."""

    contiguous = "contiguous"
    zigzag = "zigzag"
    striped = "striped"


def size(text: str) -> int:
    """``8192``, ``8k``, ``1m`` or ``2g`` (powers of 1024) as a number; a parser of typer options, as are those below.

    Raises:
        typer.BadParameter: anything else.
    """
    match = re.fullmatch(r"(\d{1,18})([kmg]?)", text.strip().lower())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not a size: it must be a whole number below 10^18, with k, m or g behind it or not"
        )
    return int(match[1]) * SUFFIXES[match[2]]


def parser_of(kind: Kind, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of typer options that takes values of one kind."""

    def parser(text: str) -> Any:
        try:
            return kind.read(parse(text))
        except ValueError:
            raise typer.BadParameter(f"{text!r} does not fit: it must be {kind.takes}") from None

    return parser


def dtype_of(known: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of a dtype by its long or its short name."""
    words = one_of(*(short for short, long in SHORT_DTYPES.items() if long in known), *known)
    return parser_of(words, lambda text: SHORT_DTYPES.get(text.strip(), text.strip()))


def listed(parser: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A parser of a comma list, as in ``8k,32k``."""

    def several(text: str) -> list[T]:
        return [parser(part) for part in text.split(",")]

    return several


count, head_dim = parser_of(whole(1, MOST_SIZE), size), parser_of(whole(1, MAX_HEAD_DIM), size)
sizes, counts, head_dims = listed(size), listed(count), listed(head_dim)
dtype_name, wire_dtype, grad_wire_dtype = dtype_of([*DTYPE_BYTES]), dtype_of(WIRE_DTYPES), dtype_of(GRAD_WIRE_DTYPES)
dtype_names = listed(dtype_name)
_LAYOUTS = f"{', '.join(LayoutName)} or the name of a .json file"
layout = parser_of(Kind(_LAYOUTS, lambda text: Path(text) if text.endswith(".json") else LayoutName(text)), str)


def window(text: str) -> tuple[int, int]:
    """``4k,0`` as (left, right), with -1 for a side without an end."""
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
    """``strided,block=128,stride=4k`` as a :class:`Pattern`, whose parameters are those of :data:`PATTERNS`."""
    name, *given = [part.strip() for part in text.split(",")]
    if name not in PATTERNS:
        raise typer.BadParameter(f"{name!r} is no pattern: it must be one of {', '.join(PATTERNS)}")
    parameters = {key.strip(): size(value) for key, _, value in (one.partition("=") for one in given)}
    if {*parameters} - {"seed"} != {*PATTERNS[name]} or ("seed" in parameters and name != "bigbird"):
        wanted = ",".join(f"{key}=SIZE" for key in PATTERNS[name]) + ("[,seed=SIZE]" if name == "bigbird" else "")
        raise typer.BadParameter(f"{text!r} does not say all of {name}, or more: it must be {name},{wanted}")
    return Pattern(name, parameters)


def _target(value: Path | None) -> Path | None:
    """A file to write, refused before any work where it cannot be written; a callback of typer options."""
    check_targets(value)
    return value


def _stream(context: typer.Context, value: str | None) -> str | None:
    """The same of --json and --csv, one of which may be ``-``, standard output."""
    if value != "-":
        check_targets(value)
    elif "-" in context.params.values():
        raise typer.BadParameter("--json and --csv are both -: standard output takes one of them")
    return value


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder for output that cannot be made or written to, before any work; nothing of it is left.

    Raises:
        typer.BadParameter: it is something else, or nothing can be written there.
    """
    made: list[Path] = []
    try:
        for part in reversed([folder, *folder.parents]):
            if not part.is_dir():
                part.mkdir()
                made.append(part)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"{flag} is {folder}: it is no folder to write to: {error.strerror}") from None
    finally:
        with suppress(OSError):  # another process may write there by now
            for part in reversed(made):
                part.rmdir()


Batch = Annotated[int, typer.Option(min=1)]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(min=1, help="Heads of K and V; default: --heads.")]
HeadDim = Annotated[int, typer.Option(min=1, max=MAX_HEAD_DIM)]
Dtype = Annotated[str, typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16 or fp16.")]
DtypeOfDevice = Annotated[
    str | None,
    typer.Option(parser=dtype_name, metavar="DTYPE", help="fp32, bf16, fp16; default: bf16; on the CPU fp32."),
]
Chunks = Annotated[int, typer.Option(min=1, help="Runs of heads that a hop is cut into.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed runs of each; medians count.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Per process; default: a share of the cores.")]
Seed = Annotated[int, typer.Option(help="Of the random inputs.")]
LayoutFlag = Annotated[LayoutName, typer.Option(help="Who holds which tokens.")]
LayoutOrFile = Annotated[
    Any,
    typer.Option(
        parser=layout,
        metavar="|".join([*LayoutName, "FILE.json"]),
        autocompletion=lambda: [*LayoutName],
        help="Who holds which tokens; a file holds the spans_per_rank of a Layout.",
    ),
]
TokensPerRank = Annotated[Any, typer.Option(parser=count, metavar="SIZE", help="Tokens per rank.")]
DeviceFlag = Annotated[str, typer.Option(help="cpu or cuda; default: cuda where there is one.")]
Timer = Annotated[str, typer.Option("--timer", metavar="|".join(TIMERS), help="Default: events; on the CPU clock.")]
TimerOfRings = Annotated[
    str, typer.Option("--timer", metavar="|".join(OF_RINGS), help="Default: events; on the CPU clock.")
]
WireDtype = Annotated[
    str | None,
    typer.Option(parser=wire_dtype, metavar="DTYPE", help=f"K/V travel as {' or '.join(WIRE_DTYPES)}."),
]
GradWireDtype = Annotated[
    str | None,
    typer.Option(parser=grad_wire_dtype, metavar="DTYPE", help=f"dK/dV travel as {' or '.join(GRAD_WIRE_DTYPES)}."),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", callback=_stream, help="Write everything as JSON.")
]
Csv = Annotated[str | None, typer.Option("--csv", metavar="FILE|-", callback=_stream, help="Write the rows.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", callback=_target, help="Every rank's timeline, for Perfetto.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", callback=_target, help="Write a picture.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", callback=_target, help="Draw the losses.")]

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
        help="; ".join(f"{name}: {', '.join(keys)}" for name, keys in PATTERNS.items()) + ".",
    ),
]


def typed(context: typer.Context) -> dict[str, str]:
    """The parameters that the user gave on the command line, by name, each with its flag as it is spelled."""
    sources = {name: context.get_parameter_source(name) for name in spelled(context)}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return {name: flag for name, flag in spelled(context).items() if name in given}


def spelled(context: typer.Context) -> dict[str, str]:
    """Every option by name, as its flag is spelled."""
    options = [one for one in context.command.params if one.param_type_name == "option"]
    return {one.name or "": max(one.opts, key=len) for one in options}


def check_mode(context: typer.Context, mode: str, takes: Collection[str], always: Collection[str] = ()) -> None:
    """Refuse flags that have no say in ``mode``: by parameter names, those that it takes.

    Raises:
        typer.BadParameter: one that it does not take was given.
    """
    idle = [flag for name, flag in typed(context).items() if name not in {*takes, *always, "json", "csv"}]
    if idle:
        raise typer.BadParameter(f"{', '.join(idle)} has no say {mode}: leave it out")


def check_needs(context: typer.Context, needs: Mapping[str, str]) -> None:
    """Refuse flags that mean nothing without another: parameter names, each with the one that it needs.

    Raises:
        typer.BadParameter: one was given without the other.
    """
    given, flags = typed(context), spelled(context)
    for name, other in needs.items():
        if name in given and other not in given:
            raise typer.BadParameter(f"{given[name]} is given without {flags[other]}: it has no say alone")


def check_apart(context: typer.Context, *names: str) -> None:
    """Refuse more than one of some flags, which say the same: by parameter names.

    Raises:
        typer.BadParameter: two of them were given.
    """
    both = [flag for name, flag in typed(context).items() if name in names]
    if len(both) > 1:
        raise typer.BadParameter(f"{' and '.join(both)} are both given: pass one of them")


def read_layout(context: typer.Context, path: Path, *apart: str) -> Layout:
    """Return the layout that ``--layout`` names by a JSON file: an object with the ``spans_per_rank`` of `Layout`.

    Args:
        context: of the command.
        path: the file.
        apart: parameters that mean nothing beside it.

    Raises:
        typer.BadParameter: one of those was given, or the file holds no layout of all positions below its length.
    """
    from ...kernels.files import read_object
    from ...ring import Layout

    for name in apart:
        check_apart(context, "layout", name)
    try:
        fields = read_object(path)
        if [*fields] != ["spans_per_rank"]:
            raise ValueError(f"it has {', '.join(fields) or 'no field'}: it must have spans_per_rank alone")
        layout = Layout(**fields)
        if not 0 < layout.seqlen == layout.reach:
            held = f"{layout.seqlen} tokens up to position {layout.reach - 1}" if layout.seqlen else "no token"
            raise ValueError(f"it has {held}: it must have every position from 0 to its last one")
    except ValueError as error:
        raise typer.BadParameter(f"--layout is {path}: {error}") from None
    return layout


def kv_heads_of(heads: int, kv_heads: int | None) -> int:
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
        listed = ",".join(map(str, chunks))
        raise typer.BadParameter(f"--chunks is {listed}: a chunk is at least one of the {kv_heads} key heads")


def check_transport(name: str, device: str, world: int) -> None:
    """Refuse what carries nothing between so many processes on a device of this kind, as far as flags tell.

    Raises:
        typer.BadParameter: no such transport, or one of another device, or of one process between several.
    """
    from ...comm.registry import AUTO, PROCESSES, find_transport, transport_names

    if name == AUTO:
        return
    if name not in transport_names():
        raise typer.BadParameter(f"--transport is {name!r}: it takes {', '.join([AUTO, *transport_names()])}")
    entry = find_transport(name)
    if device not in entry.devices:
        raise typer.BadParameter(f"--transport is {name}, of {' and '.join(entry.devices)}, and the device is {device}")
    if PROCESSES not in entry.ranks and world > 1:
        raise typer.BadParameter(f"--transport is {name}, of one process, and {world} are to run: take auto")


def resolve_world(given: int | None, default: int) -> int:
    """Return the number of ranks: the launcher's, or ``--world``, or the default.

    Raises:
        typer.BadParameter: ``--world`` is not the number of ranks that the launcher started.
    """
    place = member()
    if place is None:
        return default if given is None else given
    if given not in (None, place.world):
        raise typer.BadParameter(f"--world is {given}: the launcher started {place.world} ranks; leave it out")
    return place.world


def resolve_threads(given: int | None, world: int) -> int:
    """Return the threads of each of ``world`` ranks: ``--threads``, or a rank's share of the cores."""
    return given or max(1, cores() // ranks_here(world))


def device_name(text: str) -> str:
    """``cpu`` or ``cuda``; what is here where it is empty.

    Raises:
        typer.BadParameter: another one, or one that is not here.
    """
    import torch

    here = torch.cuda.is_available()
    if text not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"--device is {text!r}: it takes cpu or cuda")
    if text == "cuda" and not here:
        raise typer.BadParameter("--device is cuda, and torch sees no CUDA device here")
    return text or ("cuda" if here else "cpu")


def device_here(name: str | None = None) -> torch.device:
    """The device to measure; typer.BadParameter where there is none of that name."""
    import torch

    kind = device_name(name or "")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def timer_on(kind: str, timer: str, takes: Sequence[str] = TIMERS) -> str:
    """``timer``, or where it is empty what a device of this kind is timed by.

    Raises:
        typer.BadParameter: it is none of ``takes``, or not of this kind.
    """
    own = "events" if kind == "cuda" else "clock"
    known = takes if kind == "cuda" else (own,)
    if (timer or own) not in known:
        raise typer.BadParameter(f"--timer is {timer!r}: on {kind} it must be one of {', '.join(known)}")
    return timer or own


def timer_of_rings(device: str, timer: str) -> str:
    """What times a ring on a device of this kind; typer.BadParameter where it does not."""
    return timer_on(device, timer, OF_RINGS)


def human(count: float, unit: str = "") -> str:
    """A count in decimal thousands, three digits: ``67.1 MB``, ``1.02 T``; whole numbers below a thousand."""
    power = 0
    while count >= 999.5 and power < len(PREFIXES) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {PREFIXES[power]}{unit}".rstrip()


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def binary(count: int) -> str:
    """A count of tokens the way it is typed: ``8k``, ``1m``, and ``1000`` where no suffix divides it."""
    for suffix, unit in (("m", 1024**2), ("k", 1024)):
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)
