"""Check of a whole model under its own context parallelism, which needs no adapter.

``build()`` runs on every rank of a process group and returns a module. ``module(tokens)`` gets the whole sequence,
``[B, S]``, and returns logits ``[B, S, V]``, or this rank's logits and the positions of their tokens. If it takes
``cu_seqlens``, documents are checked, too. The loss is ``module.loss(tokens)``, or without it the mean over all tokens.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bench.common.result import Result
from .causes import DOCUMENT, EQUAL_ROWS, FUTURE
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
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS)).repeat(2 + len(CHANGED), 1)
    rows = torch.arange(1, 1 + len(CHANGED)), torch.tensor(CHANGED)
    tokens[rows] = (tokens[rows] + 1) % VOCABULARY
    has_documents = "cu_seqlens" in inspect.signature(model.forward).parameters

    def logits(tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        result = model(tokens, **options)
        result = getattr(result, "logits", result)
        return (result[0], result[1]) if isinstance(result, tuple | list) else (result, torch.arange(tokens.shape[1]))

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
    grad = torch.cat([x.flatten().double() for x in grads])
    return {"positions": positions, "logits": whole, "packed": packed, "loss": loss.item(), "grad": grad}


def judge_model(referee: Referee) -> Result:
    """Judge a model at every number of ranks, with one rank as the scale of loss and gradients."""
    result, alone = Result("conformance --model", UNITS), dict[str, Any]()
    for world in sorted({1, *referee.worlds}):
        reply, texts = referee.request(world, run_model, referee.seed), dict[str, str]()
        if reply.status != "ok":
            texts["run"] = f"{reply.status} {reply.error} {reply.text}"
        else:
            if {*torch.cat([part["positions"] for part in reply.values]).tolist()} != {*range(TOKENS)}:
                texts["positions"] = "those of all ranks do not hold every token"
            texts["causality"] = _leaks(reply.values, "logits", (0, TOKENS), FUTURE)
            if reply.values[0]["packed"] is not None:
                texts["documents"] = _leaks(reply.values, "packed", EDGES, DOCUMENT)
            alone = alone or reply.values[0]
            texts |= _compare_with_one_rank(reply.values, alone)
        for check, text in texts.items():
            status = "wrong" if text else "right"
            result.rows.append({"check": check, "world": world, "status": status, "message": text})
            result.failed += [f"{check} on {world} ranks: {text}"] * bool(text)
    result.notes.append(f"{len(result.rows) - len(result.failed)} of {len(result.rows)} checks are right")
    return result


def _leaks(ranks: list[dict[str, Any]], name: str, edges: tuple[int, ...], cause: str) -> str:
    """Return what tokens move that must not see a changed token: earlier ones, or those of other documents."""
    documents = torch.bucketize(torch.arange(TOKENS), torch.tensor(edges[1:]), right=True)
    for rank, part in enumerate(ranks):
        logits, at = part[name].double(), part["positions"]
        influence = (logits[1:] - logits[:1]).abs().amax(-1) > THRESHOLD * logits.abs().max()
        if influence[-1].any():
            return f"{EQUAL_ROWS}: rank {rank}, token {int(at[influence[-1]][0])}"
        for row, token in zip(influence, CHANGED, strict=False):
            wrong = row & ((at < token) | (documents[at] != documents[token]))
            if wrong.any():
                return f"{cause}: token {token} moves token {int(at[wrong][0])} of rank {rank}"
            if (at == token).any() and not row[at == token].all():
                return f"token {token} does not move itself on rank {rank}"
    return ""


def _compare_with_one_rank(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, str]:
    """Return what differs from one rank: logits, loss and gradients, of which a sum or a mean over ranks is right."""
    world, largest, tolerance = len(ranks), alone["logits"].abs().max().item(), 10 * THRESHOLD
    off = max(
        (part["logits"] - alone["logits"][:, part["positions"]]).abs().nan_to_num(nan=math.inf).max() for part in ranks
    )
    texts = {"logits": f"off by {off:.3g} of {largest:.3g}" if not off <= tolerance * largest else ""}
    grad, size = torch.stack([part["grad"] for part in ranks]).sum(0), alone["grad"].norm()
    ratios = {"loss": sum(part["loss"] for part in ranks) / alone["loss"], "gradient norm": float(grad.norm() / size)}
    for name, ratio in ratios.items():
        fits = any(abs(ratio / scale - 1) < tolerance for scale in (1, world))
        texts[name] = "" if fits else f"summed over the ranks {ratio:.4g} times that of one rank; 1 or {world} is right"
    cosine = float(grad @ alone["grad"] / (grad.norm() * size).clamp(min=1e-300))
    return texts | {
        "gradient direction": f"cosine {cosine:.5f} with that of one rank" if not cosine >= 1 - tolerance else ""
    }
