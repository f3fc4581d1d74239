"""The ready adapters, with stand-ins for the projects that they call."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringattn
from ringattn import Layout
from ringattn.conformance.adapters import flash_rings, lucidrains, megatron, ours, torch_rings
from ringattn.conformance.cases import Case
from ringattn.conformance.evidence import run_case
from ringattn.conformance.protocol import AXES, READY, TargetCall, load_target, resolve_path
from ringattn.conformance.referee import judge
from ringattn.conformance.standalone import attend_plainly

from ..support.broken_rings import reply_alone


def install(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> None:
    """Make a module with these values importable."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        package = ".".join(parts[:i])
        if package not in sys.modules or i == len(parts):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
    vars(sys.modules[name]).update(values)


def plain(q: Tensor, k: Tensor, v: Tensor, heads: Tensor, causal: bool) -> Tensor:
    mask = torch.ones(q.shape[1], q.shape[1]).tril() > 0 if causal else None
    q, k, v = q.transpose(1, 2), k[:, :, heads].transpose(1, 2), v[:, :, heads].transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def sentence(attend: Any, case: Case) -> str:
    """Return the verdict on an adapter on one rank."""
    return judge(replace(case, world=1), partial(reply_alone, run_case, attend)).sentence().partition(": ")[2]


def test_every_option_reaches_ring_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(ringattn, "ring_attention", lambda *tensors, **options: calls.append((tensors, options)))
    names = {field.name for field in fields(TargetCall)}
    values: dict[str, Any] = {name: object() for name in names} | {"layout": "zigzag", "world": 3, "prefix_length": 9}
    ours.attend("q", "k", "v", TargetCall(**values))  # type: ignore[arg-type]
    ours.attend("q", "k", "v", TargetCall(**values | {"layout": "uneven", "prefix_length": 0}))  # type: ignore[arg-type]
    (tensors, options), (_, uneven) = calls
    same = names & {*options}
    assert tensors == ("q", "k", "v") and all(options[name] is values[name] for name in same)
    assert options.keys() - same == {"learnable_sink", "return_lse"}
    assert options["learnable_sink"] is values["sink"] and options["return_lse"] is True
    described = {"rank", "world", "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "features", "positions"}
    assert names - same == described | {"sink", "needs_lse"}
    assert uneven["layout"] == Layout.uneven([16, 11, 6]) and uneven["prefix_length"] is None


@pytest.mark.parametrize("name", READY)
def test_every_adapter_describes_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flash_rings, lucidrains, megatron, torch_rings):
        monkeypatch.setattr(module, "installed", lambda package: f"1.0 of {package}")
    target = load_target(name)
    assert resolve_path(name).startswith("ringattn.conformance.adapters.") and target.version
    assert ringattn.__version__ in target.version or "1.0 of " in target.version or torch.__version__ in target.version
    dtype = "bfloat16" if "flash" in resolve_path(name) else "float32"
    cases = (
        Case(*values, dtype=dtype, heads="4/4", gradients="none")
        for values in product(("causal", "full"), AXES["documents"], ("plain",), AXES["layout"], (1, 2, 3, 4))
    )
    supported = {case for case in cases if not target.refusal(case)}
    assert supported
    for case in supported:
        tokens = torch.cat([target.positions(case.call(rank)) for rank in range(case.world)])
        assert tokens.sort().values.equal(torch.arange(case.tokens)), case.id
    causal, full = ({case.layout for case in supported if case.mask == mask} for mask in ("causal", "full"))
    layouts = {
        "ringattn": ({"contiguous", "zigzag", "striped", "uneven"},) * 2, "torch-flex": ({"contiguous"},) * 2,
        "lucidrains": ({"contiguous", "striped"}, {"contiguous"}), "megatron": ({"contiguous", "zigzag"}, set()),
        "zhuzilin": ({"contiguous", "zigzag", "striped"}, {"contiguous"}),
        "diffusers": (set(), {"contiguous", "uneven"}),
        "transformers": ({"contiguous", "zigzag"}, set()), "accelerate": ({"contiguous", "zigzag"}, set()),
    }.get(name, ({"contiguous", "zigzag"}, {"contiguous"}))  # fmt: skip
    assert (causal, full) == layouts
    has_one_rank = name in ("ringattn", "torch-sdpa", "torch-flex", "transformers", "accelerate")
    assert {case.world for case in supported} == {2, 3, 4} | ({1} if has_one_rank else set())
    documents = {case.documents for case in supported}
    assert ("none" not in documents) == (name == "zhuzilin-varlen") and ("ragged" in documents) == (
        name in ("ringattn", "zhuzilin-varlen", "torch-flex", "transformers", "accelerate")
    )


