"""The Hopper backward without a GPU: every order of its barriers, and what compilers make of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringattn.autotune.inspect.hopper_backward import unfenced
from ringattn.kernels.experimental import hopper_backward_launch

from ..support import gluon_modules
from ..support.barrier_states import Search, Traces
from ..support.gluon_arguments import BACKWARD
from ..support.gluon_stand_in import Descriptor, Machine, pointer
from ..support.kernel_cases import Sizes, inputs
from .test_hopper_order import compiling, without


def traced(steps: int, slots: int) -> tuple[Traces, dict[str, int]]:
    """(what each partition does, arrivals by barrier) of one program."""
    machine = Machine(0, lambda options: 0)
    kernel = gluon_modules.kernel(machine, "hopper_backward")
    x = inputs(Sizes(64 * steps, 128, 128), torch.float16)
    dk, dv, dq = torch.empty(x.k.shape), torch.empty(x.v.shape), torch.zeros(x.q.shape)
    to = [kernel.tiles.Strided(pointer(one), *one.stride()[:3]) for one in (dk, dv)]
    shape, bounds = kernel.tiles.Shape(128, 64 * steps, 1, None), kernel.tiles.Interval(None, None)
    described = [Descriptor(one, 64) for one in (x.dout, x.q, x.k, x.v)]
    vector = pointer(torch.zeros(64 * steps))
    kernel.hopper_backward_kernel(
        *described, Descriptor(dq, 64, 64), vector, vector, *to, *to, bounds, shape, 1, 0.125,
        128, 64, slots, False, False, False,
    )  # fmt: skip
    return machine.traces, {barrier.name: barrier.count for barrier in machine.barriers}


LONG = [pytest.param(steps, slots, marks=pytest.mark.nightly) for steps, slots in ((2, 2), (3, 2), (4, 3))]


@pytest.mark.parametrize(("steps", "slots"), [(1, 2), *LONG])
def test_no_interleaving_goes_wrong(steps: int, slots: int) -> None:
    visited, wrong = Search(*traced(steps, slots)).run()
    assert wrong is None
    assert visited > 1000 * steps


def events(traces: Traces, kind: str) -> list[tuple[str, int]]:
    return [(name, i) for name, trace in traces.items() for i, event in enumerate(trace) if event.kind == kind]


def test_the_search_sees_dq_overwritten_too_early() -> None:
    """Room that the copy engine still reads."""
    traces, counts = traced(2, 2)
    sent = [i for name, i in events(traces, "sent") if name == "consumer0"]
    told = Search(without(traces, "consumer0", sent[1]), counts).run()[1]
    assert told is not None and "overwrites" in told


def fresh(traces: Traces) -> set[tuple[str, int]]:
    """Waits that a fresh barrier lets pass: the first of a partition for its barrier, where they are for parity 1."""
    found: dict[tuple[str, str], int] = {}
    for name, i in events(traces, "wait"):
        found.setdefault((name, traces[name][i].what), i)
    return {(name, i) for (name, _), i in found.items() if traces[name][i].value == 1}


def implied(traces: Traces) -> set[tuple[str, int]]:
    """For dS of both: between the first and the last, who had room for his own knows that the other's is there."""
    found = set()
    for name in ("consumer0", "consumer1"):
        trace = traces[name]
        first = {event.what: event.kind for event in trace[::-1] if event.kind in ("wait", "arrive")}
        before_dq = [i for one, i in events(traces, "wait") if one == name and first[trace[i].what] == "arrive"]
        found |= {(name, i) for i in before_dq[1:-1]}
    return found


def unheard(traces: Traces) -> set[tuple[str, int]]:
    """Arrivals of phases that nobody waits for: the last rounds'."""
    found = set()
    for name, i in events(traces, "arrive"):
        what = traces[name][i].what
        rounds = max(sum(one.kind == "wait" and one.what == what for one in trace) for trace in traces.values())
        skipped = any(traces[one][j].what == what for one, j in fresh(traces))
        before = sum(one.kind == "arrive" and one.what == what for one in traces[name][:i])
        found |= {(name, i)} if before >= rounds - skipped else set()
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_search_misses_what_is_left_out() -> None:
    """Without any one wait or arrival some interleaving goes wrong, but for those that nobody needs."""
    traces, counts = traced(2, 2)
    for kind, spare in (("wait", fresh(traces) | implied(traces)), ("arrive", unheard(traces))):
        assert spare == {one for one in events(traces, kind) if Search(without(traces, *one), counts).run()[1] is None}


# What the compiler makes of it


def gate(*names: str) -> str:
    return compiling("-m", "ringattn.autotune.inspect.hopper_backward", *names)


@pytest.mark.compiles("kernels/experimental/hopper_backward_launch.py", "autotune/inspect")
def test_a_sample_passes_the_gate() -> None:
    assert len(gate("bf16", "D128", "middle", "full").splitlines()) == 1


FENCED = """
st.shared.v2.b32 numbers
mbarrier.arrive.shared::cta.b64
stmatrix.sync.aligned.m8n8.x4.shared.b16 ds
fence.proxy.async.shared::cta;
mbarrier.arrive.shared::cta.b64
st.shared.v2.b32 dq
fence.proxy.async.shared::cta;
cp.reduce.async.bulk.tensor.4d
"""
FENCE = "fence.proxy.async.shared::cta;\n"


@pytest.mark.parametrize(
    ("ptx", "told"),
    [
        (FENCED, []),
        (FENCED.replace(FENCE, "", 1), ["1 times stmatrix is"]),
        (FENCED.replace("dq\n" + FENCE, "dq\n"), ["1 times st.shared is"]),
        (FENCED.replace(FENCE, ""), ["1 times stmatrix is", "1 times st.shared is"]),
    ],
)
def test_the_gate_reads_what_is_handed_on_without_a_fence(ptx: str, told: list[str]) -> None:
    """The numbers of rows are read by threads, and need none."""
    found = unfenced(ptx)
    assert len(found) == len(told) and all(map(str.startswith, found, told))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", hopper_backward_launch.HEAD_DIMS)
def test_everything_that_can_be_launched_passes_the_gate(head_dim: int, dtype: str) -> None:
    gate(dtype, f"D{head_dim}")


@pytest.mark.nightly
def test_the_arguments_of_a_launch_compile() -> None:
    script = str(Path(__file__).parents[1] / "support" / "gluon_arguments.py")
    assert compiling(script, "backward").count("compiled: ") == len(BACKWARD)
