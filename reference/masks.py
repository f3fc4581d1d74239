"""Who sees whom, from global token positions. A mask is a predicate on (query position, key position)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor], Tensor]
"""(query positions ``[Sq, 1]``, key positions ``[1, Sk]``) -> bool, of a shape that broadcasts to ``[Sq, Sk]``."""


def is_causal(q: Tensor, k: Tensor) -> Tensor:
    """The query at position p sees the keys at positions up to p, itself included."""
    return k <= q


def predicates(*, causal: bool) -> list[Predicate]:
    """The predicates that the mask arguments ask for; a pair is visible where all of them hold."""
    return [is_causal] if causal else []


def visible(q_positions: Tensor, k_positions: Tensor, *, causal: bool = False) -> Tensor:
    """Which query sees which key: bool ``[Sq, Sk]``, from integer positions ``[Sq]`` and ``[Sk]`` in any order."""
    q, k = q_positions[:, None], k_positions[None, :]
    seen = torch.ones(len(q_positions), len(k_positions), dtype=torch.bool, device=q.device)
    for predicate in predicates(causal=causal):
        seen = seen & predicate(q, k)
    return seen
