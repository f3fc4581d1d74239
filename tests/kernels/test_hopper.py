"""The Hopper forward. On a GPU of compute capability 9.0 (``TRITON_INTERPRET=0``) these tests launch it; elsewhere they
run its source on a stand-in for Gluon, its partitions interleaved at random.
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

from ringattn.kernels import FULL, Bounds, KernelConfig, Runs, Scores, Tile, attention_forward, launch
from ringattn.kernels.experimental import hopper_launch

from ..support import gluon_modules
from ..support.gluon_stand_in import Descriptor, Machine, pointer
from ..support.kernel_cases import (
    DEVICE,
    KINDS,
    Inputs,
    Sizes,
    dense,
    exact,
    inputs,
    interval,
    magnitudes,
    part,
    pytorch,
)
from ..support.tolerance import assert_as_exact_as_pytorch

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
        monkeypatch.setattr(hopper_launch, "descriptor", Descriptor)
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


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("head_dim", "block_k", "slots"), [(64, 128, 2), (64, 64, 4), (128, 128, 2), (256, 64, 2)])
def test_head_dims_and_tiles(launches: Launches, head_dim: int, block_k: int, slots: int, dtype: torch.dtype) -> None:
    x = inputs(replace(SIZES, head_dim=head_dim), dtype)
    compare(*forward(x, config=config(block_k, slots)), x)
    assert ON_HOPPER or len(launches.machines) == 2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_masks(launches: Launches, kind: str, dtype: torch.dtype) -> None:
    x, bounds = inputs(SIZES, dtype), interval(kind, SIZES.queries, SIZES.keys)
    compare(*forward(x, bounds), x, bounds)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("queries", [1, 64, 65, 128, 129])
def test_lengths(launches: Launches, queries: int, keys: int) -> None:
    x = inputs(Sizes(queries, keys, 64), torch.float16)
    for bounds in (FULL, interval("window", queries, keys)):
        compare(*forward(x, bounds), x, bounds)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_heads_and_batches(launches: Launches, heads: int, kv_heads: int) -> None:
    x = inputs(replace(SIZES, heads=heads, kv_heads=kv_heads, batch=2), torch.float16)
    compare(*forward(x), x)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_softmax_scale(launches: Launches, scale: float) -> None:
    x = inputs(SIZES, torch.float16)
    compare(*forward(x, softmax_scale=scale), x, scale=scale)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("kind", ["full", "causal", "middle rows blind"])
def test_carried_state(launches: Launches, kind: str, final: bool, dtype: torch.dtype) -> None:
    """Hop after hop, an empty one and one of a single key among them; what is empty goes to the portable kernel."""
    x, bounds = inputs(replace(SIZES, heads=2), dtype), interval(kind, SIZES.queries, SIZES.keys)
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


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("view", [sliced, heads_first])
def test_strides(launches: Launches, view: Callable[[Tensor], Tensor]) -> None:
    x = inputs(replace(SIZES, heads=2, batch=2), torch.float16)
    there = x._replace(q=view(x.q), k=view(x.k), v=view(x.v))
    state = view(torch.zeros(x.dout.shape)), torch.full(x.dlse.shape, -torch.inf)
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


REFUSED: dict[str, tuple[Callable[[Inputs], Inputs], str]] = {
    "fp32": (lambda x: Inputs(*(t.float() for t in x)), "q is torch.float32: .* takes float16 and bfloat16"),
    "head dim": (
        lambda x: x._replace(q=x.q[..., :32], k=x.k[..., :32], v=x.v[..., :32]),
        "head dim 32 and v 32: .* takes one of 64, 128, 256, the same of both",
    ),
    "value dim": (lambda x: x._replace(v=x.v[..., :32]), "head dim 64 and v 32"),
    "stride": (lambda x: x._replace(k=widened(x.k)), "k has strides .* multiples of 16 bytes, 8 elements"),
    "address": (lambda x: x._replace(v=torch.cat([x.v] * 2, 3).reshape(-1)[1:4097].view(x.v.shape)), "v has strides"),
    "repeated": (lambda x: Inputs(*(t.expand(3, *t.shape[1:]) for t in x)), "q has strides .* positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(launches: Launches, name: str) -> None:
    change, told = REFUSED[name]
    x = change(inputs(SMALL, torch.float16))
    with pytest.raises(ValueError, match=told):
        forward(x)


def test_it_refuses_modified_scores(launches: Launches) -> None:
    with pytest.raises(ValueError, match=r"scores have a softcap, ALiBi slopes or dropout: .* takes plain ones"):
        forward(inputs(SMALL, torch.float16), scores=Scores(softcap=1.0))


@pytest.mark.skipif(ON_HOPPER, reason="about a GPU of another kind")
def test_it_refuses_another_gpu() -> None:
    with pytest.raises(ValueError, match=r"q is on \S+: forward_kernel='hopper' takes GPUs of compute capability 9.0"):
        forward(inputs(SMALL, torch.float16))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_it_takes(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper alone: later GPUs have no wgmma."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert hopper_launch.is_hopper.__wrapped__(torch.device("cuda")) == (capability == (9, 0))


HOPS: dict[str, Bounds] = {
    "used": Bounds(None, None, torch.tensor([40], dtype=torch.int32)),
    "runs": Bounds(None, None, None, Runs(torch.ones(1, 1, dtype=torch.bool), 128)),
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


@pytest.mark.parametrize(
    ("tile", "told"),
    [
        (Tile(64, 128, 8, 2), "64 rows"),
        (Tile(128, 128, 4, 2), "4 warps"),
        (Tile(128, 32, 8, 2), "32 keys"),
        (Tile(128, 128, 8, 1), "1 stages"),
        (Tile(128, 128, 8, 4), "shared memory"),
    ],
)
def test_tiles_it_is_not_written_for(launches: Launches, tile: Tile, told: str) -> None:
    x = inputs(Sizes(64, 64, 128), torch.float16)
    with pytest.raises(ValueError, match=told):
        forward(x, config=replace(config(), forward=tile))


def test_an_unknown_kernel() -> None:
    with pytest.raises(ValueError, match="forward_kernel is 'hoper': it must be one of portable, hopper"):
        replace(config(), forward_kernel="hoper")


def test_it_is_nobodys_default() -> None:
    assert KernelConfig(config().forward, config().dq, config().dkdv).forward_kernel == "portable"


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
    assert (list(made.shape), list(made.strides)) == ([1, 70, 2, 64], [64, 192, 64, 1])
    assert list(made.block_shape) == [1, 64, 1, 64]
