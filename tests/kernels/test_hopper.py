"""The Hopper kernels, forward and backward: values, barriers, and the compiler's output.

On a GPU of compute capability 9.0 (``TRITON_INTERPRET=0``) these tests launch the kernels. Elsewhere the source runs
on a stand-in for Gluon that interleaves the partitions at random.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from triton._C.libtriton import ir

from ringattn.autotune import gate as compiled_gate
from ringattn.kernels import (
    FULL,
    PLAIN,
    BlockSparseIndex,
    Bounds,
    KernelConfig,
    Scores,
    Tile,
    attention_forward,
    attention_gradients,
    hopper_backward_launch,
    hopper_forward_launch,
    launch,
    launch_plan,
)
from ringattn.kernels.attention import ForwardLauncher
from ringattn.kernels.bounds import tile_range
from ringattn.kernels.gpu import REGISTERS, assumed_gpu, shared_limit
from ringattn.kernels.hopper import backward as backward_kernels
from ringattn.kernels.hopper import step_order
from ringattn.kernels.single_pass import SinglePassLauncher

from ..support import gluon_stand_in, kernel_cases
from ..support.baselines import Results
from ..support.gluon_stand_in import Descriptor, Machine, pointer
from ..support.kernel_cases import (
    DEVICE,
    Inputs,
    Sizes,
    cycle_values,
    dense_mask,
    exact,
    inputs,
    interval,
    magnitudes,
    narrow_keys,
    pytorch,
)
from ..support.tolerance import assert_as_exact_as_pytorch
from .test_compiled import compiling, gate

ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0)
HALVES = (torch.float16, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("poison")


def config(block_k: int = 64, slots: int = 2) -> KernelConfig:
    tile = Tile(128, block_k, 8, slots)
    return KernelConfig(tile, tile, tile, forward_kernel="hopper")


def backward_config(tile: Tile | None = None) -> KernelConfig:
    other = Tile(64, 64, 4, 1)
    return KernelConfig(other, other, other, backward="hopper", single_pass=tile)


class Launches:
    """Replacement of ``launch`` that runs program after program on the stand-in."""

    def __init__(self, seed: int = 0) -> None:
        self.random, self.machines, self.ranks = random.Random(seed), list[Machine](), dict[str, float]()

    def choose(self, options: list[str]) -> int:
        """Choose the partition with the highest rank. Ranks change rarely, so that some partitions run far ahead."""
        if self.random.random() < 0.1:
            self.ranks.clear()
        return max(range(len(options)), key=lambda i: self.ranks.setdefault(options[i], self.random.random()))

    def __call__(self, kernel: Any, grid: int, device: torch.device, *arguments: Any, **options: Any) -> None:
        assert [options.pop(name) for name in ("num_warps", "maxnreg")] == [4, hopper_forward_launch.THREAD_REGISTERS]
        for program in range(grid):
            self.machines.append(Machine(program, self.choose))
            run = getattr(gluon_stand_in.kernel(self.machines[-1], kernel.__module__.split(".")[-1]), kernel.__name__)
            run(*(self.converted(argument) for argument in arguments), **options)

    def converted(self, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return type(argument)(*map(self.converted, argument))
        return pointer(argument) if isinstance(argument, Tensor) else argument


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Run launches on the stand-in and record them; on a Hopper GPU the real kernels run and nothing is recorded."""
    made = Launches()
    if not ON_HOPPER:
        monkeypatch.setattr(hopper_forward_launch, "launch", made)
        monkeypatch.setattr(hopper_backward_launch, "launch", made)
        monkeypatch.setattr(launch_plan, "gluon_descriptor", Descriptor)
        monkeypatch.setattr(hopper_forward_launch, "is_hopper_device", lambda device: True)
    return made


def forward(x: Inputs, bounds: Bounds = FULL, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"config": config()} | options
    q, k, v = (t.to(DEVICE) for t in (x.q, x.k, x.v))
    out, lse = attention_forward(q, k, v, bounds=bounds.to(DEVICE), **options)
    return out, lse


