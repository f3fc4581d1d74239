"""Options of the integrations: each one reaches ``ring_attention`` with its value, and no other option changes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3Config
from transformers import masking_utils as masking

from ringattn.integrations import ring_attention_pytorch, ring_flash_attn, torch_sdpa, transformers, yunchang
from ringattn.integrations.formats import Boundaries
from ringattn.integrations.transformer_engine import DotProductAttention
from ringattn.ring import prefix_tree

from ..support.ring_cases import run_ranks

Call = dict[str, Any]
Q, K = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16)
HEAD_FIRST = Q.transpose(1, 2), K.transpose(1, 2), K.transpose(1, 2)
SINK, SLOPES = torch.randn(4), torch.tensor([0.5, 0.25, 0.125, 0.0625])
MASK = torch.arange(8)[None] < 6
TREE = prefix_tree([3, 2, 3], [-1, 0, 0])

NEUTRAL: Call = {
    "causal": False, "window_size": (-1, -1), "softmax_scale": None, "softcap": 0.0, "learnable_sink": None,
    "alibi_slopes": None, "dropout_p": 0.0, "dropout_seed": None, "first_head": 0, "cu_seqlens": None,
    "seqused_k": None, "key_mask": None, "prefix_length": None, "islands": None, "intervals": None, "align": None,
    "backend": "auto", "return_lse": False, "return_max_logits": False,
}  # fmt: skip
"""Values that an integration passes to ``ring_attention`` if its framework's option is not given."""
STRUCTURE = {"layout", "kv_layout", "group", "ring"}
"""Arguments that describe token placement. The tests of each integration check them."""

# Stubs of what the integrations import from frameworks that are missing here or slow to import.


