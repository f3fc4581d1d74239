"""The small byte-level decoder that ``ringattn demo`` trains. It knows positions and an attention, and no ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # causal attention of q, k, v, each [B, S, H, D]

BYTES = 256  # the vocabulary
ROPE_BASE = 10_000.0  # Su et al., arXiv:2104.09864, section 3.2.2
NORM_EPS = 1e-5  # given: torch's default follows the dtype, and float64 would compute another function


class Decoder(nn.Module):
    """Pre-norm decoder over bytes: RoPE, grouped-query attention, RMSNorm, SwiGLU; no biases, untied head."""

    def __init__(self, *, layers: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        dim = heads * head_dim
        self.embed = nn.Embedding(BYTES, dim)
        self.layers = nn.ModuleList(Layer(heads, kv_heads, head_dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.head = nn.Linear(dim, BYTES, bias=False)

    def initialize(self, seed: int) -> None:
        """Draw the matrices, of unit gain, from a generator of their own: torch's is shared by all threads."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, generator=generator)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits ``[B, S, 256]`` of ``tokens [B, S]`` that stand at the global ``positions [S]`` of their sequence."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm and added to the stream."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        dim, kv_dim = heads * head_dim, kv_heads * head_dim
        hidden = 2 * dim  # three matrices of it: near a plain feed-forward of 4 * dim in parameters
        self.head_dim = head_dim
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_dim, bias=False)
        self.value = nn.Linear(dim, kv_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (linear(normed).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        x = x + self.out(attend(rotate(q, positions), rotate(k, positions), v).flatten(2))
        normed = self.feed_norm(x)
        fed: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return fed


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE (arXiv:2104.09864, eq. 34) of ``x [B, S, H, D]``; pairs ``(i, i + D/2)`` turn by ``position / base^(2i/D)``.

    The angles are float64 from global positions, so that a token's rotation is the same bits on every shard.
    """
    half = x.shape[-1] // 2
    powers = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions.to(torch.float64)[:, None, None] * ROPE_BASE**-powers
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
