"""The replacement of TransformerEngine's attention: arguments, index rules, and results against float64."""

from __future__ import annotations

import inspect
from itertools import chain, pairwise
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, LocalWorld, ring_attention
from ringattn.comm import LocalGroup
from ringattn.integrations import formats
from ringattn.integrations.formats import Boundaries, attend_format
from ringattn.integrations.transformer_engine import DotProductAttention

from ..support.baselines import Results, pytorch
from ..support.mask_cases import RingCase, check_max_logits, compare_with_expected, expected_results
from ..support.rank_processes import group_results
from ..support.ring_cases import inputs, run_ranks
from ..support.tolerance import assert_as_exact_as_pytorch

# Read by `ast` from transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py of the wheel
# 2.20.2. It cannot be installed beside these tests: without its CUDA libraries `import transformer_engine` raises a
# RuntimeError, and Megatron-core, which tries it, does not catch that.
ARGUMENTS = {
    "__init__": """num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type
        window_size bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number
        attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit
        name""",
    "set_context_parallel_group": "cp_group cp_global_ranks cp_stream cp_comm_type load_balancing_strategy",
    "forward": """query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv
        cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size
        bottom_right_diagonal softcap checkpoint_core_attention core_attention_bias_type core_attention_bias
        alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod
        score_mod_bprop score_mod_tensors score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim
        thd_attention_policies thd_attention_policy_dispatch""",
}

HEADS, GROUPS, DIM, VALUE_DIM = 4, 2, 16, 8


@pytest.mark.parametrize("method", ARGUMENTS)
def test_arguments_match_transformer_engine(method: str) -> None:
    assert [*inspect.signature(getattr(DotProductAttention, method)).parameters][1:] == ARGUMENTS[method].split()


def thd_indices(boundaries: list[int], world: int, rank: int) -> list[int]:
    """Return a rank's tokens as ``thd_partition_indices_kernel`` of TransformerEngine's context_parallel.cu does.

    A rank has ``1 / world`` of each document. Its first half is chunk ``rank`` of the document's ``2 * world`` chunks,
    and its second half is chunk ``2 * world - 1 - rank``.
    """
    indices = []
    own = [edge // world for edge in boundaries]
    for token in range(own[-1]):
        document = max(i for i in range(len(own) - 1) if own[i] <= token)
        half, index = (own[document + 1] - own[document]) // 2, token - own[document]
        skipped = rank if index < half else 2 * (world - 1) - rank
        indices.append(index + own[document] * world + half * skipped)
    return indices


def indices_of(rank: int, world: int, tokens: int, cu_seqlens: list[int] | None, contiguous: bool) -> Tensor:
    """Return the global positions of a rank's tokens."""
    if contiguous:
        return torch.arange(tokens).chunk(world)[rank]
    return torch.tensor(thd_indices([0, tokens] if cu_seqlens is None else cu_seqlens, world, rank))


def to_format(x: Tensor, qkv_format: str) -> Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[0]}[qkv_format]


def from_format(x: Tensor, qkv_format: str) -> Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[None]}[qkv_format].detach()


