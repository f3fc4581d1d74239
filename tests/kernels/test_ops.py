"""The kernels' entries as ``torch.library`` ops: opcheck, gradients, graphs, and renamed copies of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ringattn import kernels
from ringattn.kernels import PLAIN, BlockSparseIndex, Bounds, KernelConfig, Scores, Tile, attend, attention, ops
from ringattn.kernels.ops import op_namespace, pack_config, pack_kernel_args, unpack_config, unpack_kernel_args
from ringattn.kernels.tables import TuningPoint

from ..support.baselines import Results
from ..support.kernel_cases import Inputs, Sizes, compare, inputs, interval
from ..support.tile_tables import entry, save

ROOT = Path(__file__).parents[2]
SIZES = Sizes(queries=24, keys=40, head_dim_v=24, heads=2, batch=2)
TILES = KernelConfig(forward=Tile(16, 16, 4, 1), dq=Tile(16, 16, 4, 1), dkdv=Tile(16, 16, 4, 1))
SINGLE_PASS = replace(TILES, backward="single_pass")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.int32)


def scores() -> Scores:
    places = {"q_positions": positions(24), "k_positions": positions(40)}
    return Scores(3.0, torch.rand(2), 0.3, 2**63, 1, places["q_positions"], places["k_positions"])


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bounds": lambda: {"bounds": interval("causal", 24, 40), "softmax_scale": 0.3, "config": TILES},
    "used": lambda: {"bounds": Bounds(None, None, torch.tensor([13, 40], dtype=torch.int32))},
    "block_sparse": lambda: {
        "bounds": Bounds(None, None, block_sparse=BlockSparseIndex(torch.eye(2, 3, dtype=torch.bool), 16))
    },
    "scores": lambda: {"scores": scores()},
}


@pytest.mark.nightly
def test_opcheck() -> None:
    """The quantisation ops skip the schema check, because torch cannot compare e4m3. Graphs have tests of their own."""
    q, k, v, dout, dlse = inputs(Sizes(queries=8, keys=16))
    call = pack_kernel_args()
    out, lse = (x.clone() for x in ops.forward_op(q, k, v, False, *call))
    backward_inputs = (dout, q, k, v, lse, ops.delta_op(dout, out, dlse))
    into = (torch.zeros_like(k), torch.zeros_like(v))
    codes = torch.zeros(k.shape, dtype=torch.float8_e4m3fn), torch.zeros(kernels.scale_shape(tuple(k.shape)))
    checks = ["test_autograd_registration", "test_faketensor", "test_schema"]
    for op, args in (
        (ops.fold_op, (q, k, v, out, lse, *call)),
        (ops.finish_op, (q, k, v, out, lse, *call)),
        (ops.delta_op, (dout, out, dlse)),
        (ops.backward_op, (*backward_inputs, *call)),
        (ops.dq_op, (*backward_inputs, None, torch.zeros_like(q), True, *call)),
        (ops.dkdv_op, (*backward_inputs, None, None, *into, True, *call)),
        (
            ops.gradients_op,
            (*backward_inputs, torch.zeros_like(q), None, None, *into, True, *pack_kernel_args(config=SINGLE_PASS)),
        ),
        (ops.quantize_op, (k, *codes)),
        (ops.dequantize_op, (*codes, torch.zeros_like(k))),
    ):
        quantized = op in (ops.quantize_op, ops.dequantize_op)
        torch.library.opcheck(op, args, test_utils=checks[:-1] if quantized else checks)
    leaves = (x.requires_grad_() for x in inputs(SIZES)[:3])
    scored = (*leaves, True, *pack_kernel_args(**CALLS["scores"]()))
    torch.library.opcheck(ops.forward_op, scored, test_utils=[*checks, "test_aot_dispatch_dynamic"])


CONFIGS: list[dict[str, Any]] = [
    {"loads": "pointers"},
    {"backward": "single_pass_deterministic", "single_pass": Tile(64, 32, 8, 3)},
    {"forward_kernel": "hopper"},
    {"dkdv_splits": 2, "order": "longest", "persistent": True, "sm_margin": 8, "pack_gqa": True,
     "dkdv_epilogue": "descriptors"},
]  # fmt: skip
"""Each field except the first three tiles differs from its default in one of these configs."""


def test_packed_configs_keep_every_field() -> None:
    tiles = (Tile(16, 32, 1, 1), Tile(32, 64, 2, 2), Tile(64, 128, 4, 3))
    for chosen in CONFIGS:
        config = KernelConfig(*tiles, **chosen)
        assert unpack_config(*pack_config(config)) == config
    assert {name for chosen in CONFIGS for name in chosen} == {field.name for field in fields(KernelConfig)[3:]}
    assert unpack_config(*pack_config(None)) is None


def test_packed_arguments_keep_every_field() -> None:
    """Eager and compiled calls both pack their arguments, so they would lose the same field."""
    index, modified, cpu = BlockSparseIndex(torch.eye(2, 3, dtype=torch.bool), 16), scores(), torch.device("cpu")
    rows = positions(24), positions(24) + 1, positions(2)
    call = unpack_kernel_args(cpu, *pack_kernel_args(Bounds(*rows, index), modified, 0.3, TILES))
    assert vars(call["scores"]) == vars(modified)  # the same tensors
    made = call["bounds"]
    assert all(x is y for x, y in zip((made.lo, made.hi, made.seqused_k), rows, strict=True))
    assert (made.block_sparse.visible is index.visible, made.block, made.block_sparse.device) == (True, 16, cpu)
    assert (call["softmax_scale"], call["config"]) == (0.3, TILES)
    for bounds in (Bounds(*rows[:2]), Bounds(None, None, rows[2]), Bounds(None, None, block_sparse=index)):
        made = unpack_kernel_args(cpu, *pack_kernel_args(bounds))["bounds"]
        assert (made.lo, made.hi, made.seqused_k) == (bounds.lo, bounds.hi, bounds.seqused_k)
        assert (made.block_sparse is None) == (bounds.block_sparse is None)


@pytest.mark.parametrize(("kind", "config"), [("full", None), ("causal", SINGLE_PASS)])
def test_attend_gradients_are_exact(kind: str, config: KernelConfig | None) -> None:
    x = inputs(SIZES)
    q, k, v = (tensor.requires_grad_() for tensor in x[:3])
    bounds = interval(kind, 24, 40)
    out, lse = attend(q, k, v, bounds=bounds, config=config)
    grads = torch.autograd.grad((out, lse), (q, k, v), (x.dout, x.dlse))
    compare(Results(out.detach(), lse.detach(), *grads), Inputs(*(t.detach() for t in x)), bounds)


def test_attend_passes_its_config_to_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = {name: Mock(wraps=getattr(attention, name)) for name in ("attention_forward", "backward_from_delta")}
    for name, launch in launches.items():
        monkeypatch.setattr(attention, name, launch)
    attend(*(x.requires_grad_() for x in inputs(SIZES)[:3]), config=TILES)[0].sum().backward()
    assert [launch.call_args.kwargs["config"] for launch in launches.values()] == [TILES, TILES]


@pytest.mark.parametrize("name", ["bounds", "used", "block_sparse", "scores"])
def test_attend_in_a_graph_equals_eager(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(SIZES)[:3])
    call = CALLS[name]()
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out, lse = function(q, k, v, **call)
        results.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_second_derivative_raises() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(SIZES)[:3])
    (dq,) = torch.autograd.grad(attend(q, k, v)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward has no derivative"):
        dq.sum().backward()


def test_slopes_that_require_a_gradient_are_refused() -> None:
    q, k, v = inputs(SIZES)[:3]
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        attend(q, k, v, scores=Scores(alibi_slopes=torch.rand(2, requires_grad=True)))

    def layer(slopes: Tensor) -> Tensor:
        places = positions(24), positions(40)
        made = Scores(alibi_slopes=slopes * 2, q_positions=places[0], k_positions=places[1])
        return kernels.attention_forward(q, k, v, scores=made)[0]

    with pytest.raises(Exception, match="alibi_slopes requires a gradient"):  # torch wraps the error
        torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.rand(2, requires_grad=True))


def folded(x: Inputs, bounds: Bounds, half: torch.dtype) -> list[Tensor]:
    """Run forward and backward over two key shards, with every way to continue a state or a sum."""
    q, k, v, dout = (t.to(half) for t in x[:4])
    first, second = slice(0, 16), slice(16, None)
    state = kernels.attention_forward(q, k[:, first], v[:, first], final=False)
    state = kernels.attention_forward(q, k[:, first], v[:, first], state=state, final=False, bounds=bounds)
    out, lse = kernels.attention_forward(q, k[:, second], v[:, second], state=state)
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k[:, first], v[:, first]))
    kernels.attention_backward(dout, q, k[:, first], v[:, first], out, lse, dlse=x.dlse, dq=dq, dk=dk, dv=dv)
    dq, dk, dv = kernels.attention_backward(dout, q, k[:, first], v[:, first], out, lse, dq=dq, dk=dk, dv=dv)
    delta = kernels.attention_delta(dout, out)
    inputs = (dout, q, k[:, second], v[:, second], lse, delta)
    last = kernels.attention_dq(*inputs, accum=dq, out=torch.zeros_like(q))
    more = kernels.attention_dkdv(*inputs, scores=PLAIN)
    sums = kernels.attention_dkdv(*inputs, accum=(more[0].float(), more[1].float()))
    total = torch.zeros(q.shape)
    at_once = kernels.attention_gradients(*inputs, dq=total, config=SINGLE_PASS)
    alone = kernels.attention_backward(dout, q, *inputs[2:4], out, lse, dk=sums[0].float(), dv=sums[1].float(),
                                       config=SINGLE_PASS)  # fmt: skip
    more_sums: dict[str, Any] = {"dq": total.clone(), "dk": more[0].float(), "dv": more[1].float()}
    in_place = kernels.attention_backward(dout, q, *inputs[2:4], out, lse, **more_sums, config=SINGLE_PASS)
    float_state = kernels.attention_forward(x.q, x.k[:, first], x.v[:, first], final=False)
    updated = kernels.attention_forward(x.q, x.k[:, second], x.v[:, second], state=float_state)
    return [out, lse, dq, dk, dv, last, *more, *sums, total, *at_once, *alone, *in_place, *float_state, *updated]


def test_every_entry_in_a_graph_equals_eager() -> None:
    x, bounds = inputs(SIZES), interval("causal", 24, 16)
    expected = folded(x, bounds, torch.float16)
    got = torch.compile(folded, fullgraph=True, backend="aot_eager")(x, bounds, torch.float16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_the_last_shard_leaves_a_float32_state_alone() -> None:
    q, k, v = inputs(SIZES)[:3]
    out, lse = kernels.attention_forward(q, k, v, final=False)
    before = out.clone(), lse.clone()
    made = ops.finish_op(q, k, v, out, lse, *pack_kernel_args())
    assert torch.equal(out, before[0]) and not torch.equal(lse, before[1])
    assert torch.equal(made, kernels.attention_forward(q, k, v, state=before)[0])


def test_changed_lengths_reuse_the_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds) -> Tensor:
        return attend(q * 2, k, v, bounds=bounds)[0].sin()

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (20, 24, 36):
        q, k, v = (x.requires_grad_() for x in inputs(Sizes(queries=rows, keys=rows + 8))[:3])
        bounds = interval("causal", rows, rows + 8)
        for function in (compiled, layer):
            function(q, k, v, bounds).sum().backward()
        torch.testing.assert_close(compiled(q, k, v, bounds), layer(q, k, v, bounds), rtol=0, atol=0)
    assert counter.frame_count <= 2  # one for the first lengths, and a dynamic one


COPIES = """
import sys
import torch
import elsewhere as one
from vendor.attention import fused as other
assert not any(name.partition(".")[0] == "ringattn" for name in sys.modules), "a copy imports ours"
import ringattn.kernels as ours
q, k, v = (torch.randn(1, 24, heads, 16, requires_grad=True) for heads in (2, 1, 1))
results = []
for copy in (ours, one, other):
    out, lse = copy.attend(q, k, v, bounds=copy.Bounds(torch.zeros(24).int(), torch.arange(1, 25).int()))
    again = torch.compile(copy.attend, fullgraph=True, backend="aot_eager")(q, k, v)[0]
    assert torch.equal(again, copy.attention_forward(q.detach(), k.detach(), v.detach())[0])
    results.append([out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))])
