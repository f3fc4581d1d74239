"""transformers models on four virtual ranks, against eager attention on one: logits, loss and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.utils import ParallelismConfig
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import masking_utils as masking

from ringattn import Layout, Ring, ring_attention, unshard
from ringattn.integrations import transformers as integration
from ringattn.integrations.transformers import register, shard_batch, sharded
from ringattn.ring import prefix_tree

from ..support import rank_processes
from ..support.hf_models import (
    CONFIGS,
    DOCUMENTS,
    IMAGES,
    ISLANDS,
    SIZES,
    TOKENS,
    VOCABULARY,
    Float64Mode,
    Result,
    build_model,
    check_against_eager,
    check_results,
    gradients,
    image_entries,
    token_ids,
)
from ..support.nightly import rest_nightly
from ..support.ring_cases import LAYOUTS, run_ranks

WORLD = 4


def on_ranks(name: str, layout: Layout, cu_seqlens: Sequence[int] | None = None, prepare: Any = None) -> Result:
    models = [build_model(name) for _ in range(WORLD)]

    def step(group: Any) -> tuple[Tensor, Tensor]:
        model = models[group.rank()]
        images = image_entries(model.config.model_type, IMAGES)
        whole = {"input_ids": token_ids(), "labels": token_ids(), **images}
        batch = shard_batch(whole, layout, group, cu_seqlens=cu_seqlens)
        with sharded(model, layout, group, cu_seqlens=cu_seqlens, islands=ISLANDS if images else ()):
            out = model(**batch)
        out.loss.backward()
        return out.logits.detach(), out.loss.detach()

    for model in models:
        (prepare or (lambda model: None))(model)
    logits, losses = zip(*run_ranks(WORLD, step), strict=True)
    return Result(layout.unshard(logits), torch.stack(losses).sum(), summed_gradients(models))


def summed_gradients(models: Sequence[Any]) -> dict[str, Tensor]:
    ranks = [gradients(model) for model in models]
    return {key: torch.stack([rank[key].double() for rank in ranks]).sum(0).float() for key in ranks[0]}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("layout", "packed"),
    rest_nightly(product(("zigzag", "striped", "uneven"), (False, True)), ("zigzag", False), ("uneven", True)),
)
def test_models_equal_eager_attention(name: str, layout: str, packed: bool) -> None:
    cu_seqlens = DOCUMENTS if packed else None
    check_against_eager(name, on_ranks(name, LAYOUTS[layout](TOKENS, WORLD), cu_seqlens), cu_seqlens or [0, TOKENS])


TREE = prefix_tree([9, 7, 5, 6, 3, 4], [-1, 0, 0, 2, 2, -1])


def run_rollouts(model: Any) -> Result:
    """Run the sequences of the tree one by one, and sum their losses."""
    ids, logits, losses = token_ids()[:1, : TREE.tokens], torch.zeros(1, TREE.tokens, VOCABULARY), []
    for leaf in TREE.leaves:
        path = TREE.path(leaf)
        out = model(input_ids=ids[:, path]).logits
        logits = logits.to(out.dtype).index_copy(1, path, out.detach())
        losses.append(torch.nn.functional.cross_entropy(out[0, :-1], ids[0, path[1:]], reduction="sum"))
    loss = torch.stack(losses).sum()
    loss.backward()
    return Result(logits, loss.detach(), gradients(model))


@pytest.mark.parametrize(
    ("name", "layout"), rest_nightly(product(("llama", "qwen3"), ("zigzag", "striped", "uneven")), ("llama", "zigzag"))
)
def test_a_tree_of_rollouts_equals_the_rollouts(name: str, layout: str) -> None:
    """Compare loss and gradients with the sum over the rollouts, whose shared tokens the tree computes once."""
    models, where = [build_model(name) for _ in range(WORLD)], LAYOUTS[layout](TREE.tokens, WORLD)
    ids = token_ids()[:1, : TREE.tokens]

    def step(group: Any) -> tuple[Tensor, Tensor]:
        model = models[group.rank()]
        with sharded(model, where, group, tree=TREE):
            logits = model(**shard_batch({"input_ids": ids}, where, group, tree=TREE)).logits
        rows, targets = TREE.next_tokens(where.positions(group.rank()))
        losses = torch.nn.functional.cross_entropy(logits[0, rows], ids[0, targets], reduction="none")
        loss = (losses * TREE.rollouts[targets]).sum()
        loss.backward()
        return logits.detach(), loss.detach()

    logits, losses = zip(*run_ranks(WORLD, step), strict=True)
    ours = Result(where.unshard(logits), torch.stack(losses).sum(), summed_gradients(models))
    with Float64Mode():
        exact = run_rollouts(build_model(name, "eager").double())
    check_results(ours, run_rollouts(build_model(name, "eager")), exact)


@pytest.mark.parametrize(
    ("name", "argument", "lose"),
    [
        ("llama", "cu_seqlens", lambda _: None),
        ("gemma2", "softcap", lambda _: 0.0),
        ("gemma3", "softmax_scale", lambda _: None),
        ("gemma3 images", "islands", lambda _: None),
        ("gpt-oss", "window_size", lambda _: (-1, -1)),
        ("gpt-oss", "learnable_sink", lambda sink: sink * 0 - 1e9),
    ],
)
def test_losing_an_argument_changes_the_logits(
    monkeypatch: pytest.MonkeyPatch, name: str, argument: str, lose: Callable[[Any], object]
) -> None:
    def losing(*qkv: Tensor, **call: Any) -> Any:
        return ring_attention(*qkv, **call | {argument: lose(call[argument])})

    monkeypatch.setattr(integration, "ring_attention", losing)
    cu_seqlens = DOCUMENTS if argument == "cu_seqlens" else None
    ours = on_ranks(name, Layout.striped(TOKENS, WORLD), cu_seqlens)
    with pytest.raises(AssertionError, match="logits: error"):
        check_against_eager(name, ours, cu_seqlens or [0, TOKENS])


@pytest.mark.parametrize("kind", ["biogpt", "gpt2", "opt"])
def test_learned_positions(kind: str) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "ffn_dim": 24, "word_embed_proj_dim": 32}
    config = transformers.AutoConfig.for_model(kind, **{k: x for k, x in SIZES.items() if k != "head_dim"} | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layout, expected = Layout.zigzag(TOKENS, WORLD), model(token_ids()).logits
    model.set_attn_implementation("ringattn")

    def forward(group: Any) -> Tensor:
        with Ring(group) as ring, sharded(model, layout, ring=ring):
            logits: Tensor = model(**shard_batch({"input_ids": token_ids()}, layout, group)).logits.detach()
            return logits

    torch.testing.assert_close(layout.unshard(run_ranks(WORLD, forward)), expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_checkpointed_layers_run_again_outside_of_sharded() -> None:
    ours = on_ranks(
        "mistral", Layout.zigzag(TOKENS, WORLD), prepare=lambda model: model.gradient_checkpointing_enable()
    )
    check_against_eager("mistral", ours, [0, TOKENS])


def test_a_model_that_accelerate_prepared() -> None:
    """Accept ``is_causal`` in place of the mask, as accelerate's hooks put it. Windows are refused by accelerate."""
    ours = on_ranks("qwen3", Layout.zigzag(TOKENS, WORLD), prepare=_attach_context_parallel_hooks)
    check_against_eager("qwen3", ours, [0, TOKENS])
    with pytest.raises(ValueError, match="sliding_attention"):
        _attach_context_parallel_hooks(build_model("mistral"))


