"""Runs drawn calls on ranks that live from line to line: threads, processes over gloo, or one device."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise, product
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn import Layout, LocalWorld, Ring, shard, unshard
from ringattn.comm import LocalGroup
from ringattn.comm.topology.topology import Topology
from ringattn.kernels import Scores, attention_backward, attention_delta, attention_forward
from ringattn.ring import prefix_tree, slices
from ringattn.ring.ops import sink_gradient
from ringattn.ring.prepare import Layouts, mask_from_options
from ringattn.ring.schedule import mask as patterns
from ringattn.ring.schedule.mask import bounds
from ringattn.ring.shards import LAYOUT_NAMES

from .. import conftest  # noqa: F401  Triton's interpreter, here and in processes
from ..support.kernel_cases import tiles
from ..support.layouts import layout_from_owners
from ..support.mask_cases import RingCase, expand_to_blocks, start_call, take_rank_tokens
from ..support.move_cases import MoveCase
from ..support.rank_processes import GroupProcesses
from ..support.ring_cases import inputs
from .fuzz_draw import BASE, Literals

PATIENCE = 40.0  # seconds before a line counts as a hang
KEPT_RINGS = 4

Outcome = list[Tensor | None] | str | None
"""Outcome on one rank: out, lse and gradients; or an error; or None if the call was not reached."""


def layout_of(literals: list[Any], tokens: int, world: int) -> Layout:
    """Build a layout from literals. Tokens of a rank past the last one belong to nobody."""
    kind, *rest = literals
    if kind in LAYOUT_NAMES:
        layout: Layout = getattr(Layout, kind)(tokens, world)
    elif kind == "documents":
        layout = Layout.zigzag(tokens, world, cu_seqlens=[0, *(min(cut, tokens) for cut in rest[0]), tokens])
    elif kind == "uneven":
        layout = Layout.uneven(rest[0])
    elif kind == "balanced":
        layout = Layout.balanced(tokens, rest[0], causal=rest[1])
    elif kind == "packed_layout":
        boundaries = [0, *(min(cut, tokens) for cut in rest[0]), tokens]
        layout = Layout.packed(boundaries, world, speeds=[1] * (world - 1) + [rest[1]])
    elif kind == "owners":
        layout = layout_from_owners(rest[0], world)
    else:  # spans, one rank's after the other's or interleaved
        spans: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
        start = 0
        for length, step in rest[0]:
            for rank, own in enumerate(spans):
                own.append((start + rank * (length if step == 1 else 1), length, step))
            start += world * length
        layout = Layout(spans)
    return layout if layout.seqlen else Layout.contiguous(1, world)


def case_of(call: Literals, world: int) -> RingCase:
    """Build the tensors and arguments of a call. Positions are clamped to the last one."""
    torch.manual_seed(call["seed"])
    batch, block, (heads, _) = call["batch"], call["block"], call["heads"]
    queries = layout_of(call["layout"], call["tokens"], world)
    key_tokens = call["key_tokens"] or call["tokens"]
    keys = layout_of(call["kv_layout"], key_tokens, world) if call.get("kv_layout") else queries
    later = 0 if keys is queries else call["later"]
    more = keys.seqlen - queries.seqlen if call["align"] == "bottom-right" else 0
    layout = expand_to_blocks(queries, block, queries.reach * block - call["short"], later + max(more, 0))
    kv_layout = expand_to_blocks(keys, block, keys.reach * block - call["short"], max(-more, 0))
    reach = max(layout.reach, kv_layout.reach)
    whole = inputs(reach, tuple(call["heads"]), tuple(call["dims"]), getattr(torch, call["dtype"]), batch)
    plain = (
        "causal",
        "return_max_logits",
        "backend",
        "softmax_scale",
        "softcap",
        "dropout_p",
        "dropout_seed",
        "first_head",
    )
    arguments: dict[str, Any] = {name: call[name] for name in plain if name in call}
    if "window_size" in call:
        arguments["window_size"] = tuple(call["window_size"])
    if "prefix_length" in call:
        arguments["prefix_length"] = min(call["prefix_length"], reach)
    hosted: dict[str, list[int]] = {}
    if isinstance(next(iter(call.get("cu_seqlens") or [0])), list):
        arguments["cu_seqlens"] = [[0, *(min(cut, reach) for cut in own), reach] for own in call["cu_seqlens"]]
    elif "cu_seqlens" in call:
        hosted["cu_seqlens"] = [0, *(min(cut, reach) for cut in call["cu_seqlens"]), reach]
    for name in {"leftpad_k", "seqused_k"} & {*call}:
        hosted[name] = [min(count, kv_layout.reach) for count in call[name]]
    if "key_mask" in call:
        arguments["key_mask"] = torch.rand(batch, kv_layout.reach) < call["key_mask"]
    dtype = getattr(torch, call["host"], None)
    arguments |= {
        name: numbers if dtype is None else torch.tensor(numbers, dtype=dtype) for name, numbers in hosted.items()
    }
    if "block_mask" in call:
        rows, columns = (-(-side.reach // block) for side in (layout, kv_layout))
        arguments["block_mask"] = pattern_of(call["block_mask"], rows, columns, block)
    if "islands" in call:
        arguments["islands"] = [*islands_of(call["islands"], hosted.get("cu_seqlens", [0, reach]))]
    if "intervals" in call:
        kind, seed = call["intervals"]
        arguments["intervals"] = intervals_of(kind, seed, layout.reach, kv_layout.reach)
    if "alibi_slopes" in call:
        arguments["alibi_slopes"] = torch.rand((heads,) if call["alibi_slopes"] == "heads" else (batch, heads))
    if "config" in call:
        arguments["config"] = tiles(*call["config"])
    sink = None
    if "learnable_sink" in call:
        sink = torch.randn(heads).to(getattr(torch, call["learnable_sink"][0]))
        sink[0] = -torch.inf if call["learnable_sink"][1] else sink[0]
    where = None if keys is queries else kv_layout
    return RingCase(layout, whole, arguments, where, sink, call["strides"], call["lse"], call["ring"], call["grads"])


def islands_of(islands: list[tuple[int, int]], documents: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the parts of the islands inside the document of their first token."""
    for begin, end in islands:
        stop = next((cut for cut in documents if cut > begin), begin)
        if begin < min(end, stop):
            yield begin, min(end, stop)


