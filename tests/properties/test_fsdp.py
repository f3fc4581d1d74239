"""A model under FSDP2 with data, ring, Ulysses and tensor parallelism at once equals one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ringattn import Layout, positions, reference, ring_attention, shard

from ..support.rank_processes import group_results
from ..support.tolerance import assert_as_exact_as_pytorch

RANKS, HEADS = 4, (4, 2)
WIDTH, HEAD_DIM, LETTERS, ROWS, SEQLEN = 32, 8, 17, 2, 26
IGNORED = -100
DROPOUT = {"dropout_p": 0.2, "dropout_seed": 7}


class Layer(nn.Module):
    """Attention and a feed-forward network, with as many heads as this rank's projections give."""

    def __init__(self) -> None:
        super().__init__()
        width, kv_width = HEADS[0] * HEAD_DIM, HEADS[1] * HEAD_DIM
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=False) for n in (width, kv_width, kv_width))
        self.o, self.up, self.down = nn.Linear(width, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.o(attend(q, k, v).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Decoder(nn.Module):
    """Model from letters and positions to logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.layers, self.head = nn.ModuleList([Layer(), Layer()]), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor, at: Tensor, attend: Any) -> Tensor:
        x = self.letters(letters) + self.places(at)
        for layer in self.layers:
            x = layer(x, attend)
        logits: Tensor = self.head(x)
        return logits


def batch() -> tuple[Tensor, Tensor, int]:
    """Return letters, labels (some ignored), and the number of labels that count, for all rows."""
    letters = torch.randint(LETTERS, (ROWS, SEQLEN + 1), generator=torch.Generator().manual_seed(6))
    labels = letters[:, 1:].clone()
    labels[0, :11] = IGNORED
    return letters[:, :-1], labels, int((labels != IGNORED).sum())


def train(model: Any, letters: Tensor, labels: Tensor, at: Tensor, total: float, attend: Any) -> Tensor:
    """Run the backward and return these tokens' part of the loss."""
    logits = model(letters, at, attend)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum") / total
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def alone(attend: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return loss and gradients of one process."""
    model, (letters, labels, total) = Decoder().to(dtype), batch()
    loss = train(model, letters, labels, torch.arange(SEQLEN), total, attend)
    return {"loss": loss} | {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def sharded(rank: int, shape: tuple[int, ...], names: tuple[str, ...], call: dict[str, Any]) -> dict[str, Tensor]:
    """Return loss and gradients of one of four processes, which holds its rows' tokens and its heads."""
    mesh, model, (letters, labels, total) = init_device_mesh("cpu", shape, mesh_dim_names=names), Decoder(), batch()
    if names[-1] == "tensor":
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {name: RowwiseParallel() for name in ("o", "down")}
        for layer in model.layers:
            parallelize_module(layer, mesh["tensor"], plan)
        call = call | {"first_head": mesh["tensor"].get_local_rank() * HEADS[0] // mesh["tensor"].size()}
    replicas = mesh["data", "ring", "ulysses"]._flatten("replicas")
    for module in (*model.layers, model):
        fully_shard(module, mesh=replicas)
    sequence, data = mesh["ring", "ulysses"], mesh["data"]
    mine = slice(data.get_local_rank(), ROWS, data.size())
    layout = Layout.zigzag(SEQLEN, sequence.size())
    letters, labels = (shard(x[mine], layout=layout, group=sequence) for x in (letters, labels))
    at = positions(SEQLEN, layout=layout, group=sequence)
    attend = partial(ring_attention, layout=layout, group=sequence, causal=True, **call)
    ranks = replicas.size()  # FSDP averages over these ranks
    loss = train(model, letters, labels, at, total / ranks, attend) / ranks
    torch.distributed.all_reduce(loss, group=replicas.get_group())
    whole = {name: x.grad for name, x in model.named_parameters()}
    return {"loss": loss} | {name: x.full_tensor() for name, x in whole.items() if isinstance(x, DTensor)}


NAMES = ("data", "ring", "ulysses")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "names", "call"),
    [
        ((2, 2, 1), NAMES, {}),
        ((2, 1, 2), NAMES, {"window_size": (9, 0)}),
        ((1, 2, 2), NAMES, DROPOUT),
        ((1, 2, 1, 2), (*NAMES, "tensor"), DROPOUT),
        ((1, 1, 2, 2), (*NAMES, "tensor"), {"window_size": (5, 0)}),
    ],
    ids=["data x ring", "data x ulysses", "ring x ulysses", "ring x tensor", "ulysses x tensor"],
)
def test_fsdp_loss_and_gradients_equal_one_process(
    shape: tuple[int, ...], names: tuple[str, ...], call: dict[str, Any]
) -> None:
    """FSDP2 shards parameters over data and sequence dimensions together."""
    exact = alone(lambda *qkv: reference.attention(*qkv, causal=True, **call)[0], torch.float64)
    single = alone(partial(ring_attention, causal=True, **call), torch.float32)
    ranks = group_results(RANKS, partial(sharded, shape=shape, names=names, call=call))
    for ours in ranks:
        assert ours.keys() == exact.keys()
        for name, x in exact.items():
            assert_as_exact_as_pytorch(name, ours[name], single[name], x)
