"""The fuzz: a few drawn calls on every change, ten minutes at night, and defects that it must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.reference import masks
from ringattn.ring import moves, ops, prepare, shards

from .fuzz import Fuzz, main, search
from .fuzz_draw import BASE, WRONG, Literals, draw_line

pytestmark = [
    pytest.mark.usefixtures("one_core", "poison"),
    # tanh of a large score overflows to infinity before it becomes 1
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]

FEATURES = (
    *("threads", "processes", "alone", "kernels", "packed", "transposed", "float32", "float16", "bfloat16", "triton"),
    *("contiguous", "zigzag", "striped", "documents", "uneven", "balanced", "packed_layout", "spans", "owners"),
    *("slots", "prefetch", "chunks", "direction", "topology", "wire_dtype", "grad_wire_dtype", "block_mask", "kept"),
    *("window_size", "causal", "cu_seqlens", "prefix_length", "seqused_k", "key_mask", "leftpad_k", "kv_layout"),
    *("learnable_sink", "lse", "return_max_logits", "islands", "intervals"),
    *("softmax_scale", "softcap", "alibi_slopes", "dropout_p", "first_head", "config"),
    *("named", "late", "wait", "unshard", "move", "mesh", "align"),
)


@pytest.mark.nightly
def test_every_feature_is_drawn() -> None:
    """Each wrong value and combinations of many features occur, too."""
    drawn: Counter[str] = Counter()
    wrong: set[str] = set()
    most = 0
    for number in range(8000):
        line = draw_line(Random(number))
        for call in line["calls"]:
            if "spoil" in call:
                wrong.add(f"{call['spoil'][:2]}")
            full_call = BASE | call
            features = [
                line["run"],
                full_call["layout"][0],
                *(full_call[name] for name in ("strides", "dtype", "backend")),
            ]
            features += [*full_call["ring"], *(name for name in call if call[name] != BASE.get(name))]
            drawn.update(features)
            most = max(most, len({*features} & {*FEATURES}))
    assert [name for name in FEATURES if drawn[name] < 20] == []
    assert {f"{[name, value]}" for name, values in WRONG.items() for value in values} <= wrong
    assert most > 15


def shared(sink: Tensor, q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return a start state that shares memory with the sink: a defect."""
    return torch.zeros(*q.shape[:3], dim), sink[None, :, None].expand(q.shape[0], -1, q.shape[1])


def test_a_few_drawn_calls_pass() -> None:
    assert search(0, range(4)) == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_drawn_calls_pass_for_ten_minutes() -> None:
    assert main(["--minutes", "10", "--seed", "1"]) == 0


SINK = {"learnable_sink": ["float32", False]}


def refuse(*_: object) -> None:
    raise ValueError("that will not do")


@pytest.mark.parametrize(
    ("module", "name", "defect", "call", "message"),
    [
        (ops, "sink_gradient", lambda *args: torch.ones(1), SINK, "dsink: error"),
        (ops, "sink_state", shared, SINK | {"backend": "triton", "tokens": 1}, "learnable_sink was changed"),
        (masks, "is_causal", lambda prefix: lambda q, k: k < q, {"causal": True}, "out: error"),
        (prepare, "check_args", refuse, {"spoil": ["window_size", 4, -1]}, "window_size: no error that names it"),
        (shards, "exchange", lambda ring, xs, shapes: [-x for x in xs], {"unshard": [1, "sum"]}, "unshard puts"),
        (moves, "_sum_rows", lambda x, dim, indices, out=None: x, {"move": ["roll", 1, 3]}, "gets other tokens"),
    ],
)
def test_injected_defects_are_found(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, defect: Callable[..., Any], call: Literals, message: str
) -> None:
    monkeypatch.setattr(module, name, defect)
    assert message in Fuzz().failure({"run": "alone", "world": 1, "calls": [call]})
