"""One small ring in plain torch.distributed with a defect by name: ``tests.support.broken_rings:DEFECT``.

``none`` has no defect. The module shares the masks with the reference, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.conformance import causes
from ringattn.conformance.cases import Case
from ringattn.conformance.evidence import run_case
from ringattn.conformance.protocol import Target, TargetCall
from ringattn.conformance.ranks import Reply
from ringattn.conformance.standalone import default_positions
from ringattn.reference.masks import add_head_dim, visible
from ringattn.reference.scores import ScoreOptions, apply_score_options, dropout_factors

DEFECTS = {
    "document": causes.DOCUMENT, "future": causes.FUTURE, "window": causes.WINDOW_EDGE, "sink": causes.SINK,
    "sinks": causes.SINK_PER_HOP, "lse": causes.BASE_2, "scale": causes.SCALE_TWICE, "heads": causes.HEADS,
    "unreduced": causes.LOCAL, "shard": causes.SHIFTED, "stale": causes.STALE, "zero": causes.ZERO,
    "nan": causes.NOT_FINITE, "dropout": causes.DROPOUT_WORLD, "merge": causes.UNSCALED, "padding": causes.PADDING,
    "unseen": causes.UNSEEN, "factor": "dk is 2 dk", "misrouted": causes.MISROUTED,
}  # fmt: skip
"""The cause that each defect must be given."""


def __getattr__(name: str) -> SimpleNamespace:
    if name != "none" and name not in DEFECTS:
        raise AttributeError(name)
    return SimpleNamespace(attend=partial(attend, name), version=f"a ring with the defect {name}")


def attend(defect: str, q: Tensor, k: Tensor, v: Tensor, call: TargetCall) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = BrokenRing.apply(q, k, v, call.sink, call, defect)  # type: ignore[no-untyped-call]
    return result


def rotate(call: TargetCall, owner: int, tensors: list[Tensor]) -> list[Tensor]:
    """Send tensors of the shard of ``owner`` to the next rank, and return those of the shard before."""
    if call.world == 1:
        return tensors
    tokens = len(default_positions(replace(call, rank=(owner - 1) % call.world)))
    received = [x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in tensors]
    right, left = (call.rank + 1) % call.world, (call.rank - 1) % call.world
    requests = [dist.isend(x.contiguous(), right, tag=i) for i, x in enumerate(tensors)]
    requests += [dist.irecv(x, left, tag=i) for i, x in enumerate(received)]
    for request in requests:
        request.wait()  # type: ignore[union-attr]
    return received


class Block:
    """Weights of the own queries and the keys of one shard."""

    def __init__(self, defect: str, q: Tensor, k: Tensor, call: TargetCall, owner: int) -> None:
        remote = owner != call.rank
        at, keys = (default_positions(replace(call, rank=rank)) for rank in (call.rank, owner))
        left, right = call.window_size
        options: dict[str, Any] = {
            "causal": call.causal and not (defect == "future" and remote),
            "window_size": (left + (defect == "window" and left >= 0), right),
            "cu_seqlens": None if defect == "document" and remote else call.cu_seqlens,
            "seqused_k": None if defect == "padding" and remote else call.seqused_k,
            "prefix_length": call.prefix_length,
        }
        mask = add_head_dim(visible(at, keys, **options))
        if defect == "unseen" and (owner + 1) % call.world == call.rank != owner:
            mask = mask & False
        scale = call.softmax_scale or q.shape[-1] ** -0.5
        self.scale = scale**2 if defect == "scale" else scale
        modifiers = ScoreOptions(softcap=call.softcap, alibi_slopes=call.alibi_slopes, dropout_p=call.dropout_p)
        modifiers["dropout_seed"] = call.dropout_seed
        group = torch.arange(call.heads)
        self.heads = group % call.kv_heads if defect == "heads" else group // (call.heads // call.kv_heads)
        raw = self.by_head(q) @ self.by_head(k, self.heads).mT * self.scale
        self.slope = 1 - (torch.tanh(raw / call.softcap)) ** 2 if call.softcap else 1.0
        self.scores = apply_score_options(raw, at, keys, modifiers).float().masked_fill(~mask, -torch.inf)
        if defect == "dropout":  # drawn from local positions, which one rank has alone
            at, keys = torch.arange(len(at)), torch.arange(len(keys))
        factors = dropout_factors(tuple(self.scores.shape), at, keys, modifiers)
        self.factors = 1.0 if factors is None else factors.float()

    @staticmethod
    def by_head(x: Tensor, heads: Tensor | None = None) -> Tensor:
        x = x.float().transpose(1, 2)
        return x if heads is None else x[:, heads]

    def sum_groups(self, x: Tensor, kv_heads: int) -> Tensor:
        summed = x.new_zeros(x.shape[0], kv_heads, *x.shape[2:]).index_add(1, self.heads, x)
        return summed.transpose(1, 2)


class BrokenRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, call: TargetCall, defect: str) -> Any:
        ctx.call, ctx.defect = call, defect
        out = q.new_zeros(q.shape[0], call.heads, q.shape[1], v.shape[-1], dtype=torch.float32)
        lse = out.new_full(out.shape[:3], -torch.inf)
        if sink is not None and defect not in ("sink", "sinks"):
            lse = sink[None, :, None].expand_as(lse).clone()
        kv = [k, v]
        for hop in range(call.world):
            owner = (call.rank - hop) % call.world
            block = Block(defect, q, kv[0], call, owner)
            new = block.scores.logsumexp(-1)
            if sink is not None and defect == "sinks":
                new = torch.logaddexp(new, sink[None, :, None])
            total = torch.logaddexp(lse, new)
            pivot = total.masked_fill(total == -torch.inf, 0.0)
            part = (block.scores - pivot[..., None]).exp() * block.factors @ block.by_head(kv[1], block.heads)
            if defect == "merge":
                out += part * (pivot - new).exp().nan_to_num(0.0, 0.0)[..., None]
            else:
                out = out * (lse - pivot).exp()[..., None] + part
            lse = total
            if hop + 1 < call.world:
                kv = rotate(call, owner, kv)
        out = out.transpose(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        return out * {"zero": 0.0, "nan": torch.nan}.get(defect, 1.0), lse / (
            torch.log(torch.tensor(2.0)) if defect == "lse" else 1.0
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        (q, k, v, sink, out, lse), call, defect = ctx.saved_tensors, ctx.call, ctx.defect
        grad = Block.by_head(dout)
        delta = (grad * Block.by_head(out)).sum(-1) - dlse
        dq, kv, stale = torch.zeros_like(Block.by_head(q)), [k, v], [k, v]
        dkv = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
        for hop in range(call.world):
            owner = (call.rank - hop) % call.world
            keys, values = stale if defect == "stale" else kv
            block = Block(defect, q, keys, call, owner)
            weights = (block.scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
            dweights = grad @ block.by_head(values, block.heads).mT * block.factors
            ds = weights * (dweights - delta[..., None]) * block.slope * block.scale
            dq += ds @ block.by_head(keys, block.heads)
            if defect != "unreduced" or hop == 0:
                dkv[0] = dkv[0] + block.sum_groups(ds.mT @ block.by_head(q), call.kv_heads) * (1 + (defect == "factor"))
                dkv[1] = dkv[1] + block.sum_groups((weights * block.factors).mT @ grad, call.kv_heads)
            stale = kv
            if defect != "shard" or hop + 1 < call.world:  # the last hop brings the gradients home
                *kv, dk, dv = rotate(call, owner, [*kv, *dkv])
                dkv = dkv if defect == "misrouted" else [dk, dv]
        dsink = None if sink is None else -((sink[:, None] - lse).exp() * delta).sum((0, 2))
        return dq.transpose(1, 2).to(q.dtype), dkv[0].to(k.dtype), dkv[1].to(v.dtype), dsink, None, None


def reply_alone(work: Callable[..., Any], attend: Callable[..., Any], *arguments: Any) -> Reply:
    """Return the reply to ``work`` of a target on one rank, in this process."""
    try:
        return Reply("ok", [work(Target(SimpleNamespace(attend=attend)), 0, *arguments)])
    except Exception as error:
        return Reply("error", [], type(error).__name__, str(error))


def run_defect(target: Target, rank: int, case: Case, defect: str) -> dict[str, Any]:
    """Run a case on the ring with a defect, in processes that were started for another target."""
    return run_case(replace(target, adapter=__getattr__(defect)), rank, case)