def intervals_of(kind: str, seed: int, queries: int, keys: int) -> object:
    """Draw a prefix tree, slices, or pairs of which some queries see nothing, where their ends mean nothing."""
    draw, rng, count = Random(seed), torch.Generator().manual_seed(seed), 1 + seed % 3
    cuts = [sorted({0, *draw.choices(range(most), k=5), most}) if most else [0, 0] for most in (queries, keys)]
    if kind == "slices":
        cells: list[Any] = [cell for cell in product(*map(pairwise, cuts)) if draw.random() < 0.5]
        return slices([(*cell, draw.randrange(4)) for cell in cells], queries)
    if kind == "tree" and queries <= keys:
        lengths = [end - start for start, end in pairwise(cuts[0])]
        tree = prefix_tree(lengths, [-1, *(draw.randrange(-1, node) for node in range(1, len(lengths)))])
        return [*tree.intervals.table]  # as plain pairs, so that windows count global positions
    ends = torch.randint(keys + 1, (queries, 2 * count), generator=rng).sort(0).values.sort(1).values
    blind = torch.rand(queries, generator=rng) < (seed % 7 == 0) / 20
    lo, hi = ends[:, ::2].T.contiguous(), ends[:, 1::2].T.contiguous()
    lo[seed % count, blind] = keys
    return [(a.int() if seed % 2 else a, b) for a, b in zip(lo, hi, strict=True)]


def pattern_of(literals: list[Any], rows: int, columns: int, block: int) -> object:
    """Build a block mask with the given number of query and key blocks."""
    kind, sizes = literals
    if kind == "longformer":
        return patterns.longformer(**sizes)
    if kind == "random":
        return patterns.BlockMask(torch.rand(rows, columns) < sizes["share"], block)
    square = getattr(patterns, kind)(max(rows, columns) * block, block, **sizes)
    return patterns.BlockMask(square.visible[:rows, :columns], block)


SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "three dims": lambda x: x[..., 0],
    "two dims": lambda x: torch.zeros(2, 2, 2),
    "int32": lambda x: x.int(),
    "float64": lambda x: x.double(),
    "strided": lambda x: torch.zeros(*x.shape[:3], 2 * x.shape[3] + 2, dtype=x.dtype)[..., ::2],
    "other dtype": lambda x: x.to(torch.float16 if x.dtype != torch.float16 else torch.float32),
    "other batch": lambda x: torch.cat([x, x.new_zeros(2, *x.shape[1:])]),
    "other tokens": lambda x: torch.cat([x, x.new_zeros(x.shape[0], 3, *x.shape[2:])], 1),
    "other heads": lambda x: torch.cat([x] * 5, 2),
    "other dim": lambda x: torch.cat([x, x[..., :1]], 3),
    "meta": lambda x: x.to("meta"),
}


def change_of(call: Literals, rank: int) -> Callable[[dict[str, Any]], None]:
    """Return a function that changes a rank's arguments: the layout's name, align, and the wrong value."""

    def change(arguments: dict[str, Any]) -> None:
        if call["block"] == 1 and not call["later"] and not call["align"]:
            arguments["layout"] = by_name(call, arguments["layout"])
        if call["align"]:  # align replaces the positions of the case
            tokens, world = {"layout": call["tokens"], "kv_layout": call["key_tokens"]}, arguments["kv_layout"].world
            aligned = {side: layout_of(call[side], count, world) for side, count in tokens.items()}
            arguments |= aligned | {"align": call["align"]}
        name, value, where = call["spoil"] or ("", "", -2)
        if where in (-1, rank):
            before = arguments.get(name)
            if isinstance(value, str) and value in SPOILT:
                value = SPOILT[value](arguments["q"].new_zeros(2) if before is None else before)
            arguments[name] = value

    return change


def by_name(call: Literals, layout: Layout) -> Layout | str:
    """Return the layout's name if a name can stand for the layout."""
    equal = len({*layout.lengths}) == 1 and call["layout"][0] in LAYOUT_NAMES
    return call["layout"][0] if call["named"] and equal else layout


def play(calls: list[tuple[Literals, RingCase]], rank: int, group: Any, rings: dict[str, Ring]) -> list[Outcome]:
    """Run the calls on one rank and return their outcomes. An unexpected error ends the run."""
    made: list[Outcome] = [None] * len(calls)
    begun = {}
    now = 0
    try:
        for number, (call, case) in enumerate(calls):
            now = number
            time.sleep(0.02 * (call["late"] == rank))
            if call["unshard"]:
                there_and_back(call, case.layout, rank, mesh_of(group, call["mesh"]))
                made[now] = []
            elif call["move"]:
                move_case(call, case.layout.world).run(rank, mesh_of(group, call["mesh"]))
                made[now] = []
            elif call["spoil"]:
                try:
                    start_call(case, rank, change=change_of(call, rank), **where(call, group, rings))
                    made[now] = "nothing was raised"
                except Exception as error:
                    made[now] = told(error)
            else:
                begun[now] = start_call(case, rank, change=change_of(call, rank), **where(call, group, rings))
            last = number + 1 == len(calls)
            for now in [earlier for earlier in begun if last or earlier + calls[earlier][0]["wait"] <= number]:
                made[now] = begun.pop(now).finish()
    except Exception as error:
        made[now] = told(error)
    return made


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def where(call: Literals, group: Any, rings: dict[str, Ring]) -> dict[str, Any]:
    """Return the ring or group argument. Rings with settings live from line to line."""
    if call["mesh"] is not None:
        return {"group": mesh_of(group, call["mesh"])}
    if call["kept"] or (call["spoil"] and call["spoil"][0] in ("ring", "group")):
        return {"group": group}
    name, settings = repr(sorted(call["ring"].items())), dict(call["ring"])
    if name not in rings and len(rings) == KEPT_RINGS:
        rings.pop(next(iter(rings))).close()
    if "topology" in settings:
        settings["topology"] = Topology(settings["topology"])
    # Evict the least recently used ring: the backward of a later one may be pending.
    rings[name] = rings.pop(name) if name in rings else Ring(group, deadline=PATIENCE / 2, **settings)
    return {"ring": rings[name]}