def test_generation_on_one_rank_equals_eager() -> None:
    prompt = token_ids()[:, :5]
    ours, theirs = (
        build_model("gemma3", attention).eval().generate(prompt, max_new_tokens=9, do_sample=False, use_cache=False)
        for attention in ("ringattn", "eager")
    )
    assert ours.equal(theirs)


def test_dropout_is_passed_in_training_only_and_positions_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    check_positions = Mock(side_effect=integration.MaskSpec.check_positions, autospec=True)
    monkeypatch.setattr(integration.MaskSpec, "check_positions", lambda *given: check_positions(*given))

    def recording(*qkv: Tensor, **call: Any) -> Any:
        calls.append(call["dropout_p"])
        return ring_attention(*qkv, **call)

    monkeypatch.setattr(integration, "ring_attention", recording)
    model = build_model("mistral")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
    model(token_ids())
    model.eval()(token_ids())
    assert calls == [0.25, 0.25, 0.0, 0.0] and check_positions.call_count == 2  # in each forward


MASKS = {
    "causal": masking.create_causal_mask,
    "window": masking.create_sliding_window_causal_mask,
    "chunk": masking.create_chunked_causal_mask,
    "full": masking.create_bidirectional_mask,
    "full window": masking.create_bidirectional_sliding_window_mask,
}