class MegatronModule(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()


class AttnMaskType(Enum):
    padding, causal, no_mask, arbitrary = range(4)


def is_layer_window_attention(window: Any, skip: int | None, layer: int) -> bool:
    return window is not None and (skip is None or layer % skip != 0)


STAND_INS: dict[str, dict[str, Any]] = {
    "megatron.core.packed_seq_params": {"PackedSeqParams": SimpleNamespace},
    "megatron.core.process_groups_config": {
        "ProcessGroupCollection": Mock(
            use_mpu_process_groups=lambda required_pgs: SimpleNamespace(**dict.fromkeys(required_pgs, group_of(2, 3)))
        )
    },
    "megatron.core.transformer.dot_product_attention": {"DotProductAttention": Mock(sharded_state_dict=vars)},
    "megatron.core.transformer.enums": {"AttnMaskType": AttnMaskType},
    "megatron.core.transformer.module": {"MegatronModule": MegatronModule},
    "megatron.core.transformer.transformer_config": {"TransformerConfig": SimpleNamespace},
    "megatron.core.transformer.utils": {"is_layer_window_attention": is_layer_window_attention},
    "diffusers.models._modeling_parallel": {"gather_size_by_comm": None},
    "diffusers.models.attention_dispatch": {"AttentionBackendName": None, "_AttentionBackendRegistry": None},
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace Megatron-core and diffusers by stubs and import their integrations again."""
    for name, members in STAND_INS.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    ours = ["ringattn.integrations.megatron", "ringattn.integrations.diffusers"]
    before = {name: sys.modules.pop(name, None) for name in ours}
    yield
    for name, module_before in before.items():
        sys.modules.pop(name, None)
        if module_before is not None:
            sys.modules[name] = module_before


OFF = (
    "fp8_dot_product_attention", "fp8_multi_head_attention", "batch_invariant_mode", "flash_decode",
)  # fmt: skip
"""Fields of Megatron's config that must be off."""


def group_of(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def transformer_engine(call: Call | None = None, *, train: bool = True, keys: int = 8, **made: Any) -> None:
    common: Call = {"num_attention_heads": 4, "kv_channels": 16, "num_gqa_groups": 2, "qkv_format": "bshd"}
    module = DotProductAttention(**common | made).train(train)
    if module.softmax_offset is not None:
        assert module.softmax_offset.shape == SINK.shape  # one entry per head of this rank
        module.softmax_offset.data.copy_(SINK)
    k = torch.randn(1, keys, 2, 16)
    module(Q, k, k, **call or {})


def megatron_module(
    *, tp: Any = None, cp: Any = None, layer: int = 1, heads: int = 4, own: Call | None = None, **fields_of_config: Any
) -> Any:
    integration = import_module("ringattn.integrations.megatron")
    fields = {
        "context_parallel_size": 1, "kv_channels": 16, "attention_dropout": 0.0, "window_size": None,
        "window_attn_skip_freq": None, "softmax_type": "vanilla", "use_cpu_initialization": True,
        "num_attention_heads": heads, "params_dtype": torch.float32, "perform_initialization": False,
        **dict.fromkeys(OFF, False),
    }  # fmt: skip
    config = SimpleNamespace(**fields | fields_of_config)
    groups = {"pg_collection": SimpleNamespace(tp=tp or group_of(0, 1), cp=cp)}
    make = integration.RingCoreAttention
    module = make(config, layer, AttnMaskType.causal, "self", **groups | (own or {}))
    if module.softmax_offset is not None:
        assert module.softmax_offset.shape == SINK.shape
        module.softmax_offset.data.copy_(SINK)
    return module


def megatron(call: Call | None = None, *, train: bool = True, **made: Any) -> Any:
    call = call or {}
    is_packed = getattr(call.get("packed_seq_params"), "qkv_format", None) == "thd"
    q, k, v = (x[0] if is_packed else x.transpose(0, 1) for x in (Q, K, K))
    return megatron_module(**made).train(train)(**{"query": q, "key": k, "value": v, "attention_mask": None} | call)


def attend(
    mask_function: Any = None, is_causal: bool | None = True, packed: Any = None, unused: Any = None,
    module: Call | None = None, **options: Any,
) -> None:  # fmt: skip
    """Call transformers' attention interface with a mask from its mask interface; ``packed`` goes to ``sharded``.

    ``unused`` is the function of another mask, and ``module`` has attributes of the calling module.
    """
    masks: dict[Any, Any] = {None: None}
    caller = nn.Module()
    vars(caller).update(module or {})
    with transformers.sharded(caller, None, **packed or {}):
        for function in filter(None, (mask_function, unused)):
            masks[function] = transformers.mask_interface(q_length=8, kv_length=8, mask_function=function)
        transformers.attention_interface(caller, *HEAD_FIRST, masks[mask_function], is_causal=is_causal, **options)


def long_context(made: Callable[..., Any], *tensors: Tensor, train: bool, **options: Any) -> None:
    """Call a yunchang module on a mesh of one rank."""
    run_ranks(1, lambda group: made(group=group.mesh(1, 1)).train(train)(*tensors, **options))


def usp(*, train: bool = True, **options: Any) -> None:
    long_context(yunchang.LongContextAttention, Q, K, K, train=train, **options)


def usp_packed(*, train: bool = True, **options: Any) -> None:
    long_context(yunchang.LongContextAttentionQKVPacked, torch.stack([Q] * 3, 2), train=train, **options)


def sdpa(**options: Any) -> None:
    with torch_sdpa.ring_sdpa("contiguous"):
        nn.functional.scaled_dot_product_attention(*HEAD_FIRST, enable_gqa=True, **options)


def diffusers(**options: Any) -> None:
    import_module("ringattn.integrations.diffusers")._attention(Q, K, K, enable_gqa=True, **options)


def ring_dense(**options: Any) -> None:
    ring_flash_attn.zigzag_ring_flash_attn_func(Q, K, K, **options)


def ring_varlen(**options: Any) -> None:
    edges = torch.tensor([0, 4, 8])
    ring_flash_attn.ring_flash_attn_varlen_func(Q[0], K[0], K[0], edges, 4, **options)


def ring_packed(**options: Any) -> None:
    ring_flash_attn.stripe_flash_attn_qkvpacked_func(torch.stack([Q] * 3, 2), **options)


def usp_ring(**options: Any) -> None:
    yunchang.RING_IMPL_QKVPACKED_DICT["strip"](torch.stack([Q] * 3, 2), **options)


def lucidrains(**options: Any) -> None:
    ring_attention_pytorch.ring_flash_attn(Q, K, K, ring_reduce_col=True, **options)


def lucidrains_zig_zag(**options: Any) -> None:
    ring_attention_pytorch.zig_zag_attn(*HEAD_FIRST, **options)


def lucidrains_tree(**options: Any) -> None:
    q = Q.transpose(1, 2)
    ring_attention_pytorch.tree_attn_decode(q, q, q, **options)


Driver = Callable[..., Any]
HOMES: dict[Driver, str] = {
    transformer_engine: "formats", megatron: "formats", attend: "transformers", usp: "yunchang",
    usp_packed: "yunchang", sdpa: "torch_sdpa", diffusers: "diffusers", ring_dense: "ring_flash_attn",
    ring_varlen: "ring_flash_attn", ring_packed: "ring_flash_attn", usp_ring: "ring_flash_attn",
    **{driver: "ring_attention_pytorch" for driver in (lucidrains, lucidrains_zig_zag, lucidrains_tree)},
}  # fmt: skip
"""Module whose ``ring_attention`` each driver calls."""

BASES: dict[Driver, Call] = {
    transformer_engine: {"causal": True, "softmax_scale": 0.25}, megatron: {"causal": True, "softmax_scale": 0.25},
    attend: {"causal": True}, **{ring: {"return_lse": True} for ring in (ring_dense, ring_packed, usp_ring)},
    ring_varlen: {"return_lse": True, "cu_seqlens": (0, 4, 8)}, lucidrains_tree: {"return_lse": True},
}  # fmt: skip
"""Arguments that a driver passes without any option."""


def unchanged(**options: Any) -> list[tuple[Call, Call]]:
    """Return a case for each option: the option as given and as passed on."""
    return [({name: value}, {name: value}) for name, value in options.items()]


FLASH = unchanged(causal=True, window_size=(3, 2), softmax_scale=0.5, alibi_slopes=SLOPES, dropout_p=0.3, softcap=3.0)
"""Options with flash-attention's names."""
DIAGONALS = (None, None), (False, None), (True, False), (False, True)
"""Values of ``bottom_right_diagonal`` of a module and of its call."""
_BOTTOM, _TOP = "bottom-right", "top-left"
ALIGNED = {
    **dict.fromkeys(("no_mask", "padding"), (_BOTTOM, _TOP, _TOP, _BOTTOM)),
    **dict.fromkeys(("causal", "padding_causal"), (_TOP,) * 4),
    **dict.fromkeys(("causal_bottom_right", "padding_causal_bottom_right"), (_BOTTOM,) * 4),
}
"""Expected ``align`` for each mask type and for each of :data:`DIAGONALS`."""
LENGTHS: Call = {"cu_seqlens_q": torch.tensor([0, 6])}
TWO_RANKS: Call = {"num_attention_heads": 8, "num_gqa_groups": 4}
IMAGES = masking.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1]]))
CAUSAL_IMAGES = masking.or_masks(masking.causal_mask_function, IMAGES)
WITHOUT_EFFECT = (
    "cache_position", "deterministic", "layer_idx", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "return_dict", "shift_labels", "use_cache",
)  # fmt: skip
CHUNKS = masking.chunked_causal_mask_function
IN_EVAL = ({"dropout_p": 0.3, "train": False}, {"dropout_p": 0.3})  # yunchang applies dropout in eval mode, too
MORE = unchanged(learnable_sink=SINK, dropout_seed=3, prefix_length=5)
TORCH: list[tuple[Call, Call]] = [
    ({"is_causal": True}, {"causal": True}), ({"scale": 0.5}, {"softmax_scale": 0.5}), *unchanged(dropout_p=0.3),
]  # fmt: skip
CASES: dict[Driver, list[tuple[Call, Call]]] = {
    transformer_engine: [
        *unchanged(softmax_scale=0.5, softcap=3.0, window_size=(3, 0)),
        ({"softcap": 3.0, "call": {"softcap": 2.0}}, {"softcap": 2.0}),
        ({"softcap": 3.0, "call": {"softcap": 0.0}}, {}),
        ({"window_size": (3, 0), "call": {"window_size": (2, 0)}}, {"window_size": (2, 0)}),
        ({"attn_mask_type": "no_mask"}, {"causal": False}),
        ({"call": {"attn_mask_type": "no_mask"}}, {"causal": False}),
        ({"return_max_logit": True}, {"return_max_logits": True}),
        ({"call": {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES}}, {"alibi_slopes": SLOPES}),
        ({"softmax_type": "learnable"}, {"learnable_sink": SINK}),
        ({"softmax_type": "off-by-one"}, {"learnable_sink": torch.zeros(4)}),
        ({"attention_dropout": 0.3}, {"dropout_p": 0.3}),
        ({"attention_dropout": 0.3, "train": False}, {}),
        ({"num_attention_heads": 12, "num_gqa_groups": 6, "tp_group": group_of(2, 3), "attention_dropout": 0.3},
         {"first_head": 8, "dropout_p": 0.3}),
        (TWO_RANKS | {"tp_group": group_of(1, 2), "softmax_type": "learnable"},
         {"first_head": 4, "learnable_sink": SINK}),
        ({"attn_mask_type": "no_mask", "window_size": (3, 0)}, {"causal": False, "window_size": (3, 0)}),
        ({"attn_mask_type": "padding", "call": LENGTHS}, {"causal": False, "seqused_k": (6,)}),
        *(
            (
                {"keys": 12, "attention_type": "cross", "attn_mask_type": mask,
                 "bottom_right_diagonal": diagonals[0],
                 "call": {"bottom_right_diagonal": diagonals[1]} | (LENGTHS if "padding" in mask else {})},
                {"causal": "causal" in mask, "align": align, "seqused_k": (6,) if "padding" in mask else None},
            )
            for mask, aligned in ALIGNED.items() for diagonals, align in zip(DIAGONALS, aligned, strict=True)
        ),
    ],
    megatron: [
        ({"own": {"softmax_scale": 0.5}}, {"softmax_scale": 0.5}),
        ({"kv_channels": 8, "own": {"k_channels": 16, "v_channels": 16}}, {}),
        ({"window_size": (3, 0)}, {"window_size": (3, 0)}),
        ({"window_size": (3, 0), "window_attn_skip_freq": 2, "layer": 2}, {}),
        ({"call": {"attn_mask_type": AttnMaskType.no_mask}}, {"causal": False}),
        ({"softmax_type": "learnable"}, {"learnable_sink": SINK}),
        ({"softmax_type": "learnable", "heads": 8, "tp": group_of(1, 2)}, {"learnable_sink": SINK, "first_head": 4}),
        ({"softmax_type": "off-by-one", "heads": 8, "tp": group_of(0, 2)}, {"learnable_sink": torch.zeros(4)}),
        ({"attention_dropout": 0.3}, {"dropout_p": 0.3}),
        ({"attention_dropout": 0.3, "train": False}, {}),
        ({"attention_dropout": 0.3, "own": {"attention_dropout": 0.1}}, {"dropout_p": 0.1}),
        ({"attention_dropout": 0.3, "own": {"attention_dropout": 0.0}}, {}),
        ({"qk_clip": True}, {"return_max_logits": True}),
        ({"log_max_attention_logit": True}, {"return_max_logits": True}),
        ({"heads": 12, "tp": group_of(2, 3)}, {"first_head": 8}),
        ({"heads": 12, "context_parallel_size": 3, "own": {"pg_collection": None}}, {"first_head": 8}),
    ],
    attend: [
        ({"scaling": 0.5}, {"softmax_scale": 0.5}),
        ({"softcap": 3.0}, {"softcap": 3.0}),
        ({"s_aux": SINK}, {"learnable_sink": SINK}),
        ({"dropout": 0.3}, {"dropout_p": 0.3}),
        ({"is_causal": False}, {"causal": False}),
        ({"is_causal": None}, {}),
        ({name: 1 for name in WITHOUT_EFFECT} | {"output_attentions": False, "head_mask": None}, {}),
        ({"is_causal": None, "module": {"is_causal": False}}, {"causal": False}),
        ({"is_causal": True, "module": {"is_causal": False}}, {}),
        ({"mask_function": masking.causal_mask_function, "unused": CAUSAL_IMAGES,
          "packed": {"islands": [(1, 3), (5, 8)]}}, {}),
        ({"mask_function": masking.bidirectional_mask_function}, {"causal": False}),
        ({"mask_function": masking.sliding_window_causal_mask_function(4)}, {"window_size": (3, -1)}),
        ({"mask_function": masking.sliding_window_bidirectional_mask_function(4), "sliding_window": 4},
         {"causal": False, "window_size": (4, 4)}),
        ({"mask_function": CHUNKS(5, torch.zeros(1))}, {"cu_seqlens": [0, 5, 8]}),
        ({"packed": {"cu_seqlens": [0, 3, 8]}}, {"cu_seqlens": (0, 3, 8)}),
        ({"packed": {"tree": TREE}}, {"intervals": TREE.intervals}),
        ({"mask_function": CAUSAL_IMAGES, "packed": {"islands": [(1, 3), (5, 8)]}}, {"islands": ((1, 3), (5, 8))}),
        ({"mask_function": CHUNKS(2, torch.zeros(1)), "packed": {"cu_seqlens": [0, 3, 8]}},
         {"cu_seqlens": [0, 2, 3, 5, 7, 8]}),
    ],
    **{module: [*FLASH, IN_EVAL] for module in (usp, usp_packed)},
    **{ring: [*FLASH, *MORE] for ring in (ring_dense, ring_varlen, ring_packed)},
    usp_ring: FLASH,
    sdpa: TORCH,
    diffusers: [*TORCH, *unchanged(window_size=(3, 2), softcap=3.0, learnable_sink=SINK, return_lse=True)],
    lucidrains: [
        ({"causal": True}, {"causal": True}),
        ({"causal": True, "max_lookback_seq_len": 3}, {"causal": True, "window_size": (3, -1)}),
        ({"causal": True, "max_lookback_seq_len": 0}, {"causal": True, "window_size": (0, -1)}),
        ({"softclamp_qk_sim": True, "softclamp_value": 3.0}, {"softcap": 3.0}),
        ({"softclamp_qk_sim": True}, {"softcap": 50.0}),
        ({"softclamp_value": 3.0}, {}),
        ({"mask": MASK}, {"key_mask": MASK}),
    ],
    lucidrains_zig_zag: [({"causal": True}, {"causal": True}), ({"dropout": 0.3}, {"dropout_p": 0.3})],
    lucidrains_tree: [({"use_triton": True}, {"backend": "triton"}), ({"use_triton": False}, {"backend": "aten"})],
}  # fmt: skip
ROWS = [
    pytest.param(driver, *case, id=f"{driver.__name__}-{index}")
    for driver, cases in CASES.items()
    for index, case in enumerate([({}, {}), *cases])
]


