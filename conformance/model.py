"""Check of a whole model under its own context parallelism, which needs no adapter.

``build()`` runs on every rank of a process group and returns a module. ``module(tokens)`` gets the whole sequence,
``[B, S]``, and returns logits ``[B, S, V]``, or this rank's logits and the positions of their tokens. If it takes
``cu_seqlens``, documents are checked, too. The loss is ``module.loss(tokens)``, or without it the mean over all tokens.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench.common.result import Result
from .causes import DOCUMENT, FUTURE
from .protocol import Target

if TYPE_CHECKING:
    from .referee import Referee

TOKENS, VOCABULARY = 120, 16  # tokens are a multiple of twice 1 to 6 ranks
EDGES = (0, 31, 77, TOKENS)
CHANGED = (1, 17, 30, 31, 50, 76, 77, 90, 119)
"""Tokens that the probe changes: near the edges of documents, and in every shard."""
THRESHOLD = 1e-4  # of the largest logit, or of the loss
UNITS = dict.fromkeys(("check", "world", "status", "message"), "")


def run_model(target: Target, rank: int, seed: int) -> dict[str, Any]:
    """Run the model on one rank; return positions, logits with and without documents, and loss and gradients."""
    torch.manual_seed(seed)
    model = target.adapter.attend()
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS)).repeat(1 + len(CHANGED), 1)
    rows = torch.arange(1, 1 + len(CHANGED)), torch.tensor(CHANGED)
    tokens[rows] = (tokens[rows] + 1) % VOCABULARY
    has_documents = "cu_seqlens" in inspect.signature(model.forward).parameters

    def logits(tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        returned = model(tokens, **options)
        return returned if isinstance(returned, tuple) else (returned, torch.arange(tokens.shape[1]))

    with torch.no_grad():
        whole, positions = logits(tokens)
        packed = logits(tokens, cu_seqlens=EDGES)[0] if has_documents else None
    if hasattr(model, "loss"):
        loss = model.loss(tokens[:1])
    else:
        own, at = logits(tokens[:1])
        labels = F.pad(tokens[0, 1:], (0, 1), value=-100)[at]
        loss = F.cross_entropy(own[0].float(), labels, reduction="sum") / (TOKENS - 1)
    loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    flat = torch.cat([x.flatten().double() for x in grads])
    weights = torch.cat([x.detach().flatten().double() for x in model.parameters()])
    return {
        "positions": positions,
        "logits": whole,
        "packed": packed,
        "loss": loss.item(),
        "grads": flat,
        "weights": weights,
    }


def judge_model(referee: Referee) -> Result:
    """Judge a model at every number of ranks, with one rank as the scale of loss and gradients."""
    result, alone = Result("conformance --model", UNITS), None
    for world in sorted({1, *referee.worlds}):
        reply = referee.request(world, run_model, referee.seed)
        if reply.status != "ok":
            texts = {"run": f"{reply.status} {reply.error} {reply.text}"}
        else:
            ranks = reply.values
            alone = ranks[0] if world == 1 else alone
            texts = {"causality": _leaks(ranks, "logits", (0, TOKENS), FUTURE)}
            texts["documents"] = "" if ranks[0]["packed"] is None else _leaks(ranks, "packed", EDGES, DOCUMENT)
            if alone is not None and world > 1:
                texts |= _compare_with_one_rank(ranks, alone)
        for check, text in texts.items():
            result.rows.append(
                {"check": check, "world": world, "status": "wrong" if text else "right", "message": text}
            )
            result.failed += [f"{check} on {world} ranks: {text}"] * bool(text)
    result.notes.append(
        f"{sum(row['status'] == 'right' for row in result.rows)} of {len(result.rows)} checks are right"
    )
    return result


def _leaks(ranks: list[dict[str, Any]], name: str, edges: tuple[int, ...], cause: str) -> str:
    """Return what tokens move that must not see a changed token: earlier ones, or those of other documents."""
    documents = torch.bucketize(torch.arange(TOKENS), torch.tensor(edges[1:]), right=True)
    for rank, part in enumerate(ranks):
        logits, at = part[name].double(), part["positions"]
        moved = (logits[1:] - logits[:1]).abs().amax(-1) > THRESHOLD * logits.abs().max()
        for row, token in zip(moved, CHANGED, strict=True):
            wrong = row & ((at < token) | (documents[at] != documents[token]))
            if wrong.any():
                return f"{cause}: token {token} moves token {int(at[wrong][0])} of rank {rank}"
            if (at == token).any() and not row[at == token].all():
                return f"token {token} does not move itself on rank {rank}"
    return ""


def _compare_with_one_rank(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, str]:
    """Return what differs from one rank: weights, logits, loss and gradients, which may need a sum or a mean."""
    world = len(ranks)
    off = max((part["logits"] - alone["logits"][:, part["positions"]]).abs().max().item() for part in ranks)
    largest = alone["logits"].abs().max().item()
    texts = {"weights": "" if all(part["weights"].equal(alone["weights"]) for part in ranks) else "ranks build others"}
    texts["logits"] = f"off by {off:.3g} of {largest:.3g}" if off > 10 * THRESHOLD * largest else ""
    total, grads = sum(part["loss"] for part in ranks), torch.stack([part["grads"] for part in ranks]).sum(0)
    for name, ratio in (
        ("loss", total / alone["loss"]),
        ("gradient norm", float(grads.norm() / alone["grads"].norm())),
    ):
        fits = any(abs(ratio / scale - 1) < 10 * THRESHOLD for scale in (1, world))
        texts[name] = "" if fits else f"summed over the ranks {ratio:.4g} times that of one rank; 1 or {world} is right"
    direction = float(grads @ alone["grads"] / (grads.norm() * alone["grads"].norm()).clamp(min=1e-300))
    texts["gradients"] = (
        f"they point elsewhere than those of one rank: cosine {direction:.5f}" if direction < 0.9999 else ""
    )
    return texts