def mask(attention: str = "ringattn", create: str = "causal", tokens: int = TOKENS, **more: Any) -> Any:
    """Return a mask made as a model makes it, by default with a llama config."""
    config = more.pop("config", None) or transformers.LlamaConfig()
    config.sliding_window, config.attention_chunk_size, config._attn_implementation = 5, 8, attention
    make = {"inputs_embeds": torch.zeros(1, tokens, 1), "attention_mask": None, "past_key_values": None} | more
    return MASKS[create](config, **make)


@pytest.mark.parametrize(
    ("create", "packed", "islands"),
    [
        *((create, False, []) for create in MASKS),
        *((create, True, []) for create in ("causal", "window", "chunk")),
        *((create, False, [(3, 8), (24, 27)]) for create in ("causal", "window")),
    ],
)
def test_masks_equal_the_dense_ones(create: str, packed: bool, islands: list[tuple[int, int]]) -> None:
    """Use equal scores and one-hot values, so that a non-zero output marks a visible key."""
    documents = DOCUMENTS if packed else None
    lengths = [end - start for start, end in pairwise(documents or [0, TOKENS])]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    skip = {"allow_is_bidirectional_skip" if create.startswith("full") else "allow_is_causal_skip": False}
    blocks = torch.full((1, TOKENS), -1)
    for number, (begin, end) in enumerate(islands):
        blocks[:, begin:end] = number
    more = {"block_sequence_ids": blocks} if islands else {}
    dense = torch.block_diag(*(mask("sdpa", create, length, **skip, **more)[0, 0] for length in lengths)).bool()
    layout, values = Layout.zigzag(TOKENS, WORLD), torch.eye(TOKENS)[None, None]

    def rows(group: Any) -> Tensor:
        here = layout.shard(positions, group.rank())
        own: Any = {name: layout.shard(x, group.rank()) for name, x in more.items()}
        with sharded(torch.nn.Module(), layout, group, cu_seqlens=documents, islands=islands):
            mine = mask(create=create, tokens=here.shape[1], position_ids=here, **own)
            zeros = torch.zeros(1, 1, here.shape[1], 8)
            v = layout.shard(values, group.rank(), 2)
            out, _ = integration.attention_interface(torch.nn.Module(), zeros, zeros, v, mine, position_ids=here)
        return out

    assert (layout.unshard(run_ranks(WORLD, rows))[0, :, 0] > 0).equal(dense)


def on_two_ranks(layout: Any = "contiguous", attention: str = "ringattn", name: str = "llama", **given: Any) -> None:
    """Run a forward on two ranks with rings of their own, both with rank 0's token ids."""
    model = build_model(name, attention)

    def forward(group: Any) -> None:
        with Ring(group) as ring, sharded(model, layout, ring=ring):
            model(**{"input_ids": token_ids()[:, :20]} | given)

    run_ranks(2, forward)


def attention_without_a_mask(config: Any, **given: Any) -> None:
    """Call attention without a mask, as a model that makes none."""
    module, patches = torch.nn.Module(), torch.zeros(1, 4, 10, 8)
    module.config = config

    def call(group: Any) -> None:
        with sharded(module, "contiguous", group):
            integration.attention_interface(module, patches, patches, patches, None, is_causal=False, **given)

    run_ranks(2, call)


def rotary_by_length(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind}
    rope = {"full_attention": rope} if kind == "longrope" else rope
    attention_without_a_mask(SimpleNamespace(model_type="phi3", rope_parameters=rope))


