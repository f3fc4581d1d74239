"""Layouts and masks for tests: the named layouts, and hypothesis strategies for arbitrary ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import torch
from hypothesis import strategies as st

from ringattn.ring.schedule.intervals import Intervals
from ringattn.ring.schedule.layout import Documents, Layout
from ringattn.ring.schedule.mask import UNLIMITED, BlockMask, Mask

NAMES = ("contiguous", "zigzag", "striped")


def build_layout(name: str, seqlen: int, world: int) -> Layout:
    """Return the layout that the constructor ``name`` of :class:`Layout` makes."""
    layout: Layout = getattr(Layout, name)(seqlen, world)
    return layout


def layout_from_owners(owners: list[int], world: int) -> Layout:
    """Return the layout in which token i belongs to rank ``owners[i]``."""
    return Layout([[(p, 1) for p, owner in enumerate(owners) if owner == rank] for rank in range(world)])


def small_layouts(max_seqlen: int, max_world: int) -> list[Layout]:
    """Return every named layout of 0 to ``max_seqlen`` tokens on 1 to ``max_world`` ranks."""
    return [
        build_layout(name, seqlen, world)
        for name in NAMES
        for world in range(1, max_world + 1)
        for seqlen in range(max_seqlen + 1)
    ]


@st.composite
def layouts(draw: st.DrawFn, max_world: int = 8, max_seqlen: int = 48, world: int | None = None) -> Layout:
    """Draw a partition of ``[0, seqlen)``: named, uneven or arbitrary; some ranks may hold nothing."""
    world = world or draw(st.integers(1, max_world))
    kind = draw(st.sampled_from([*NAMES, "uneven", "any"]))
    if kind == "uneven":
        return Layout.uneven(draw(st.lists(st.integers(0, max_seqlen // world), min_size=world, max_size=world)))
    if kind == "any":
        owners = draw(st.lists(st.integers(0, world - 1), max_size=max_seqlen))
        return layout_from_owners(owners, world)
    return build_layout(kind, draw(st.integers(0, max_seqlen)), world)


@dataclass(frozen=True)
class Window(Mask):
    """A custom interval mask, a window inside documents of one size, to test code against foreign masks."""

    left: int = 3
    right: int = 0
    document: int = 1000

    def interval(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lo, hi = super().interval(positions)
        start = positions // self.document * self.document
        lo = torch.maximum(torch.maximum(lo, positions - self.left), start)
        hi = torch.minimum(torch.minimum(hi, positions + self.right + 1), start + self.document)
        return lo, hi


def is_visible_pair(mask: Mask, query: int, key: int, row: int | None = None) -> bool:
    """Return True if a query sees a key; ``row`` None means in any batch row."""
    if mask.used is not None and key >= (max(mask.used, default=0) if row is None else mask.used[row]):
        return False
    if mask.blocks is not None and not mask.blocks.visible[query // mask.blocks.block, key // mask.blocks.block]:
        return False
    if isinstance(mask, Window):
        in_window = query - mask.left <= key <= query + mask.right
        return in_window and query // mask.document == key // mask.document and (not mask.causal or key <= query)
    in_island = any(start <= min(query, key) and max(query, key) < end for start, end in mask.islands)
    if mask.causal and key > query and key >= mask.prefix and not in_island:
        return False
    if mask.intervals is not None and not any(lo <= key < hi for lo, hi in mask.intervals.table[:, :, query].tolist()):
        return False
    if mask.documents is not None and document_index(mask.documents, query) != document_index(mask.documents, key):
        return False
    left, right = mask.window
    in_window = (left == UNLIMITED or key >= query - left) and (right == UNLIMITED or key <= query + right)
    return in_window or any(start <= position < end for start, end in mask.global_tokens for position in (query, key))


def visible_shards(layout: Layout, mask: Mask, keys: Layout) -> list[tuple[int, int]]:
    """Return every (rank, shard) where some query of the rank sees some key of the shard, pair by pair."""
    queries, positions = ([side.positions(rank).tolist() for rank in range(side.world)] for side in (layout, keys))
    return [
        (rank, shard)
        for rank, shard in product(range(layout.world), range(keys.world))
        if any(is_visible_pair(mask, query, key) for query in queries[rank] for key in positions[shard])
    ]


def document_index(documents: Documents, position: int) -> int | None:
    """Return the index of the document that holds a position, or None outside of all documents."""
    containing = [i for i, (start, end) in enumerate(pairwise(documents.boundaries)) if start <= position < end]
    return containing[0] if containing else None


@st.composite
def masks(draw: st.DrawFn, parts: bool = False, used: bool = False) -> Mask:
    """Draw a mask with any combination of fields, or a custom `Window`; ``parts`` also draws masks of several parts."""
    if draw(st.integers(0, 3)) == 0:
        side = st.integers(-2, 9)
        return Window(causal=draw(st.booleans()), left=draw(side), right=draw(side), document=draw(st.integers(1, 30)))
    causal = draw(st.booleans())
    side = st.one_of(st.just(UNLIMITED), st.integers(0, 9))
    cuts = draw(st.none() | st.lists(st.integers(0, 48), max_size=6))
    return Mask(
        causal=causal,
        window=(draw(side), draw(side)),
        documents=None if cuts is None else Documents([0, *sorted(cuts), 48]),
        prefix=draw(st.integers(0, 30)) if causal else 0,
        islands=tuple(draw(disjoint_runs())) if causal and draw(st.booleans()) else (),
        used=tuple(draw(st.lists(st.integers(0, 48), min_size=1, max_size=3)))
        if used and draw(st.booleans())
        else None,
        global_tokens=tuple(draw(disjoint_runs())) if parts else (),
        intervals=Intervals(draw(interval_pairs())) if parts and draw(st.booleans()) else None,
    )


@st.composite
def interval_pairs(draw: st.DrawFn, positions: int = 49) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw disjoint intervals with ascending ends; some queries see nothing, and their ends mean nothing."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    count, widest = draw(st.integers(1, 3)), draw(st.sampled_from([2, 10, positions]))
    ends = torch.randint(positions, (positions, 2 * count), generator=generator) * widest // positions
    ends = (ends + (torch.arange(positions)[:, None] * (positions - widest) // positions)).clamp(max=positions - 1)
    ends = ends.sort(0).values.sort(1).values  # rows stay sorted when columns are
    blind = torch.rand(positions, count, generator=generator) < draw(st.sampled_from([0.0, 0.1]))
    lo = torch.where(blind, ends[:, 1::2], ends[:, ::2])
    return [*zip(lo.T.contiguous(), ends[:, 1::2].T.contiguous(), strict=True)]


@st.composite
def block_layouts(draw: st.DrawFn, blocks: int, block: int, world: int, whole: bool = False) -> Layout:
    """Draw a partition of up to ``blocks`` blocks; the last may be short, and unless ``whole`` some are left out."""
    owners = draw(st.lists(st.integers(0, world - whole), max_size=blocks))  # owner `world` means no rank
    short = draw(st.integers(0, block - 1)) if owners else 0
    end = len(owners) * block - short
    spans = [(start, min(block, end - start)) for start in range(0, end, block)]
    return Layout([[span for span, at in zip(spans, owners, strict=True) if at == rank] for rank in range(world)])


@st.composite
def block_masks(draw: st.DrawFn, rows: int, columns: int, block: int) -> BlockMask:
    dense = draw(st.sampled_from([0.1, 0.5, 0.9]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return BlockMask(torch.rand(rows, columns, generator=generator) < dense, block)


@st.composite
def disjoint_runs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Draw disjoint ascending runs of positions; some touch, and some begin at 0."""
    edges = sorted(draw(st.sets(st.integers(0, 40), max_size=4)))
    return list(zip(edges[::2], edges[1::2], strict=False))
