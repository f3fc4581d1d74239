"""diffusers' models under its own context parallelism with the backend ``"ringattn"``, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout

from ..support.baselines import Modified, Results, exact, pytorch
from ..support.forked import results
from ..support.tolerance import assert_as_exact_as_pytorch

# importing diffusers takes longer than all of this file's tests
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of diffusers' imports
]
HEADS, DIM = 4, 16
IMPORTS = 300  # seconds: every process imports diffusers


class Case(NamedTuple):
    """A model, the tokens of its sequences, the arguments of its ``ContextParallelConfig``."""

    model: str
    tokens: tuple[int, int]
    config: dict[str, Any]
    compiled: bool = False


# where the lengths differ only those of the text do: diffusers gathers the image's, which gloo cannot do unless equal
RING, ULYSSES = {"ring_degree": 2}, {"ulysses_degree": 2}
CASES = {
    2: [
        Case("flux", (24, 8), RING),
        Case("flux", (24, 8), RING, compiled=True),
        Case("flux", (24, 8), ULYSSES),
        Case("flux", (24, 7), RING | {"ring_anything": True}),
        Case("flux", (24, 7), ULYSSES | {"ulysses_anything": True}),
        Case("wan", (4, 8), RING),
        Case("wan", (4, 8), ULYSSES),
    ],
    4: [
        Case("flux", (24, 8), {"ring_degree": 4}),
        Case("flux", (24, 6), {"ring_degree": 4, "ring_anything": True}),
        Case("flux", (24, 8), RING | ULYSSES),
        Case("wan", (4, 8), RING | ULYSSES),
        Case("wan", (4, 8), {"ring_degree": 4}),
    ],
}


def flux(image: int, text: int) -> tuple[Any, dict[str, Tensor]]:
    """A double and a single block, both of joint text and image tokens."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=DIM,
        num_attention_heads=HEADS, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, image, 4),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.randint(8, (image, 3)).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def wan(frames: int, side: int) -> tuple[Any, dict[str, Tensor]]:
    """Self-attention of video tokens, and cross-attention to text that every rank has whole."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, frames, side, side),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(2, 12, 16),
    }


MODELS = {"flux": flux, "wan": wan}


def run(case: Case, *, dtype: torch.dtype = torch.float32, parallel: bool = False) -> dict[str, Tensor]:
    """The model's output and the gradient of every parameter."""
    torch.manual_seed(5)
    model, inputs = MODELS[case.model](*case.tokens)
    dout = torch.randn(inputs["hidden_states"].shape)
    model.to(dtype)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    if parallel:
        from diffusers import ContextParallelConfig

        model.set_attention_backend("ringattn")
        with patch("torch.accelerator.device_count", lambda: 1):  # it divides by that, which is 0 on a CPU
            model.enable_parallelism(config=ContextParallelConfig(**case.config))
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if parallel and case.compiled else model
    (out,) = call(**inputs, return_dict=False)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, parameters, dout.to(dtype))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


class Attention(NamedTuple):
    """One call of ``dispatch_attention_fn``: its parallel config, the tokens of the ranks, what is asked for."""

    config: dict[str, Any]
    queries: Layout
    keys: Layout
    call: dict[str, Any]
    attention_kwargs: dict[str, Any]


def attention(config: dict[str, Any], layout: Layout, keys: Layout | None = None, **call: Any) -> Attention:
    more: dict[str, Any] = {
        name: call.pop(name) for name in ("window_size", "softcap", "learnable_sink") if name in call
    }
    return Attention(config, layout, keys or layout, call, more)


CAUSAL: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
ATTENTIONS = {
    2: [
        attention(RING, Layout.contiguous(48, 2), **CAUSAL),
        attention(RING, Layout.contiguous(48, 2), is_causal=True, window_size=(7, 0)),
        attention(RING, Layout.contiguous(48, 2), Layout.contiguous(20, 2), scale=0.3),
        attention(RING, Layout.contiguous(48, 2), softcap=2.0, learnable_sink=torch.arange(4.0)),
        attention(RING | {"ring_anything": True}, Layout.uneven([29, 19]), **CAUSAL),
        attention(ULYSSES, Layout.contiguous(48, 2), **CAUSAL),
        attention(ULYSSES | {"ulysses_anything": True}, Layout.uneven([29, 19]), Layout.uneven([3, 17])),
    ],
    4: [
        attention({"ring_degree": 4, "ring_anything": True}, Layout.uneven([9, 23, 1, 15]), **CAUSAL),
        attention(RING | ULYSSES, Layout.contiguous(48, 4), **CAUSAL),
    ],
}


def whole_of(case: Attention) -> list[Tensor]:
    """q, k, v, dout and dlse of the whole sequences."""
    torch.manual_seed(7)
    queries, keys = case.queries.seqlen, case.keys.seqlen
    heads, kv_heads = (8, 4) if "enable_gqa" in case.call else (4, 4)
    shapes = [(queries, heads, DIM), *[(keys, kv_heads, DIM)] * 2, (queries, heads, DIM), (heads, queries)]
    return [torch.randn(8, *shape) for shape in shapes]


