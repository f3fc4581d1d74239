"""Backends on other projects' kernels: their calls, limits and refusals, by stand-ins on the CPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ringattn import Layout, Supports, ring_attention
from ringattn.kernels import PLAIN
from ringattn.kernels.gpu import arch_name, assumed_gpu
from ringattn.ring import loop
from ringattn.ring.cpu import aten
from ringattn.ring.cpu.aten import CPU_OPERATOR
from ringattn.ring.local import gpu_operators, rectangles
from ringattn.ring.local.operators import Operator, OperatorAttention, is_deterministic
from ringattn.ring.local.protocol import FEATURES

from ..support.ring_cases import check_ring, inputs, run_ring
from .test_local_kernels import nothing_sent, refusals

pytestmark = pytest.mark.usefixtures("one_core")
BACKENDS = {kernel.name: kernel for kernel in gpu_operators.GPU_BACKENDS}
NAMES = pytest.mark.parametrize("name", BACKENDS)
ON_CPU = Supports(devices=("cpu",), value_dims=range(1, 257))


def on_cpu(operator: Operator, **options: Any) -> OperatorAttention:
    return OperatorAttention("stand-in", operator, supports=ON_CPU, **options)


@pytest.mark.parametrize("causal", [True, False])
def test_the_class_equals_the_aten_backend_bit_for_bit(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "MIN_SPLIT_ROWS", 512)  # aten would compute causal squares in pieces
    layout, whole = Layout.zigzag(512, 2), inputs(512, (4, 2))
    ours = run_ring(layout, whole, causal=causal, backend=on_cpu(CPU_OPERATOR))
    assert all(map(torch.equal, ours, run_ring(layout, whole, causal=causal, backend="aten")))


class Calls(TorchDispatchMode):
    """Dispatch mode that records the arguments of attention operators by the names in torch's schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func._schema.name:
            given = {argument.name: argument.default_value for argument in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            self.calls[func._schema.name.removeprefix("aten::")] = given
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "operator"), [
    ("flash_attention", gpu_operators.FLASH_OPERATOR),
    ("cudnn_attention", gpu_operators.CUDNN_OPERATOR),
    ("flash_attention_for_cpu", CPU_OPERATOR),
])  # fmt: skip
def test_calls_fit_the_schemas_of_the_installed_torch(kind: str, operator: Operator) -> None:
    q, out, dout = (torch.empty(2, 4, 5, 16, device="meta") for _ in range(3))
    k, v = (torch.empty(2, 2, 7, 16, device="meta") for _ in range(2))
    lse = torch.empty(2, 4, 5, device="meta")
    with Calls() as seen:
        made, made_lse = operator.forward_call(q, k, v, True, 0.3)
        grads = operator.backward_call(dout, q, k, v, out, lse, True, 0.3)
    assert made.shape == q.shape and made_lse.shape == lse.shape
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    forward, backward = (seen.calls[f"_scaled_dot_product_{kind}{suffix}"] for suffix in ("", "_backward"))
    for call in (forward, backward):
        assert call["query"] is q and call["key"] is k and call["value"] is v
        assert (call["dropout_p"], call["is_causal"], call["scale"]) == (0.0, True, 0.3)
        assert call.get("attn_bias") is None and call.get("attn_mask") is None
    assert backward["grad_out"] is dout and backward["out"] is out
    assert backward["logsumexp"].shape == ((2, 4, 5, 1) if kind.startswith("cudnn") else (2, 4, 5))
    if kind.startswith("cudnn"):
        assert forward["compute_log_sumexp"] is True
    if "cpu" not in kind:
        assert (backward["max_q"], backward["max_k"]) == (5, 7)
        assert backward["cum_seq_q"] is None and backward["cum_seq_k"] is None


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and ``lse`` on ``[B, S, H, D]``, after checks that GPU kernels also make."""
    for x in (q, k, v):
        assert x.shape[-1] % 8 == 0 and x.stride(-1) == 1
        assert all(size % 8 == 0 for size in (x.storage_offset(), *x.stride()[:-1]))
    assert not causal or q.shape[1] == k.shape[1]
    return CPU_OPERATOR.forward(q, k, v, causal=causal, scale=scale)


def differentiate(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert out.shape == dout.shape == (*q.shape[:3], v.shape[3])
    return CPU_OPERATOR.backward(dout, q, k, v, out, lse, causal=causal, scale=scale)


def published(compute: Callable[..., Any], names: str) -> Callable[..., Any]:
    """Return an entry that takes these arguments, by position or by name, and passes them to ``compute``."""
    kind, default = Parameter.POSITIONAL_OR_KEYWORD, {"causal": False, "is_causal": False, "deterministic": False}
    signature = Signature([Parameter(name, kind, default=default.get(name)) for name in names.split()])

    def entry(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        given.apply_defaults()
        return compute(**given.arguments)

    return entry


def forward_3(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    results = attend(q, k, v, given["causal"], given["softmax_scale"])
    return results if given["return_attn_probs"] else results[0]


def backward_3(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **given: Any) -> Tensor:
    assert not any(given[name] is not None for name in given if "seq" in name)
    assert given["deterministic"] == torch.are_deterministic_algorithms_enabled()
    grads = differentiate(dout, q, k, v, out, softmax_lse, given["is_causal"], given["softmax_scale"])
    for into, grad in zip((given["dq"], given["dk"], given["dv"]), grads, strict=True):
        into.copy_(grad)
    return softmax_lse


def forward_4(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Any:
    out, lse = attend(q, k, v, given["causal"], given["softmax_scale"])
    return out, lse if given["return_lse"] else None


def backward_4(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **given: Any
) -> tuple[Tensor, ...]:
    assert given["deterministic"] == torch.are_deterministic_algorithms_enabled()
    return differentiate(dout, q, k, v, out, lse, given["causal"], given["softmax_scale"])


# The arguments published in Dao-AILab/flash-attention at 0251105a (2026-08-15).
PUBLISHED = {
    "fa3": {
        "flash_attn_func": published(forward_3, """
            q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits
            pack_gqa deterministic sm_margin return_attn_probs"""),
        "_flash_attn_backward": published(backward_3, """
            dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv
            softmax_scale is_causal window_size_left window_size_right softcap deterministic sm_margin"""),
    },
    "fa4": {
        "flash_attn_func": published(forward_4, """
            q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa
            deterministic score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors
            block_sparse_tensors_bwd return_lse"""),
        "_flash_attn_bwd": published(backward_4, """
            q k v out dout lse softmax_scale causal softcap window_size_left window_size_right m_block_size n_block_size
            num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB dQ_swapAB AtomLayoutMSdP
            AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q
            max_seqlen_k deterministic dq dk dv score_mod score_mod_bwd mask_mod aux_tensors aux_scalars
            block_sparse_tensors dlse learnable_sink"""),
    },
}  # fmt: skip
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Install a stand-in for FlashAttention-3 or 4."""
    module = SimpleNamespace(**PUBLISHED[name])
    for place in ("flash_attn", "flash_attn.cute", MODULES[name]):
        monkeypatch.setitem(sys.modules, place, module)


