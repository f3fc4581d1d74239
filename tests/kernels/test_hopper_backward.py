"""The Hopper backward: values, every order of its barriers, what compilers make of it.

On a GPU of compute capability 9.0 (``TRITON_INTERPRET=0``) these tests launch it; elsewhere they run its source on a
stand-in for Gluon, its partitions interleaved at random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.autotune.gate import unfenced
from ringattn.kernels import FULL, Bounds, KernelConfig, Scores, Tile, attention_gradients, launch
from ringattn.kernels.experimental import hopper_backward_launch, hopper_launch

from ..support import gluon_modules
from ..support.barrier_states import Search, Traces
from ..support.baselines import Results
from ..support.gluon_stand_in import Descriptor, Machine, pointer
from ..support.kernel_cases import DEVICE, KINDS, Inputs, Sizes, compare, exact, inputs, interval, part
from .test_compiled import compiling, gate
from .test_hopper import HALVES, HOPS, ON_HOPPER, Launches, sliced, without

pytestmark = pytest.mark.usefixtures("poison")

TILE = Tile(64, 64, 4, 1)


def config(tile: Tile | None = None) -> KernelConfig:
    return KernelConfig(TILE, TILE, TILE, backward="hopper", single_pass=tile)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What was launched: nothing to see on a GPU, where it really is."""
    made = Launches()
    if not ON_HOPPER:
        monkeypatch.setattr(hopper_backward_launch, "launch", made)
        monkeypatch.setattr(launch, "gluon_descriptor", Descriptor)
        monkeypatch.setattr(hopper_launch, "is_hopper", lambda device: True)
    return made


