"""diffusers models under its own context parallelism with the backend ``"ringattn"``, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ringattn import Layout

from ..support.mask_cases import RingCase, combine_ranks, compare_with_expected, expected_results, take_rank_tokens
from ..support.rank_processes import group_results
from ..support.ring_cases import inputs
from ..support.tolerance import assert_as_exact_as_pytorch

# importing diffusers takes longer than running these tests
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # warnings of diffusers' imports
]
HEADS, DIM = 4, 16
IMPORTS = 300  # seconds, because every process imports diffusers


class ModelCase(NamedTuple):
    """A model, its sequence lengths, and the arguments of its ``ContextParallelConfig``."""

    model: Callable[[int, int], tuple[Any, dict[str, Tensor]]]
    tokens: tuple[int, int]
    config: dict[str, Any]
    compiled: bool = False


def flux(image: int, text: int) -> tuple[Any, dict[str, Tensor]]:
    """Build one double and one single block, both over joint text and image tokens."""
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
    """Build self-attention over video tokens and cross-attention to text that every rank holds whole."""
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


# Only text lengths differ between ranks, because diffusers gathers image tokens and gloo needs equal sizes.
RING, ULYSSES = {"ring_degree": 2}, {"ulysses_degree": 2}
CASES = {
    2: [
        ModelCase(flux, (24, 8), RING),
        ModelCase(flux, (24, 8), RING, compiled=True),
        ModelCase(flux, (24, 8), ULYSSES),
        ModelCase(flux, (24, 7), RING | {"ring_anything": True}),
        ModelCase(flux, (24, 7), ULYSSES | {"ulysses_anything": True}),
        ModelCase(wan, (4, 8), RING),
        ModelCase(wan, (4, 8), ULYSSES),
    ],
    4: [
        ModelCase(flux, (24, 8), {"ring_degree": 4}),
        ModelCase(flux, (24, 6), {"ring_degree": 4, "ring_anything": True}),
        ModelCase(flux, (24, 8), RING | ULYSSES),
        ModelCase(wan, (4, 8), RING | ULYSSES),
        ModelCase(wan, (4, 8), {"ring_degree": 4}),
    ],
}


def run(case: ModelCase, *, dtype: torch.dtype = torch.float32, parallel: bool = False) -> dict[str, Tensor]:
    """Return the model's output and the gradient of every parameter."""
    torch.manual_seed(5)
    model, inputs = case.model(*case.tokens)
    dout = torch.randn(inputs["hidden_states"].shape)
    model.to(dtype)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    if parallel:
        from diffusers import ContextParallelConfig

        model.set_attention_backend("ringattn")
        with patch("torch.accelerator.device_count", lambda: 1):  # diffusers divides by this count, which is 0 on a CPU
            model.enable_parallelism(config=ContextParallelConfig(**case.config))
    if parallel and case.compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    (out,) = model(**inputs, return_dict=False)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, parameters, dout.to(dtype))
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


class Attention(NamedTuple):
    """Arguments of ``dispatch_attention_fn``: parallel config, token layouts, and ringattn's own arguments."""

    config: dict[str, Any]
    layout: Layout
    call: dict[str, Any]
    kv_layout: Layout | None = None
    sink: Tensor | None = None

    def case(self) -> RingCase:
        """Build the same inputs on every rank."""
        torch.manual_seed(7)
        return RingCase(self.layout, inputs(48, (8, 4)), self.call, kv_layout=self.kv_layout, sink=self.sink)


EVEN, UNEVEN = Layout.contiguous(48, 2), Layout.uneven([29, 19])
CAUSAL: dict[str, Any] = {"causal": True}
ATTENTIONS = {
    2: [
        Attention(RING, EVEN, CAUSAL),
        Attention(RING, EVEN, CAUSAL | {"window_size": (7, 0)}),
        Attention(RING, EVEN, {"softmax_scale": 0.3}, Layout.contiguous(20, 2)),
        Attention(RING, EVEN, {"softcap": 2.0}, sink=torch.arange(8.0)),
        Attention(RING | {"ring_anything": True}, UNEVEN, CAUSAL),
        Attention(ULYSSES, EVEN, CAUSAL),
        Attention(ULYSSES | {"ulysses_anything": True}, UNEVEN, {}, Layout.uneven([3, 17])),
    ],
    4: [
        Attention({"ring_degree": 4, "ring_anything": True}, Layout.uneven([9, 23, 1, 15]), CAUSAL),
        Attention(RING | ULYSSES, Layout.contiguous(48, 4), CAUSAL),
    ],
}