def llama(**given: Any) -> None:
    build_model("llama")(**{"input_ids": token_ids()} | given)


def on_two_shards(model: str = "LlamaForCausalLM", given: Any = None, **options: Any) -> None:
    """Run a forward with the output of shard_batch and the given arguments."""
    cls = getattr(transformers, model)
    whole = cls(cls.config_class(**SIZES | options, attn_implementation="ringattn")).eval()

    def forward(group: Any) -> None:
        with sharded(whole, "contiguous", group):
            whole(**shard_batch({"input_ids": token_ids()[:, :40]}, "contiguous", group) | (given or {}))

    run_ranks(2, forward)


def generate() -> None:
    model = build_model("llama").eval()

    def forward(group: Any) -> None:
        with sharded(model, "contiguous", group):
            model.generate(token_ids()[:, :20], max_new_tokens=2, do_sample=False)

    run_ranks(2, forward)


def with_sharding(create: str | None = None, images: Tensor = IMAGES, **given: Any) -> None:
    """Run a forward inside sharded on one rank, or make one mask with the islands of transformers."""
    with sharded(model := build_model("llama"), None, **given):
        if create is not None:
            mask(create=create, block_sequence_ids=images[:1] - 1)
        else:
            model(token_ids())


def tree_under_chunks() -> None:
    model = build_model("qwen3")
    with sharded(model, None, tree=prefix_tree([TOKENS], [-1])):
        model(token_ids(), attention_mask=dict.fromkeys(("full_attention", "sliding_attention"), mask(create="chunk")))


def keys_of_a_cache() -> None:
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 2, 8)
    integration.attention_interface(torch.nn.Module(), q, k, k, None)


def a_second_config_under_one_mask() -> None:
    """Give a good config and then a bad one to calls that share a mask."""
    module, patches = torch.nn.Module(), torch.zeros(1, 4, 10, 8)

    def call(group: Any) -> None:
        with sharded(module, "contiguous", group):
            shared = mask(tokens=10)
            for config in (transformers.LlamaConfig(), transformers.Qwen3NextConfig()):
                module.config = config
                where = torch.arange(10)[None] + 10 * group.rank()
                integration.attention_interface(module, patches, patches, patches, shared, position_ids=where)

    run_ranks(2, call)


def foreign_mask(*_: Any) -> bool:
    return True


foreign_mask.__qualname__ = "causal_mask_function"  # as of transformers


def with_cache() -> None:
    model = build_model("llama").eval()
    model(token_ids()[:, :1], past_key_values=model(token_ids()).past_key_values)


def static_cache() -> None:
    llama(past_key_values=transformers.StaticCache(build_model("llama").config, max_cache_len=64))


def attentions_by_config() -> None:
    model = build_model("llama")
    model.config._output_attentions = True
    model(token_ids())


