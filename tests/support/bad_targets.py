"""Targets that misbehave, merges and models, for the tests of the referee."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.conformance.standalone import default_positions

from . import broken_rings


def attend(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    return broken_rings.attend("none", q, k, v, call)[0]


def prints(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    print("hello from", call.rank, "\x00", flush=True)
    return attend(q, k, v, call)


def raises(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    if call.rank == 1:
        raise RuntimeError("out of luck")
    return attend(q, k, v, call)  # waits for the other rank


def refuses(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    if call.window_size != (-1, -1):
        raise NotImplementedError("window_size is not supported")
    raise ValueError("no")


def forks(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    os.fork()  # both return; the copy must not answer, and takes no part in collectives
    return (q * 0 + v.repeat_interleave(q.shape[2] // v.shape[2], 2)) if call.world == 1 else q


def changes_input(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    out = attend(q, k.clone(), v, call)
    k.data.mul_(2)
    return out


def hangs(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    if call.rank == 0:
        time.sleep(60)
    return attend(q, k, v, call)


def dies(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    if call.rank == call.world - 1:
        child = subprocess.Popen(["sleep", "60"])
        os.write(2, f"started {child.pid}\n".encode())
        os._exit(3)
    return attend(q, k, v, call)


def exits(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    raise SystemExit(0)


def changes_defaults(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    out = attend(q, k, v, call)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    return out


def closes_output(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Tensor:
    sys.stdout.close()
    return attend(q, k, v, call)


def returns_nothing(q: Tensor, k: Tensor, v: Tensor, call: Any) -> None:
    return None


features = {"causal", "full", "contiguous", "float32", "gradients", "grouped heads"}
overlaps = SimpleNamespace(attend=attend, positions=lambda call: torch.arange(call.tokens // call.world))
beyond = SimpleNamespace(attend=attend, positions=lambda call: default_positions(call) + 1)
misspelt = SimpleNamespace(attend=attend, features={"windows"})
shifted = SimpleNamespace(attend=lambda q, k, v, call: attend(q, k, v, call)[:, 1:], positions=default_positions)


def merge_by_softmax(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    lse = torch.stack(lses)
    total = lse.logsumexp(0)
    weights = (lse - total.nan_to_num(neginf=0.0)).exp().transpose(2, 3)[..., None]
    return (torch.stack(outs).float() * weights).sum(0), total


def merge_by_powers_of_2(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    return merge_by_softmax(outs, [lse * 0.6931472 for lse in lses])[0], torch.stack(lses).logsumexp(0)


class Decoder(torch.nn.Module):
    """One layer over contiguous shards, which returns its own logits and their positions."""

    def __init__(self, *, sees_future: bool = False, ignores_documents: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)
        self.unused = torch.nn.Parameter(torch.zeros(2))
        self.sees_future, self.ignores_documents, self.scale = sees_future, ignores_documents, scale

    def forward(self, tokens: Tensor, cu_seqlens: Any = None) -> tuple[Tensor, Tensor]:
        world, rank = dist.get_world_size(), dist.get_rank()
        x = self.embed(tokens)
        at = torch.arange(tokens.shape[1])
        positions = at.chunk(world)[rank]
        edges = torch.tensor((0,) if cu_seqlens is None or self.ignores_documents else cu_seqlens)
        document = torch.bucketize(at, edges, right=True)
        see = ((positions[:, None] >= at) | self.sees_future) & (document[positions][:, None] == document)
        scores = (x[:, positions] @ x.mT).masked_fill(~see, -torch.inf)
        return self.head(scores.softmax(-1) @ x) * (self.scale if world > 1 else 1.0), positions


def build() -> Decoder:
    return Decoder()


def build_scaled() -> Decoder:
    return Decoder(scale=1.83)