def parallel_config(config: dict[str, Any], rank: int) -> Any:
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig

    context = ContextParallelConfig(**config)
    mesh = init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    parallel = ParallelConfig(context_parallel_config=context)
    parallel.setup(rank, mesh.size(), torch.device("cpu"), mesh=mesh)
    return parallel


def dispatched(attention: Attention, rank: int) -> list[Tensor | None]:
    """Return out, lse and gradients of this rank's shard, and check that diffusers' own ring still refuses causal."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config, case = parallel_config(attention.config, rank), attention.case()
    layouts = {"q": case.layout, "k": case.keys, "v": case.keys}
    leaves = [take_rank_tokens(layout, case.whole[name], rank).requires_grad_() for name, layout in layouts.items()]
    sinks = [] if case.sink is None else [case.sink.clone().requires_grad_()]
    call: dict[str, Any] = {"is_causal": case.call.get("causal", False), "scale": case.call.get("softmax_scale")}
    call |= {"enable_gqa": True, "parallel_config": config}
    if call["is_causal"]:
        with pytest.raises(ValueError, match="Causal attention is not yet supported"):
            dispatch_attention_fn(*leaves, **call, backend="native")
    more: dict[str, Any] = {name: case.call[name] for name in ("window_size", "softcap") if name in case.call}
    more |= {"learnable_sink": sinks[0] if sinks else None, "return_lse": True}
    out, lse = dispatch_attention_fn(*leaves, **call, attention_kwargs=more, backend="ringattn")
    grads = [
        take_rank_tokens(case.layout, case.whole["dout"], rank),
        take_rank_tokens(case.layout, case.whole["dlse"], rank, 2).mT,
    ]
    results_of_backward = torch.autograd.grad((out, lse), [*leaves, *sinks], grads)
    return [out.detach(), lse.detach().mT, *results_of_backward, *[None] * (not sinks)]


def on_rank(world: int, rank: int) -> dict[str, list[Any]]:
    from ringattn.integrations.diffusers import register

    register()
    return {
        "models": [run(case, parallel=True) for case in CASES[world]],
        "attention": [dispatched(case, rank) for case in ATTENTIONS[world]],
    }


@pytest.fixture(scope="module", params=CASES)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, list[Any]]]:
    return group_results(request.param, partial(on_rank, request.param), patience=IMPORTS)


@pytest.mark.timeout(2 * IMPORTS)
def test_models_on_ranks_equal_one_process(ranks: list[dict[str, list[Any]]]) -> None:
    for index, case in enumerate(CASES[len(ranks)]):
        theirs, exact = run(case), run(case, dtype=torch.float64)
        for name in exact:
            parts = [rank["models"][index][name] for rank in ranks]
            # Every rank has the whole output, but only the part of a gradient that its tokens contribute.
            ours = parts[0] if name == "out" else torch.stack(parts).sum(0)
            assert_as_exact_as_pytorch(f"{case}: {name}", ours, theirs[name], exact[name])


@pytest.mark.timeout(2 * IMPORTS)
def test_dispatched_attention_equals_one_process(ranks: list[dict[str, list[Any]]]) -> None:
    for index, attention in enumerate(ATTENTIONS[len(ranks)]):
        case = attention.case()
        compare_with_expected(
            expected_results(case), *combine_ranks(case, [rank["attention"][index] for rank in ranks])
        )


def test_unknown_arguments_are_refused_by_name() -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from ringattn.integrations.diffusers import register

    register()
    q = torch.ones(2, 6, 4, 8)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sink'"):
        dispatch_attention_fn(q, q, q, attention_kwargs={"sink": 1}, backend="ringattn")
