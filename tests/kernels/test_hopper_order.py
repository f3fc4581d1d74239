"""The Hopper forward without a GPU: the order of its tiles, every order of its barriers, what compilers make of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringattn.autotune.inspect import hopper as compiled_hopper
from ringattn.autotune.inspect.sass import matrix_loops
from ringattn.kernels.bounds import tile_range
from ringattn.kernels.experimental import hopper_launch
from ringattn.kernels.experimental import steps as order

from ..support import gluon_modules
from ..support.barrier_states import Search, Traces
from ..support.gluon_arguments import CASES
from ..support.gluon_stand_in import Descriptor, Event, Machine, pointer
from ..support.kernel_cases import Sizes, inputs

# The order of tiles


@pytest.mark.parametrize("columns", [1, 8, 13, 24])
def test_steps_cover_the_tile_range(columns: int) -> None:
    """Every tile once, from the last to the first, masked where its range says so."""
    block = 8
    limits = [(a, b, c, d) for a in range(columns) for b in range(a, columns) for c in range(a, columns + 1)
              for d in range(max(b, c), columns + 1) if c >= a]  # fmt: skip
    for limit in limits:
        tiles = tile_range(*limit, block)
        past, tail, full, count = order.phases_of(*tiles, columns, block)
        visited = [order.column_of(step, past, block) for step in range(count)]
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


@pytest.mark.parametrize(("tiles", "slots"), [(1, 2), (2, 2), (3, 2), (5, 2), (4, 3)])
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


def gate(*names: str) -> str:
    return compiling("-m", "ringattn.autotune.inspect.hopper", *names)


def compiling(*arguments: str) -> str:
    """Compile in a process of its own: here kernels are interpreted, so there is nothing to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


COMPILED = pytest.mark.compiles(
    "kernels/experimental/hopper_launch.py", "autotune/inspect", "tests/support/gluon_arguments.py"
)


@COMPILED
@pytest.mark.parametrize("names", [("bf16", "D128", "middle", "gqa"), ("fp16", "D64", "last", "full", "gqa")])
def test_a_sample_passes_the_gate(names: tuple[str, ...]) -> None:
    assert len(gate(*names).splitlines()) == (1 if "full" in names else 2)


@COMPILED
def test_the_arguments_of_a_launch_compile() -> None:
    assert compiling(str(Path(__file__).parents[1] / "support" / "gluon_arguments.py")).count("compiled: ") == len(
        CASES
    )


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
    found = compiled_hopper.order_faults(listing, 1, 64)
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
    found = compiled_hopper.handing_faults(ptx)
    assert len(found) == len(told) and all(map(str.startswith, found, told))


PORTABLE = 523
"""Instructions of the portable kernel's unmasked loop at the same tile, ``test_compiled.BEFORE``; 16 products too."""


@COMPILED
def test_its_loop_is_shorter_than_the_portable_one() -> None:
    told = gate("bf16", "D128", "middle", "full", "gqa")
    assert max(map(int, re.findall(r"instructions=(\d+)", told))) < PORTABLE


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", hopper_launch.HEAD_DIMS)
def test_everything_that_can_be_launched_passes_the_gate(head_dim: int, dtype: str) -> None:
    gate(dtype, f"D{head_dim}")
