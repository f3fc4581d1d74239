"""ring_flash_attn's adapter for transformers: models on packed documents, cut as its users cut them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib.metadata import files
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ringattn import Layout
from ringattn.integrations import ring_flash_attn_adapters as ours
from ringattn.integrations.transformers import shard_batch

from ..support.hf_models import DOCUMENTS, TOKENS, Result, build_model, check_against_eager, token_ids
from ..support.nightly import rest_nightly
from ..support.ring_cases import run_ranks

INTERFACES = transformers.AttentionInterface, transformers.AttentionMaskInterface


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore transformers' ``flash_attention_2``, which is global."""
    functions = [interface()["flash_attention_2"] for interface in INTERFACES]
    yield
    for interface, function in zip(INTERFACES, functions, strict=True):
        interface.register("flash_attention_2", function)


def update(group: Any, *boundaries: int) -> Any:
    ours.update_ring_flash_attn_params(torch.tensor(boundaries or DOCUMENTS, dtype=torch.int32), group)


def forward(model: Any, group: Any, layout: Layout, **more: Any) -> Any:
    """Run one rank's forward with its part of the token ids and of the positions within documents."""
    update(group)
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(DOCUMENTS)])[None]
    batch = shard_batch({"input_ids": token_ids(), "labels": token_ids()}, layout, group, cu_seqlens=DOCUMENTS)
    cut = {name: layout.shard(x, group.rank()) for name, x in (("input_ids", token_ids()), ("position_ids", positions))}
    return model(**batch | cut | more)


@pytest.mark.parametrize(
    ("name", "world", "implementation"),
    rest_nightly(
        product(("llama", "gemma2"), (1, 2, 4), ("ringattn", "flash_attention_2")),
        ("llama", 1, "ringattn"),
        ("llama", 4, "ringattn"),
        ("gemma2", 2, "flash_attention_2"),
    ),
)
def test_packed_documents(name: str, world: int, implementation: str) -> None:
    models, layout = [build_model(name) for _ in range(world)], Layout.contiguous(TOKENS, world)

    def rank(group: Any) -> tuple[Tensor, Tensor]:
        model = models[group.rank()]
        assert ours.substitute_hf_flash_attn(group, 1) == "ringattn"
        model.config._attn_implementation = implementation
        forward(model, group, layout)
        out = forward(model, group, layout)
        out.loss.backward()
        return out.logits.detach(), out.loss.detach()

    logits, losses = zip(*run_ranks(world, rank), strict=True)
    parameters = [dict(model.named_parameters()) for model in models]
    grads = {key: torch.stack([x[key].grad for x in parameters]).double().sum(0).float() for key in parameters[0]}
    check_against_eager(name, Result(layout.unshard(logits), torch.stack(losses).sum(), grads), DOCUMENTS)


def one(group: Any, attention: str = "ringattn", **more: Any) -> Any:
    ours.substitute_hf_flash_attn(group, 1)
    return forward(build_model("llama", attention), group, Layout.contiguous(TOKENS, group.size()), **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: ours.substitute_hf_flash_attn(group, 0), "heads_k_stride is 0"),
        (lambda group: ours.substitute_hf_flash_attn(group, "1"), "heads_k_stride is '1'"),  # type: ignore[arg-type]
        (lambda group: ours.substitute_hf_flash_attn(group, True), "heads_k_stride is True"),
        (lambda group: update(group), "Call substitute_hf_flash_attn"),
        (lambda group: (one(group), update(None)), "process_group is unknown"),
        (lambda group: (one(group), update(group, 0, 4, 2)), "must not decrease"),
        (lambda group: (one(group, "sdpa"), update(group)), "no attention has used ringattn since"),
        (lambda group: one(group, position_ids=torch.arange(22 - group.rank())[None]), "position_ids from token 19"),
        (lambda group: one(group, input_ids=token_ids()[:, :5], position_ids=torch.arange(5)[None]), "the model got 5"),
        (lambda group: (ours.substitute_hf_flash_attn(group, 1), build_model("llama")(token_ids())), "layout is None"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        run_ranks(2, call)


@pytest.mark.nightly
def test_names_and_arguments_match_the_package() -> None:
    """Compare with their source, because importing their adapter needs flash_attn."""
    sources = {path.as_posix(): path.read_text() for path in files("ring-flash-attn") or [] if path.suffix == ".py"}
    (exports,) = ast.parse(sources["ring_flash_attn/adapters/__init__.py"]).body
    functions = {
        node.name: node
        for node in ast.parse(sources["ring_flash_attn/adapters/hf_adapter.py"]).body
        if isinstance(node, ast.FunctionDef)
    }
    assert isinstance(exports, ast.ImportFrom) and exports.module == "hf_adapter"
    for alias in exports.names:
        arguments = [argument.arg for argument in functions[alias.name].args.args]
        assert [*inspect.signature(getattr(ours, alias.name)).parameters] == arguments
