"""Tiles that a block of rows visits: the arithmetic against brute force, and the kernels' loads, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from ringattn.kernels import (
    FULL,
    PLAIN,
    BlockSparseIndex,
    Bounds,
    KernelConfig,
    attention,
    attention_dkdv,
    attention_dq,
    attention_forward,
    tile_range,
)
from ringattn.kernels.device import tiles as jit
from ringattn.kernels.device.tile_ops import first_part_width, needs_reload, second_part_width
from ringattn.kernels.device.tiles import LaunchShape, MaskInterval
from ringattn.ring.schedule.layout import Layout
from ringattn.ring.schedule.mask import Mask, bounds

from ..support import kernel_cases
from ..support.kernel_cases import Sizes, interval, tiles, visible
from ..support.layouts import NAMES, build_layout
from ..support.nightly import rest_nightly

Limits = tuple[int, int, int, int]
"""lo_first, lo_last, hi_first, hi_last"""


def limits(keys: int) -> Iterator[Limits]:
    """Yield first and last ends of all ascending interval vectors."""
    index = range(keys + 1)
    for lo_first, lo_last, hi_first, hi_last in product(index, repeat=4):
        if lo_first <= lo_last <= hi_last and lo_first <= hi_first <= hi_last:
            yield lo_first, lo_last, hi_first, hi_last


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_every_small_range(block: int) -> None:
    for lo_first, lo_last, hi_first, hi_last in limits(8):
        got = tile_range(lo_first, lo_last, hi_first, hi_last, block)
        assert all(end % block == 0 for end in got)
        assert got.start <= got.full_start <= got.full_end <= got.end
        starts = range(0, 2 * block + 8, block)
        hull = {start for start in starts if start < hi_last and start + block > lo_first and hi_last > lo_first}
        assert set(range(got.start, got.end, block)) == hull
        whole = {start for start in starts if start >= lo_last and start + block <= hi_first}
        assert set(range(got.full_start, got.full_end, block)) == whole
        assert whole or got.full_start == got.start, "then all are the tail's: one masked loop, and FULL needs no head"


@triton.jit  # type: ignore[untyped-decorator]
def mirror(out: Any, interval: Any, shape: Any, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0)
    got = jit.load_tile_range(interval, program * BLOCK_ROWS, shape, BLOCK_ROWS, BLOCK)
    for i in tl.static_range(4):
        tl.store(out + 4 * program + i, got[i])


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_the_jit_tile_range_equals_the_host_function(block: int) -> None:
    """Two positions per program. The last one is alone, so its block is partial."""
    cases = [*limits(4), (2, 2, 3, 3)]
    lo = torch.tensor([end for case in cases for end in case[:2]], dtype=torch.int32)[:-1]
    hi = torch.tensor([end for case in cases for end in case[2:]], dtype=torch.int32)[:-1]
    calls = [(MaskInterval(lo, hi), len(lo), 4, cases)]
    calls += [(MaskInterval(None, None), 5, columns, [(0, 0, columns, columns)] * 3) for columns in range(7)]
    packed = 3 if block == 2 else None  # query heads per position
    for made, rows, columns, ends in calls:
        out, shape = torch.full((len(ends), 4), -1, dtype=torch.int32), LaunchShape(rows, columns, 1, 1, packed=packed)
        mirror[(len(ends),)](out, made, shape, BLOCK_ROWS=2 * (packed or 1), BLOCK=block)
        assert torch.equal(out, torch.tensor([tile_range(*case, block) for case in ends], dtype=torch.int32))


def test_head_dims_are_split_only_if_that_takes_fewer_columns() -> None:
    parts = {
        1: (16, 0),
        24: (32, 0),
        40: (32, 16),
        56: (64, 0),
        96: (64, 32),
        192: (128, 64),
        256: (256, 0),
        300: (256, 64),
    }
    assert {dim: (first_part_width(dim), second_part_width(dim)) for dim in parts} == parts


def test_rows_of_wide_float32_heads_are_loaded_in_every_step() -> None:
    """Kept in shared memory, 16 rows of K and V would take more than the 99 KB of a block."""
    for dtype, dims, expected in (
        (tl.float32, (512, 16), True),
        (tl.float32, (300, 256), True),
        (tl.float32, (256, 256), False),
        (tl.float16, (512, 512), False),
    ):
        assert needs_reload(tl.pointer_type(dtype), *dims) is expected


class Loads:
    """Tiles that each program of a launch loads, found by the addresses of the loads.

    ``tiles[name][program]`` counts (first row, head) of each tile of a tensor; ``plain`` has the unmasked ones.
    """

    def __init__(self, **tensors: Tensor) -> None:
        assert all(t.is_contiguous() and t.shape[0] == 1 for t in tensors.values())
        self.tensors = tensors
        self.plain = {name: set[tuple[int, int]]() for name in tensors}
        self.tiles: dict[str, dict[int, Counter[tuple[int, int]]]] = {name: {} for name in tensors}

    def record(self, program: int, addresses: Any, mask: Any, plain: bool) -> None:
        """Record a load of ``[rows, columns]``. Loads of vectors (bounds, lse, delta) are no tiles."""
        if addresses.ndim != 2:
            return
        places = addresses.astype("int64")
        name = next(name for name, t in self.tensors.items() if 0 <= places[0, 0] - t.data_ptr() < t.nbytes)
        tensor = self.tensors[name]
        offsets = (places[mask] - tensor.data_ptr()) // tensor.itemsize
        heads, head_dim = tensor.shape[2:]
        rows, (head,) = (
            np.unique(index).tolist() for index in (offsets // (heads * head_dim), offsets // head_dim % heads)
        )
        assert rows == list(range(rows[0], min(rows[0] + len(addresses), tensor.shape[1]))), "a tile is whole"
        tile = rows[0], head
        self.tiles[name].setdefault(program, Counter())[tile] += 1
        if plain:
            self.plain[name].add((program, rows[0]))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Loads]]:
    """Yield a list; launches are recorded by each ``Loads`` in the list."""
    watching: list[Loads] = []
    load, masked_load = InterpreterBuilder.create_load, InterpreterBuilder.create_masked_load
    plain = False

    def spy(self: Any, pointers: Any, *rest: Any) -> Any:
        nonlocal plain
        plain = True
        try:
            return load(self, pointers, *rest)  # the interpreter implements a plain load as a masked one
        finally:
            plain = False

    def masked_spy(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        for loads in watching:
            loads.record(self.grid_idx[0], pointers.data, mask.data, plain)
        return masked_load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_load", spy)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", masked_spy)
    yield watching


def test_sums_in_place_are_loaded_by_all_threads_before_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may load the element that a thread stores, so a barrier comes between."""
    x, events = kernel_cases.inputs(Sizes(20, 20, heads=2)), list[tuple[str, int]]()

    def spy(name: str, letter: str) -> None:
        original = getattr(InterpreterBuilder, name)

        def call(self: Any, *arguments: Any) -> Any:
            events.append((letter, int(arguments[0].data.flat[0]) if arguments else 0))
            return original(self, *arguments)

        monkeypatch.setattr(InterpreterBuilder, name, call)

    for name, letter in (("create_masked_load", "l"), ("create_masked_store", "s"), ("create_barrier", "b")):
        spy(name, letter)
    launcher = attention.ForwardLauncher(x.q, 0.25, None, max_logits=True)
    launcher.fold(x.k, x.v, FULL, scores=PLAIN, final=True)
    sums = torch.zeros_like(x.k), torch.zeros_like(x.v)
    attention_dkdv(x.dout, *x[:3], x.dlse, x.dlse, accum=sums, out=sums, config=replace(tiles(16, 32), dkdv_splits=2))
    assert launcher._row_max is not None
    for updated in (launcher._row_max, *sums):
        memory = range(updated.data_ptr(), updated.data_ptr() + updated.nbytes)
        steps = "".join(letter for letter, address in events if letter == "b" or address in memory)
        assert "lbs" in steps and "ls" not in steps