def record(monkeypatch: pytest.MonkeyPatch, driver: Driver, given: Call) -> tuple[Call, Any]:
    """Return the arguments of the ``ring_attention`` call, and what the integration makes of an output of ones."""
    calls: list[Call] = []

    def recording(
        q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_max_logits: bool = False, **call: Any
    ) -> Any:
        calls.append(call | {"return_lse": return_lse, "return_max_logits": return_max_logits})
        assert {x.stride(-1) for x in (q, k, v)} == {1}
        out = torch.ones(*q.shape[:-1], v.shape[-1])
        more = [torch.zeros(q.shape[0], q.shape[2], q.shape[1])] * return_lse + [torch.zeros(4)] * return_max_logits
        return (out, *more) if more else out

    home = import_module(f"ringattn.integrations.{HOMES[driver]}")
    monkeypatch.setattr(home, "ring_attention", recording)
    result = driver(**given)
    (call,) = calls
    return {name: value for name, value in call.items() if name not in STRUCTURE}, result


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("driver", "given", "expected"), ROWS)
def test_an_option_reaches_the_call(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, given: Call, expected: Call
) -> None:
    call, _ = record(monkeypatch, driver, given)
    right = NEUTRAL | BASES.get(driver, {}) | expected
    for name, value in (NEUTRAL | call).items():
        other = right[name]
        if isinstance(other, Tensor):
            assert isinstance(value, Tensor) and torch.equal(value, other), name
        elif name == "cu_seqlens" and value is not None and other is not None:
            assert list(value) == list(other)
        else:
            assert value == other, f"{name} is {value}, not {other}"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("driver", [x for x in HOMES if x is not attend])