def mesh_of(group: Any, shape: list[int] | None) -> Any:
    """Return a mesh over all ranks, or the group if the shape is None."""
    if shape is None:
        return group
    return group.mesh(*shape) if isinstance(group, LocalGroup) else device_mesh(*shape)


@cache
def device_mesh(ring: int, ulysses: int) -> DeviceMesh:
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def there_and_back(call: Literals, layout: Layout, rank: int, group: Any) -> None:
    """Check ``shard``, ``unshard`` and its gradient on integers, whose sums are exact."""
    (dim, grad), generator, size = call["unshard"], torch.Generator().manual_seed(call["seed"]), [2, 3, 2]
    size[dim] = layout.seqlen
    numbers = torch.randint(-9, 10, (layout.world + 1, *size), generator=generator).to(getattr(torch, call["dtype"]))
    whole, losses, mine = numbers[0], numbers[1:], layout.positions(rank)
    arguments: dict[str, Any] = {"layout": by_name(call, layout), "group": group, "dim": dim}
    own = shard(whole, **arguments).requires_grad_()
    back = unshard(own, **arguments, grad=grad)
    (gradient,) = torch.autograd.grad(back, own, losses[rank])
    loss = losses.sum(0) if grad == "sum" else losses[rank]
    assert own.equal(whole.index_select(dim, mine)), "shard takes other tokens"
    assert back.equal(whole), "unshard puts tokens elsewhere"
    assert gradient.equal(loss.index_select(dim, mine)), "the gradient of unshard is another"


def move_case(call: Literals, world: int) -> MoveCase:
    """Build a case from literals. The target of a relayout has the positions of its source in another order."""
    layout, (name, dim, *args) = layout_of(call["layout"], call["tokens"], world), call["move"]
    if name == "relayout":
        target = layout_of(call["target"], layout.seqlen, world)
        if target.seqlen != layout.seqlen:
            target = Layout.contiguous(layout.seqlen, world)
        held = torch.cat([layout.positions(rank) for rank in range(world)]).sort().values
        args = [Layout.from_positions(held[target.positions(rank)] for rank in range(world))]
    cuts = call.get("cu_seqlens")
    documents = None if cuts is None else [0, *(min(cut, layout.seqlen) for cut in cuts), layout.seqlen]
    return MoveCase(
        name, args, layout, by_name(call, layout), documents, dim, (call["batch"], 3, 2),
        getattr(torch, call["dtype"]), call["strides"] == "transposed", call["seed"],
    )  # fmt: skip