def expected_tiles(visible: Tensor, rows: int, columns: int) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Return, by the first row of each block, the tiles with a visible pair and the fully visible ones."""
    visible_tiles: dict[int, set[int]] = {}
    full_tiles: dict[int, set[int]] = {}
    for first in range(0, visible.shape[0], rows):
        tile = {at: visible[first : first + rows, at : at + columns] for at in range(0, visible.shape[1], columns)}
        visible_tiles[first] = {start for start, pairs in tile.items() if pairs.any()}
        full_tiles[first] = {start for start, pairs in tile.items() if pairs.shape[1] == columns and pairs.all()}
    return visible_tiles, full_tiles


def check_loads(loads: Loads, own: list[str], walked: list[str], visible: Tensor, rows: int, columns: int) -> None:
    """Check that each program loads its block of ``own`` once, and visible tiles of ``walked`` once per query head."""
    visible_tiles, full_tiles = expected_tiles(visible, rows, columns)
    blocks = loads.tiles[own[0]]
    heads = loads.tensors[own[0]].shape[2]
    every = Counter((first, head) for first in visible_tiles for head in range(heads))
    assert sum(blocks.values(), Counter()) == every, "every block of every head, once"
    longest_first = sorted(every, key=lambda block: (block[1], block[0] if own[0] == "k" else -block[0]))
    assert [*chain.from_iterable(blocks[program] for program in sorted(blocks))] == longest_first
    for program, block in blocks.items():
        ((first, head),) = block
        assert all(loads.tiles[name][program] == block for name in own)
        for name in walked:
            other = loads.tensors[name].shape[2]
            partners = range(head * other // heads, head * other // heads + max(other // heads, 1))
            expected = Counter((start, partner) for start in visible_tiles[first] for partner in partners)
            assert loads.tiles[name].get(program, Counter()) == expected, (name, first)
            if name in ("k", "v"):
                unmasked = {start for owner, start in loads.plain[name] if owner == program}
                assert unmasked == full_tiles[first], "only edge tiles pay for the mask"


def check_launches(
    watch: list[Loads], made: Bounds, queries: int, keys: int, config: KernelConfig, heads: int = 1, kv_heads: int = 1
) -> None:
    """Check the loads of the three kernels."""
    q, dout = (torch.randn(1, queries, heads, 16) for _ in range(2))
    k, v = (torch.randn(1, keys, kv_heads, 16) for _ in range(2))
    lse, delta = torch.zeros(1, heads, queries), torch.zeros(1, heads, queries)
    pairs, tile = visible(made, 1, queries, keys)[0, 0], config.forward
    assert tile is not None
    by_query, by_key = (pairs, tile.block_q, tile.block_k), (pairs.mT, tile.block_k, tile.block_q)
    gradients = (dout, q, k, v, lse, delta)
    launches: list[tuple[Any, tuple[Tensor, ...], list[str], list[str], Any]] = [
        (attention_forward, (q, k, v), ["q"], ["k", "v"], by_query),
        (attention_dq, gradients, ["q", "dout"], ["k", "v"], by_query),
        (attention_dkdv, gradients, ["k", "v"], ["q", "dout"], by_key),
    ]
    for launch, arguments, own, walked, expected in launches:
        watch[:] = [loads := Loads(q=q, k=k, v=v, dout=dout)]
        launch(*arguments, bounds=made, config=config)
        watch.clear()
        check_loads(loads, own, walked, *expected)


@pytest.mark.parametrize(("name", "causal"), [*((name, True) for name in (*NAMES, "uneven")), ("uneven", False)])
def test_invisible_tiles_are_never_loaded(name: str, causal: bool, watch: list[Loads]) -> None:
    """Each visible tile is loaded once per pass, in every hop of every rank."""
    layout, done = Layout.uneven([60, 3, 27]) if name == "uneven" else build_layout(name, 90, 3), set()
    for rank, shard in product(range(3), repeat=2):
        q, k = layout.positions(rank), layout.positions(shard)
        made = bounds(Mask(causal=causal), q, k)
        same = (len(q), len(k), None if made.hi is None else tuple(made.hi.tolist()))
        if same not in done:  # many hops have equal bounds
            done.add(same)
            check_launches(watch, made, len(q), len(k), tiles(16, 16))


@pytest.mark.parametrize(
    "kind", rest_nightly(["full", "window", "documents", "last rows blind"], "documents", "last rows blind")
)
def test_padding_and_hidden_blocks_are_never_loaded(kind: str, watch: list[Loads]) -> None:
    """Padded batch rows and hidden blocks are not loaded; query heads share tiles of their key head."""
    whole = interval(kind, 70, 75)
    check_launches(watch, whole, 70, 75, tiles(16, 32), heads=4, kv_heads=2)
    check_launches(watch, whole, 70, 75, tiles(32, 16))
    if kind in ("full", "window"):
        for used in (0, 20):
            padded = Bounds(whole.lo, whole.hi, torch.tensor([used], dtype=torch.int32))
            check_launches(watch, padded, 70, 75, tiles(16, 16))
        shown = torch.rand(2, 2) < 0.5
        check_launches(watch, Bounds(whole.lo, whole.hi, None, BlockSparseIndex(shown, 48)), 70, 75, tiles(16, 16))


def test_state_of_invisible_blocks_is_not_read(watch: list[Loads]) -> None:
    """A block of rows without visible keys loads nothing if the state is updated in place."""
    q, k, v = (torch.randn(1, 40, 1, 16) for _ in range(3))
    state, lse = torch.randn(1, 40, 1, 16), torch.randn(1, 1, 40)
    watch.append(loads := Loads(q=q, k=k, v=v, state=state))
    attention_forward(q, k, v, bounds=interval("first rows blind", 40, 40), state=(state, lse), config=tiles(16, 16))
    for name in ("q", "state"):  # rows 0 to 19 see no key, so block 0 is not loaded
        assert sum(loads.tiles[name].values(), Counter()) == Counter({(16, 0): 1, (32, 0): 1})
