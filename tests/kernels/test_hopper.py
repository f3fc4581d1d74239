"""The Hopper forward: values, every order of its barriers, what compilers make of it.

On a GPU of compute capability 9.0 (``TRITON_INTERPRET=0``) these tests launch it; elsewhere they run its source on a
stand-in for Gluon, its partitions interleaved at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.autotune import gate as compiled_gate
from ringattn.autotune.sass import matrix_loops
from ringattn.kernels import FULL, BlockSparseIndex, Bounds, KernelConfig, Scores, Tile, attention_forward, launch
from ringattn.kernels.bounds import tile_range
from ringattn.kernels.experimental import hopper_launch, steps
from ringattn.kernels.tables import Gpu

from ..support import gluon_modules
from ..support.barrier_states import Search, Traces
from ..support.gluon_stand_in import Descriptor, Event, Machine, pointer
from ..support.kernel_cases import (
    DEVICE,
    Inputs,
    Sizes,
    dense,
    exact,
    in_turn,
    inputs,
    interval,
    magnitudes,
    part,
    pytorch,
)
from ..support.tolerance import assert_as_exact_as_pytorch
from .test_compiled import BEFORE, compiling, gate

ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
HALVES = (torch.float16, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("poison")


def config(block_k: int = 64, slots: int = 2) -> KernelConfig:
    tile = Tile(128, block_k, 8, slots)
    return KernelConfig(tile, tile, tile, forward_kernel="hopper")


class Launches:
    """Takes the place of a launch: program after program on the stand-in."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.machines = random.Random(seed), list[Machine]()

    def choose(self, options: list[str]) -> int:
        return self.random.randrange(len(options))

    def __call__(self, kernel: Any, grid: int, device: torch.device, *arguments: Any, **options: Any) -> None:
        assert [options.pop(name) for name in ("num_warps", "maxnreg")] == [4, hopper_launch.REGISTERS]
        for program in range(grid):
            self.machines.append(Machine(program, self.choose))
            run = getattr(gluon_modules.kernel(self.machines[-1], kernel.__module__.split(".")[-1]), kernel.__name__)
            run(*(self.converted(argument) for argument in arguments), **options)

    def converted(self, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return type(argument)(*map(self.converted, argument))
        return pointer(argument) if isinstance(argument, Tensor) else argument


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What was launched: nothing to see on a GPU, where it really is."""
    made = Launches()
    if not ON_HOPPER:
        monkeypatch.setattr(hopper_launch, "launch", made)
        monkeypatch.setattr(launch, "gluon_descriptor", Descriptor)
        monkeypatch.setattr(hopper_launch, "is_hopper", lambda device: True)
    return made


def forward(x: Inputs, bounds: Bounds = FULL, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"config": config()} | options
    q, k, v = (t.to(DEVICE) for t in (x.q, x.k, x.v))
    out, lse = attention_forward(q, k, v, bounds=bounds.to(DEVICE), **options)
    return out, lse


def compare(out: Tensor, lse: Tensor, x: Inputs, bounds: Bounds = FULL, scale: float | None = None) -> None:
    truth, baseline = exact(x, bounds, scale), pytorch(x, bounds, scale)
    size = magnitudes(x, truth, dense(bounds, x.q.shape[1], x.k.shape[1]), scale)["out"]
    assert_as_exact_as_pytorch("out", out.cpu(), baseline.out.to(out.dtype), truth.out, magnitude=size)
    assert_as_exact_as_pytorch("lse", lse.cpu(), baseline.lse, truth.lse)


SIZES = Sizes(queries=200, keys=300, head_dim=64)
"""Two programs, the second's last warpgroup partly past the end; five tiles, the last not whole."""


@pytest.mark.parametrize(
    ("head_dim", "block_k", "slots", "dtype"),
    in_turn([(64, 128, 2), (64, 64, 4), (128, 128, 2), (256, 64, 2)], HALVES),
)
def test_head_dims_and_tiles(launches: Launches, head_dim: int, block_k: int, slots: int, dtype: torch.dtype) -> None:
    x = inputs(replace(SIZES, head_dim=head_dim), dtype)
    compare(*forward(x, config=config(block_k, slots)), x)
    assert ON_HOPPER or len(launches.machines) == 2


@pytest.mark.parametrize(("kind", "dtype"), in_turn(["causal", "window", "documents", "last rows blind"], HALVES))
def test_masks(launches: Launches, kind: str, dtype: torch.dtype) -> None:
    x, bounds = inputs(SIZES, dtype), interval(kind, SIZES.queries, SIZES.keys)
    compare(*forward(x, bounds), x, bounds)


@pytest.mark.parametrize(
    ("queries", "keys", "kind"),
    in_turn([(1, 1), (65, 64), (128, 65), (1, 129), (129, 256)], ["full", "window"]),
)
def test_lengths(launches: Launches, queries: int, keys: int, kind: str) -> None:
    x, bounds = inputs(Sizes(queries, keys, 64), torch.float16), interval(kind, queries, keys)
    compare(*forward(x, bounds), x, bounds)


def test_heads_batches_and_scales(launches: Launches) -> None:
    x = inputs(Sizes(130, 140, 64, heads=4, kv_heads=2, batch=2), torch.float16)
    compare(*forward(x, softmax_scale=0.01), x, scale=0.01)


@pytest.mark.parametrize(
    ("kind", "final", "dtype"), [("causal", False, torch.float16), ("middle rows blind", True, torch.bfloat16)]
)
def test_carried_state(launches: Launches, kind: str, final: bool, dtype: torch.dtype) -> None:
    """Hop after hop, an empty one and one of a single key among them; what is empty goes to the portable kernel."""
    x, bounds = inputs(SIZES, dtype), interval(kind, SIZES.queries, SIZES.keys)
    state: tuple[Tensor, Tensor] | None = None
    cuts = [0, 130, 131, 131, 300] if ON_HOPPER else [0, 130, 131, 300]
    for begin, end in pairwise(cuts):
        last = final and end == cuts[-1]
        hop = x._replace(k=x.k[:, begin:end], v=x.v[:, begin:end])
        out, lse = forward(hop, part(bounds, begin, end), state=state, final=last)
        assert out.dtype == (dtype if last else torch.float32)
        if state is not None:
            assert lse is state[1]
            assert (out is state[0]) == (out.dtype == torch.float32)
        state = out, lse
    assert state is not None
    compare(state[0] if final else state[0].to(dtype), state[1], x, bounds)


def test_a_hop_that_sees_nothing_leaves_the_state_as_it_is(launches: Launches) -> None:
    x, blind = inputs(SIZES, torch.float16), interval("all rows blind", SIZES.queries, SIZES.keys)
    state = forward(x, final=False)
    before = [t.clone() for t in state]
    x.v[:] = torch.nan  # of keys that nobody sees
    after = forward(x, blind, state=state, final=False)
    assert all(map(torch.equal, before, after))


def sliced(x: Tensor) -> Tensor:
    """A part of a larger tensor, rows and heads apart."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, 2 * x.shape[2], x.shape[3] + 8), torch.nan, dtype=x.dtype)
    view = wide[:, 2:-1, ::2, 8:]
    view.copy_(x)
    return view


def test_strides(launches: Launches) -> None:
    x = inputs(Sizes(130, 140, 64, None, 2, 2, 2), torch.float16)
    there = x._replace(q=sliced(x.q), k=sliced(x.k), v=sliced(x.v))
    state = sliced(torch.zeros(x.dout.shape)), torch.full(x.dlse.shape, -torch.inf)
    q, k, v = (t.to(DEVICE) for t in (there.q, there.k, there.v))
    out, lse = attention_forward(
        q, k, v, state=(state[0].to(DEVICE), state[1].to(DEVICE)), final=False, config=config()
    )
    compare(out.half(), lse, x)


def test_scores_far_from_zero(launches: Launches) -> None:
    x = inputs(SIZES, torch.bfloat16)
    x = x._replace(q=x.q * 100)
    compare(*forward(x), x)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("head_dim", hopper_launch.HEAD_DIMS)
@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents"])
def test_long_on_a_gpu(head_dim: int, kind: str) -> None:
    """Against the portable kernel: many tiles, many programs, many times round the ring."""
    x = inputs(Sizes(4096 + 40, 4096 + 72, head_dim, None, 8, 2, 2), torch.bfloat16)
    bounds = interval(kind, x.q.shape[1], x.k.shape[1])
    block_k = 64 if head_dim == 256 else 128
    for _ in range(20):  # a race shows now and then
        out, lse = forward(x, bounds, config=config(block_k))
        wanted, wanted_lse = forward(x, bounds, config=None)
        torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


# What goes to the portable kernel, and what is refused


SMALL = Sizes(64, 64, 64)


def widened(x: Tensor) -> Tensor:
    return torch.empty(*x.shape[:3], x.shape[3] + 1, dtype=x.dtype)[..., :-1]


def with_tile(*tile: int) -> dict[str, Any]:
    return {"config": replace(config(), forward=Tile(*tile))}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda x: Inputs(*(t.float() for t in x)), {}, "q is torch.float32: .* takes float16 and bfloat16"),
        (lambda x: x._replace(q=x.q[..., :32], k=x.k[..., :32], v=x.v[..., :32]), {},
         "head dim 32 and v 32: .* takes one of 64, 128, 256, the same of both"),
        (lambda x: x._replace(v=x.v[..., :32]), {}, "head dim 64 and v 32"),
        (lambda x: x._replace(k=widened(x.k)), {}, "k has strides .* multiples of 16 bytes, 8 elements"),
        (lambda x: x._replace(v=torch.cat([x.v] * 2, 3).reshape(-1)[1:4097].view(x.v.shape)), {}, "v has strides"),
        (lambda x: Inputs(*(t.expand(3, *t.shape[1:]) for t in x)), {}, "q has strides .* positive"),
        (lambda x: x, {"scores": Scores(softcap=1.0)}, "scores have a softcap, ALiBi .* takes plain ones"),
        (lambda x: x, with_tile(64, 128, 8, 2), "64 rows"),
        (lambda x: x, with_tile(128, 128, 4, 2), "4 warps"),
        (lambda x: x, with_tile(128, 32, 8, 2), "32 keys"),
        (lambda x: x, with_tile(128, 128, 8, 1), "1 stages"),
        (lambda x: x, with_tile(128, 128, 8, 8), "shared memory"),
    ],
)  # fmt: skip
def test_what_it_refuses(
    launches: Launches, change: Callable[[Inputs], Inputs], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        forward(change(inputs(SMALL, torch.float16)), **options)


def test_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later GPUs have no wgmma."""
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        found = Gpu("", 10 * capability[0] + capability[1])
        monkeypatch.setattr(hopper_launch, "gpu_of", lambda device, found=found: found)
        assert hopper_launch.is_hopper(torch.device("cuda")) == (capability == (9, 0))


@pytest.mark.skipif(ON_HOPPER, reason="about a GPU of another kind")
def test_it_refuses_another_gpu() -> None:
    with pytest.raises(ValueError, match=r"q is on \S+: forward_kernel='hopper' takes GPUs of compute capability 9.0"):
        forward(inputs(SMALL, torch.float16))


HOPS: dict[str, Bounds] = {
    "used": Bounds(None, None, torch.tensor([40], dtype=torch.int32)),
    "runs": Bounds(None, None, None, BlockSparseIndex(torch.ones(1, 1, dtype=torch.bool), 128)),
}


@pytest.mark.parametrize("kind", HOPS)
def test_hops_of_the_portable_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What has ``used`` or ``runs`` goes there with the same tile, all else it is asked to check being as it must."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("ringattn.kernels.attention.launch", lambda *a, **options: calls.append(options))
    forward(inputs(SMALL, torch.float16), HOPS[kind])
    assert [(one["BLOCK_Q"], one["BLOCK_K"], one["num_warps"]) for one in calls] == [(128, 64, 8)]
    assert not launches.machines
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        forward(inputs(SMALL, torch.float32), HOPS[kind])


@pytest.mark.parametrize("state", [False, True])
def test_a_hop_without_keys(launches: Launches, state: bool) -> None:
    """It goes to the portable kernel, which leaves a state as it is."""
    x = inputs(SMALL, torch.float16)
    before = forward(x, final=False) if state else None
    kept = [t.clone() for t in before or ()]
    hop = x._replace(k=x.k[:, :0], v=x.v[:, :0])
    assert not hopper_launch.takes(hop.q, hop.k, hop.v, FULL, Scores(), config().forward)
    out, lse = forward(hop, state=before, final=False)
    assert torch.equal(out, kept[0] if state else torch.zeros_like(out))
    assert torch.equal(lse, kept[1] if state else torch.full_like(lse, -torch.inf))


def test_descriptors_are_kept_with_their_tensors() -> None:
    k, v = (torch.zeros(1, 128, 2, 64, dtype=torch.float16) for _ in range(2))
    described = launch.Descriptors()
    made: Any = described(k, 64)
    again: Any = described(k, 64)
    assert again is made and again.base is k and again.block_shape == [1, 64, 1, 64]
    others: list[Any] = [described(k, 128), described(v, 64), described(k, 64, 32)]
    assert len({id(one) for one in (made, *others)}) == 4
    assert [one.block_shape[1::2] for one in others] == [[128, 64], [64, 64], [64, 32]]


def test_descriptors() -> None:
    """Strides of single elements are replaced, others kept."""
    x = torch.empty(70 * 192, dtype=torch.bfloat16).as_strided((1, 70, 2, 64), (3, 192, 64, 1))
    made: Any = launch.gluon_descriptor(x, 64)
    assert launch.is_aligned(x)
    assert (list(made.shape), list(made.strides)) == ([1, 70, 2, 64], [64, 192, 64, 1])
    assert list(made.block_shape) == [1, 64, 1, 64]


@pytest.mark.parametrize("dim", range(3))
def test_alignment(dim: int) -> None:
    """The address, and the strides of whatever has more than one element."""
    memory = torch.empty(100)
    for size, stride, aligned in ((1, 18, True), (2, 18, False), (2, 20, True), (2, 0, False), (0, 18, True)):
        shape, strides = [1, 1, 1, 16], [16, 16, 16, 1]
        shape[dim], strides[dim] = size, stride
        assert launch.is_aligned(memory.as_strided(shape, strides)) == aligned
        assert launch.is_aligned(memory.as_strided(shape, strides, 1)) == (size == 0)


# The order of tiles


@pytest.mark.parametrize("columns", [1, 8, 13])
def test_steps_cover_the_tile_range(columns: int) -> None:
    """Every tile once, from the last to the first, masked where its range says so."""
    block = 8
    limits = [(a, b, c, d) for a in range(columns) for b in range(a, columns) for c in range(a, columns + 1)
              for d in range(max(b, c), columns + 1) if c >= a]  # fmt: skip
    for limit in limits:
        tiles = tile_range(*limit, block)
        past, tail, full, count = steps.phases_of(*tiles, columns, block)
        visited = [steps.column_of(step, past, block) for step in range(count)]
        if tiles.end <= tiles.start:
            assert count == 1 and visited[0] >= columns and tail == full == 1
            continue
        assert visited == list(range(tiles.start, tiles.end, block))[::-1]
        unmasked = visited[tail:full]
        assert set(unmasked) >= {x for x in visited[1:] if tiles.full_start <= x < tiles.full_end}
        assert all(tiles.full_start <= x < tiles.full_end for x in unmasked)


# The barriers


def traced(tiles: int, slots: int) -> tuple[Traces, dict[str, int]]:
    """(what each partition does, arrivals by barrier) of one program."""
    machine = Machine(0, lambda options: 0)
    kernel = gluon_modules.kernel(machine)
    x = inputs(Sizes(128, 64 * tiles, 64), torch.float16)
    out, lse = torch.empty(x.dout.shape), torch.empty(x.dlse.shape)
    to, lse_at = kernel.tiles.Strided(pointer(out), *out.stride()[:3]), pointer(lse)
    shape, bounds = kernel.tiles.Shape(128, 64 * tiles, 1, 1), kernel.tiles.Interval(None, None)
    described = Descriptor(x.q, 64), Descriptor(x.k, 64), Descriptor(x.v, 64)
    kernel.hopper_kernel(*described, to, to, lse_at, bounds, shape, 0.125, 64, 64, slots, False)
    return machine.traces, {barrier.name: barrier.count for barrier in machine.barriers}


@pytest.mark.parametrize(("tiles", "slots"), [(1, 2), (5, 2), (4, 3)])
def test_no_interleaving_goes_wrong(tiles: int, slots: int) -> None:
    visited, wrong = Search(*traced(tiles, slots)).run()
    assert wrong is None
    assert visited > 100 * tiles


def without(traces: Traces, partition: str, index: int) -> Traces:
    return traces | {partition: [event for i, event in enumerate(traces[partition]) if i != index]}


def waits(traces: Traces, barrier: str) -> list[Event]:
    return [event for trace in traces.values() for event in trace if event.kind == "wait" and event.what == barrier]


def spare_waits(traces: Traces) -> set[tuple[str, int]]:
    """Those that a fresh barrier lets pass; and what the first consumer has waited for before it gave the turn away."""
    second = traces["consumer1"]
    turns = [i for i, event in enumerate(second) if event.kind == "wait" and second[i + 1].kind == "start"][1:]
    implied = {i for i, e in enumerate(second) if e.kind == "wait" and 2 < i < turns[-1] and i not in turns}
    return {("consumer1", i) for i in implied} | {
        (name, i)
        for name, trace in traces.items()
        for i, event in enumerate(trace)
        if event.kind == "wait" and event.value == 1 and event is waits(traces, event.what)[0]
    }


def spare_arrivals(traces: Traces) -> set[tuple[str, int]]:
    """Those of phases that nobody waits for: the last tiles' and the last turn's."""
    found = set()
    for name, trace in traces.items():
        for i, event in enumerate(trace):
            if event.kind == "arrive":
                waited = waits(traces, event.what)
                needed = len(waited) - (waited[0].value == 1)
                before = sum(e.kind == "arrive" and e.what == event.what for e in trace[:i])
                found |= {(name, i)} if before >= needed else set()
    return found


@pytest.mark.parametrize(("kind", "spare"), [("wait", spare_waits), ("arrive", spare_arrivals)])
def test_the_search_misses_what_is_left_out(kind: str, spare: Callable[[Traces], set[tuple[str, int]]]) -> None:
    """Without any one wait or arrival some interleaving goes wrong, but for those that nobody needs."""
    traces, counts = traced(5, 2)
    all_of_them = {(name, i) for name, trace in traces.items() for i, e in enumerate(trace) if e.kind == kind}
    missed = {one for one in all_of_them if Search(without(traces, *one), counts).run()[1] is not None}
    assert missed == all_of_them - spare(traces)
    assert len(missed) > len(all_of_them) // 2


def test_the_search_sees_a_slot_given_back_too_early() -> None:
    """A release before the product that reads the slot is done."""
    traces, counts = traced(5, 2)
    trace = list(traces["consumer0"])
    early = next(i for i, event in enumerate(trace) if (event.kind, event.what) == ("drain", 1))
    assert trace[early + 1].kind == "arrive"
    trace[early], trace[early + 1] = trace[early + 1], trace[early]
    assert "while a product reads it" in (Search(traces | {"consumer0": trace}, counts).run()[1] or "")


# What the compiler makes of it


COMPILED = pytest.mark.compiles(
    "kernels/experimental/hopper_launch.py", "autotune/gate.py", "tests/support/launch_arguments.py"
)


@COMPILED
def test_a_sample_passes_the_gate() -> None:
    """The loop of a full hop in the middle of a ring is shorter than the portable kernel's, with as many products."""
    rows = gate("90:bf16:128:hopper:middle:gqa", "90:fp16:64:hopper:last:full:gqa")
    assert len(rows) == 3
    (of_a_hop,) = (row for row in rows if row["full"] and row["role"] == "middle")
    assert of_a_hop["instructions"] < BEFORE["forward"][1]


@COMPILED
def test_the_arguments_of_a_launch_compile() -> None:
    assert compiling("tests.support.launch_arguments", "hopper").count("compiled: ") == 5


STEP = """
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88, gsb0 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
{}WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
@P0 BRA `(.L_x_1) ;
"""
"""A main loop's listing, of what the gate looks at."""

EXP = "MUFU.EX2 R1, R1 ;\n"


@pytest.mark.parametrize(
    ("listing", "told"),
    [
        (STEP.format(EXP * 32), []),
        (STEP.format(EXP * 31), ["31 of 31 exponentials run under the product with V"]),
        (STEP.format("").replace("@P0", EXP * 32 + "@P0"), ["0 of 32 exponentials run under the product with V"]),
        (STEP.format(EXP * 32).replace("0x1", "0x0"), ["0 of 1 main loops start a product before the wait"]),
    ],
)
def test_the_gate_reads_the_order(listing: str, told: list[str]) -> None:
    found = compiled_gate.order_problems(listing, 1, 64)
    assert len(found) == len(told) and all(map(str.startswith, found, told))


PARTITIONS = """
        /*0000*/ BRX R2 -0x10 ;
.L_x_1:
        /*0010*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/ @P0 BRA `(.L_x_1) ;
        /*0040*/ EXIT ;
.L_x_2:
        /*0050*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0060*/ @P0 BRA `(.L_x_2) ;
        /*0070*/ EXIT ;
"""
"""Of a kernel whose warps find their partition by a table."""


def test_loops_behind_an_indirect_branch_are_read() -> None:
    assert [(loop.matrix, loop.waits) for loop in matrix_loops(PARTITIONS)] == [(1, 1), (1, 0)]
    assert list(matrix_loops(PARTITIONS.replace("BRX R2 -0x10", "EXIT"))) == []


HANDED = """
cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4, %r5}], [%r6];
setmaxnreg.dec.sync.aligned.u32 \t24;
setmaxnreg.inc.sync.aligned.u32 \t240;
wgmma.wait_group.sync.aligned 1;
bar.sync 0, 128;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 1;
"""


@pytest.mark.parametrize(
    ("ptx", "told"),
    [
        (HANDED, []),
        (HANDED.replace("cp.async.bulk.tensor", "ld.global"), ["no TMA loads"]),
        (HANDED.replace("240", "168"), ["registers are handed on as [24, 168]"]),
        (HANDED.replace("bar.sync 0, 128;", ""), ["a slot is given back before all warps are done with it"]),
        (HANDED.replace("@%p1 mbarrier", "wgmma.x;\n@%p1 mbarrier"), ["a slot is given back before all warps"]),
        (HANDED.replace("mbarrier.arrive", "x"), ["no slot is given back"]),
    ],
)
def test_the_gate_reads_who_hands_on_what(ptx: str, told: list[str]) -> None:
    found = compiled_gate.handing_problems(ptx)
    assert len(found) == len(told) and all(map(str.startswith, found, told))
