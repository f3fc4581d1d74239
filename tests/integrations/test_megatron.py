"""Megatron-core with ring attention against its own attention in one process, and refused options."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ringattn import Layout

from ..support.rank_processes import group_results
from ..support.ring_cases import run_ranks
from ..support.tolerance import assert_as_exact_as_pytorch

pytestmark = [
    pytest.mark.nightly,  # megatron-core is not in the default environment
    pytest.mark.filterwarnings("ignore::UserWarning:megatron"),  # Apex, TransformerEngine and deprecated names
]

HEADS, GROUPS, DIM, TOKENS = 4, 2, 16, 64
ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


class CudaIsTheCpu(TorchFunctionMode):
    """A mode that puts Megatron-core's masks and buffers, which it creates on the GPU, on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))


NAMES = {
    "megatron.core": ("parallel_state", "tensor_parallel"),
    "megatron.core.models.gpt": ("GPTModel",),
    "megatron.core.models.gpt.gpt_layer_specs": ("get_gpt_decoder_block_spec", "get_gpt_layer_local_spec"),
    "megatron.core.packed_seq_params": ("PackedSeqParams",),
    "megatron.core.transformer.dot_product_attention": ("DotProductAttention",),
    "megatron.core.transformer.enums": ("AttnMaskType",),
    "megatron.core.transformer.transformer_config": ("TransformerConfig",),
    "megatron.core.utils": ("GlobalMemoryBuffer", "get_batch_on_this_cp_rank"),
    "ringattn.integrations.megatron": ("RingCoreAttention", "with_ring_attention"),
}


@contextmanager
def on_the_cpu() -> Iterator[SimpleNamespace]:
    """Yield Megatron-core's names and make its own attention run on the CPU."""
    with warnings.catch_warnings():  # missing packages and deprecated names
        warnings.simplefilter("ignore")
        core = SimpleNamespace(
            **{name: getattr(import_module(home), name) for home, names in NAMES.items() for name in names}
        )
    tracker = SimpleNamespace(fork=nullcontext)
    with (
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(core.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker),
        patch.object(core.parallel_state, "get_global_memory_buffer", core.GlobalMemoryBuffer),
        CudaIsTheCpu(),
    ):
        yield core


def config_of(core: SimpleNamespace, **fields: Any) -> Any:
    common = {"num_layers": 2, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    no_dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return core.TransformerConfig(**common | no_dropout | {"use_cpu_initialization": True} | fields)


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "causal": ({}, 1, 2),
    "window": ({"window_size": (21, 0)}, 1, 2),
    "window of every other layer": ({"window_size": (21, 0), "window_attn_skip_freq": 2}, 2, 2),
    "sinks, layer scaling": ({"softmax_type": "learnable", "apply_query_key_layer_scaling": True}, 3, 4),
    "a sink of 0, softmax not in fp32": ({"softmax_type": "off-by-one", "attention_softmax_in_fp32": False}, 1, 2),
}


def attention(core: SimpleNamespace, cls: Any, group: Any, layer: int = 1, **fields: Any) -> Any:
    """Build a core attention as Megatron-core does."""
    channels = {name: fields.pop(name) for name in ("k_channels", "v_channels", "softmax_scale") if name in fields}
    config = config_of(core, context_parallel_size=group.size(), **fields)
    groups = SimpleNamespace(tp=ALONE, cp=group)
    causal = core.AttnMaskType.causal
    return cls(config, layer, causal, "self", cp_comm_type="p2p", pg_collection=groups, **channels)


