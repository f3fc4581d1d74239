"""The one list of cases: masks, documents, scores, layouts, worlds, dtypes, heads and gradients, chosen pairwise."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch

from .protocol import AXES, TargetCall
from .standalone import Results, draw_whole, uneven_lengths

TOKENS_PER_RANK, HEAD_DIM, DROPOUT = 16, 16, 0.25
PROBE_STEP = 64.0  # change of a value in the probe


@dataclass(frozen=True)
class Case:
    """One attention of a whole sequence on ``world`` ranks."""

    mask: str = "causal"
    documents: str = "none"
    scores: str = "plain"
    layout: str = "contiguous"
    world: int = 2
    dtype: str = "float32"
    heads: str = "4/2"
    gradients: str = "out"
    seed: int = 0
    length_world: int = 0
    """Number of ranks whose number of tokens it has; 0 for ``world``."""
    is_probe: bool = False
    """True if batch row ``j + 1`` differs from the first and the last only in the value of token ``j``."""

    @property
    def id(self) -> str:
        """The values of all axes in one word."""
        return "-".join(str(getattr(self, name)) for name in AXES).replace(" ", "_")

    @property
    def tokens(self) -> int:
        """Tokens of the whole sequence."""
        world = self.length_world or self.world
        return sum(uneven_lengths(world)) if self.layout == "uneven" else TOKENS_PER_RANK * world

    @property
    def features(self) -> frozenset[str]:
        """The features that the case uses, by the names in :data:`.protocol.HINTS`."""
        heads, kv_heads = self.heads.split("/")
        uses = {
            "gradients": self.gradients != "none", "lse": self.gradients == "out and lse",
            "grouped heads": heads != kv_heads, "causal": self.mask in ("window", "prefix"),
        }  # fmt: skip
        names = {self.mask, self.layout, self.dtype, f"{self.documents} documents", self.scores}
        return frozenset(names | {name for name in uses if uses[name]}) - {"none documents", "plain"}

    def call(self, rank: int = 0) -> TargetCall:
        """Return a rank's call."""
        heads, kv_heads = map(int, self.heads.split("/"))
        tokens, generator = self.tokens, torch.Generator().manual_seed(heads)
        grain = 2 * (self.length_world or self.world)  # zigzag's documents must be multiples of it
        lengths = (tokens - 5,) * (2 + tokens) if self.is_probe else (tokens - 5, max(1, tokens // 2))
        options: dict[str, dict[str, Any]] = {
            "causal": {"causal": True}, "window": {"causal": True, "window_size": (9, 0)},
            "two-sided window": {"window_size": (5, 3)}, "prefix": {"causal": True, "prefix_length": tokens // 3},
            "padding": {"seqused_k": lengths},
            "aligned": {"cu_seqlens": (0, 2 * grain, 5 * grain, tokens)},
            "ragged": {"cu_seqlens": (0, 1, 1 + tokens // 3, tokens - 4, tokens)},
            "scale": {"softmax_scale": 0.4}, "softcap": {"softcap": 1.5},
            "sink": {"sink": torch.randn(heads, generator=generator)},
            "alibi": {"alibi_slopes": torch.rand(heads, generator=generator.manual_seed(heads))},
            "dropout": {"dropout_p": DROPOUT, "dropout_seed": 7, "head_dim": tokens},
        }  # fmt: skip
        call = TargetCall(
            rank, self.world, tokens, self.layout, len(lengths), heads, kv_heads, HEAD_DIM, getattr(torch, self.dtype),
            tuple(sorted(self.features)), needs_lse="lse" in self.features,
        )  # fmt: skip
        mask, documents, scores = (options.get(value, {}) for value in (self.mask, self.documents, self.scores))
        return replace(call, **mask, **documents, **scores)

    def inputs(self) -> Results:
        """Return q, k, v, dout and dlse of the whole sequence; with dropout, ``v`` is the identity."""
        call = self.call()
        rows = 1 if self.is_probe else call.batch
        whole = draw_whole(replace(call, batch=rows), self.input_seed)
        if call.dropout_p:
            whole["v"] = torch.eye(call.tokens, dtype=call.dtype)[None, :, None].repeat(rows, 1, call.kv_heads, 1)
        if self.is_probe:
            whole = {name: x.repeat(call.batch, *[1] * (x.dim() - 1)) for name, x in whole.items()}
            whole["v"][torch.arange(1, call.batch - 1), torch.arange(call.tokens)] += PROBE_STEP
        return whole

    @property
    def input_seed(self) -> int:
        """Seed of the random inputs."""
        return zlib.crc32(f"{self.id}{self.seed}".encode())


Cell = tuple[int, int]
"""An axis and the index of one of its values."""


def pairwise_cases(*axes: Iterable[Any], allowed: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Return rows of the product of the axes in which any two values of two axes occur together.

    The choice is greedy and deterministic. Rows are ``allowed(*row)``; pairs that no allowed row has are left out.
    """
    values = [tuple(axis) for axis in axes]
    cells = [[(axis, at) for at in range(len(choices))] for axis, choices in enumerate(values)]
    uncovered = {pair for two in combinations(cells, 2) for pair in product(*two)}
    dice, rows = random.Random(0), list[tuple[Any, ...]]()

    def gain(cell: Cell, row: dict[int, int]) -> int:
        return sum((min(cell, other), max(cell, other)) in uncovered for other in row.items())

    while uncovered:
        pair = min(uncovered)
        for attempt in range(30):
            row = dict(pair)
            for axis in dice.sample(range(len(cells)), len(cells)):
                if axis not in row:
                    gains = [gain(cell, row) for cell in cells[axis]]
                    best = max(gains) if attempt < 10 else min(gains)  # then any row that has the pair
                    choices = [at for at, gain in enumerate(gains) if gain >= best]
                    row[axis] = dice.choice(choices) if attempt else choices[0]
            chosen = tuple(values[axis][row[axis]] for axis in range(len(cells)))
            if allowed(*chosen):
                uncovered -= {*combinations(sorted(row.items()), 2)}
                rows.append(chosen)
                break
        uncovered.discard(pair)
    return rows


def select_cases(
    refuse: Callable[[Case], str], worlds: Sequence[int], seed: int = 0
) -> tuple[list[Case], dict[Case, str]]:
    """Return the cases of a target, simple ones first, and the reasons for those outside what it says it supports.

    The first cases differ from a default in one axis, which shows causes best. The default is the first supported case
    with at most two other values than :class:`Case` has. Rows with every pair of values of two axes that the target
    supports together follow.
    """
    axes: dict[str, tuple[Any, ...]] = {**AXES, "world": (*worlds,)}
    default = Case(world=2 if 2 in worlds else worlds[0], seed=seed)
    pairs = ((a, x, b, y) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b]))
    changes: Iterator[dict[str, Any]] = ({a: x, b: y} for a, x, b, y in pairs)
    default = next((case for change in changes if not refuse(case := replace(default, **change))), default)
    rows = pairwise_cases(*axes.values(), allowed=lambda *row: not refuse(Case(*row)))
    values_used = {pair for row in rows for pair in zip(axes, row, strict=True)}
    singles = {replace(default, **{name: value}): (name, value) for name in axes for value in axes[name]}
    reasons = {case: refuse(case) for case in [default, *singles]}
    refusals = {case: reasons[case] for case in singles if reasons[case] and singles[case] not in values_used}
    combined = (replace(Case(*row), seed=seed) for row in rows)
    return [*dict.fromkeys([*(case for case in reasons if not reasons[case]), *combined])], refusals
