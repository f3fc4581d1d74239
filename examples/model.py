"""Small byte-level decoder that ``train.py`` trains.

The model gets global positions and an attention function, so nothing in it depends on the ranks.
"""

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

BYTES = 256  # vocabulary size
ROPE_BASE = 10_000.0  # Su et al., arXiv:2104.09864, section 3.2.2
NORM_EPS = 1e-5  # explicit, because torch's default depends on the dtype


class Decoder(nn.Module):
    """Pre-norm decoder over bytes in the style of Llama: RoPE, GQA, RMSNorm, SwiGLU, no biases.

    With ``block``, feed-forward and loss process that many tokens at a time and are recomputed in the backward (Liu
    and Abbeel, arXiv:2305.19370, section 3). Each layer then saves only the inputs of its two halves and the results
    of the ring.
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
        """Draw the weights with unit gain from a separate generator, because all threads share torch's.

        Every rank draws full matrices, so that the weights do not depend on the number of ranks.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                std = module.in_features**-0.5 if isinstance(module, nn.Linear) else 1.0
                drawn, weight = torch.empty(module.weight.shape).normal_(std=std, generator=generator), module.weight
                if isinstance(weight, DTensor):  # take this rank's part; src_data_rank=None avoids a broadcast
                    mesh, placements = weight.device_mesh, weight.placements
                    drawn = distribute_tensor(drawn.to(weight.device), mesh, placements, src_data_rank=None)
                weight.copy_(drawn)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, labels: Tensor | None = None) -> Tensor:
        """Return logits ``[B, S, 256]`` of ``tokens [B, S]`` at global ``positions [S]``, or losses with ``labels``."""
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
    """Attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, block: int | None) -> None:
        super().__init__()
        dim, kv_dim = heads * head_dim, kv_heads * head_dim
        hidden = 2 * dim  # SwiGLU's three matrices have about as many parameters as two with 4 * dim
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

    def forward(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        if self.block is None:
            x = self._attention(x, cos_sin, attend)
        else:  # save the ring's results, recompute the projections
            contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
            x = checkpoint(
                self._attention, x, cos_sin, attend, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
            )
        return blockwise(self._feed, self.block, x)

    def _attention(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        attended: Tensor = x + self.out(attend(rotate(q, cos_sin), rotate(k, cos_sin), v).flatten(2))
        return attended

    def _feed(self, x: Tensor) -> Tensor:
        normed = self.feed_norm(x)
        fed: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return fed


def blockwise(function: Callable[..., Tensor], block: int | None, *tensors: Tensor) -> Tensor:
    """Apply ``function`` to ``block`` tokens at a time and recompute it in the backward; None disables both."""
    if block is None:
        return function(*tensors)
    parts = zip(*(torch.split(x, block, dim=1) for x in tensors), strict=True)
    blocks = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(blocks, dim=1)


def rotation(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return cosines and sines ``[2, S, 1, D/2]`` of RoPE's angles ``position / base^(2i/D)``.

    The angles are computed in float64 from global positions, so that a token's rotation is bitwise equal in any shard.
    """
    half = head_dim // 2
    powers = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angles = positions.to(torch.float64)[:, None, None] * ROPE_BASE**-powers
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply RoPE (arXiv:2104.09864, eq. 34) to ``x [B, S, H, D]``; pairs are ``(i, i + D/2)``."""
    cos, sin = cos_sin.to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