@pytest.mark.parametrize(("layout", "mask"), [("contiguous", "causal"), ("contiguous", "full"), ("striped", "causal")])
def test_lucidrains_gets_its_own_order_of_heads(layout: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[dict[str, Any]]()

    def ring_flash_attn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        calls.append(options)
        return plain(q, k, v, torch.arange(q.shape[2]) % k.shape[2], options["causal"])

    install(monkeypatch, "ring_attention_pytorch.ring_flash_attention", ring_flash_attn=ring_flash_attn)
    for heads in ("4/2", "6/1"):
        assert sentence(lucidrains.attend, Case(mask, layout=layout, heads=heads)) == "right"
    assert calls[0] == {
        "causal": mask == "causal", "bucket_size": 8, "ring_reduce_col": True, "ring_size": 1,
        "striped_ring_attn": layout == "striped",
    }  # fmt: skip
    striped = Case(layout="striped")
    first = [lucidrains.positions(striped.call(rank))[:5].tolist() for rank in (0, 1)]
    assert first == [[0, 4, 8, 12, 16], [2, 6, 10, 14, 18]]


def test_megatron_gets_tokens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(torch.nn.Module):
        def __init__(self, config: Any, layer: int, mask: str, kind: str) -> None:
            super().__init__()
            assert (layer, mask, kind, config.num_layers) == (1, "causal", "self", 1)
            self.config = config

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
            config, heads = self.config, torch.arange(q.shape[2])
            assert config.hidden_size == q.shape[2] * q.shape[3] and config.num_attention_heads == q.shape[2]
            assert config.context_parallel_size == 1 and config.num_query_groups == k.shape[2] == v.shape[2]
            group = config.num_attention_heads // config.num_query_groups
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return plain(q, k, v, heads // group, causal=True).flatten(2).transpose(0, 1)

    folder = "megatron.core.transformer"
    install(monkeypatch, f"{folder}.dot_product_attention", DotProductAttention=Attention)
    install(monkeypatch, f"{folder}.enums", AttnMaskType=SimpleNamespace(causal="causal"))
    install(monkeypatch, f"{folder}.transformer_config", TransformerConfig=SimpleNamespace)
    for heads in ("4/2", "6/1"):
        assert sentence(megatron.attend, Case(heads=heads)) == "right"


class Flash(torch.autograd.Function):
    """The stand-in for ``flash_attn`` as an operator; ``edges`` selects the functions for packed documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, edges: Tensor | None, rest: dict[str, Any]) -> Any:
        ctx.edges, ctx.rest = edges, rest
        if edges is None:
            out, lse, *_ = flash_rings._flash_attn_forward(q, k, v, **rest)
        else:
            varlen = flash_rings._flash_attn_varlen_forward
            rows = [varlen(*x, edges, edges, **rest)[:2] for x in zip(q, k, v, strict=True)]
            out, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        if ctx.edges is None:
            flash_rings._flash_attn_backward(dout, q, k, v, out, lse, *grads, **ctx.rest)  # type: ignore[arg-type]
        else:
            for row in zip(dout, q, k, v, out, lse, *grads, strict=True):
                flash_rings._flash_attn_varlen_backward(*row, ctx.edges, ctx.edges, **ctx.rest)  # type: ignore[call-arg]
        return *grads, None, None


@pytest.mark.parametrize("case", [
    Case(), Case("full", heads="6/1"), Case("window", scores="scale"), Case("two-sided window", heads="4/4"),
    Case(documents="ragged"), Case("window", "ragged", dtype="bfloat16"),
], ids=lambda case: case.id)  # fmt: skip
def test_the_stand_in_for_flash_attn_is_right(case: Case) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
        edges = None if call.cu_seqlens is None else torch.tensor(call.cu_seqlens)
        left, right = call.window_size
        rest = {"dropout_p": 0.0, "softmax_scale": call.softmax_scale or call.head_dim**-0.5, "causal": call.causal}
        return Flash.apply(q, k, v, edges, rest | {"window_size_left": left, "window_size_right": right})  # type: ignore[no-untyped-call]

    assert sentence(attend, case) == "right"


def test_the_stand_in_for_flash_attn_aligns_masks_to_the_last_query() -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 3, 2, 8), torch.randn(2, 1, 7, 1, 8)
    out, lse, *_ = flash_rings._flash_attn_forward(q, k, v, 0.0, 1.0, True, 2, -1)
    for query in range(3):
        keys = slice(query + 2, query + 5)
        scores = torch.einsum("hd,kd->hk", q[0, query], k[0, keys, 0])
        torch.testing.assert_close(lse[0, :, query], scores.logsumexp(-1))
        torch.testing.assert_close(out[0, query], scores.softmax(-1) @ v[0, keys, 0])


def test_the_flash_rings_get_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()

    class Named:
        def __init__(self, module: str) -> None:
            self.module = module

        def llama3_flash_attn_prepare_cu_seqlens(self, *arguments: Any) -> tuple[str, ...]:
            calls.append(("prepare", arguments[0].tolist(), *arguments[1:]))
            return "cq", "ck", "maxq", "maxk", "slice"

        def __getattr__(self, function: str) -> Any:
            def call(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
                calls.append(
                    (self.module, function, [x.tolist() if isinstance(x, Tensor) else x for x in rest], options)
                )
                return q

            return call

    monkeypatch.setattr(flash_rings, "_zhuzilin", Named)
    q = torch.zeros(2, 16, 4, 16)
    for layout, name in (("contiguous", "ring"), ("zigzag", "zigzag_ring"), ("striped", "stripe")):
        call = replace(Case("window", scores="scale", layout=layout).call(1))
        flash_rings.fixed.attend(q, q, q, call)
        options = {"causal": True, "softmax_scale": 0.4, "window_size": (9, 0)}
        assert calls.pop() == (f"{name}_flash_attn", f"{name}_flash_attn_func", [], options)
    call = Case("window", "aligned", scores="scale").call(1)
    assert flash_rings.varlen.attend(q, q, q, call).shape == q.shape
    name = "llama3_flash_attn_varlen"
    assert calls[0] == ("prepare", [0, 8, 20, 32], True, 1, 2)
    assert calls[1:] == [(name, f"{name}_func", ["cq", "ck", "maxq", "maxk", 1, "slice"], options)] * 2
    calls.clear()
    flash_rings.varlen.attend(q, q, q, replace(call, layout="zigzag"))
    name = "zigzag_ring_flash_attn_varlen"
    assert calls == [(name, f"{name}_func", [[0, 4, 10, 16], 6], options)] * 2
    zigzag = flash_rings.varlen.positions(replace(call, layout="zigzag"))
    assert zigzag.tolist() == [2, 3, 4, 5, 11, 12, 13, 14, 15, 16, 23, 24, 25, 26, 27, 28]


def test_zhuzilins_modules_load_without_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ring_flash_attn").mkdir()
    (tmp_path / "ring_flash_attn" / "__init__.py").write_text("raise ImportError('transformers')")
    (tmp_path / "ring_flash_attn" / "one.py").write_text("import flash_attn\nversion = flash_attn.__version__")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = ("flash_attn", "ring_flash_attn")
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] not in theirs}
    monkeypatch.setattr(sys, "modules", modules)
    monkeypatch.setattr(flash_rings, "find_spec", lambda name: None if name == "flash_attn" else find_spec(name))
    for _ in range(2):
        assert flash_rings._zhuzilin("one").version == "2.8.3"
        assert flash_rings._install_stand_in() == "a stand-in for flash_attn"
    interface = import_module("flash_attn.flash_attn_interface")
    assert interface._flash_attn_varlen_backward is flash_rings._flash_attn_varlen_backward
    modules["flash_attn"] = ModuleType("flash_attn")
    assert flash_rings._install_stand_in() == "flash_attn"


def test_usp_splits_the_ranks_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls = list[Any](), list[Any]()

    class Attention:
        def __init__(self, ring_impl_type: str) -> None:
            self.kind = ring_impl_type

        def __call__(self, *tensors: Any, **options: Any) -> None:
            calls.append((self.kind, *tensors, options))

    install(monkeypatch, "yunchang", LongContextAttention=Attention, set_seq_parallel_pg=lambda *how: made.append(how))
    monkeypatch.setattr(flash_rings, "_usp_groups", {})
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for world, heads, degrees in ((4, "4/2", (2, 2)), (4, "6/1", (4, 1)), (6, "4/4", (3, 2)), (3, "4/4", (3, 1))):
        call = Case("window", layout="zigzag", world=world, heads=heads).call(1)
        assert flash_rings._usp_degrees(call) == degrees
        for _ in range(2):
            flash_rings.usp.attend("q", "k", "v", call)
        assert made == [(degrees[1], degrees[0], 1, world)], "groups are made once"
        flash_rings.usp.attend("q", "k", "v", replace(call, layout="contiguous"))
        options = {"causal": True, "softmax_scale": None, "window_size": (9, 0)}
        assert [calls.pop() for _ in range(3)] == [
            (kind, "q", "k", "v", options) for kind in ("basic", *["zigzag"] * 2)
        ]
        made.clear()
    call = Case(layout="zigzag", world=4, heads="4/4").call(1)
    shard = [*range(16), *range(48, 64)]
    assert [flash_rings.usp.positions(replace(call, rank=rank)).tolist() for rank in (0, 1)] == [shard[:16], shard[16:]]


def test_pytorchs_ring_gets_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    seen = list[Any]()

    def forward(group: Any, dim: int, op: Any, *, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        seen.append((dim, theirs._cp_options.enable_load_balance, options))
        return op(query, key, value, options["dropout_p"], options["is_causal"], scale=options["scale"])

    def backward(group: Any, dim: int, op: Any, *, grad_out_name: str, **named: Any) -> Any:
        options = {name: named.pop(name) for name in ("is_causal", "dropout_p", "scale")}
        seen.append((dim, grad_out_name, options))
        order = ("grad_out", "query", "key", "value", "out", "logsumexp")
        return *op(*(named[name] for name in order), 0.0, options["is_causal"], scale=options["scale"]), None, None

    monkeypatch.setattr(theirs, "_templated_ring_attention", forward)
    monkeypatch.setattr(theirs, "_templated_ring_attention_backward", backward)
    monkeypatch.setattr(theirs._cp_options, "enable_load_balance", True)
    for mask, scores, layout in (("causal", "scale", "zigzag"), ("full", "plain", "contiguous")):
        assert sentence(torch_rings.sdpa.attend, Case(mask, scores=scores, heads="4/4", layout=layout)) == "right"
        options = {"is_causal": mask == "causal", "dropout_p": 0.0, "scale": 0.4 if scores == "scale" else None}
        assert seen == [(2, layout == "zigzag", options), (2, "grad_out", options)]
        seen.clear()
    hooked = list[Any]()
    install(monkeypatch, "accelerate.big_modeling", _attach_context_parallel_hooks=hooked.append)
    call = Case().call(1)
    q = torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match="attention_mask is not supported"):
        torch_rings.accelerate.attend(q, q, q, replace(call, positions=torch.arange(2)))
    assert isinstance(hooked[0].self_attn, torch_rings._SelfAttention)


def test_flex_attention_gets_the_mask_of_the_whole_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    flex: Any = import_module("torch.nn.attention.flex_attention")
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    parallel = Mock(AttentionType=SimpleNamespace(FLEX="flex"))
    parallel.return_value.flex_input_fn = lambda module, inputs, options, mesh: (inputs, options)
    at = torch.arange(16)
    for module, name, value in (
        (theirs, "_create_cp_block_mask", lambda mask_mod, *sizes: mask_mod(0, 0, at[:, None], at)),
        (theirs, "_ContextParallel", parallel), (theirs._cp_options, "enable_load_balance", True),
        (theirs, "_compiled_create_block_mask", None), (flex, "_DEFAULT_SPARSE_BLOCK_SIZE", 128),
        (flex, "flex_attention", lambda *tensors, block_mask, **options: sdpa(*tensors, block_mask, **options)),
        (torch_rings, "init_device_mesh", lambda *how: how),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    assert sentence(torch_rings.flex.attend, Case("window", "ragged", "scale", gradients="none")) == "right"
    assert parallel.call_args.args == (2, "flex") and theirs._cp_options.enable_load_balance is False
    assert theirs._compiled_create_block_mask is flex.create_block_mask and flex._DEFAULT_SPARSE_BLOCK_SIZE == 16


def test_diffusers_gets_one_configuration_for_each_kind_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()

    class Config:
        mesh_shape, mesh_dim_names = (2, 1), ("ring", "ulysses")

        def __init__(self, **degrees: Any) -> None:
            self.degrees = degrees

        def setup(self, *how: Any) -> None:
            calls.append((self.degrees, *how))

    install(monkeypatch, "diffusers", ContextParallelConfig=Config)
    install(monkeypatch, "diffusers.models._modeling_parallel", ParallelConfig=SimpleNamespace)
    install(
        monkeypatch, "diffusers.models.attention_dispatch",
        _templated_context_parallel_attention=lambda *tensors, **options: (tensors[3:], options),
    )  # fmt: skip
    monkeypatch.setattr(torch_rings, "_configs", {})
    monkeypatch.setattr(torch_rings, "init_device_mesh", lambda *how, mesh_dim_names: (*how, mesh_dim_names))
    q, cpu = torch.zeros(1), torch.device("cpu")
    for layout, anything in (("contiguous", False), ("contiguous", False), ("uneven", True)):
        rest, options = torch_rings.diffusers.attend(q, q, q, Case("full", scores="scale", layout=layout).call(1))
        assert rest == (None, 0.0, False, 0.4)
        config = options["_parallel_config"].context_parallel_config
        assert config.degrees == {"ring_degree": 2, "ring_anything": anything}
        assert options["forward_op"] is torch_rings._diffusers_forward
        assert options["backward_op"] is torch_rings._diffusers_backward
    mesh = ("cpu", (2, 1), ("ring", "ulysses"))
    assert calls == [({"ring_degree": 2, "ring_anything": anything}, 1, 2, cpu, mesh) for anything in (False, True)]


def test_diffusers_gets_operators_of_tokens_before_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    case = Case("full", scores="scale", heads="4/4", world=1)
    whole, ctx = case.inputs(), SimpleNamespace(save_for_backward=lambda *tensors: None)
    exact, (q, k, v) = attend_plainly(whole, case.call()), (whole[name] for name in "qkv")
    out, lse = torch_rings._diffusers_forward(ctx, q, k, v, None, 0.0, False, 0.4, False, True)
    grads = torch_rings._diffusers_backward(ctx, whole["dout"], query=q, key=k, value=v, out=out, lse=lse)
    for x, name in zip((out, lse.transpose(1, 2), *grads), ("out", "lse", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(x.double(), exact[name], rtol=1e-4, atol=1e-5)