ONES, PADDING = torch.ones(2, TOKENS), torch.ones(2, TOKENS).index_fill(1, torch.tensor([0]), 0)
ONE_IMAGE = torch.zeros(1, TOKENS, dtype=torch.int64).index_fill(1, torch.arange(3, 9), 1)
RESTARTING = torch.arange(TOKENS)[None] % 20
IDS: dict[str, Any] = {"input_ids": token_ids()}
INVALID: list[tuple[str, Callable[[], object]]] = [
    ("hides 2 tokens as padding.*cu_seqlens", lambda: llama(attention_mask=PADDING)),
    ("is a Tensor", lambda: llama(attention_mask=torch.zeros(2, 1, TOKENS, TOKENS))),
    ("position_ids do not match.*cu_seqlens", lambda: llama(position_ids=RESTARTING, use_cache=False)),
    ("cu_seqlens", lambda: llama(position_ids=RESTARTING)),
    ("islands and the batch disagree on the token at position 0",
     lambda: mask(block_sequence_ids=torch.zeros(1, TOKENS))),
    ("tree has 34 tokens, but .* has 43", lambda: with_sharding(tree=TREE)),
    ("tree has 44 tokens, but .* has 43", lambda: with_sharding(tree=prefix_tree([44], [-1]))),
    *(("labels cannot be used with tree", partial(shard_batch, {"input_ids": token_ids(), name: token_ids()}, None,
                                                  tree=TREE)) for name in ("labels", "shift_labels")),
    ("position_ids from token", generate),
    ("layout is None with 2 ranks.*sharded", lambda: on_two_ranks(None)),
    ("position_ids from token 0 are .0, 1, 2, 3.*20, 21", on_two_ranks),
    ("20 tokens.* has 15 for rank ", lambda: on_two_ranks(Layout.zigzag(30, 2))),
    ("cu_seqlens", lambda: shard_batch({**IDS, "attention_mask": PADDING}, "zigzag")),
    ("special_tokens", lambda: shard_batch({**IDS, "special_tokens": ONES}, "zigzag")),
    ("must have either input_ids", lambda: shard_batch({}, "zigzag")),
    ("must end at 43", lambda: shard_batch(IDS, "zigzag", cu_seqlens=[0, 42])),
]  # fmt: skip
UNSUPPORTED: list[tuple[str, Callable[[], object]]] = [
    ("output_attentions.*eager", lambda: llama(output_attentions=True)),
    ("output_attentions.*eager", attentions_by_config),
    ("head_mask", lambda: llama(head_mask=torch.ones(4))),
    ("cu_seq_lens_q", lambda: llama(cu_seq_lens_q=torch.tensor([0, 43]))),
    ("1 queries from .* 44 keys from 0.*use_cache=False", with_cache),
    ("neither a cache", static_cache),
    ("mask function causal_mask_function of", lambda: integration.parse_mask_function(foreign_mask)),
    ("mask function .*lambda", lambda: mask(and_mask_function=lambda *_: ONES[0, 0] > 0)),
    ("or_masks", lambda: mask(or_mask_function=masking.causal_mask_function)),
    ("an island is longer than 5", lambda: with_sharding("window", ONE_IMAGE, islands=[(3, 9)])),
    ("or_masks", lambda: with_sharding("chunk", ONE_IMAGE, islands=[(3, 9)])),
    ("2 keys for 1 queries in Module", keys_of_a_cache),
    ("tree is given, but the mask of Qwen3.* has chunks", tree_under_chunks),
    ("mask sets .*window_size.* twice",
     lambda: mask(create="window", and_mask_function=masking.sliding_window_overlay(3))),
    ("does not support masks with sinks",
     lambda: integration.mask_interface(q_length=1, kv_length=1, mask_function=masking.causal_mask_function, sinks=4)),
    ("aux_loss of GptOssForCausalLM",
     lambda: on_two_shards("GptOssForCausalLM", {"output_router_logits": True}, num_local_experts=4)),
    ("logits .2, 1, 37. of LlamaForCausalLM", lambda: on_two_shards(given={"logits_to_keep": 1})),
    ("loss without shift_labels of LlamaForCausalLM", lambda: on_two_shards(given={"labels": token_ids()[:, :20]})),
    ("logits .2, 2. of Gemma2", lambda: on_two_shards("Gemma2ForSequenceClassification")),
    ("pooler_output of NomicBertModel", lambda: on_two_shards("NomicBertForSequenceClassification")),
    ("does not pass position_ids .B, S.",
     lambda: attention_without_a_mask(transformers.LlamaConfig(), position_ids=torch.zeros(3, 1, 10))),
    ("return_dict=False of Llama", lambda: on_two_shards(given={"return_dict": False})),
    ("qwen3_next .*linear_attention", a_second_config_under_one_mask),
    *(("rope_type", partial(rotary_by_length, kind)) for kind in ("dynamic", "longrope")),
    ("attn_temperature_tuning", lambda: attention_without_a_mask(transformers.Llama4TextConfig())),
    ("roberta .* its positions", lambda: on_two_shards("RobertaModel")),
    ("bart .* its positions", lambda: on_two_shards("BartForCausalLM", d_model=32, decoder_attention_heads=4)),
    ("clip_vision_model .* its positions",
     lambda: attention_without_a_mask(transformers.CLIPVisionConfig(hidden_size=32, num_attention_heads=4))),
    ("PersimmonAttention does not pass position_ids", lambda: on_two_shards("PersimmonForCausalLM")),
    ("scores, .* does not build mask tensors", lambda: torch.zeros(1, 1, 2, 2) + mask()),
]  # fmt: skip
REFUSALS = [
    *((NotImplementedError, *row) for row in UNSUPPORTED),
    *((ValueError, *row) for row in INVALID),
    (RuntimeError, "made no mask with islands", lambda: with_sharding(islands=ISLANDS)),
    (RuntimeError, "attn_implementation", lambda: on_two_ranks(attention="sdpa")),
    (AttributeError, "dtype .* does not build mask tensors", lambda: mask().dtype),
]


