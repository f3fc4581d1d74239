"""Drawn calls of the public face: a few with every change, ten minutes at night, and what the fuzz itself can see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.reference import masks
from ringattn.ring import args, ops, shards

from .fuzz import Fuzz, main, search
from .fuzz_draw import BASE, WRONG, Literals, draw_line

pytestmark = [
    pytest.mark.usefixtures("one_core", "poison"),
    # tanh of a large score, which is 1 by way of an infinity
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]

LAYOUTS = ("contiguous", "zigzag", "striped", "documents", "uneven", "balanced", "spans", "owners")
RINGS = ("slots", "prefetch", "chunks", "direction", "topology", "wire_dtype", "grad_wire_dtype")
ARGUMENTS = (
    *("window_size", "causal", "cu_seqlens", "prefix_length", "seqused_k", "kv_layout", "learnable_sink", "lse"),
    *("softmax_scale", "softcap", "alibi_slopes", "dropout_p", "config", "named", "kept", "late", "wait"),
)
ONE_OF = (
    ("threads", "processes", "alone", "kernels"),
    LAYOUTS,
    ("contiguous strides", "packed", "transposed"),
    ("float32", "float16", "bfloat16"),
    ("triton", "aten"),
    ("blocks", "longformer"),
)
"""Of which a call has one at most."""
APART = {
    **{("longformer", "window_size"): "a Longformer mask has a window of its own, and refuses another"},
    **{pair: "the interpreter takes bfloat16 for integers" for pair in product(["bfloat16"], ["triton", "kernels"])},
    **{("aten", name): "tiles are the kernels'" for name in ("config", "kernels")},
    **{("config", "blocks"): "a tile divides a block", ("bfloat16", "config"): "tiles are the kernels'"},
    **{("kernels", name): "of the ring alone" for name in ("blocks", "longformer", "processes", *RINGS)},
    **{("kept", name): "the ring that calls with group= share has no settings" for name in RINGS},
}
"""Pairs of features that mean nothing, and why."""


def features(line: Literals, call: Literals) -> set[str]:
    """What a call has of everything that a call can have."""
    call = BASE | call
    pattern = call.get("block_mask")
    strides = "contiguous strides" if call["strides"] == "contiguous" else call["strides"]
    backend = "triton" if call["backend"] == "triton" else "aten"
    found = {line["run"], call["layout"][0], strides, call["dtype"], backend, *call["ring"]}
    if pattern is not None:
        found.add("longformer" if pattern[0] == "longformer" else "blocks")
    return found | {name for name in ARGUMENTS if call.get(name) not in (None, BASE.get(name))}


def test_every_pair_of_features() -> None:
    """Every two that mean something are drawn together, every wrong value too."""
    pairs: Counter[tuple[str, ...]] = Counter()
    wrong: set[str] = set()
    for number in range(5000):
        line = draw_line(Random(number))
        for call in line["calls"]:
            if "spoil" in call:
                wrong.add(f"{call['spoil'][:2]}")
            elif "unshard" not in call:
                pairs.update(combinations(sorted(features(line, call)), 2))
    apart = {tuple(sorted(pair)) for pair in [*APART, *(pair for names in ONE_OF for pair in combinations(names, 2))]}
    names = sorted({*ARGUMENTS, *RINGS, *(name for names in ONE_OF for name in names)})
    assert {pair for pair in combinations(names, 2) if pairs[pair] < 10} == apart
    assert {f"{[name, value]}" for name, values in WRONG.items() for value in values} <= wrong


def shared(sink: Tensor, q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The state before any key in the memory of the sink."""
    return torch.zeros(*q.shape[:3], dim), sink[None, :, None].expand(q.shape[0], -1, q.shape[1])


def test_drawn_calls() -> None:
    assert search(0, range(12)) == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_drawn_calls_for_ten_minutes() -> None:
    assert main(["--minutes", "10", "--seed", "1"]) == 0


SINK = {"learnable_sink": ["float32", False]}


def refuse(*_: object) -> None:
    raise ValueError("that will not do")


@pytest.mark.parametrize(
    ("module", "name", "defect", "call", "told"),
    [
        (ops, "sink_gradient", lambda *given: torch.ones(1), SINK, "dsink: error"),
        (ops, "sink_state", shared, SINK | {"backend": "triton", "tokens": 1}, "learnable_sink was changed"),
        (masks, "is_causal", lambda prefix: lambda q, k: k < q, {"causal": True}, "the reference's out is not"),
        (args, "mask_of", refuse, {"spoil": ["window_size", 4, -1]}, "window_size: no error that names it"),
        (shards, "exchange", lambda ring, given, shapes: [-x for x in given], {"unshard": [1, "sum"]}, "unshard puts"),
    ],
)
def test_defects(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, defect: Callable[..., Any], call: Literals, told: str
) -> None:
    monkeypatch.setattr(module, name, defect)
    assert told in Fuzz().failure({"run": "alone", "world": 1, "calls": [call]})


def test_a_failure_becomes_one_short_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "sink_gradient", lambda sink, delta, lse: torch.full_like(sink, 9.0))
    long = {
        "tokens": 24,
        "causal": True,
        "softcap": 3.0,
        "heads": [2, 2],
        "ring": {"slots": 4, "chunks": 2},
        "lse": True,
    }
    line = {"run": "threads", "world": 3, "calls": [long, long | SINK | {"wait": 1}, long]}
    fuzz = Fuzz()
    small, told = fuzz.shrunk(line, fuzz.failure(line))
    fuzz.close()
    assert small == {"run": "threads", "world": 1, "calls": [SINK]}
    assert told.startswith("dsink: error ")
