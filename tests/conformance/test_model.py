"""Verdicts on whole models, whose ranks run here one after another because they need no communication."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringattn.bench.common.result import Result
from ringattn.conformance.causes import DOCUMENT, EQUAL_ROWS, FUTURE
from ringattn.conformance.model import TOKENS, VOCABULARY, judge_model, run_model
from ringattn.conformance.protocol import Target
from ringattn.conformance.ranks import Reply
from ringattn.conformance.referee import Referee

from ..support.bad_targets import Decoder

Logits = tuple[Tensor, Tensor]


class Changed(Decoder):
    """The right model with one change of its logits and their positions."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__(**options)
        self.change = change

    def forward(self, tokens: Tensor, cu_seqlens: Any = None) -> Any:
        return self.change(*super().forward(tokens, cu_seqlens))


class OwnLoss(Decoder):
    """A model whose ``loss`` is the mean over the tokens of its rank, divided by a power of the number of ranks."""

    power = 0

    def loss(self, tokens: Tensor) -> Tensor:
        logits, at = self(tokens)
        return F.cross_entropy(logits[0], tokens[0, at]) / dist.get_world_size() ** self.power  # type: ignore[no-any-return]


class TwiceDivided(OwnLoss):
    power = 2


def judge_ranks(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, failing_world: int = 0) -> Result:
    def request(world: int, work: Any, *arguments: Any) -> Reply:
        if world == failing_world:
            return Reply("error", [], "RuntimeError", "out of luck")
        values = list[Any]()
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        for rank in range(world):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            assert arguments == (5,)
            values.append(work(Target(SimpleNamespace(attend=build)), rank, *arguments))
        return Reply("ok", values)

    return judge_model(cast(Referee, SimpleNamespace(worlds=[3], seed=5, request=request)))


def on_several(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Logits]:
    """Return a change of the logits that one rank alone does not make."""
    return lambda logits, at: (change(logits) if dist.get_world_size() > 1 else logits, at)


def without_last(logits: Tensor, at: Tensor) -> Logits:
    return logits[:, at < TOKENS - 1], at[at < TOKENS - 1]


SIZES = {"loss", "gradient norm"}
SCALED = {"logits", *SIZES, "gradient direction"}
ALL = {"causality", "documents", *SCALED}
MODELS: dict[str, tuple[Callable[[], Any], set[str], set[str], str]] = {
    "right": (Decoder, set(), set(), ""),
    "logits as an attribute": (lambda: Changed(lambda *both: SimpleNamespace(logits=[*both])), set(), set(), ""),
    "own loss": (OwnLoss, set(), set(), ""),
    "sees the future": (lambda: Decoder(sees_future=True), {"causality", "documents"}, set(), f"{FUTURE}: token "),
    "mixes documents": (lambda: Decoder(ignores_documents=True), {"documents"}, set(), f"{DOCUMENT}: token "),
    "dropout on the last rank": (
        lambda: Changed(lambda logits, at: (F.dropout(logits) if at[0] >= 80 else logits, at)), set(), ALL,
        f"{EQUAL_ROWS}: rank 2, token 80",
    ),
    "dead": (
        lambda: Changed(lambda logits, at: (logits * 0 + torch.arange(16.0), at)),
        {"causality", "documents", "gradient norm", "gradient direction"}, set(), "token 1 does not move itself",
    ),
    "a lost token": (lambda: Changed(without_last), {"positions"}, set(), "do not hold every token"),
    "larger on several ranks": (lambda: Decoder(scale=1.83), set(), SCALED, "of one rank; 1 or 3 is right"),
    "NaN": (lambda: Changed(on_several(lambda logits: logits * torch.nan)), set(), ALL, "off by inf"),
    "a mean twice": (TwiceDivided, set(), SIZES, "0.3333 times that of one rank"),
    "gradients of the wrong sign": (
        lambda: Changed(on_several(lambda logits: 2 * logits.detach() - logits)), set(), {"gradient direction"},
        "cosine -1.00000",
    ),
}  # fmt: skip
"""A model, its wrong checks on any number of ranks, those on several ranks only, and a part of a message."""


@pytest.mark.parametrize("name", MODELS)
def test_every_mistake_of_a_model_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, always, on_many, text = MODELS[name]
    result = judge_ranks(build, monkeypatch)
    wrong = {(row["check"], row["world"]) for row in result.rows if row["status"] == "wrong"}
    assert wrong == {(check, world) for check in always for world in (1, 3)} | {(check, 3) for check in on_many}
    assert len(result.failed) == len(wrong) and (any(text in failure for failure in result.failed) or not text)
    assert result.notes == [f"{len(result.rows) - len(wrong)} of {len(result.rows)} checks are right"]
    assert {row["check"] for row in result.rows} >= ALL


def test_a_model_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_ranks(Decoder, monkeypatch, failing_world=3).failed == [
        "run on 3 ranks: error RuntimeError out of luck"
    ]


def test_the_loss_is_that_of_the_next_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, Tensor]()

    class Keeps(Decoder):
        def forward(self, tokens: Tensor, cu_seqlens: Any = None) -> Logits:
            logits, at = super().forward(tokens, cu_seqlens)
            seen.update(tokens=tokens, logits=logits)
            return logits, at

    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    found = run_model(Target(SimpleNamespace(attend=Keeps)), 0, 0)
    assert seen["tokens"].shape == (1, TOKENS) and seen["logits"].shape == (1, TOKENS, VOCABULARY)
    expected = F.cross_entropy(seen["logits"][0, :-1], seen["tokens"][0, 1:])
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-5)