for copied in results[1:]:
    assert all(torch.equal(x, y) for x, y in zip(copied, results[0], strict=True))
names = {copy.ops.forward_op._qualname for copy in (ours, one, other)}
assert names == {f"{n}::attention_forward" for n in ("ringattn", "elsewhere", "vendor__attention__fused")}, names
assert ours.Bounds is not one.Bounds is not other.Bounds
other.launch_plan.gpu_specs = lambda device: other.gpu.assumed_gpu(90, "NVIDIA H200")
assert other.default_config(q, v).forward == other.Tile(64, 128, 8, 2), "a table in `tuned/` of a copy serves"
"""


def test_ops_are_named_after_the_package() -> None:
    packages = {
        "ringattn.kernels": "ringattn",
        "vendor.ringattn.kernels": "vendor__ringattn",
        "a.kernels": "a__kernels",
    }
    assert {name: op_namespace(name) for name in packages} == packages


@pytest.mark.nightly
def test_renamed_copies_run_beside_the_original(tmp_path: Path) -> None:
    for place in ("elsewhere", "vendor/attention/fused"):
        shutil.copytree(ROOT / "kernels", tmp_path / place, ignore=shutil.ignore_patterns("__pycache__"))
    point = TuningPoint("forward", "fp32", 16, 16, 2, "full", 64)
    save(tmp_path / "vendor/attention/fused/tuned", entry(point, Tile(64, 128, 8, 2)))
    done = subprocess.run([sys.executable, "-c", COPIES], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