def given(x: Inputs, bounds: Bounds = FULL, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, delta) of the whole, as a forward leaves them."""
    truth = exact(x, bounds, scale)
    out = truth.out.to(x.q.dtype)
    delta = (x.dout.double() * out.double()).sum(-1).transpose(1, 2) - x.dlse
    return out, truth.lse.float(), delta.float().contiguous()


def gradients(x: Inputs, lse: Tensor, delta: Tensor, dq: Tensor, bounds: Bounds = FULL, **options: Any) -> Any:
    options = {"config": config()} | options
    dout, q, k, v, lse, delta = (t.to(DEVICE) for t in (x.dout, x.q, x.k, x.v, lse, delta))
    return attention_gradients(dout, q, k, v, lse, delta, dq=dq, bounds=bounds.to(DEVICE), **options)


def check(x: Inputs, bounds: Bounds = FULL, scale: float | None = None, **options: Any) -> None:
    """As exact as PyTorch in the same dtype."""
    out, lse, delta = given(x, bounds, scale)
    dq = torch.zeros(x.q.shape, device=DEVICE)
    dk, dv = gradients(x, lse, delta, dq, bounds, softmax_scale=scale, **options)
    assert dk.dtype == dv.dtype == x.k.dtype
    made = (out, lse, dq.to(x.q.dtype), dk, dv)
    compare(Results(*(t.cpu() for t in made)), x, bounds, scale)


SIZES = Sizes(queries=200, keys=300, head_dim=128)
"""Three programs, the last with keys past the end, one warpgroup of it with nothing else; the last tile not whole."""


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_head_dims(launches: Launches, head_dim: int, dtype: torch.dtype) -> None:
    check(inputs(replace(SIZES, head_dim=head_dim), dtype))
    assert ON_HOPPER or len(launches.machines) == 3


@pytest.mark.parametrize("kind", ["causal", "documents"])
def test_masks(launches: Launches, kind: str) -> None:
    dtype, head_dim = HALVES[KINDS.index(kind) % 2], (64, 128)[KINDS.index(kind) % 3 % 2]
    x, bounds = inputs(replace(SIZES, head_dim=head_dim), dtype), interval(kind, SIZES.queries, SIZES.keys)
    check(x, bounds)


def test_heads_and_batches(launches: Launches) -> None:
    """And strides: rows and heads of larger tensors."""
    x = inputs(Sizes(70, 70, 64, heads=3, batch=2), torch.float16)
    x = x._replace(q=sliced(x.q), k=sliced(x.k), v=sliced(x.v), dout=sliced(x.dout))
    check(x, interval("causal", 70, 70))


def test_a_scale_and_slots(launches: Launches) -> None:
    x = inputs(SIZES, torch.float16)
    check(x, scale=0.3, config=config(Tile(64, 128, 8, 3)))


def test_sums_are_continued(launches: Launches) -> None:
    """Key shard after key shard into one dQ; of each two calls, the second adds to what the first left."""
    x, bounds = inputs(Sizes(130, 200, 64), torch.float16), interval("causal", 130, 200)
    out, lse, delta = given(x, bounds)
    dq = torch.randn(x.q.shape, device=DEVICE)
    before, parts = dq.clone(), []
    for begin, end in ((0, 130), (130, 200)):
        keys = x._replace(k=x.k[:, begin:end], v=x.v[:, begin:end])
        start = torch.randn(keys.k.shape, device=DEVICE), torch.randn(keys.v.shape, device=DEVICE)
        sums = start[0].clone(), start[1].clone()
        got = gradients(keys, lse, delta, dq, part(bounds, begin, end), accum=sums, out=sums)
        assert got[0] is sums[0] and got[1] is sums[1]
        last = torch.empty_like(keys.k, device=DEVICE), torch.empty_like(keys.v, device=DEVICE)
        scrap = torch.zeros_like(dq)
        gradients(keys, lse, delta, scrap, part(bounds, begin, end), accum=start, out=last)
        for one, other in zip(got, last, strict=True):
            torch.testing.assert_close(one.half(), other, rtol=0, atol=0)
        parts.append([one - other for one, other in zip(got, start, strict=True)])
    dk, dv = (torch.cat(one, 1).half() for one in zip(*parts, strict=True))
    made = (out, lse, (dq - before).half(), dk, dv)
    compare(Results(*(t.cpu() for t in made)), x, bounds)


def test_keys_that_nobody_sees(launches: Launches) -> None:
    """They keep their sums, or leave zeros."""
    x, blind = inputs(SIZES, torch.float16), interval("all rows blind", SIZES.queries, SIZES.keys)
    _, lse, delta = given(x)
    dq, sums = torch.zeros(x.q.shape, device=DEVICE), (torch.randn(x.k.shape, device=DEVICE),) * 2
    kept = sums[0].clone()
    gradients(x, lse, delta, dq, blind, accum=sums, out=sums)
    assert torch.equal(sums[0], kept) and not dq.any()
    dk, dv = gradients(x, lse, delta, dq, blind)
    assert not dk.any() and not dv.any() and not dq.any()


def test_keys_past_the_end_are_nobodys(launches: Launches) -> None:
    """Without a mask, where weights of the padding of a tile overflow: inf * 0 would be NaN."""
    x = inputs(Sizes(16, 40, 64), torch.float16)
    x = x._replace(q=x.q.abs() + 1, k=-20 * (x.k.abs() + 1))
    _, lse, delta = given(x)
    assert lse.max() < -88
    dq = torch.zeros(x.q.shape, device=DEVICE)
    gradients(x, lse, delta, dq)
    assert dq.isfinite().all()


@pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("head_dim", hopper_backward_launch.HEAD_DIMS)
@pytest.mark.parametrize("kind", ["full", "causal", "window", "documents"])
def test_long_on_a_gpu(head_dim: int, kind: str) -> None:
    """Against the portable kernel: many tiles, many programs, many times round the ring."""
    x = inputs(Sizes(4096 + 40, 4096 + 72, head_dim, None, 8, 2, 2), torch.bfloat16)
    bounds = interval(kind, x.q.shape[1], x.k.shape[1])
    _, lse, delta = given(x, bounds)
    wanted = torch.zeros(x.q.shape, device=DEVICE)
    of_portable = gradients(x, lse, delta, wanted, bounds, config=replace(config(), backward="single_pass"))
    for _ in range(20):  # a race shows now and then
        dq = torch.zeros(x.q.shape, device=DEVICE)
        made = gradients(x, lse, delta, dq, bounds)
        for one, other in zip((dq, *made), (wanted, *of_portable), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


# What goes to the portable kernel, and what is refused


SMALL = Sizes(64, 64, 64)


def refused(x: Inputs, told: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=told):
        gradients(x, x.dlse, x.dlse, torch.zeros(x.q.shape, device=DEVICE), **options)


def test_what_it_refuses(launches: Launches) -> None:
    x = inputs(SMALL, torch.float16)
    refused(Inputs(*(t.float() for t in x)), "q is torch.float32: backward='hopper' takes float16 and bfloat16")
    refused(inputs(Sizes(64, 64, 32), torch.float16), "head dim 32 and v 32: .* takes one of 64, 128, the same of both")
    refused(x, "scores have a softcap", scores=Scores(softcap=1.0))
    wide = torch.zeros(1, 64, 1, 65)[..., :64]
    with pytest.raises(ValueError, match=r"dq has strides .* backward='hopper' takes an address .* 4 elements"):
        gradients(x, x.dlse, x.dlse, wide.to(DEVICE))
    refused(x, "64 queries, 128 keys and 8 warps: .* takes 128 queries", config=config(Tile(64, 128, 8, 2)))
    refused(x, "shared memory at head dim 64", config=config(Tile(128, 128, 8, 4)))


@pytest.mark.skipif(ON_HOPPER, reason="about a GPU of another kind")
def test_it_refuses_another_gpu() -> None:
    refused(inputs(SMALL, torch.float16), r"q is on \S+: backward='hopper' takes GPUs of compute capability 9.0")


@pytest.mark.parametrize("kind", HOPS)
def test_hops_of_the_portable_kernel(launches: Launches, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What has ``used`` or ``runs`` goes to the portable single pass."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("ringattn.kernels.experimental.single_pass.launch", lambda *a, **options: calls.append(options))
    x = inputs(SMALL, torch.float16)
    gradients(x, x.dlse, x.dlse, torch.zeros(x.q.shape, device=DEVICE), HOPS[kind])
    assert len(calls) == 1 and not launches.machines


# The barriers


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


@pytest.mark.parametrize(("steps", "slots"), [(1, 2), pytest.param(4, 3, marks=pytest.mark.nightly)])
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


# What the compiler makes of it


@pytest.mark.compiles("kernels/experimental/hopper_backward_launch.py", "autotune/gate.py")
def test_a_sample_passes_the_gate() -> None:
    assert len(gate("90:bf16:128:hopper_backward:middle:full:gqa")) == 1


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
def test_the_arguments_of_a_launch_compile() -> None:
    assert compiling("tests.support.launch_arguments", "hopper_backward").count("compiled: ") == 3