def test_tensors_reach_the_call_with_unit_strides(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """``attend`` is left out, because models of transformers make such tensors themselves."""
    for name in ("Q", "K"):
        monkeypatch.setitem(globals(), name, globals()[name].mT.contiguous().mT)
    monkeypatch.setitem(globals(), "HEAD_FIRST", tuple(x.mT.contiguous().mT for x in HEAD_FIRST))
    record(monkeypatch, driver, {})


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("home", sorted({*HOMES.values()}))
def test_every_option_that_an_integration_passes_has_a_case(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    drivers = [driver for driver, name in HOMES.items() if name == home]
    passed = {name for driver in drivers for name in record(monkeypatch, driver, {})[0]}
    tested = {name for driver in drivers for _, expected in CASES[driver] for name in expected}
    always = {name for driver in drivers for name in BASES.get(driver, {})} | {"return_lse", "return_max_logits"}
    assert passed - tested - always == set()


FOUR, TWO = group_of(0, 4), group_of(0, 2)
SPLIT: Call = {"context_parallel_size": 4, "cp": FOUR}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("made", "packed", "mask", "expected"),
    [
        ({"cp": FOUR}, None, "causal", (1, "sbhd", "causal")),
        (SPLIT, None, "no_mask", (4, "sbhd", "no_mask")),
        ({"context_parallel_size": 2, "cp": TWO}, {"qkv_format": None}, "causal", (2, "sbhd", "causal")),
        (SPLIT, {"qkv_format": "thd"}, "causal", (4, "thd", "padding_causal")),
        (SPLIT, {"qkv_format": "thd", "local_cp_size": 1}, "no_mask", (1, "thd", "padding")),
        (SPLIT, {"qkv_format": "thd", "local_cp_size": 2, "cp_group": TWO}, "padding", (2, "thd", "padding")),
        (SPLIT, {"qkv_format": "thd", "cp_group": TWO}, "padding", (2, "thd", "padding")),
    ],
)
def test_group_format_and_boundaries_of_a_megatron_micro_batch(
    made: Call, packed: Call | None, mask: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = Boundaries(*(torch.tensor([0, 8]) for _ in range(4)))
    named = {f"cu_seqlens_{side}": x for side, x in edges._asdict().items()}
    attended: Any = Mock(return_value=Q)
    monkeypatch.setattr(import_module("ringattn.integrations.megatron"), "attend_format", attended)
    micro_batch = None if packed is None else SimpleNamespace(**named | packed)
    megatron({"packed_seq_params": micro_batch, "attn_mask_type": AttnMaskType[mask]}, **made)
    call = attended.call_args.kwargs
    assert (call["group"].size(), call["qkv_format"], call["attn_mask_type"]) == expected
    assert call["boundaries"] == (Boundaries() if packed is None else edges)


@pytest.mark.usefixtures("stand_ins")
def test_megatron_keeps_the_largest_scores_until_they_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0]), torch.tensor([0.0, 1.0])]
    attended = Mock(side_effect=[(Q, x) for x in scores])
    monkeypatch.setattr(import_module("ringattn.integrations.megatron"), "attend_format", attended)
    module, largest = megatron_module(qk_clip=True), []
    for reset in (False, False, True):
        module.current_max_attn_logits = None if reset else module.current_max_attn_logits
        assert module(Q, Q, Q, None) is Q
        largest.append(module.current_max_attn_logits.tolist())
    assert largest == [[1, 5], [3, 5], [0, 1]]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("initialize", [True, False])
