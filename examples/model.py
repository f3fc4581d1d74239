"""The small byte-level decoder that ``train.py`` trains. It knows positions and an attention, and no ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ringattn import checkpoint_policy

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal attention of q, k, v, each [B, S, H, D]

BYTES = 256  # the vocabulary
ROPE_BASE = 10_000.0  # Su et al., arXiv:2104.09864, section 3.2.2
NORM_EPS = 1e-5  # named: torch's default follows the dtype, and float64 would compute another function


class Decoder(nn.Module):
    """Pre-norm decoder over bytes, as Llama is built: RoPE, grouped-query attention, RMSNorm, SwiGLU; no biases.

    With ``block`` no more is kept for the backward than the inputs of each layer's two halves and what the ring gave:
    feed-forward and loss take so many tokens at once (Liu and Abbeel, arXiv:2305.19370, section 3).
    """

    def __init__(self, *, layers: int, heads: int, kv_heads: int, head_dim: int, block: int | None = None) -> None:
        super().__init__()
        dim = heads * head_dim
        self.head_dim, self.block = head_dim, block
        self.embed = nn.Embedding(BYTES, dim)
        self.layers = nn.ModuleList(Layer(heads, kv_heads, head_dim, block) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, BYTES, bias=False)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw the matrices, of unit gain, from a generator of their own: torch's is shared by all threads.

        Each is drawn whole, so that they are the same however many ranks have parts of them.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                std = module.in_features**-0.5 if isinstance(module, nn.Linear) else 1.0
                drawn, weight = torch.empty(module.weight.shape).normal_(std=std, generator=generator), module.weight
                if isinstance(weight, DTensor):  # every rank has drawn it, and takes its part
                    mesh, where = weight.device_mesh, weight.placements
                    drawn = distribute_tensor(drawn.to(weight.device), mesh, where, src_data_rank=None)
                weight.copy_(drawn)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, labels: Tensor | None = None) -> Tensor:
        """Logits ``[B, S, 256]`` of ``tokens [B, S]`` at the global ``positions [S]``; with labels their losses."""
        x, turn = self.embed(tokens), rotation(positions, self.head_dim, self.norm.weight.dtype)
        for layer in self.layers:
            x = layer(x, turn, attend)
        if labels is None:
            return self._logits(x)
        return blockwise(self._loss, self.block, x, labels)

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(x).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm and added to the stream."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, block: int | None) -> None:
        super().__init__()
        dim, kv_dim = heads * head_dim, kv_heads * head_dim
        hidden = 2 * dim  # three matrices of it: near a plain feed-forward of 4 * dim in parameters
        self.head_dim, self.block = head_dim, block
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_dim, bias=False)
        self.value = nn.Linear(dim, kv_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        if self.block is None:
            x = self._attention(x, turn, attend)
        else:  # the ring's results are kept, projections are computed again
            contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
            x = checkpoint(
                self._attention, x, turn, attend, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
            )
        return blockwise(self._feed, self.block, x)

    def _attention(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        attended: Tensor = x + self.out(attend(rotate(q, turn), rotate(k, turn), v).flatten(2))
        return attended

    def _feed(self, x: Tensor) -> Tensor:
        normed = self.feed_norm(x)
        fed: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return fed


def blockwise(function: Callable[..., Tensor], block: int | None, *tensors: Tensor) -> Tensor:
    """``function`` of so many tokens at once, computed again in the backward; with None of all, and all is kept."""
    if block is None:
        return function(*tensors)
    parts = zip(*(torch.split(x, block, dim=1) for x in tensors), strict=True)
    blocks = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(blocks, dim=1)


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines ``[2, S, 1, D/2]`` of the angles ``position / base^(2i/D)`` by which RoPE turns pairs.

    The angles are float64 from global positions, so that a token's rotation is the same bits on every shard.
    """
    half = head_dim // 2
    powers = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angles = positions.to(torch.float64)[:, None, None] * ROPE_BASE**-powers
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """RoPE (arXiv:2104.09864, eq. 34) of ``x [B, S, H, D]`` by :func:`rotation`; pairs are ``(i, i + D/2)``."""
    cos, sin = turn.to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