def parallel_config(config: dict[str, Any], rank: int) -> Any:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    context = ContextParallelConfig(**config)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    made = ParallelConfig(context_parallel_config=context)
    made.setup(rank, mesh.size(), torch.device("cpu"), mesh=mesh)
    return made


def dispatched(case: Attention, rank: int) -> list[Tensor]:
    """Out, lse and gradients of this rank's shard; what diffusers' own ring refuses is refused by it still."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config, (q, k, v, dout, dlse) = parallel_config(case.config, rank), whole_of(case)
    layouts = (case.queries, case.keys, case.keys)
    leaves = [layout.shard(x, rank).requires_grad_() for layout, x in zip(layouts, (q, k, v), strict=True)]
    if "is_causal" in case.call:
        with pytest.raises(ValueError, match="Causal attention is not yet supported"):
            dispatch_attention_fn(*leaves, **case.call, backend="native", parallel_config=config)
    out, lse = dispatch_attention_fn(
        *leaves, **case.call, attention_kwargs=case.attention_kwargs | {"return_lse": True}, backend="ringattn",
        parallel_config=config,
    )  # fmt: skip
    lse = lse.transpose(1, 2)
    grads = [case.queries.shard(dout, rank), case.queries.shard(dlse, rank, 2)]
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, grads)]


def on_rank(world: int, rank: int) -> dict[str, list[Any]]:
    from ringattn.integrations.diffusers import register

    register()
    return {
        "models": [run(case, parallel=True) for case in CASES[world]],
        "attention": [dispatched(case, rank) for case in ATTENTIONS[world]],
    }


@pytest.fixture(scope="module", params=CASES)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, list[Any]]]:
    return results(request.param, partial(on_rank, request.param), patience=IMPORTS)


@pytest.mark.timeout(2 * IMPORTS)
def test_models_on_ranks_are_models_on_one(ranks: list[dict[str, list[Any]]]) -> None:
    for index, case in enumerate(CASES[len(ranks)]):
        theirs, exact = run(case), run(case, dtype=torch.float64)
        for name in exact:
            parts = [rank["models"][index][name] for rank in ranks]
            # every rank has the whole output; of a gradient it has its tokens' part
            ours = parts[0] if name == "out" else torch.stack(parts).sum(0)
            assert_as_exact_as_pytorch(f"{case}: {name}", ours, theirs[name], exact[name])


@pytest.mark.timeout(2 * IMPORTS)
def test_causal_windows_grouped_heads_and_other_keys(ranks: list[dict[str, list[Any]]]) -> None:
    for index, case in enumerate(ATTENTIONS[len(ranks)]):
        layouts = (case.queries, case.queries, case.queries, case.keys, case.keys)
        parts = zip(*(rank["attention"][index] for rank in ranks), strict=True)
        pairs = enumerate(zip(layouts, parts, strict=True))
        ours = Results(*(layout.unshard(shards, 2 if i == 1 else 1) for i, (layout, shards) in pairs))
        q, k, v, dout, dlse = whole_of(case)
        causal, more = case.call.get("is_causal", False), case.attention_kwargs
        left, _ = more.get("window_size", (len(q[0]), 0))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        seen = seen.tril().triu(-left) if causal else seen
        modified = Modified(more.get("softcap", 0.0), sink=more.get("learnable_sink"))
        scale = case.call.get("scale")
        theirs = pytorch(q, k, v, dout, dlse, visible=seen, softmax_scale=scale, modified=modified)
        truth = exact(q, k, v, dout, dlse, causal=causal, softmax_scale=scale, **more)
        for name in Results._fields:
            assert_as_exact_as_pytorch(f"{case}: {name}", *(getattr(x, name) for x in (ours, theirs, truth)))


REFUSED: list[tuple[bool, dict[str, Any], type[Exception], str]] = [
    (
        True,
        {"attn_mask": torch.ones(2, 6, dtype=torch.bool)},
        NotImplementedError,
        "attn_mask is a Tensor.*window",
    ),
    (True, {"attention_kwargs": {"sink": 1}}, TypeError, "unexpected keyword argument 'sink'"),
    (True, {"key": torch.ones(2, 6, 2, 8)}, ValueError, "key has 2 heads, query has 4.*enable_gqa"),
    (False, {}, NotImplementedError, "convert_to_fp32 is False"),
]


@pytest.mark.parametrize(("in_fp32", "arguments", "error", "words"), REFUSED)
def test_refused_by_name(in_fp32: bool, arguments: Any, error: type[Exception], words: str) -> None:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from ringattn.integrations.diffusers import register

    register()
    register()  # again is once
    config = ParallelConfig(ContextParallelConfig(ring_degree=2, convert_to_fp32=in_fp32))
    call = {"key": torch.ones(2, 6, 4, 8), "backend": "ringattn", "parallel_config": config, **arguments}
    with pytest.raises(error, match=words):
        dispatch_attention_fn(torch.ones(2, 6, 4, 8), value=call["key"], **call)


def test_an_unknown_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    from ringattn.integrations.diffusers import register

    monkeypatch.setattr(diffusers, "__version__", "0.43.0")
    with pytest.raises(RuntimeError, match=r"diffusers is 0\.43\.0.*0\.42\.x"):
        register()
