"""Documents packed one after the other into one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch

from ...comm.checked import shown
from ..checked import INTEGERS

REPR_BOUNDARIES = 16  # more of them are shown by their number and a digest


class Documents:
    """Where each of several packed documents begins and ends; immutable and hashable.

    Args:
        cu_seqlens: boundaries as in flash-attention's ``cu_seqlens``: document i is ``[cu_seqlens[i],
            cu_seqlens[i + 1])``, the first is 0. A list, or a one-dimensional integer tensor on the CPU: schedules are
            made on the host, and a copy from a GPU would be a hidden synchronisation. Empty documents are allowed.

    Raises:
        ValueError: boundaries that are not whole numbers, do not start at 0, descend, or lie on a GPU.
    """

    __slots__ = ("__dict__", "boundaries")

    def __init__(self, cu_seqlens: Iterable[int] | torch.Tensor) -> None:
        made = whole_numbers("cu_seqlens", cu_seqlens, "[documents + 1]")
        if len(made) < 2:
            raise ValueError(f"cu_seqlens is {list(made)}: it must have at least one document, [0, length]")
        if made[0] != 0:
            raise ValueError(f"cu_seqlens starts at {made[0]}: it must start at 0")
        for number, (start, end) in enumerate(pairwise(made)):
            if end < start:
                raise ValueError(f"cu_seqlens[{number + 1}] is {end}, the one before is {start}: it must not descend")
        self.boundaries = made

    @property
    def seqlen(self) -> int:
        """Tokens of all documents together."""
        return self.boundaries[-1]

    def around(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Start and end of the document of each position; both at the very end for a position past all of them."""
        after = torch.searchsorted(self._tensor, positions, right=True)
        last = len(self.boundaries) - 1
        return self._tensor[(after - 1).clamp(max=last)], self._tensor[after.clamp(max=last)]

    @cached_property
    def _tensor(self) -> torch.Tensor:
        return torch.tensor(self.boundaries)

    @cached_property
    def _hash(self) -> int:
        return hash(self.boundaries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self.boundaries == other.boundaries

    def __reduce__(self) -> tuple[Any, ...]:
        return Documents, (self.boundaries,)

    def __repr__(self) -> str:
        if len(self.boundaries) <= REPR_BOUNDARIES:
            return f"Documents({list(self.boundaries)})"
        digest = sha256(repr(self.boundaries).encode()).hexdigest()[:16]
        return f"<{len(self.boundaries) - 1} documents of {self.seqlen} tokens, boundaries {digest}>"


def whole_numbers(name: str, given: Iterable[int] | torch.Tensor, shape: str) -> tuple[int, ...]:
    """A list or a one-dimensional CPU tensor as integers: ValueError otherwise."""
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu":
            raise ValueError(
                f"{name} is on {given.device}: it must be a list or a CPU tensor, since schedules are host data"
            )
        if given.dim() != 1 or given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(f"{name} is {given.dtype} {list(given.shape)}: it must be integers {shape}")
        return tuple(given.tolist())
    try:
        return tuple(map(INTEGERS.read, given))
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {shown(given)}: it must be a list of whole numbers, or a CPU tensor") from None