def compare(out: Tensor, lse: Tensor, x: Inputs, bounds: Bounds = FULL, scale: float | None = None) -> None:
    truth, baseline = exact(x, bounds, scale), pytorch(x, bounds, scale)
    size = magnitudes(x, truth, dense_mask(bounds, x.q.shape[1], x.k.shape[1]), scale)["out"]
    assert_as_exact_as_pytorch("out", out.cpu(), baseline.out.to(out.dtype), truth.out, magnitude=size)
    assert_as_exact_as_pytorch("lse", lse.cpu(), baseline.lse, truth.lse)


def of_forward(x: Inputs, bounds: Bounds = FULL, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and delta over all keys."""
    truth = exact(x, bounds, scale)
    out = truth.out.to(x.q.dtype)
    delta = (x.dout.double() * out.double()).sum(-1).transpose(1, 2) - x.dlse
    return out, truth.lse.float(), delta.float().contiguous()


def gradients(x: Inputs, lse: Tensor, delta: Tensor, dq: Tensor, bounds: Bounds = FULL, **options: Any) -> Any:
    options = {"config": backward_config()} | options
    dout, q, k, v, lse, delta = (t.to(DEVICE) for t in (x.dout, x.q, x.k, x.v, lse, delta))
    return attention_gradients(dout, q, k, v, lse, delta, dq=dq, bounds=bounds.to(DEVICE), **options)


def zero_dq(x: Inputs) -> Tensor:
    return torch.zeros(x.q.shape, device=DEVICE)


def check_backward(x: Inputs, bounds: Bounds = FULL, scale: float | None = None, **options: Any) -> None:
    out, lse, delta = of_forward(x, bounds, scale)
    dq = zero_dq(x)
    dk, dv = gradients(x, lse, delta, dq, bounds, softmax_scale=scale, **options)
    assert dk.dtype == dv.dtype == x.k.dtype
    made = Results(*(t.cpu() for t in (out, lse, dq.to(x.q.dtype), dk, dv)))
    kernel_cases.compare(made, x, bounds, scale)


SIZES = Sizes(queries=200, keys=300, head_dim=64)
"""Forward: two programs with a partial last warpgroup, and five key tiles with a partial last one.

Backward: three programs; the last one has keys past the end, and one of its warpgroups has no others."""


@pytest.mark.parametrize(
    ("sizes", "tile", "kind", "dtype"),
    cycle_values(
        [
            (SIZES, (128, 2), "full"),
            (SIZES, (64, 4), "documents"),
            (replace(SIZES, head_dim=128), (128, 2), "window"),
            (Sizes(129, 130, 256), (64, 2), "causal"),
            (SIZES, (64, 2), "last rows blind"),
            (Sizes(1, 1, 64), (64, 2), "full"),
            (Sizes(65, 129, 64), (64, 2), "window"),
            (Sizes(129, 64, 64), (64, 2), "full"),
        ],
        HALVES,
    ),
)
def test_forward_is_exact(
    launches: Launches, sizes: Sizes, tile: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    x, bounds = inputs(sizes, dtype), interval(kind, sizes.queries, sizes.keys)
    compare(*forward(x, bounds, config=config(*tile)), x, bounds)
    assert ON_HOPPER or len(launches.machines) == -(-sizes.queries // 128)


@pytest.mark.parametrize(
    ("head_dim", "kind", "dtype", "scale", "tile"),
    [
        (64, "full", torch.bfloat16, None, None),
        (128, "full", torch.float16, 0.3, Tile(64, 128, 8, 3)),
        (64, "causal", torch.float16, None, None),
        (128, "documents", torch.bfloat16, None, None),
    ],
)
def test_backward_is_exact(
    launches: Launches, head_dim: int, kind: str, dtype: torch.dtype, scale: float | None, tile: Tile | None
) -> None:
    x, bounds = inputs(replace(SIZES, head_dim=head_dim), dtype), interval(kind, SIZES.queries, SIZES.keys)
    check_backward(x, bounds, scale, config=backward_config(tile))
    assert ON_HOPPER or len(launches.machines) == 3


def sliced(x: Tensor) -> Tensor:
    """Return a view of a larger tensor with gaps between rows and heads."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, 2 * x.shape[2], x.shape[3] + 8), torch.nan, dtype=x.dtype)
    view = wide[:, 2:-1, ::2, 8:]
    view.copy_(x)
    return view


def test_heads_batches_strides_and_scales(launches: Launches) -> None:
    x = inputs(Sizes(130, 140, 64, heads=4, kv_heads=2, batch=2), torch.float16)
    views = x._replace(q=sliced(x.q), k=sliced(x.k), v=sliced(x.v))
    state = sliced(torch.zeros(x.dout.shape)).to(DEVICE), torch.full(x.dlse.shape, -torch.inf).to(DEVICE)
    out, lse = forward(views, state=state, final=False, softmax_scale=0.01)
    compare(out.half(), lse, x, scale=0.01)
    x = inputs(Sizes(140, 140, 64, heads=2, batch=2), torch.float16)  # queries of the last keys begin at a late tile
    views = x._replace(q=sliced(x.q), k=sliced(x.k), v=sliced(x.v), dout=sliced(x.dout))
    check_backward(views, interval("causal", 140, 140))


@pytest.mark.parametrize(
    ("kind", "final", "dtype"), [("causal", False, torch.float16), ("middle rows blind", True, torch.bfloat16)]
)
def test_state_is_carried_from_hop_to_hop(launches: Launches, kind: str, final: bool, dtype: torch.dtype) -> None:
    """Hops include an empty one, which the portable kernel takes, and one of a single key."""
    x, bounds = inputs(SIZES, dtype), interval(kind, SIZES.queries, SIZES.keys)
    cuts = [0, 130, 131, 131, 300] if ON_HOPPER else [0, 130, 131, 300]
    out, lse = kernel_cases.forward_hops(x, bounds, cuts, final=final, config=config())
    compare(out.to(dtype), lse, x, bounds)


def test_largest_scores_of_all_hops(launches: Launches) -> None:
    x, bounds = inputs(Sizes(130, 140, 64, heads=2), torch.float16), interval("causal", 130, 140)
    launcher = ForwardLauncher(x.q.to(DEVICE), 0.125, config(), max_logits=True)
    for begin, end in ((0, 70), (70, 140)):
        shard = (t[:, begin:end].to(DEVICE) for t in (x.k, x.v))
        launcher.fold(*shard, narrow_keys(bounds, begin, end).to(DEVICE), final=end == 140)  # type: ignore[arg-type, call-arg]

    def largest(dtype: torch.dtype) -> Tensor:
        scores = 0.125 * torch.einsum("bqhd,bkd->bhqk", x.q.to(dtype), x.k[:, :, 0].to(dtype))
        return scores.masked_fill(~dense_mask(bounds, 130, 140), -torch.inf).amax((0, 2, 3))

    made = launcher.max_logits().cpu()
    assert_as_exact_as_pytorch("max_logits", made, largest(torch.float32), largest(torch.float64))
    assert ON_HOPPER or len(launches.machines) == 8


def test_gradients_are_accumulated(launches: Launches) -> None:
    """Two key shards add to one dQ; per shard, the second call adds to the result of the first."""
    x, bounds = inputs(Sizes(130, 200, 64), torch.float16), interval("causal", 130, 200)
    out, lse, delta = of_forward(x, bounds)
    dq = torch.randn(x.q.shape, device=DEVICE)
    before, parts = dq.clone(), []
    for begin, end in ((0, 130), (130, 200)):
        keys = x._replace(k=x.k[:, begin:end], v=x.v[:, begin:end])
        start = torch.randn(keys.k.shape, device=DEVICE), torch.randn(keys.v.shape, device=DEVICE)
        sums = start[0].clone(), start[1].clone()
        got = gradients(keys, lse, delta, dq, narrow_keys(bounds, begin, end), accum=sums, out=sums)
        assert got[0] is sums[0] and got[1] is sums[1]
        last = torch.empty_like(keys.k, device=DEVICE), torch.empty_like(keys.v, device=DEVICE)
        gradients(keys, lse, delta, torch.zeros_like(dq), narrow_keys(bounds, begin, end), accum=start, out=last)
        torch.testing.assert_close([total.half() for total in got], [*last], rtol=0, atol=0)
        parts.append([after - other for after, other in zip(got, start, strict=True)])
    dk, dv = (torch.cat(shards, 1).half() for shards in zip(*parts, strict=True))
    made = (out, lse, (dq - before).half(), dk, dv)
    kernel_cases.compare(Results(*(t.cpu() for t in made)), x, bounds)


def test_hops_without_visible_keys(launches: Launches) -> None:
    """State and sums do not change, and new gradients are zeros."""
    x, blind = inputs(SIZES, torch.float16), interval("all rows blind", SIZES.queries, SIZES.keys)
    _, lse, delta = of_forward(x)
    state = forward(x, final=False)
    before = [t.clone() for t in state]
    nothing = x._replace(v=torch.full_like(x.v, torch.nan))
    assert all(map(torch.equal, before, forward(nothing, blind, state=state, final=False)))
    dq, sums = zero_dq(x), (torch.randn(x.k.shape, device=DEVICE),) * 2
    before_sums = sums[0].clone()
    gradients(x, lse, delta, dq, blind, accum=sums, out=sums)
    assert torch.equal(sums[0], before_sums)
    assert not any(t.any() for t in (dq, *gradients(x, lse, delta, dq, blind)))


def test_scores_far_from_zero(launches: Launches) -> None:
    """Very negative scores without a mask: weights of a tile's padding overflow, and inf * 0 would be NaN."""
    x = inputs(SIZES, torch.bfloat16)
    x = x._replace(q=x.q * 100)
    compare(*forward(x), x)
    x = inputs(Sizes(16, 40, 64), torch.float16)
    x = x._replace(q=x.q.abs() + 1, k=-20 * (x.k.abs() + 1))
    _, lse, delta = of_forward(x)
    assert lse.max() < -88
    gradients(x, lse, delta, dq := zero_dq(x))
    assert dq.isfinite().all()


SMALL = inputs(Sizes(64, 64, 64), torch.float16)
FLOAT32 = Inputs(*(t.float() for t in SMALL))
NARROW = SMALL._replace(q=SMALL.q[..., :32], k=SMALL.k[..., :32], v=SMALL.v[..., :32], dout=SMALL.dout[..., :32])
SHIFTED = torch.zeros(4097, dtype=torch.float16)[1:].view(1, 64, 1, 64)
WIDE = torch.zeros(1, 64, 1, 65)[..., :64]
WIDE_HALF = torch.zeros(1, 64, 1, 65, dtype=torch.float16)[..., :64]
SOFTCAP = {"scores": Scores(softcap=1.0)}


def call_backward(x: Inputs, **options: Any) -> Any:
    dq = options.pop("dq", zero_dq(x)).to(DEVICE)
    return gradients(x, x.dlse, x.dlse, dq, **options)


def with_tile(*tile: int) -> dict[str, Any]:
    return {"config": replace(config(), forward=Tile(*tile))}


REFUSALS: list[tuple[Callable[..., Any], Inputs, dict[str, Any], str]] = [
    (forward, FLOAT32, {}, "q is torch.float32: .* supports only float16 and bfloat16"),
    (forward, NARROW, {}, "head dim 32 and v has 32: .* head dim 64 or 128 or 256, the same"),
    (forward, SMALL._replace(v=NARROW.v), {}, "head dim 64 and v has 32: .* head dim 64 or 128 or 256, the same"),
    (forward, SMALL._replace(k=WIDE_HALF), {}, "k has strides .* multiples of 16 bytes, or 8 elements"),
    (forward, SMALL._replace(v=SHIFTED), {}, "v has strides"),
    (forward, Inputs(*(t.expand(3, *t.shape[1:]) for t in SMALL)), {}, "q has strides .* positive"),
    (forward, SMALL, SOFTCAP, "scores have a softcap, ALiBi .* supports only plain scores"),
    (forward, SMALL, with_tile(64, 128, 8, 2), "block_q=64"),
    (forward, SMALL, with_tile(128, 128, 4, 2), "num_warps=4: .* num_warps=8"),
    (forward, SMALL, with_tile(128, 32, 8, 2), "block_k=32"),
    (forward, SMALL, with_tile(128, 64, 8, 1), "num_stages=1: .* at least 2"),
    (forward, SMALL, with_tile(128, 128, 8, 8), "shared memory"),
    (call_backward, FLOAT32, {}, "q is torch.float32: backward='hopper' supports only float16 and bfloat16"),
    (call_backward, NARROW, {}, "head dim 32 and v has 32: .* head dim 64 or 128, the same"),
    (call_backward, SMALL, {"dq": WIDE}, "dq has strides .* supports only addresses .* 4 elements"),
    *(
        (call_backward, SMALL._replace(**{name: WIDE_HALF}), {}, f"{name} has strides")
        for name in ("q", "k", "v", "dout")
    ),
    (call_backward, SMALL, SOFTCAP, "scores have a softcap, ALiBi .* supports only plain scores"),
    (call_backward, SMALL, {"config": backward_config(Tile(64, 128, 8, 2))}, "block_q=64, .* only block_q=128"),
    (call_backward, SMALL, {"config": backward_config(Tile(128, 64, 8, 2))}, "block_k=64 .* block_k=128"),
    (call_backward, SMALL, {"config": backward_config(Tile(128, 128, 4, 2))}, "num_warps=4: .* num_warps=8"),
    (call_backward, SMALL, {"config": backward_config(Tile(128, 128, 8, 4))}, "shared memory at head dim 64"),
]


@pytest.mark.parametrize(("call", "x", "options", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_unsuitable_inputs_are_refused(
    launches: Launches, call: Any, x: Inputs, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(x, **options)


def test_registers_of_a_multiprocessor_are_shared_by_three_warpgroups() -> None:
    registers, threads = hopper_forward_launch.THREAD_REGISTERS, 3 * 128
    assert registers % 8 == 0 and registers * threads <= REGISTERS < (registers + 8) * threads


def test_barriers_have_a_kibibyte_of_shared_memory() -> None:
    assert hopper_forward_launch.forward_shared_bytes(128, Tile(128, 64, 8, 3)) == 2 * 128 * (128 + 3 * 2 * 64)
    # K and V, two slots of Q and dO with lse and delta, dS of two steps, and dQ in fp32
    assert hopper_backward_launch.backward_shared_bytes(128, Tile(64, 128, 8, 2)) == 65_536 + 66_560 + 32_768 + 32_768
    room = shared_limit(hopper_forward_launch.HOPPER_CAPABILITY) - 1024
    hopper_forward_launch.check_shared_bytes("config.forward", 128, room, "num_stages")
    with pytest.raises(ValueError, match=r"config\.forward needs 232,449 bytes of shared memory at head dim 128"):
        hopper_forward_launch.check_shared_bytes("config.forward", 128, room + 1, "num_stages")


def test_only_compute_capability_9_0_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later GPUs have no wgmma."""
    for arch in (89, 90, 100):
        monkeypatch.setattr(hopper_forward_launch, "gpu_specs", lambda device, arch=arch: assumed_gpu(arch))
        assert hopper_forward_launch.is_hopper_device(torch.device("cuda")) == (arch == 90)
    monkeypatch.setattr(hopper_forward_launch, "device_text", lambda device: f"{device}, sm_100")
    for call, kernel in ((forward, "forward_kernel"), (call_backward, "backward")):
        with pytest.raises(
            ValueError, match=rf"q is on \S+, sm_100: {kernel}='hopper' supports only GPUs of compute capability 9.0"
        ):
            call(SMALL)


HOPS: dict[str, Bounds] = {
    "used": Bounds(None, None, torch.tensor([40], dtype=torch.int32)),
    "block_sparse": Bounds(None, None, None, BlockSparseIndex(torch.ones(1, 1, dtype=torch.bool), 128)),
}


@pytest.mark.parametrize("kind", HOPS)
def test_unsupported_hops_run_on_the_portable_kernels(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Hops with ``used``, ``block_sparse`` or without keys run on the portable kernel with the same tile."""
    calls: list[dict[str, Any]] = []
    for module in ("attention", "single_pass"):
        monkeypatch.setattr(f"ringattn.kernels.{module}.launch", lambda *a, **options: calls.append(options))
    forward(SMALL, HOPS[kind])
    assert [(call["BLOCK_Q"], call["BLOCK_K"], call["num_warps"]) for call in calls] == [(128, 64, 8)]
    forward(SMALL._replace(k=SMALL.k[:, :0], v=SMALL.v[:, :0]))
    no_queries = SMALL._replace(q=SMALL.q[:, :0], dout=SMALL.dout[:, :0], dlse=SMALL.dlse[:, :, :0])
    call_backward(no_queries)
    forward(no_queries)
    assert len(calls) == 4 and not launches.machines
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        forward(FLOAT32, HOPS[kind])
    q, k, v, dout, lse = (x.to(DEVICE) for x in SMALL)
    launcher = SinglePassLauncher(dout, q, lse, lse, zero_dq(SMALL), 1.0, backward_config())
    for bounds in (FULL, HOPS[kind], FULL):  # the same slots in hops of another kind
        launcher(k, v, bounds=bounds.to(DEVICE), scores=PLAIN, accum=None, out=(k.clone(), v.clone()))
    assert len(calls) == 5 and (ON_HOPPER or len(launches.machines) == 2)


def test_descriptors_are_cached_per_tensor_and_block() -> None:
    k, v = (torch.zeros(1, 128, 2, 64, dtype=torch.float16) for _ in range(2))
    described: Any = launch.TensorCache(launch.gluon_descriptor)
    made = described(k, 64)
    assert described(k, 64) is made and made.base is k and made.block_shape == [1, 64, 1, 64]
    others = [described(k, 128), described(v, 64), described(k, 64, 32)]
    assert [descriptor.block_shape[1::2] for descriptor in others] == [[128, 64], [64, 64], [64, 32]]
    shapes, x = launch.TensorCache(lambda x: x.shape), torch.empty(3)
    made, alive = shapes(x), weakref.ref(x)
    del x
    assert made == (3,) and alive() is not None  # otherwise another tensor could get its id
    odd: Any = launch.gluon_descriptor(torch.empty(70 * 192).as_strided((1, 70, 2, 64), (3, 192, 64, 1)), 64)
    assert (odd.shape, odd.strides) == ((1, 70, 2, 64), (64, 192, 64, 1))


@pytest.mark.parametrize("columns", [1, 8, 13])
def test_steps_cover_the_tile_range(columns: int) -> None:
    """Each tile is visited once, from last to first, and masked if its range is partial."""
    block = 8
    limits = [(a, b, c, d) for a in range(columns) for b in range(a, columns) for c in range(a, columns + 1)
              for d in range(max(b, c), columns + 1) if c >= a]  # fmt: skip
    for limit in limits:
        tiles = tile_range(*limit, block)
        past, tail, full, count = step_order.step_phases(*tiles, columns, block)
        visited = [step_order.step_column(step, past, block) for step in range(count)]
        if tiles.end <= tiles.start:
            assert count == 1 and visited[0] >= columns and tail == full == 1
            continue
        assert visited == list(range(tiles.start, tiles.end, block))[::-1]
        unmasked = visited[tail:full]
        assert set(unmasked) >= {x for x in visited[1:] if tiles.full_start <= x < tiles.full_end}
        assert all(tiles.full_start <= x < tiles.full_end for x in unmasked)


def test_results_do_not_depend_on_the_interleaving(launches: Launches) -> None:
    """A slot read before its tile arrives, a slot overwritten while read, or a deadlock would fail here."""
    x, y = inputs(Sizes(128, 256, 64), torch.float16), inputs(Sizes(512, 128, 64), torch.float16)
    _, lse, delta = of_forward(y)
    made = []
    for seed in range(16):
        launches.random.seed(seed)
        dq = zero_dq(y)
        made.append((*forward(x, config=config(64, 2 + seed % 2)), dq, *gradients(y, lse, delta, dq)))
    for other in made[1:]:
        assert all(map(torch.equal, other, made[0]))


COMPILED = pytest.mark.compiles(
    "kernels/hopper_forward_launch.py",
    "kernels/hopper_backward_launch.py",
    "autotune/gate.py",
    "tests/support/launch_arguments.py",
)


@COMPILED
def test_a_sample_passes_the_gate() -> None:
    """The loop of a full middle hop has fewer instructions than the portable kernel's of the same tile by pointers."""
    names = "90:bf16:128:hopper:middle:gqa", "90:fp16:64:hopper:last:full:gqa"
    rows = gate(*names, "90:bf16:128:hopper_backward:middle:full:gqa")
    assert len(rows) == 4
    (of_a_hop,) = (row for row in rows if (row["kernel"], row["full"], row["role"]) == ("forward", True, "middle"))
    assert of_a_hop["instructions"] < 523


@COMPILED
@pytest.mark.parametrize(
    ("kernel", "count"), [("hopper", 5), pytest.param("hopper_backward", 3, marks=pytest.mark.nightly)]
)
def test_the_arguments_of_a_launch_compile(kernel: str, count: int) -> None:
    assert compiling("tests.support.launch_arguments", kernel).count("compiled: ") == count


STEP = """
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR8].tnspB, R88, gsb0 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
{}WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
@P0 BRA `(.L_x_1) ;
"""
"""Listing of a main loop, reduced to the instructions that the gate reads."""

EXP = "MUFU.EX2 R1, R1 ;\n"
HANDED = """
cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4, %r5}], [%r6];
setmaxnreg.dec.sync.aligned.u32 \t24;
setmaxnreg.inc.sync.aligned.u32 \t240;
wgmma.wait_group.sync.aligned 1;
bar.sync 0, 128;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 1;
"""
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
"""Listing of stores and fences. Threads read the row numbers, so those stores need no fence."""

FENCE = "fence.proxy.async.shared::cta;\n"


def order_problems(listing: str) -> list[str]:
    return compiled_gate.order_problems(listing, 1, 64)


@pytest.mark.parametrize(
    ("reads", "code", "problems"),
    [
        (order_problems, STEP.format(EXP * 32), []),
        (order_problems, STEP.format(EXP * 31), ["31 of 31 exponentials run under the product with V"]),
        (order_problems, STEP.format(EXP * 32).replace("0x1", "0x0"), ["0 of 1 main loops start a product before the"]),
        (compiled_gate.handoff_problems, HANDED, []),
        (compiled_gate.handoff_problems, HANDED.replace("cp.async.bulk.tensor", "ld.global"), ["no TMA loads"]),
        (lambda code: compiled_gate.order_problems(code, 1, 128), STEP.format(EXP * 63), ["63 of 63 exponentials"]),
        (compiled_gate.handoff_problems, HANDED.replace("240", "168"), ["setmaxnreg is [24, 168]"]),
        (compiled_gate.handoff_problems, HANDED.replace("24;", "40;"), ["setmaxnreg is [40, 240]"]),
        (compiled_gate.handoff_problems, HANDED + HANDED.split("128;")[1], ["a slot is released before all"]),
        (compiled_gate.handoff_problems, HANDED.replace("bar.sync 0, 128;", ""), ["a slot is released before all"]),
        (compiled_gate.handoff_problems, HANDED.replace("mbarrier.arrive", "x"), ["no slot is released"]),
        (compiled_gate.unfenced_stores, FENCED, []),
        (compiled_gate.unfenced_stores, FENCED.replace(FENCE, ""), ["1 stmatrix", "1 st.shared"]),
    ],
)
def test_gate_problems_of_listings(reads: Callable[[str], list[str]], code: str, problems: list[str]) -> None:
    """Listings with a missing overlap, a wrong handover or a missing fence are found."""
    read = reads(code)
    assert len(read) == len(problems) and all(map(str.startswith, read, problems))


def test_the_tma_add_of_older_tritons_takes_32_bit_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ringattn.kernels.hopper.backward.tma.async_atomic_add", raising=False)
    semantic, handles = Mock(), [Mock(), Mock()]
    backward_kernels.find_tma_add()(*handles[:1], "coord", handles[1], _semantic=semantic)
    coord = semantic._convert_to_ir_values
    coord.assert_called_once_with("coord", require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    reduce = semantic.builder.create_async_tma_reduce
    reduce.assert_called_once_with(add, handles[0].handle, coord.return_value, handles[1].handle)