def by_hand(case: RingCase) -> list[list[Tensor | None]]:
    """Run each rank's queries over one key shard after the other with the public kernel functions."""
    names = ("causal", "window_size", "cu_seqlens", "seqused_k", "prefix_length", "islands", "block_mask")
    defaults = {"window_size": (-1, -1), "softcap": 0.0, "dropout_p": 0.0, "first_head": 0}
    call: dict[str, Any] = defaultdict(lambda: None, defaults | case.call)
    batch, ranks = case.whole["q"].shape[0], range(case.layout.world)
    mask = mask_from_options(Layouts(case.layout, case.keys), batch, **{name: call[name] for name in names})
    scores = Scores(
        call["softcap"], call["alibi_slopes"], call["dropout_p"], call["dropout_seed"] or 0, call["first_head"]
    )
    keys = [[take_rank_tokens(case.keys, case.whole[name], rank) for name in "kv"] for rank in ranks]
    sums = [[torch.zeros_like(x, dtype=torch.float32) for x in pair] for pair in keys]
    made: list[list[Tensor | None]] = []
    for rank in ranks:
        rows, dlse = case.layout.positions(rank), None
        q, dout = (take_rank_tokens(case.layout, case.whole[name], rank) for name in ("q", "dout"))
        if case.through_lse:
            dlse = take_rank_tokens(case.layout, case.whole["dlse"], rank, 2)
        hops: list[dict[str, Any]] = []
        for other in ranks:
            columns = case.keys.positions(other)
            hop_scores = replace(scores, q_positions=rows.int(), k_positions=columns.int())
            hops.append({"bounds": bounds(mask, rows, columns), "scores": hop_scores})
            hops[-1] |= {name: call[name] for name in ("softmax_scale", "config")}
        state = None
        if case.sink is not None:  # one key with the sink as its score and a value of 0
            state = torch.zeros(dout.shape), case.sink.float()[None, :, None].repeat(batch, 1, len(rows))
        for other in ranks:
            state = attention_forward(q, *keys[other], state=state, final=other == ranks[-1], **hops[other])
        assert state is not None
        dq = torch.zeros_like(q, dtype=torch.float32)
        for (k, v), (dk, dv), hop in zip(keys, sums, hops, strict=True):
            attention_backward(dout, q, k, v, *state, dlse=dlse, dq=dq, dk=dk, dv=dv, **hop)
        delta = attention_delta(dout, state[0], dlse)
        dsink = None if case.sink is None else sink_gradient(case.sink, delta, state[1])
        made.append([*state, dq.to(q.dtype), None, None, dsink])
    for own, pair in zip(made, sums, strict=True):  # complete only after all ranks' queries
        own[3:5] = [x.to(case.whole["k"].dtype) for x in pair]
    return made


def prepared(calls: list[Literals], world: int) -> list[tuple[Literals, RingCase]]:
    return [(call, case_of(call, world)) for call in (BASE | call for call in calls)]


class Threads:
    """Ranks as threads; also a single device, and the kernels called directly."""

    def __init__(self, run: str, world: int) -> None:
        self._run = run
        self._world = LocalWorld(world, timeout=PATIENCE / 2) if run == "threads" else None
        self._rings: list[dict[str, Ring]] = [{} for _ in range(world)]

    def play(self, calls: list[Literals], world: int) -> list[list[Outcome]]:
        """Return the outcomes of each rank."""
        cases = prepared(calls, world)
        if self._run == "kernels":
            return [[*parts] for parts in zip(*(by_hand(case) for _, case in cases), strict=True)]
        if self._world is None:
            return [play(cases, 0, None, self._rings[0])]
        return self._world.run(lambda group: play(cases, group.rank(), group, self._rings[group.rank()]))

    def close(self) -> None:
        for ring in [ring for rings in self._rings for ring in rings.values()]:
            with suppress(Exception):  # the failure was reported before
                ring.close()
        if self._world is not None:
            self._world.close()


class Processes:
    """Ranks as processes over gloo."""

    def __init__(self, run: str, world: int) -> None:
        self._ranks = GroupProcesses(world, serve, timeout=timedelta(seconds=PATIENCE))
        self.close = self._ranks.close

    def play(self, calls: list[Literals], world: int) -> list[list[Outcome]]:
        """Return the outcomes of each rank, or a message for a rank that died or hangs."""
        made: list[list[Outcome]] = [[f"no answer within {PATIENCE:.0f} s"] for _ in range(world)]
        deadline = time.monotonic() + PATIENCE
        for end in self._ranks.ends:
            end.send_bytes(pickle.dumps(calls))
        for rank, (end, process) in enumerate(zip(self._ranks.ends, self._ranks.processes, strict=True)):
            if end.poll(max(deadline - time.monotonic(), 0)):
                try:
                    made[rank] = pickle.loads(end.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process.join(5)
                    made[rank] = [f"ended with exit code {process.exitcode}"]
        return [row + [None] * (len(calls) - len(row)) for row in made]


def serve(rank: int, end: Connection) -> None:
    """Run the lines that arrive until the connection closes."""
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    rings: dict[str, Ring] = {}
    with suppress(EOFError, ConnectionResetError):
        while True:
            calls = pickle.loads(end.recv_bytes())
            try:
                made = play(prepared(calls, dist.get_world_size()), rank, dist.group.WORLD, rings)
            except Exception as error:  # the line is not valid
                made = [told(error)]
            end.send_bytes(pickle.dumps(made))