def computed(module: Any, tensors: Iterable[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
    """Return the output and the gradients of queries, keys, values and parameters."""
    *qkv, grad = tensors
    leaves = [*(x.clone().requires_grad_() for x in qkv), *module.parameters()]
    out = module(*leaves[:3], *arguments, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def draw(rows: tuple[int, ...], key_dim: int = DIM, value_dim: int = DIM) -> list[Tensor]:
    """Return random queries, keys, values and output gradient."""
    shapes = (HEADS, key_dim), (GROUPS, key_dim), (GROUPS, value_dim), (HEADS * value_dim,)
    return [torch.randn(*rows, *shape) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_its_own_attention(name: str) -> None:
    fields, layer, world = CASES[name]
    sink = {"learnable": torch.randn(HEADS), "off-by-one": torch.zeros(HEADS)}.get(fields.get("softmax_type", ""))
    whole, layout = draw((TOKENS, 2)), Layout.zigzag(TOKENS, world)
    with on_the_cpu() as core:

        def module(cls: Any, group: Any) -> Any:
            core_attention = attention(core, cls, group, layer, **fields)
            for parameter in core_attention.parameters():
                parameter.data.copy_(sink)
            return core_attention

        own = module(core.DotProductAttention, ALONE)
        theirs = computed(own, whole, None)
        exact = computed(own.double(), (x.double() for x in whole), None)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]

        def one_rank(group: Any) -> list[Tensor]:
            rank = group.rank()
            shards = [layout.shard(x, rank, 0) for x in whole]
            return computed(module(core.RingCoreAttention, group), shards, layout.shard(mask, rank, 2))

        parts = [*zip(*run_ranks(world, one_rank), strict=True)]
    ours = [layout.unshard(part, 0) for part in parts[:4]] + [torch.stack(part).sum(0) for part in parts[4:]]
    for field, *three in zip(("out", "dq", "dk", "dv", "dsink"), ours, theirs, exact, strict=False):
        assert_as_exact_as_pytorch(field, *three)


@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_documents_of_latent_attention(dynamic: bool) -> None:
    real, padded, scale, value_dim = [0, 19, 51], [0, 24, 64], 0.3, 8
    whole, layout = draw((TOKENS, 1), 24, value_dim), Layout.zigzag(TOKENS, 2, padded)
    with on_the_cpu() as core:
        packed = core.PackedSeqParams(
            "thd", *(torch.tensor(x, dtype=torch.int32) for x in (real, real, padded, padded))
        )
        own = attention(core, core.DotProductAttention, ALONE, kv_channels=value_dim, softmax_scale=scale)

        def by_document(dtype: torch.dtype) -> list[Tensor]:
            """Compute each document alone and leave 0 in the padding."""
            results = [torch.zeros_like(x, dtype=dtype) for x in (whole[3], *whole[:3])]
            for document in (slice(0, 19), slice(24, 56)):
                parts = computed(own.to(dtype), [x[document].to(dtype) for x in whole], None)
                for result, part in zip(results, parts, strict=True):
                    result[document] = part
            return results

        theirs, exact = by_document(torch.float32), by_document(torch.float64)

        def one_rank(group: Any) -> list[Tensor]:
            channels: dict[str, Any] = {"k_channels": 24, "v_channels": value_dim, "softmax_scale": scale}
            module = attention(core, core.RingCoreAttention, ALONE if dynamic else group, **channels)
            here = replace(packed, cp_group=group, local_cp_size=2) if dynamic else packed
            shards = (layout.shard(x, group.rank(), 0).squeeze(1) for x in whole)
            return computed(module, shards, None, packed_seq_params=here)

        parts = [*zip(*run_ranks(2, one_rank), strict=True)]
    for field, part, *two in zip(("out", "dq", "dk", "dv"), parts, theirs, exact, strict=True):
        assert_as_exact_as_pytorch(field, layout.unshard(part, 0)[:, None], *two)


def trained(core: SimpleNamespace, cls: str, dtype: torch.dtype) -> list[Tensor]:
    """Return the loss and gradients of a two-layer model, summed over the ranks."""
    world = dist.get_world_size()
    spec = core.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec = core.with_ring_attention(spec) if cls == "RingCoreAttention" else spec
    fields: dict[str, Any] = {
        "window_size": (21, 0), "window_attn_skip_freq": 2, "normalization": "RMSNorm", "softmax_type": "learnable",
    }  # fmt: skip
    torch.manual_seed(0)
    model = core.GPTModel(config_of(core, context_parallel_size=world, **fields), spec, 96, TOKENS).to(dtype)
    tokens = torch.randint(96, (2, TOKENS + 1))
    shards = core.get_batch_on_this_cp_rank({
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": torch.arange(TOKENS).repeat(2, 1),
        "attention_mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None],
    })  # fmt: skip
    losses = model(shards["tokens"], shards["position_ids"], shards["attention_mask"], labels=shards["labels"])
    loss = losses.sum() / (2 * TOKENS)
    loss.backward()
    assert cls in {type(module).__name__ for module in model.modules()}
    groups = {"dp_cp_group": core.parallel_state.get_data_parallel_group(with_context_parallel=True)}
    assert any(name.endswith("core_attention.softmax_offset") for name in model.sharded_state_dict(metadata=groups))
    results = [loss.detach(), *(x.grad for x in model.parameters())]
    for x in results:
        dist.all_reduce(x)
    return results


def of_one_rank(cls: str, dtypes: tuple[torch.dtype, ...], rank: int) -> list[list[Tensor]]:
    with on_the_cpu() as core:
        core.parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
        return [trained(core, cls, dtype) for dtype in dtypes]


def test_a_model_on_two_processes_equals_one() -> None:
    single, double = torch.float32, torch.float64
    (ours,) = group_results(2, partial(of_one_rank, "RingCoreAttention", (single,)), patience=300)[0]
    theirs, exact = group_results(1, partial(of_one_rank, "DotProductAttention", (single, double)), patience=300)[0]
    for index, three in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_as_exact_as_pytorch(f"{index}", *three)


def test_ring_attention_in_specs_of_layers_and_blocks() -> None:
    with on_the_cpu() as core:
        latent = core.get_gpt_layer_local_spec(multi_latent_attention=True)
        ours = core.with_ring_attention(latent)
        assert ours.submodules.self_attention.submodules.core_attention is core.RingCoreAttention
        assert latent.submodules.self_attention.submodules.core_attention is core.DotProductAttention
        block = core.with_ring_attention(
            core.get_gpt_decoder_block_spec(config_of(core), use_transformer_engine=False, pp_rank=0)
        )
        modules = [layer.submodules.self_attention.submodules.core_attention for layer in block.layer_specs]
        assert modules == [core.RingCoreAttention] * 2
        with pytest.raises(ValueError, match="core_attention"):
            core.with_ring_attention(core.RingCoreAttention)