def test_the_learnable_sink_of_megatron_is_drawn_in_its_dtype(initialize: bool) -> None:
    drawn = Mock()
    made: Call = {"params_dtype": torch.bfloat16, "perform_initialization": initialize, "init_method": drawn}
    module = megatron_module(softmax_type="learnable", **made)
    sink = module.softmax_offset
    assert type(module).sharded_state_dict is vars  # of DotProductAttention
    assert sink.dtype == torch.bfloat16 and drawn.call_count == initialize
    assert not initialize or drawn.call_args.args[0] is sink


MEGATRON_REFUSED: list[tuple[Call, Call, str]] = [
    *(({field: True}, {}, f"config.{field} is on") for field in OFF),
    *((SPLIT | {"cp": group_of(0, size)}, {}, f"context_parallel_size is 4, .* has {size} ranks") for size in (2, 8)),
    (SPLIT | {"cp": None}, {}, "pg_collection.cp is None"),
    ({"tp": "tp"}, {}, "pg_collection.tp is 'tp'"),
    ({"own": {"cp_comm_type": "a2a"}}, {}, "cp_comm_type is 'a2a'"),
    ({"softmax_type": "sigmoid"}, {}, "softmax_type is 'sigmoid'"),
    ({"own": {"k_channels": 8}}, {}, r"head dims \(16, 16\): .* \(8, 16\)"),
    ({"own": {"v_channels": 8}}, {}, r"head dims \(16, 16\): .* \(16, 8\)"),
    ({}, {"attention_bias": Q}, "attention_bias is given"),
    ({}, {"attention_mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool)}, "attention_mask has shape"),
    ({}, {"attn_mask_type": AttnMaskType.padding}, "attn_mask_type is 'padding'"),
    ({}, {"attn_mask_type": AttnMaskType.arbitrary}, "attn_mask_type is 'arbitrary'"),
    ({}, {"key": K.expand(9, 8, 2, 16)}, "query has 8 tokens and key has 9"),
    ({}, {"packed_seq_params": SimpleNamespace(qkv_format="sbhd", local_cp_size=2, cu_seqlens_q=None,
     cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)}, "local_cp_size is 2 and cp_group"),
]  # fmt: skip


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("made", "called", "named"), MEGATRON_REFUSED)
def test_refused_options_of_megatron_are_named(made: Call, called: Call, named: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=named):
        megatron(called, **made)


@pytest.mark.usefixtures("stand_ins")
def test_with_ring_attention_changes_a_copy_of_a_megatron_spec() -> None:
    def spec_of(**submodules: Any) -> SimpleNamespace:
        return SimpleNamespace(submodules=SimpleNamespace(**submodules))

    names, integration = ("self_attention", "cross_attention"), import_module("ringattn.integrations.megatron")
    spec = spec_of(layer_specs=[spec_of(**{name: spec_of(core_attention=name) for name in names})])
    for checked_spec, expected in (
        (integration.with_ring_attention(spec), [integration.RingCoreAttention] * 2),
        (spec, [*names]),
    ):
        (layer,) = checked_spec.submodules.layer_specs
        assert [getattr(layer.submodules, name).submodules.core_attention for name in names] == expected
    with pytest.raises(ValueError, match="spec is a SimpleNamespace without core_attention"):
        integration.with_ring_attention(spec_of(self_attention=spec_of()))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("uneven", ["ring_anything", "ulysses_anything", ""])
def test_mesh_and_layouts_of_a_diffusers_config(uneven: str, degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect own lengths of queries and keys with uneven shards."""
    integration, attended = import_module("ringattn.integrations.diffusers"), Mock(return_value=(Q, Q[..., 0].mT))
    flags = dict.fromkeys(("ring_anything", "ulysses_anything"), False) | dict.fromkeys([uneven] * bool(uneven), True)
    context = SimpleNamespace(
        **flags, convert_to_fp32=True, ulysses_degree=degree, _ring_mesh="ring", _mesh={("ring", "ulysses"): "both"},
        _flattened_mesh=SimpleNamespace(get_group=lambda: "all"),
    )  # fmt: skip
    monkeypatch.setattr(integration, "gather_size_by_comm", lambda tokens, group: [tokens, {"all": 3}[group]])
    monkeypatch.setattr(integration, "ring_attention", attended)
    given: Call = {"enable_gqa": True, "_parallel_config": SimpleNamespace(context_parallel_config=context)}
    out, lse = integration._attention(Q, K[:, :5], K[:, :5], **given)
    call = attended.call_args.kwargs
    assert call["group"] == {1: "ring", 2: "both"}[degree] and out is Q and lse.equal(Q[..., 0])
    layouts = [call[name] for name in ("layout", "kv_layout")]
    assert [getattr(x, "lengths", x) for x in layouts] == ([(8, 3), (5, 3)] if uneven else ["contiguous"] * 2)
    context.convert_to_fp32 = False
    with pytest.raises(NotImplementedError, match="convert_to_fp32 is False"):
        integration._attention(Q, K, K, **given)


@pytest.mark.usefixtures("stand_ins")
def test_diffusers_calls_without_a_config_and_refused_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    integration, attended = import_module("ringattn.integrations.diffusers"), Mock(return_value=Q)
    monkeypatch.setattr(integration, "ring_attention", attended)
    integration._attention(Q, Q, Q)
    assert attended.call_args.kwargs["group"] is integration.SINGLE_RANK
    with pytest.raises(ValueError, match=r"key has 2 heads and query has 4.*enable_gqa"):
        integration._attention(Q, K, K)
    with pytest.raises(NotImplementedError, match=r"attn_mask is a Tensor.*window"):
        integration._attention(Q, Q, Q, MASK)


@pytest.mark.usefixtures("stand_ins")
def test_the_backend_of_diffusers_is_registered_once_and_takes_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    integration, registered = import_module("ringattn.integrations.diffusers"), list[Any]()
    names: Any = Enum("names", {"NATIVE": "native"}, type=str)
    registry = SimpleNamespace(
        register=lambda *backend, **options: lambda function: registered.append((*backend, options, function)),
        _supported_arg_names=defaultdict(set),
    )
    monkeypatch.setattr(integration, "AttentionBackendName", names)
    monkeypatch.setattr(integration, "_AttentionBackendRegistry", registry)
    for version in ("0.41.9", "0.43.0", "0.4"):
        monkeypatch.setattr(integration.diffusers, "__version__", version, raising=False)
        with pytest.raises(RuntimeError, match=f"diffusers is {version}: .* needs 0.42.x"):
            integration.register()
    monkeypatch.setattr(integration.diffusers, "__version__", "0.42.1")
    integration.register()
    integration.register()
    assert [(x.name, x.value) for x in names] == [("NATIVE", "native"), ("RINGATTN", "ringattn")]
    assert registered == [(names("ringattn"), {"supports_context_parallel": True}, integration._attention)] * 2
    assert "an unknown argument" in registry._supported_arg_names[names["RINGATTN"]]


def test_a_window_without_a_mask_and_a_tree_under_a_full_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window is 4"):
        attend(sliding_window=4)
    with pytest.raises(NotImplementedError, match="tree is given"):
        attend(is_causal=False, packed={"tree": TREE})


@pytest.mark.parametrize("argument", ["q_offset", "kv_offset", "use_vmap"])
def test_a_mask_with_an_offset_is_refused(argument: str) -> None:
    """Ignore options of dense masks."""
    names = ("allow_is_bidirectional_skip", "allow_is_causal_skip", "allow_torch_fix", "batch_size", "config", "dtype")
    options: Call = dict.fromkeys((*names, "local_size", argument), 1)
    with pytest.raises(NotImplementedError, match="8 keys from") if "offset" in argument else nullcontext():
        transformers.mask_interface(q_length=8, kv_length=8, mask_function=masking.causal_mask_function, **options)


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_layers_and_rotary_embeddings_that_work_over_several_ranks(rope_type: str) -> None:
    kinds = ["full_attention", "sliding_attention", "chunked_attention"]
    transformers._check_config(SimpleNamespace(rope_parameters={"rope_type": rope_type}, layer_types=kinds))
    transformers._check_config(Gemma3Config())  # the text config within it has the rotary embedding


@pytest.mark.parametrize("items", [None, 5, torch.tensor(7)])
def test_num_items_in_batch_is_given_or_counted(items: Any) -> None:
    labels = torch.tensor([[1, 2, -100, 3, 4, 5], [-100, -100, 1, 2, 3, 4]])
    batch = {"input_ids": labels.abs(), "labels": labels, "num_items_in_batch": items}
    right = 6 if items is None else int(items)

    types = {"token_type_ids": labels % 2, "mm_token_type_ids": labels % 3}

    def part(group: Any) -> int:
        sharded = transformers.shard_batch(batch | types, "contiguous", group, cu_seqlens=[0, 4, 6])
        assert sharded.cu_seqlens == (0, 4, 6) and sharded["labels"].eq(-100).all()
        for name, x in types.items():
            assert sharded[name].equal(x.chunk(2, 1)[group.rank()])
        shifted = transformers.shard_batch(batch | {"shift_labels": labels}, "contiguous", group)["shift_labels"]
        assert shifted.equal(labels.chunk(2, 1)[group.rank()])
        return int(sharded["num_items_in_batch"])

    assert run_ranks(2, part) == [right, right]


def test_sharded_adds_its_hook_once_and_ends_with_its_block() -> None:
    from ..support.hf_models import build_model, token_ids

    model, ids = build_model("llama"), token_ids()
    for _ in range(3):
        with pytest.raises(KeyError), transformers.sharded(model, None, tree=TREE):
            raise KeyError
    assert [len(part._forward_hooks) for part in (model, model.model)] == [1, 1]
    outside = model(ids, labels=ids).loss
    with transformers.sharded(model, None):  # one rank may compute any loss
        assert model(ids, labels=ids).loss.equal(outside)


def test_only_outputs_of_text_models_are_checked() -> None:
    """Accept the pooled output of a vision tower, which sees its whole image."""
    module = nn.Module()
    with transformers.sharded(module, None):
        transformers._sharding.get().tokens = 8
        for name in ("input_ids", "pixel_values"):
            vars(module)["main_input_name"] = name
            with pytest.raises(NotImplementedError, match="pooler_output") if name == "input_ids" else nullcontext():
                transformers._check_output(module, (), {}, {"pooler_output": Q})
