"""The manifest of an export: what the files are, where they come from, and what a launcher of one's own needs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import triton

from ... import __version__
from ...bench.common.provenance import git, sources
from ...kernels.config import Tile
from .arguments import MAP, Argument
from .kernels import Exported, TensorMap
from .maps import DATA_TYPES, FIXED, swizzle_of
from .wish import Wish, chosen_tiles

SCHEMA = 2  # 1 had no tensor maps: all parameters that were not repeated were asked for
LICENCE = "MIT"
SCRATCH = {"name": "scratch", "size": 8, "value": 0}  # what Triton appends


def manifest(wish: Wish, kernels: list[Exported], hashes: dict[str, str]) -> dict[str, Any]:
    """Of files with these SHA-256 sums, by name."""
    return {
        "schema": SCHEMA,
        "name": wish.prefix,
        "licence": LICENCE,
        "versions": {"ringattn": __version__, "triton": triton.__version__, "sources": sources(), **git()},
        "arch": f"sm_{wish.arch}",
        "dtype": wish.dtype,
        "head_dim": [wish.head_dim, wish.head_dim_v],
        "bounded": wish.bounded,
        "grouped": wish.grouped,
        "role": wish.role,
        "forward_kernel": wish.forward_kernel,
        "backward": wish.backward,
        "run": "not on a GPU by whoever wrote this file",
        "sha256": hashes,
        "kernels": [_entry(wish, kernel) for kernel in kernels],
    }


def _entry(wish: Wish, kernel: Exported) -> dict[str, Any]:
    tile, whence = chosen_tiles(wish)[kernel.name]
    parameters = [*map(_parameter, kernel.arguments), *[SCRATCH] * kernel.scratch]
    maps = {f"{one.of.tensor}_map": _map(one) for one in kernel.maps}
    return {
        "name": kernel.name,
        "cubin": f"{wish.prefix}_{kernel.name}.cubin",
        "symbol": kernel.symbol,
        "grid": [f"ceil(rows / {kernel.block}) * batch * heads", 1, 1],
        "threads": kernel.threads,
        "shared_memory": kernel.shared,
        "tile": {one.name: getattr(tile, one.name) for one in fields(Tile)},
        "tile_from": whence,
        "arguments": [_parameter(one) for one in kernel.asked],
        "parameters": [
            {**one, "offset": begin, **({"tensor_map": maps[one["name"]]} if one["name"] in maps else {})}
            for one, (begin, _) in zip(parameters, kernel.layout, strict=True)
        ],
    }


def _parameter(argument: Argument) -> dict[str, Any]:
    told: dict[str, Any] = {"name": argument.name, "type": argument.type, "size": argument.size}
    if argument.type == MAP:
        told["alignment"] = argument.alignment
    if argument.same_as:
        told["same_as"] = argument.same_as
    if argument.made_of:
        told["made_of"] = argument.made_of
    if argument.multiple > 1:
        told["multiple_of"] = argument.multiple
    return told


def _map(one: TensorMap) -> dict[str, Any]:
    """Arguments of cuTensorMapEncodeTiled but for address, sizes and strides; dimensions as it has them."""
    return {
        "data_type": DATA_TYPES[one.of.dtype],
        "rank": len(one.box),
        "sizes": [str(size) for size in one.of.sizes[::-1]],
        "strides": [f"{one.of.tensor}_stride_{axis} * {one.of.element_size}" for axis in "hsb"],
        "box": [*one.box[::-1]],
        "element_strides": [1] * len(one.box),
        "swizzle": swizzle_of(one),
        **FIXED,
    }