CASES: dict[str, dict[str, Any]] = {
    "windows, sinks": {
        "qkv_format": "sbhd", "window_size": (9, 0), "softmax_type": "learnable", "kv_channels": (DIM, VALUE_DIM),
    },
    "softcap, slopes, two-sided window": {
        "qkv_format": "bshd", "attn_mask_type": "no_mask", "window_size": (11, 5), "softcap": 3.0, "slopes": True,
    },
    "scale, a sink of 0": {"qkv_format": "bshd", "softmax_scale": 0.5, "softmax_type": "off-by-one", "world": 4},
    "rows with padding": {
        "qkv_format": "bshd", "attn_mask_type": "padding", "cu_seqlens": [0, 37, 37 + 48],
    },
    "documents with padding": {
        "qkv_format": "thd", "attn_mask_type": "padding,causal", "cu_seqlens": [0, 13, 13, 38], "world": 4,
        "padded": [0, 16, 16, 48], "softmax_type": "learnable", "window_size": (9, 0),
    },
    "documents, padding at the end": {
        "qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens": [0, 8, 32, 32], "rest": 5,
    },
    "runs of tokens": {
        "qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens": [0, 7, 48], "world": 3,
        "contiguous": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_one_device(name: str) -> None:
    case = {**CASES[name]}
    world, contiguous, rest = case.pop("world", 2), case.pop("contiguous", False), case.pop("rest", 0)
    real, padded, has_slopes = case.pop("cu_seqlens", None), case.pop("padded", None), case.pop("slopes", False)
    qkv_format, mask_type = case["qkv_format"], case.get("attn_mask_type", "causal")
    kv_channels = case.pop("kv_channels", DIM)
    packed, batch = qkv_format == "thd", 1 if qkv_format == "thd" else 2
    tokens = (padded or real)[-1] if packed else 48
    value_dim = kv_channels if isinstance(kv_channels, int) else kv_channels[1]
    whole = inputs(tokens, (HEADS, GROUPS), (DIM, value_dim), batch=batch)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if has_slopes else None
    sink = {"learnable": torch.randn(HEADS), "off-by-one": torch.zeros(HEADS)}.get(case.get("softmax_type", ""))
    boundaries = {
        f"cu_seqlens_{side}{suffix}": torch.tensor(edges, dtype=torch.int32)
        for side in ("q", "kv") for suffix, edges in (("", real), ("_padded", padded)) if edges is not None
    }  # fmt: skip
    ends = (padded or real) if packed else None
    held = [indices_of(rank, world, tokens, ends, contiguous) for rank in range(world)]

    def one_rank(group: LocalGroup) -> list[Tensor]:
        where = held[group.rank()]
        module = DotProductAttention(HEADS, kv_channels, GROUPS, **case, return_max_logit=True)
        module.set_context_parallel_group(group, None, None, "p2p", ("DUAL_CHUNK_SWAP", "NO_LOAD_BALANCE")[contiguous])
        filler = torch.full((rest,), -1)  # repeats the last token, which no query may see
        tensors = (whole[name][:, torch.cat([where, filler])] for name in ("q", "k", "v", "dout"))
        shards = [to_format(x, qkv_format).clone() for x in tensors]
        leaves = [x.requires_grad_() for x in shards[:3]]
        if sink is not None and module.softmax_offset is not None:
            leaves.append(module.softmax_offset)
            module.softmax_offset.data.copy_(sink)
        options = {} if slopes is None else {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
        out, largest = module(*shards[:3], **boundaries, **options)
        assert out.is_contiguous()
        module.return_max_logit = False  # hides no keys of padding from queries of padding
        torch.testing.assert_close(module(*shards[:3], **boundaries, **options), out)
        found = [out.detach().unflatten(-1, (HEADS, -1)), *torch.autograd.grad(out, leaves, shards[3].flatten(-2))]
        of_tokens = [from_format(x, qkv_format) for x in found[:4]]
        assert not any(x[:, len(where) :].any() for x in of_tokens)
        return [largest, *(x[:, : len(where)] for x in of_tokens), *found[4:]]

    largest, *parts = zip(*run_ranks(world, one_rank), strict=True)
    parts = [*zip(*parts, strict=True)]
    out, *grads = (torch.cat(x, 1)[:, torch.cat(held).argsort()] for x in list(zip(*parts, strict=True))[:4])
    call: dict[str, Any] = {name: case[name] for name in ("window_size", "softcap", "softmax_scale") if name in case}
    call |= {"causal": "causal" in mask_type} | ({} if slopes is None else {"alibi_slopes": slopes})
    if real is not None:  # padding belongs to no document and is never a key
        starts, at = (padded or real)[:-1] if packed else [0] * batch, torch.arange(tokens)
        documents = [(start, start + end - begin) for start, (begin, end) in zip(starts, pairwise(real), strict=True)]
        rows = [documents] if packed else [[document] for document in documents]
        call["cu_seqlens"] = [[0, *chain(*row), tokens] for row in rows]
        is_real = [[(at >= start) & (at < end) for start, end in row] for row in rows]
        call["key_mask"] = torch.stack([torch.stack(row).any(0) for row in is_real])
    right = RingCase(Layout.contiguous(tokens, 1), whole, call, sink=sink, through_lse=False)
    check_max_logits(right, largest)
    dsink = torch.stack([part[4] for part in parts]).sum(0) if len(parts[0]) > 4 else None
    compare_with_expected(expected_results(right), Results(out, None, *grads), dsink)  # type: ignore[arg-type]


def heads(tokens: int = 8, groups: int = GROUPS) -> list[Tensor]:
    """Return queries, keys and values of one row, in bshd."""
    return [torch.randn(1, tokens, count, DIM, requires_grad=True) for count in (HEADS, groups, groups)]


def test_packed_inputs_and_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute attention once, or twice with checkpointing. ``tp_size`` without a group is enough without dropout."""
    calls: Any = []
    monkeypatch.setattr(formats, "ring_attention", lambda *qkv, **call: calls.append(0) or ring_attention(*qkv, **call))
    module = DotProductAttention(2 * HEADS, DIM, tp_size=2)
    q, k, v = heads(groups=HEADS)
    whole = DotProductAttention(HEADS, DIM, qkv_format="bshd")(q, k, v)
    for times, named in (
        (1, {"qkv_layer": torch.stack([q, k, v], -3)}),
        (1, {"qkv_layer": torch.stack([q, k, v], -2), "qkv_interleave_dim": -2}),
        (1, {"query_layer": q, "kv_layer": torch.stack([k, v], -2), "qkv_interleave_dim": -2}),
        (2, {"query_layer": q, "key_layer": k, "value_layer": v, "checkpoint_core_attention": True}),
    ):
        calls.clear()
        out = module(**named, qkv_format="bshd", pad_between_seqs=False)
        assert out.equal(whole)
        assert torch.autograd.grad(out.sum(), q)[0].equal(torch.autograd.grad(whole.sum(), q, retain_graph=True)[0])
        assert len(calls) == times


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_padding_masks_are_copied_to_the_device_once(qkv_format: str) -> None:
    """Cache padding masks between layers, because copying blocks the host. Inference fills the cache for training."""
    q, k, v = (x.flatten(0, -3) if qkv_format == "thd" else x for x in heads(12))
    edges = torch.tensor([0, 9])
    padded = torch.tensor([0, 12]) if qkv_format == "thd" else None
    call: dict[str, Any] = {"qkv_format": qkv_format, "boundaries": Boundaries(edges, None, padded, None)}
    call |= {"attn_mask_type": "padding", "return_max_logits": True}
    for cached in (formats._padding, formats._hide_padding):
        cached.cache_clear()
    with torch.inference_mode():
        attend_format(q, k, v, group=None, **call)
    for _ in range(2):
        attend_format(q, k, v, group=None, **call)[0].sum().backward()
    assert formats._padding.cache_info().misses == formats._hide_padding.cache_info().misses == 1


@pytest.mark.parametrize(("mask_type", "diagonal"), [("no_mask", 16), ("causal", 0), ("causal_bottom_right", 8)])
def test_more_keys_than_queries(mask_type: str, diagonal: int) -> None:
    (q, *_), (_, k, v) = heads(8), heads(16)
    options: dict[str, Any] = {"qkv_format": "bshd", "attention_type": "cross", "attn_mask_type": mask_type}

    def one_rank(group: LocalGroup) -> Tensor:
        module = DotProductAttention(HEADS, DIM, GROUPS, cp_group=group, **options)
        out = module(*(x[:, indices_of(group.rank(), 2, x.shape[1], None, False)] for x in (q, k, v)))
        return cast(Tensor, out.detach().unflatten(-1, (HEADS, DIM)))

    out = torch.cat(run_ranks(2, one_rank), 1)[:, torch.tensor([0, 1, 6, 7, 2, 3, 4, 5]).argsort()]
    seen = torch.ones(8, 16, dtype=torch.bool).tril(diagonal)
    theirs, truth = (
        pytorch(*(x.to(t) for x in (q, k, v, out)), visible=seen).out for t in (torch.float32, torch.float64)
    )
    assert_as_exact_as_pytorch("out", out, theirs, truth)


@pytest.mark.parametrize(
    ("mask_type", "given", "taken"),
    [("causal", (4, 2), (4, 0)), ("causal_bottom_right", (0, 9), (0, 0)), ("no_mask", (-1, 0), (-1, -1))],
)
def test_windows_that_contradict_the_mask_are_corrected_with_a_warning(
    mask_type: str, given: tuple[int, int], taken: tuple[int, int]
) -> None:
    """Correct and warn as their ``check_set_window_size``, for the module and for a call."""
    q, k, v = (x.detach() for x in heads())
    options: dict[str, Any] = {"qkv_format": "bshd", "attn_mask_type": mask_type}
    right = DotProductAttention(HEADS, DIM, GROUPS, window_size=taken, **options)(q, k, v)
    module = DotProductAttention(HEADS, DIM, GROUPS, window_size=given, **options)
    for call in ({}, {"window_size": given}):
        with pytest.warns(UserWarning, match=rf"window_size \({given[0]}, {given[1]}\)"):
            assert module(q, k, v, **call).equal(right)


def test_strides_and_names_of_masks() -> None:
    q, k, v = (x.detach() for x in heads())
    lengths = torch.tensor([0, 6])
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="bshd", attn_mask_type="padding,causal")
    out = module(q, k, v, cu_seqlens_q=lengths)
    spread = [x.mT.contiguous().mT for x in (q, k, v)]
    assert module(*spread, cu_seqlens_q=lengths, attn_mask_type="causal,padding").equal(out)


def without_a_group(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    q, k, v = (x.detach() for x in heads())
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="bshd")
    groups = [dist.new_group([member]) for member in range(2)]
    return module(q, k, v), ring_attention(q, k, v, causal=True, group=groups[rank]).flatten(2)


def test_without_a_group_a_rank_is_alone() -> None:
    (first, same), (second, as_well) = group_results(2, without_a_group)
    assert first.equal(same) and second.equal(as_well) and not first.equal(second)


ENDS = torch.tensor([0, 8])
PADDED = {"attn_mask_type": "padding", "cu_seqlens_q": ENDS}
MADE: dict[str, Any] = {
    "cp_comm_type": "a2a", "cp_group": [], "softmax_type": "sigmoid", "num_gqa_groups": 3,
    "attention_type": "both", "qkv_format": "bhsd",
}  # fmt: skip
CALLED: dict[str, Any] = {
    "attn_mask_type": "arbitrary", "cu_seqlens_q": ENDS, "window_size": (-1, 2), "inference_params": object(),
    "attention_mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool), "core_attention_bias_type": "post_scale_bias",
    "core_attention_bias": torch.ones(1, HEADS, 8, 8), "fp8_output": True, "num_splits": 4, "score_mod": max,
    "thd_attention_policies": [{}], "thd_attention_policy_dispatch": "grouped", "qkv_interleave_dim": 1,
    "bf16_backward": True, "score_mod_bprop": max, "score_mod_tensors": {}, "score_mod_bprop_tensors": {},
    "kv_layer": torch.ones(1, 8, 2, GROUPS, DIM),
    "qkv_layer": torch.ones(1, 8, 3, HEADS, DIM),
}  # fmt: skip
PACKED = {f"{name}_layer": torch.ones(8, n, DIM) for name, n in (("query", HEADS), ("key", GROUPS), ("value", GROUPS))}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({name: value}, {}, name) for name, value in MADE.items()),
    *(({}, {name: value}, name) for name, value in CALLED.items()),
    ({"attention_dropout": 0.1, "tp_size": 2, "num_attention_heads": 8, "num_gqa_groups": 4}, {}, "tp_group"),
    ({"kv_channels": 8}, {}, r"\(heads, head dim\)"),
    ({"num_attention_heads": 0, "num_gqa_groups": None}, {}, "num_attention_heads is 0"),
    ({"tp_size": 0}, {}, "tp_size is 0"),
    ({"tp_size": 4}, {}, "num_gqa_groups is 2"),
    ({"kv_channels": (DIM, 0)}, {}, "kv_channels is 0"),
    ({"cp_group": "cp"}, {}, "cp_group is a str"),
    ({"window_size": 4}, {}, "window_size is 4"),
    ({}, {"attn_mask_type": "padding_causal"}, "cu_seqlens_q is None"),
    *(
        ({}, {"kv_layer": torch.ones(1, 8, 2, GROUPS, DIM), f"{name}_layer": None}, "kv_layer")
        for name in ("key", "value")
    ),
    ({}, PACKED | {"qkv_format": "thd"}, "attn_mask_type is 'causal' with qkv_format 'thd'"),
    ({}, PACKED, r"query has shape \[8, 4, 16\]. With qkv_format 'bshd'"),
    ({}, PADDED | {"cu_seqlens_q_padded": ENDS + 0, "pad_between_seqs": False}, "pad_between_seqs is False"),
    ({}, {"cu_seqlens_q": torch.tensor([0]), "attn_mask_type": "padding"}, "cu_seqlens_q has 0 documents"),
    *(({}, PADDED | {f"cu_seqlens_{name}_padded": ENDS}, "only qkv_format 'thd' takes padded") for name in ("q", "kv")),
    ({}, PADDED | {"cu_seqlens_kv": ENDS - 1}, "cu_seqlens_kv differs"),
    ({}, {"alibi_slopes": torch.ones(HEADS)}, "core_attention_bias_type"),
]


@pytest.mark.parametrize(("made", "called", "named"), REFUSED)
def test_refused_options_are_named(made: dict[str, Any], called: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"num_attention_heads": HEADS, "kv_channels": DIM, "num_gqa_groups": GROUPS}
    with pytest.raises((ValueError, NotImplementedError), match=named):
        tensors = dict(zip(("query_layer", "key_layer", "value_layer"), heads(), strict=True))
        DotProductAttention(**arguments | {"qkv_format": "bshd"} | made)(**tensors | called)


def test_unknown_load_balancing_is_refused() -> None:
    with pytest.raises(ValueError, match="load_balancing_strategy is 'STRIPES'"):
        DotProductAttention(HEADS, DIM).set_context_parallel_group(None, None, None, "p2p", "STRIPES")


def test_the_causal_mask_of_a_rank_s_rows_is_accepted_and_any_other_refused() -> None:
    (q, k, v), layout = (x.detach() for x in heads()), Layout.zigzag(8, 2)
    masks = [torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None, layout.positions(rank)] for rank in range(2)]

    def one_rank(group: LocalGroup) -> Tensor:
        mine = [layout.shard(x, group.rank()) for x in (q, k, v)]
        module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="bshd", cp_group=group)
        no_mask: dict[str, Any] = {"attn_mask_type": "no_mask", "attention_mask": masks[group.rank()]}
        cut = ({"attention_mask": mask} for mask in (masks[0][..., :4], masks[group.rank()][:, :, :2]))
        for wrong in ({"attention_mask": masks[1 - group.rank()]}, no_mask, *cut):
            with pytest.raises(NotImplementedError, match="attention_mask has shape"):
                module(*mine, **wrong)
        return cast(Tensor, module(*mine, attention_mask=masks[group.rank()]))

    whole = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="bshd")(q, k, v)
    torch.testing.assert_close(layout.unshard(run_ranks(2, one_rank)), whole)


@pytest.mark.parametrize("ranks", [[0, 1], [2, 0]])
def test_cp_global_ranks_that_contradict_the_group_are_refused(
    ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 2])
    group = dist.ProcessGroup(0, 2)  # type: ignore[call-arg]
    given: dict[str, Any] = {"cp_global_ranks": [0, 2], "cp_stream": "stream", "layer_number": 7, "name": "core"}
    module = DotProductAttention(HEADS, DIM, cp_group=group, **given)
    assert {name: getattr(module, name) for name in given} == given
    with pytest.raises(ValueError, match=rf"cp_global_ranks is \[{ranks[0]}, {ranks[1]}\]: it must be \[0, 2\]"):
        DotProductAttention(HEADS, DIM, cp_group=group, cp_global_ranks=ranks)


@pytest.mark.parametrize(
    ("boundaries", "tokens", "message"),
    [
        (Boundaries(), 8, "cu_seqlens_q is None"),
        (Boundaries(torch.tensor([0, 6, 16])), 8, "document 0 has 6 tokens"),
        (Boundaries(torch.tensor([0, 6, 16]), q_padded=torch.tensor([0, 16])), 8, "cu_seqlens_q_padded has 2"),
        (Boundaries(torch.tensor([0, 6]), q_padded=torch.tensor([0, 4])), 2, "document 0 has 6 .* cu_seqlens_q and 4"),
        (Boundaries(torch.tensor([0, 8, 4])), 2, "document 1 has -4 tokens in cu_seqlens_q and -4"),
        (Boundaries(torch.tensor([0, 16]), torch.tensor([0, 8])), 8, "cu_seqlens_kv"),
        (Boundaries(torch.tensor([0, 6]), None, ENDS, 2 * ENDS), 4, "cu_seqlens_kv differs"),
        (Boundaries(torch.tensor([0, 16])), 7, "query has 7 tokens"),
        (Boundaries(torch.tensor([0, 14])), 8, "document 0 has 14 tokens with its padding, .* multiple of 4"),
        (Boundaries(torch.tensor([0.0, 16.0])), 8, "cu_seqlens_q is torch.float32"),
        (Boundaries(torch.tensor([False, True])), 8, "cu_seqlens_q is torch.bool"),
        (Boundaries(torch.arange(0)), 8, r"cu_seqlens_q is torch.int64 of shape \[0\]"),
        (Boundaries([0, 16]), 8, "cu_seqlens_q is a list"),  # type: ignore[arg-type]
        (Boundaries(ENDS, ENDS, q_padded=2 * ENDS), 8, "cu_seqlens_kv_padded is None and cu_seqlens_q_padded"),
    ],
)
def test_wrong_boundaries_are_refused(boundaries: Boundaries, tokens: int, message: str) -> None:
    q, k, v = (x[0] for x in heads(tokens))
    options: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "boundaries": boundaries}
    with LocalWorld(2) as world, pytest.raises((ValueError, NotImplementedError), match=message):
        world.run(lambda group: attend_format(q, k, v, group=group, **options))


def test_documents_need_equal_numbers_of_queries_and_keys() -> None:
    (q, *_), (_, k, v) = ([x[0] for x in heads(tokens)] for tokens in (9, 8))
    options: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", "boundaries": Boundaries(ENDS)}
    with pytest.raises(ValueError, match="query has 9 tokens and key has 8"):
        attend_format(q, k, v, group=None, **options)
    module = DotProductAttention(HEADS, DIM, GROUPS, qkv_format="thd", attn_mask_type="padding")
    module(**PACKED, cu_seqlens_q=ENDS, cu_seqlens_q_padded=ENDS, pad_between_seqs=False)  # the same tensor, no padding


def test_layouts_and_packings_of_one_and_of_several_ranks() -> None:
    assert formats._even_layout(7, 1, False).lengths == formats._even_layout(7, 1, True).lengths == (7,)
    assert formats._even_layout(6, 2, True) == Layout.contiguous(6, 2)
    assert formats._even_layout(8, 2, False) == Layout.zigzag(8, 2)
    for seqlen, contiguous, multiple in ((6, False, 4), (7, True, 2)):
        with pytest.raises(ValueError, match=f"has {seqlen} tokens over 2 ranks: use a multiple of {multiple}"):
            formats._even_layout(seqlen, 2, contiguous)
    assert formats._packing((0, 3, 5), (0, 3, 7), 1, False) == (Layout.contiguous(7, 1), (0, 3, 3, 5, 7), True)
    assert formats._packing((0, 8), (0, 8), 2, False) == (Layout.zigzag(8, 2, (0, 8)), (0, 8, 8), False)


@pytest.mark.parametrize(("window", "causal", "full"), [
    (None, True, True), (None, False, True), ((3, 0), True, False), ((-1, 0), True, False), ((3, -1), True, False),
    ((3, 1), True, None), ((3, 1), False, False), ((0, 0), False, False), ((-1, -1), False, False),
    ((3, -1), False, None), ((-1, 3), False, None), ((3, 1.0), False, None), (3, False, None), ([2, 2], False, False),
    ((4,), True, None), (("4", 0), True, None),
])  # fmt: skip
def test_windows_with_and_without_a_causal_mask(window: Any, causal: bool, full: bool | None) -> None:
    """Refuse a window if ``full`` is None."""
    if full is None:
        with pytest.raises(ValueError, match="window_size is "):
            formats._resolve_window(window, "a mask", causal)
    else:
        assert formats._resolve_window(window, "a mask", causal) == ((-1, -1) if full else tuple(window))