@pytest.mark.parametrize(("error", "text", "call"), REFUSALS)
def test_unsupported_calls_are_refused(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"position_ids": torch.zeros(1, 20, dtype=torch.int64)}, "position_ids do not match"),
        ({"position_ids": torch.arange(20)[None]}, "position_ids from token 0"),
        ({"attention_mask": torch.arange(20).gt(0).expand(2, -1)}, "attention_mask hides 2 tokens"),
        ({"token_type_ids": torch.ones(2, 20, dtype=torch.int64)}, "disagree on the token at position 20:"),
    ],
)
def test_an_entry_that_one_rank_refuses_ends_the_forward_of_all(wrong: dict[str, Tensor], message: str) -> None:
    model, images = build_model("gemma3 images"), [(3, 12), (30, 36)]
    whole = {"input_ids": token_ids()[:, :40], "token_type_ids": torch.zeros(2, 40, dtype=torch.int64)}
    for begin, end in images:
        whole["token_type_ids"][:, begin:end] = 1

    def forward(group: Any) -> str:
        batch = shard_batch(whole, "contiguous", group) | (wrong if group.rank() else {})
        with Ring(group) as ring:
            ranks: Any = {"ring": ring} if "position_ids" in wrong else {"group": group}
            with pytest.raises(ValueError) as refused, sharded(model, "contiguous", islands=images, **ranks):
                model(**batch)
        return str(refused.value)

    assert all(message in text for text in run_ranks(2, forward))


def test_unsupported_transformers_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert register() == register() == "ringattn"
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.21.4")
        with pytest.raises(ImportError, match=r"is 5\.21\.4: ringattn needs 5\.22"):
            register()
    monkeypatch.setattr(transformers, "__version__", "5.22.0")
    assert register() == "ringattn"
    monkeypatch.setattr(transformers, "__version__", "5.100.0")
    monkeypatch.setattr(masking, "sliding_window_overlay", lambda size: masking.causal_mask_function)
    with pytest.raises(ImportError, match=r"is 5\.100\.0.*and_mask"):
        register()


def fully_sharded(rank: int) -> Result:
    """Train with accelerate's meshes and ``fully_shard``, because accelerate's ``prepare`` refuses windows."""
    mesh = ParallelismConfig(cp_size=2).get_device_mesh("cpu")  # use ``accelerator.torch_device_mesh`` on GPUs
    group, model = mesh["cp"], build_model("gpt-oss")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard_cp"])
    fully_shard(model, mesh=mesh["dp_shard_cp"])
    layout = Layout.zigzag(TOKENS, 2)
    batch = shard_batch({"input_ids": token_ids(), "labels": token_ids()}, layout, group)
    with sharded(model, layout, group):
        out = model(**batch)
    (out.loss * group.size()).backward()  # FSDP averages gradients over the mesh
    loss, logits = out.loss.detach(), unshard(out.logits.detach(), layout=layout, group=group, grad="slice")
    dist.all_reduce(loss, group=group.get_group())
    return Result(logits, loss, {name: x.grad.full_tensor() for name, x in model.named_parameters()})


@pytest.mark.nightly
def test_fsdp_on_meshes_of_accelerate() -> None:
    for ours in rank_processes.group_results(2, fully_sharded):
        check_against_eager("gpt-oss", ours, [0, TOKENS])
