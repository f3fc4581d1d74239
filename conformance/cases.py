"""The one list of cases: masks, documents, scores, layouts, worlds, dtypes, heads and gradients, chosen pairwise."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from ..reference.masks import visible
from ..reference.scores import AttentionOptions
from .protocol import AXES, TargetCall, uneven_lengths

TOKENS_PER_RANK, HEAD_DIM, BATCH, DROPOUT = 16, 16, 2, 0.25
WINDOW, TWO_SIDED = (9, 0), (5, 3)
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
    length_world: int = 0
    """Number of ranks whose number of tokens it has; 0 for ``world``."""

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
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Boundaries of the documents: multiples of twice the number of ranks, or any, with one of a single token."""
        tokens, world = self.tokens, self.length_world or self.world
        edges = {"aligned": (0, 4 * world, 10 * world, tokens), "ragged": (0, 1, 1 + tokens // 3, tokens - 4, tokens)}
        return edges.get(self.documents)

    @property
    def features(self) -> frozenset[str]:
        """The features that the case uses, by the names in :data:`.protocol.HINTS`."""
        heads, kv_heads = map(int, self.heads.split("/"))
        names = {self.mask, self.layout, self.dtype, f"{self.documents} documents", self.scores}
        names |= {"gradients"} if self.gradients != "none" else set()
        names |= {"lse"} if self.gradients == "out and lse" else set()
        names |= {"grouped heads"} if heads != kv_heads else set()
        names |= {"causal"} if self.mask in ("window", "prefix") else set()
        return frozenset(names - {"none documents", "plain"})

    def call(self, rank: int = 0, group: Any = None, *, probe: bool = False) -> TargetCall:
        """Return a rank's call; a ``probe`` has one batch row per token and one more."""
        heads, kv_heads = map(int, self.heads.split("/"))
        tokens, batch = self.tokens, 1 + self.tokens if probe else BATCH
        lengths = [tokens - 5] * batch if probe else [tokens - 5, max(1, tokens // 2)]
        generator = torch.Generator().manual_seed(heads)
        return TargetCall(
            rank, self.world, tokens, self.layout, batch, heads, kv_heads,
            head_dim=tokens if self.scores == "dropout" else HEAD_DIM, dtype=getattr(torch, self.dtype),
            features=self.features, causal=self.mask in ("causal", "window", "prefix"),
            window_size={"window": WINDOW, "two-sided window": TWO_SIDED}.get(self.mask, (-1, -1)),
            prefix_length=tokens // 3 if self.mask == "prefix" else 0, cu_seqlens=self.cu_seqlens,
            seqused_k=tuple(lengths) if self.mask == "padding" else None,
            softmax_scale=0.4 if self.scores == "scale" else None, softcap=1.5 if self.scores == "softcap" else 0.0,
            sink=torch.randn(heads, generator=generator) if self.scores == "sink" else None,
            alibi_slopes=torch.rand(heads, generator=generator) if self.scores == "alibi" else None,
            dropout_p=DROPOUT if self.scores == "dropout" else 0.0,
            dropout_seed=7 if self.scores == "dropout" else None,
            needs_lse=self.gradients == "out and lse", group=group,
        )  # fmt: skip

    def inputs(self, seed: int, *, probe: bool = False) -> dict[str, Tensor]:
        """Return q, k, v, dout and dlse of the whole sequence.

        With dropout, ``v`` is the identity, so that ``out`` shows the weights and with them the mask of the dropout. In
        a ``probe``, row ``j + 1`` differs from row 0 only in the value of token ``j``.
        """
        call = self.call(probe=probe)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.id}{seed}".encode()))
        rows = 1 if probe else call.batch
        shapes = {"q": call.heads, "k": call.kv_heads, "v": call.kv_heads, "dout": call.heads}
        whole = {
            name: torch.randn(rows, call.tokens, heads, call.head_dim, generator=generator).to(call.dtype)
            for name, heads in shapes.items()
        }
        whole["dlse"] = torch.randn(rows, call.heads, call.tokens, generator=generator)
        if call.dropout_p:
            whole["v"] = torch.eye(call.tokens, dtype=call.dtype)[None, :, None].repeat(rows, 1, call.kv_heads, 1)
        if probe:
            whole = {name: x.repeat(call.batch, *[1] * (x.dim() - 1)) for name, x in whole.items()}
            whole["v"][torch.arange(1, call.batch), torch.arange(call.tokens)] += PROBE_STEP
        return whole

    def options(self, *, probe: bool = False) -> AttentionOptions:
        """Return the case's mask and scores as arguments of :func:`ringattn.reference.attention`."""
        call = self.call(probe=probe)
        options = AttentionOptions(causal=call.causal, window_size=call.window_size, softcap=call.softcap)
        options |= {"prefix_length": call.prefix_length, "cu_seqlens": call.cu_seqlens, "seqused_k": call.seqused_k}
        options |= {"softmax_scale": call.softmax_scale, "alibi_slopes": call.alibi_slopes}
        return options

    def visible(self, **changes: Any) -> Tensor:
        """Return which key each query sees, ``[tokens, tokens]`` or ``[B, tokens, tokens]``, with changed options."""
        positions = torch.arange(self.tokens)
        return visible(positions, positions, **{**self.options(), **changes})


def pairwise_cases(*axes: Iterable[Any], allowed: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Return rows of the product of the axes in which any two values of two axes occur together.

    The choice is greedy and deterministic. Rows are ``allowed(*row)``; pairs that no allowed row has are left out.
    """
    values = [tuple(axis) for axis in axes]
    cells = [[(axis, at) for at in range(len(choices))] for axis, choices in enumerate(values)]
    uncovered = {pair for i, j in combinations(range(len(cells)), 2) for pair in _pairs(cells[i], cells[j])}
    dice, rows = random.Random(0), list[tuple[Any, ...]]()
    while uncovered:
        pair = min(uncovered)
        for attempt in range(30):
            row = dict(pair)
            for axis in dice.sample(range(len(cells)), len(cells)):
                if axis not in row:
                    gains = [sum(_pair(cell, other) in uncovered for other in row.items()) for cell in cells[axis]]
                    best = max(gains) if attempt < 10 else min(gains)  # then any row that has the pair
                    choices = [at for at, gain in enumerate(gains) if gain >= best]
                    row[axis] = dice.choice(choices) if attempt else choices[0]
            chosen = tuple(values[axis][row[axis]] for axis in range(len(cells)))
            if allowed(*chosen):
                uncovered -= {_pair(*two) for two in combinations(row.items(), 2)}
                rows.append(chosen)
                break
        uncovered.discard(pair)
    return rows


Cell = tuple[int, int]


def _pair(one: Cell, other: Cell) -> tuple[Cell, Cell]:
    return (one, other) if one < other else (other, one)


def _pairs(left: Sequence[Cell], right: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    return (_pair(one, other) for one in left for other in right)


def select_cases(refuse: Callable[[Case], str], worlds: Sequence[int]) -> tuple[list[Case], dict[Case, str]]:
    """Return the cases of a target, simple ones first, and the reasons for those outside what it says it supports.

    The first cases differ from a default in one axis, which shows causes best. The default is the first supported case
    with at most two other values than :class:`Case` has. Rows with every pair of values of two
    axes that the target supports together follow.
    """
    axes: dict[str, tuple[Any, ...]] = {**AXES, "world": (*worlds,)}
    default = Case(world=2 if 2 in worlds else worlds[0])
    pairs = ((a, x, b, y) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b]))
    changes: Iterator[dict[str, Any]] = ({a: x, b: y} for a, x, b, y in pairs)
    default = next((case for change in changes if not refuse(case := replace(default, **change))), default)
    rows = [Case(*row) for row in pairwise_cases(*axes.values(), allowed=lambda *row: not refuse(Case(*row)))]
    single_values: list[dict[str, Any]] = [{name: value} for name in axes for value in axes[name]]
    singles = {replace(default, **change): next(iter(change.items())) for change in single_values}
    values_used = {(name, getattr(row, name)) for row in rows for name in axes}
    reasons = {case: refuse(case) for case in singles}
    refusals = {case: reason for case, reason in reasons.items() if reason and singles[case] not in values_used}
    return [*dict.fromkeys([*(case for case in [default, *singles] if not refuse(case)), *rows])], refusals
