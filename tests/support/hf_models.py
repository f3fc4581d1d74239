"""Tiny transformers models with random weights, and their eager results in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from ringattn.integrations.transformers import register

from .tolerance import assert_as_exact_as_pytorch

TOKENS, VOCABULARY = 43, 37  # prime, so that no layout divides it evenly
DOCUMENTS = [0, 19, 22, 43]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
    "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
ALTERNATING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "gemma2": ("Gemma2Config", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 11, **ALTERNATING}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 11, **ALTERNATING}),
    "gemma3 images": (
        "Gemma3Config",
        {
            "text_config": SIZES | ALTERNATING | {"query_pre_attn_scalar": 11, "sliding_window": 5},
            "vision_config": VISION,
        },
    ),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 3, "num_experts_per_tok": 2, **ALTERNATING}),
}
ISLANDS = [(3, 12), (24, 40)]
IMAGES = torch.zeros(2, TOKENS, dtype=torch.int64)
for _begin, _end in ISLANDS:
    IMAGES[:, _begin:_end] = 1
register()


class Result(NamedTuple):
    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor]


def build_model(name: str, attention: str = "ringattn") -> Any:
    config, options = CONFIGS[name]
    torch.manual_seed(0)
    built_config = getattr(transformers, config)(**options if "text_config" in options else SIZES | options)
    built_config._experts_implementation = "eager"  # the grouped GEMM does not support float64
    return AutoModelForCausalLM.from_config(built_config, attn_implementation=attention).float().train()


def token_ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


class Float64Mode(TorchFunctionMode):
    """Mode that replaces transformers' casts to float32 by casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        widened_args = [torch.float64 if x is torch.float32 else x for x in args]
        widened_kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        function: Any = torch.Tensor.double if func is torch.Tensor.float else func
        return function(*widened_args, **widened_kwargs)


def run_one_process(model: Any, documents: Sequence[int]) -> Result:
    ids, items = token_ids(), token_ids().shape[0] * (TOKENS - len(documents) + 1)
    outs = []
    for start, end in pairwise(documents):
        part, images = ids[:, start:end], image_entries(model.config.model_type, IMAGES[:, start:end])
        outs.append(model(input_ids=part, labels=part, num_items_in_batch=items, **images))
    loss = torch.stack([out.loss for out in outs]).sum()
    loss.backward()
    logits = torch.cat([out.logits for out in outs], 1)
    return Result(logits.detach(), loss.detach(), gradients(model))


def image_entries(kind: str, images: Tensor) -> dict[str, Tensor]:
    return {"token_type_ids": images} if kind == "gemma3" else {}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}  # the vision tower has none


@cache
def eager_results(name: str, documents: tuple[int, ...]) -> tuple[Result, Result]:
    """Return the results of eager attention in float32 and in float64."""
    with Float64Mode():
        exact = run_one_process(build_model(name, "eager").double(), documents)
    return run_one_process(build_model(name, "eager"), documents), exact


def check_against_eager(name: str, ours: Result, documents: Sequence[int]) -> None:
    check_results(ours, *eager_results(name, tuple(documents)))


def check_results(ours: Result, pytorch: Result, exact: Result) -> None:
    assert_as_exact_as_pytorch("logits", ours.logits, pytorch.logits, exact.logits)
    terms = exact.logits.abs().max().item()  # a loss is a difference of logits
    assert_as_exact_as_pytorch("loss", ours.loss, pytorch.loss, exact.loss, magnitude=terms)
    # Scaled by each parameter's largest gradient and compared together: the maximum of eight numbers is too noisy.
    sizes = {key: grad.abs().max() for key, grad in exact.grads.items()}
    together = (
        torch.cat([(result.grads[key] / size).flatten() for key, size in sizes.items()])
        for result in (ours, pytorch, exact)
    )
    assert_as_exact_as_pytorch("gradients", *together)
