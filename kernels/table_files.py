"""Tables of tuned tiles in JSON: one file per GPU and Triton minor version, checked strictly before it is believed.

A file may come from anywhere: it is read as data, never executed, and anything that is not exactly the schema below is
refused with the file's path and the reason. ``kernels/README.md`` has the format for people.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .config import EPILOGUES, FORWARD_KERNELS, LEAST_SIDE, ORDERS, KernelConfig, Tile
from .strict import (
    Check,
    checked_as,
    either,
    load_json,
    named,
    number,
    one_of,
    optional,
    power_of_two,
    read_text,
    shown,
    text,
    typed,
    whole,
)
from .tables import (
    ARCH,
    DTYPES,
    MASKS,
    NO_GPU,
    SINGLE_PASS,
    TUNED,
    Entry,
    Point,
    RefusedTable,
    Table,
    fields_of,
    least_shared,
    options_of,
    shared_limit,
    with_options,
)

SCHEMA = "ringattn tiles"
VERSION = 1
MOST_BYTES = 4 << 20
MOST_ENTRIES = 10_000
MOST_TOKENS = 1 << 40
MOST_SIDE = 512
MOST_STAGES = 8
MOST_GROUP = 1024
MOST_PROCESSORS = 1024


def read(path: Path) -> Table:
    """The table of a file.

    Raises:
        RefusedTable: it is no regular file, too large, not JSON, or not of this schema.
        FileNotFoundError: there is none.
    """
    try:
        return replace(parse(read_text(path, MOST_BYTES)), path=path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise RefusedTable(f"{path} is refused: {error}") from error


def parse(text: str) -> Table:
    """The table that JSON text describes.

    Raises:
        ValueError: the text is not JSON or not of this schema; the message names the field, what it got, what it takes.
    """
    data = load_json(text)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"schema is {shown(data.get('schema') if isinstance(data, dict) else data)}, not {SCHEMA!r}")
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(f"its schema is version {version}, this code reads up to {VERSION}: update ringattn")
    checked_as("", data, _TABLE, optional={"rings"})
    arch, (major, minor) = data["arch"], data["triton"].split(".")
    made_without_gpu = ARCH.fullmatch(data["gpu"])
    if made_without_gpu and int(made_without_gpu[1]) != arch:
        raise ValueError(f"gpu is {data['gpu']} and arch {arch}")
    entries = tuple(_entry(f"entries[{i}]", given) for i, given in enumerate(data["entries"]))
    if made_without_gpu and not all(entry.estimated for entry in entries):
        raise ValueError(f"gpu is {data['gpu']}: a table of no GPU has estimated entries alone")
    for i, entry in enumerate(entries):
        if (least := least_shared(entry.point, entry.tile)) > (limit := shared_limit(arch)):
            raise ValueError(
                f"entries[{i}].tile takes at least {least} bytes of shared memory, a block of sm_{arch} has {limit}"
            )
    if len({entry.point for entry in entries}) < len(entries):
        raise ValueError("two entries are for the same point")
    if arch == NO_GPU and entries:
        raise ValueError(f"arch is {NO_GPU}, no GPU: such a table has settings of rings alone")
    return Table(data["gpu"], arch, (int(major), int(minor)), entries, tuple(data.get("rings", ())))


def as_json(table: Table) -> dict[str, Any]:
    """What :func:`parse` reads."""
    entries = [{**entry.point._asdict(), **_told(entry)} for entry in sorted(table.entries, key=lambda one: one.point)]
    version = ".".join(map(str, table.triton))
    return {
        "schema": SCHEMA, "version": VERSION, "gpu": table.gpu, "arch": table.arch, "triton": version,
        "entries": entries, **({"rings": list(table.rings)} if table.rings else {}),
    }  # fmt: skip


def _told(entry: Entry) -> dict[str, Any]:
    told = {one.name: getattr(entry, one.name) for one in fields(Entry) if one.name != "point"}
    tile = {name: value for name, value in fields_of(entry.tile).items() if name in _TILE or value != _DEFAULTS[name]}
    more = {"versions": dict(entry.versions), "clocks": dict(entry.clocks)}
    return told | {"tile": tile, "options": options_of(entry.tile)} | more


def _entry(where: str, given: object) -> Entry:
    taken = checked_as(where, given, _ENTRY, optional={"options"})
    point = Point(*(taken.pop(name) for name in Point._fields))
    options = checked_as(
        f"{where}.options", taken.pop("options", {}), known := OPTIONS[point.kernel], optional={*known}
    )
    tile = Tile(**checked_as(f"{where}.tile", taken.pop("tile"), _TILE | MORE_OF_TILE, optional={*MORE_OF_TILE}))
    try:
        KernelConfig(tile, tile, tile, **options)
    except ValueError as error:
        raise ValueError(f"{where}.options do not go together: {error}") from None
    entry = Entry(point, with_options(tile, options), **taken)
    if entry.estimated != (entry.seconds is None):
        raise ValueError(f"{where}.estimated is {entry.estimated} and seconds {entry.seconds}: one or the other")
    return entry


_TILE: dict[str, Check] = {
    "block_q": power_of_two(LEAST_SIDE, MOST_SIDE),
    "block_k": power_of_two(LEAST_SIDE, MOST_SIDE),
    "num_warps": one_of(1, 2, 4, 8, 16),
    "num_stages": whole(1, MOST_STAGES),
}
_DEFAULTS = {one.name: one.default for one in fields(Tile)}

# What may be tuned beside these four, one line each: other fields of `Tile`, and by kernel fields of `KernelConfig`.
# They are left out of a file where they have their default. `autotune/space.py` says which values are tried.
MORE_OF_TILE: dict[str, Check] = {}
_DEALT: dict[str, Check] = {
    "order": one_of(*ORDERS),
    "persistent": typed("true or false", bool),
    "sm_margin": whole(1, MOST_PROCESSORS),  # a ring launches by tables, and its transfers need a place
}
_PACKED = {"pack_gqa": _DEALT["persistent"]}
OPTIONS: dict[str, dict[str, Check]] = {
    "forward": {"forward_kernel": one_of(*FORWARD_KERNELS)} | _DEALT | _PACKED,
    "dq": _DEALT | _PACKED,
    "dkdv": _DEALT | {"dkdv_splits": whole(1, MOST_GROUP), "dkdv_epilogue": one_of(*EPILOGUES)},
    **{kernel: {} for kernel in SINGLE_PASS},  # their order is their own
}

_ENTRY: dict[str, Check] = {
    "kernel": one_of(*TUNED),
    "dtype": one_of(*DTYPES),
    "head_dim": whole(1, 256),
    "head_dim_v": whole(1, 256),
    "group": whole(1, MOST_GROUP),
    "mask": one_of(*MASKS),
    "length": whole(1, MOST_TOKENS),
    "tile": typed("an object", dict),
    "options": typed("an object", dict),
    "estimated": typed("true or false", bool),
    "date": text(r"\d{4}-\d\d-\d\d[ -~]{0,30}", "an ISO 8601 date"),
    "seconds": optional(number(zero=False)),
    "spread": optional(number()),
    "beside": optional(number(zero=False)),
    "baseline": optional(number(zero=False)),
    "bound": optional(number()),
    "bound_by": text(),
    "versions": named(text()),
    "driver": optional(text()),
    "clocks": named(optional(either(number(), text()))),
    "command": text(),
}
_TABLE: dict[str, Check] = {
    "schema": one_of(SCHEMA),
    "version": whole(1, VERSION),
    "gpu": text(r"[ -~]{1,100}", "the name of a GPU, at most 100 printable characters"),
    "arch": either(whole(70, 999), one_of(NO_GPU)),
    "triton": text(r"\d{1,3}\.\d{1,3}", "a version such as 3.7"),
    "entries": lambda value: (
        None if isinstance(value, list) and len(value) <= MOST_ENTRIES else f"a list of at most {MOST_ENTRIES} entries"
    ),
    "rings": lambda value: (
        None
        if isinstance(value, list) and len(value) <= MOST_ENTRIES and all(isinstance(one, dict) for one in value)
        else f"a list of at most {MOST_ENTRIES} objects"
    ),
}
