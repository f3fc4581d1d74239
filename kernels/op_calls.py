"""What a ``torch.library`` op takes beside its tensors: bounds, scores and a config as plain values, there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bounds import FULL, Bounds, Runs
from .config import KernelConfig, Tile
from .scores import PLAIN, SEEDS, Scores

SCHEMA = (
    "Tensor? lo, Tensor? hi, Tensor? used, Tensor? visible, SymInt block, float softcap, Tensor? alibi_slopes, "
    "float dropout_p, SymInt dropout_seed, SymInt first_head, Tensor? q_positions, Tensor? k_positions, "
    "float? softmax_scale, int[]? tiles, str[] choices"
)

TILES = tuple(one.name for one in fields(KernelConfig) if one.type in ("Tile", "Tile | None"))
CHOICES = tuple(one.name for one in fields(KernelConfig) if one.name not in TILES)
SIDES = tuple(one.name for one in fields(Tile))
NO_TILE = (0,) * len(SIDES)


class Call(NamedTuple):
    """What every entry takes beside its tensors, as ``SCHEMA`` has it."""

    lo: Tensor | None
    hi: Tensor | None
    used: Tensor | None
    visible: Tensor | None
    block: int
    softcap: float
    alibi_slopes: Tensor | None
    dropout_p: float
    dropout_seed: int  # signed
    first_head: int
    q_positions: Tensor | None
    k_positions: Tensor | None
    softmax_scale: float | None
    tiles: list[int] | None
    choices: list[str]


def pack(
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    config: KernelConfig | None = None,
) -> Call:
    """The arguments of an entry as those of an op."""
    runs, seed = bounds.runs, scores.dropout_seed
    return Call(
        bounds.lo,
        bounds.hi,
        bounds.used,
        None if runs is None else runs.visible,
        0 if runs is None else runs.block,
        scores.softcap,
        scores.alibi_slopes,
        scores.dropout_p,
        seed - SEEDS if seed >= SEEDS // 2 else seed,
        scores.first_head,
        scores.q_positions,
        scores.k_positions,
        softmax_scale,
        *pack_config(config),
    )


def pack_config(config: KernelConfig | None) -> tuple[list[int] | None, list[str]]:
    """The numbers of a config's tiles, and what else it has."""
    if config is None:
        return None, []
    tiles = (getattr(config, kernel) for kernel in TILES)
    numbers = [n for tile in tiles for n in (NO_TILE if tile is None else (getattr(tile, side) for side in SIDES))]
    return numbers, [str(getattr(config, choice)) for choice in CHOICES]


def unpack_config(tiles: Sequence[int] | None, choices: Sequence[str]) -> KernelConfig | None:
    """What :func:`pack_config` was given; the same object each time."""
    return None if tiles is None else _config(tuple(tiles), tuple(choices))


@lru_cache(maxsize=64)
def _config(tiles: tuple[int, ...], choices: tuple[str, ...]) -> KernelConfig:
    sizes = len(SIDES)
    given = (tiles[i * sizes : (i + 1) * sizes] for i in range(len(TILES)))
    made: dict[str, Any] = {
        kernel: None if one == NO_TILE else Tile(*one) for kernel, one in zip(TILES, given, strict=True)
    }
    return KernelConfig(**made | dict(zip(CHOICES, map(_choice, choices), strict=True)))


def _choice(word: str) -> str | int | bool | None:
    """What has been made text by ``str``; the words of a config are none of these."""
    names = {"None": None, "True": True, "False": False}
    return names[word] if word in names else int(word) if word.isdecimal() else word


def unpack(device: torch.device, *args: Any) -> dict[str, Any]:
    """The arguments of an op as those of an entry."""
    call = Call(*args)
    runs = None if call.visible is None else Runs(call.visible, call.block, device)
    plain = all(x is None for x in (call.lo, call.hi, call.used, runs))
    scores = Scores(
        call.softcap, call.alibi_slopes, call.dropout_p, call.dropout_seed % SEEDS, call.first_head,
        call.q_positions, call.k_positions,
    )  # fmt: skip
    return {
        "bounds": FULL if plain else Bounds(call.lo, call.hi, call.used, runs),
        "scores": scores,
        "softmax_scale": call.softmax_scale,
        "config": unpack_config(call.tiles, call.choices),
    }