@pytest.mark.parametrize("dims", [(16, 16), (12, 20)])
@pytest.mark.parametrize("name", MODULES)
def test_flash_attention_is_exact_in_a_ring(name: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, name)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: dims == (16, 16))
    operator = BACKENDS[name].operator
    kernel = on_cpu(
        Operator(operator.forward_call, operator.backward_call, has_one_dim=True), load=BACKENDS[name]._load
    )
    check_ring(Layout.zigzag(40, 2), inputs(40, (4, 2), dims), causal=True, backend=kernel)


@NAMES
def test_cpu_tensors_are_refused_before_anything_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_sent(monkeypatch):
        refusals(name, ValueError, f"backend '{name}' does not support q on cpu: it supports cuda")


@pytest.mark.parametrize(("name", "install"), [("fa3", "the folder hopper"), ("fa4", "pip install flash-attn-4")])
def test_a_missing_package_is_named_before_anything_is_sent(
    name: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with nothing_sent(monkeypatch):
        kernel = on_cpu(BACKENDS[name].operator, load=BACKENDS[name]._load)
        refusals(kernel, ImportError, f"{MODULES[name]} cannot be imported .*{install}")


@NAMES
def test_only_masks_and_gradients_are_supported(name: str) -> None:
    refused = {"softcap", "alibi_slopes", "dropout_p", "return_max_logits", "nan_inputs", "config"}
    assert {*BACKENDS[name].supports.features} == FEATURES.keys() - refused
    assert BACKENDS[name].supports.dtypes == (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(("name", "arch", "dims", "deterministic", "accepted"), [
    ("flash", 80, (256, 256), True, True),
    ("flash", 75, (64, 64), False, False),
    ("flash", 89, (128, 193), False, False),  # padded to 200
    *(("flash", arch, (224, 224), False, False) for arch in (86, 120, 121)),
    ("flash", 89, (192, 192), False, True),
    ("flash", 89, (225, 225), False, True),
    ("flash", 90, (200, 200), False, True),
    ("flash", 90, (192, 128), False, True),
    ("cudnn", 80, (128, 128), False, True),
    ("cudnn", 80, (129, 64), False, False),
    ("cudnn", 90, (256, 256), False, True),
    ("cudnn", 90, (64, 64), True, False),
    ("cudnn", 103, (192, 128), False, True),
    ("cudnn", 100, (192, 192), False, False),
    ("cudnn", 90, (192, 128), False, True),
    ("cudnn", 120, (192, 128), False, False),
    ("flash", 90, (64, 257), False, False),
    ("cudnn", 90, (512, 512), False, False),
    ("cudnn", 80, (64, 256), False, False),
    ("fa3", 90, (64, 512), False, False),
    ("fa3", 90, (128, 104), False, False),
    ("fa4", 90, (320, 320), False, False),
    ("fa4", 90, (64, 264), False, False),
    ("fa4", 100, (64, 136), False, False),
    ("fa3", 80, (256, 256), False, True),
    ("fa3", 80, (192, 128), False, False),
    ("fa3", 90, (192, 128), False, True),
    ("fa3", 90, (128, 64), False, False),
    ("fa3", 90, (192, 96), False, False),
    ("fa3", 90, (64, 256), False, True),
    ("fa3", 80, (64, 256), False, False),
    ("fa3", 90, (192, 192), True, True),
    ("fa3", 75, (64, 64), False, False),
    ("fa3", 90, (256, 256), True, False),
    ("fa3", 100, (128, 128), False, False),
    ("fa4", 80, (64, 64), False, False),
    ("fa4", 90, (256, 128), False, True),
    ("fa4", 100, (256, 256), False, True),
    ("fa4", 100, (192, 192), False, False),
    ("fa4", 110, (192, 128), False, True),
    ("fa4", 100, (128, 128), True, True),
    ("fa4", 120, (128, 128), True, False),
    ("fa4", 120, (128, 128), False, True),
    ("fa4", 120, (192, 128), False, False),
    *((name, 0x942, (64, 64), False, False) for name in ("cudnn", "fa3", "fa4")),
])  # fmt: skip
def test_head_dims_of_every_gpu(
    name: str, arch: int, dims: tuple[int, int], deterministic: bool, accepted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ringattn.kernels.gpu._query_gpu", lambda device: assumed_gpu(arch))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    kernel = on_cpu(BACKENDS[name].operator, accepts=BACKENDS[name]._accepts, limits="THESE")
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, v = (torch.empty(1, 1, 1, dim, device="cuda") for dim in dims)
        if accepted:
            kernel.check(q, v, scores=PLAIN, block=None, config=None)
        else:
            mode = " in deterministic mode" if deterministic else ""
            message = f"head dim {dims[0]} for q and k and {dims[1]} for v on {arch_name(arch)}{mode}: .*THESE"
            with pytest.raises(ValueError, match=message):
                kernel.check(q, v, scores=PLAIN, block=None, config=None)


def test_columns_of_an_lse_gradient_count_as_head_dim() -> None:
    kernel = on_cpu(gpu_operators.FLASH_OPERATOR, accepts=lambda arch, dim, *_: dim <= 64)
    with FakeTensorMode(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("ringattn.kernels.gpu._query_gpu", lambda device: assumed_gpu(90))
        narrow, wide = (torch.empty(1, 1, 1, dim, device="cuda") for dim in (62, 64))
        kernel.check(wide, wide, scores=PLAIN, block=None, config=None)
        kernel.check_dlse(narrow, narrow)
        with pytest.raises(ValueError, match="64 for v with 2 more columns for the gradient through lse"):
            kernel.check_dlse(wide, wide)


def test_an_lse_gradient_is_checked_before_the_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no room for lse")

    monkeypatch.setattr(OperatorAttention, "check_dlse", refuse)
    monkeypatch.setattr(loop, "backward", lambda *_: pytest.fail("the backward has begun"))
    refusals(on_cpu(CPU_OPERATOR), ValueError, "no room for lse", return_lse=True)


def test_unaligned_tensors_are_copied() -> None:
    operator: Any = Operator(attend, differentiate)
    whole = torch.randn(5, 2, 6, 4, 24)
    # only the offset is unaligned, and then only the strides
    for unaligned in (whole[..., 3:19], whole.as_strided((5, 2, 6, 4, 16), (960, 480, 68, 17, 1))):
        aligned = unaligned.contiguous()
        results = operator.forward(*unaligned[:3], causal=True, scale=0.25)
        assert not operator.forward(*unaligned[:3].detach().requires_grad_(), causal=True, scale=0.25)[0].requires_grad
        assert all(map(torch.equal, results, operator.forward(*aligned[:3], causal=True, scale=0.25)))
        grads = operator.backward(*unaligned[:4], *results, causal=True, scale=0.25)
        assert all(map(torch.equal, grads, operator.backward(*aligned[:4], *results, causal=True, scale=0.25)))


def test_one_key_or_one_row_goes_to_the_other_operator() -> None:
    def refuse(q: Tensor, k: Tensor, *_: Any) -> Any:
        assert min(q.shape[1], k.shape[1]) > 1
        return attend(q, k, *_)

    def refuse_backward(dout: Tensor, q: Tensor, k: Tensor, *_: Any) -> Any:
        assert min(q.shape[1], k.shape[1]) > 1
        return differentiate(dout, q, k, *_)

    operator = Operator(refuse, refuse_backward, for_one_token=Operator(attend, differentiate))
    check_ring(Layout.uneven([1, 20, 1]), inputs(22, (4, 2)), causal=True, backend=on_cpu(operator))
    assert gpu_operators.CUDNN_OPERATOR.for_one_token is gpu_operators.FLASH_OPERATOR


@pytest.mark.parametrize("only_warns", [False, True])
def test_a_mode_that_only_warns_is_not_deterministic(only_warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch, "is_deterministic_algorithms_warn_only_enabled", lambda: only_warns)
    assert is_deterministic() != only_warns


def test_many_rectangles_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 64, 1, 8)
    kernel = on_cpu(CPU_OPERATOR)
    with caplog.at_level(logging.INFO, logger=rectangles.__name__):
        ring_attention(q, q, q, causal=True, backend=kernel)
        assert not caplog.records
        for _ in range(2):
            ring_attention(q, q, q, cu_seqlens=[*range(0, 65, 2)], backend=kernel)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "backend 'stand-in': a mask splits a hop into 32 rectangles, each a kernel call"
    ]
