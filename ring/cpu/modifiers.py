"""What becomes of scores on their way to weights, tile by tile: softcap, ALiBi, and dropout behind the softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import Scores
from .philox import first_word
from .pieces import Piece

LOG2_E = 1 / math.log(2)


class Place(NamedTuple):
    """Where a tile of scores lies in its piece."""

    item: int
    heads: slice
    rows: slice
    keys: slice


@dataclass(frozen=True)
class Modifiers:
    """``scores`` as one piece sees it. Positions, slopes and random numbers are those of the whole call.

    Shapes: a tile is ``[heads, rows, keys]``, fp32.
    """

    scores: Scores
    piece: Piece
    first_head: int = 0  # of the piece, among the heads that `scores` speaks of

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.scores.dropout_p > 0

    def apply(self, tile: Tensor, at: Place, *, backward: bool = False) -> Tensor | None:
        """Modify ``scale * q k^T``, here and behind it times log2(e), in place.

        ``cap * tanh(score / cap)``, then ``- slope * |p_q - p_k|``. Returns what a gradient in the ``backward`` is
        multiplied with on its way through: ``1 - tanh^2``, None without softcap.
        """
        derivative, cap = None, self.scores.softcap * LOG2_E
        if cap:
            tile.div_(cap).tanh_()
            derivative = (tile * tile).neg_().add_(1) if backward else None
            tile.mul_(cap)
        slopes = self.scores.alibi_slopes
        if slopes is not None:
            own = slopes if slopes.dim() == 1 else slopes[self.piece.batch + at.item]
            rows, keys = self._positions(at)
            distance = (rows[:, None] - keys).abs_().float()
            tile.addcmul_(own[_moved(at.heads, self.first_head), None, None], distance, value=-LOG2_E)
        return derivative

    def kept(self, at: Place) -> Tensor:
        """What dropout multiplies the weights with: 0, or ``1 / (1 - p)``.

        A weight stays where the first word of philox4x32-10 (key: the seed; counter: query position, key position,
        head, batch item) is at least ``scores.threshold``.
        """
        seed, threshold = self.scores.dropout_seed, self.scores.threshold
        rows, keys = self._positions(at)
        item = torch.tensor(self.piece.batch + at.item)
        first = self.scores.first_head + self.first_head
        factors = torch.empty(at.heads.stop - at.heads.start, len(rows), len(keys), dtype=torch.float32)
        for number, factor in enumerate(factors):  # one head at a time: 64-bit words of more would leave the cache
            head = torch.tensor(first + at.heads.start + number)
            factor.copy_(first_word(seed, (rows[:, None], keys, head, item)) >= threshold)
        return factors.mul_(1 / (1 - self.scores.dropout_p))

    def _positions(self, at: Place) -> tuple[Tensor, Tensor]:
        """Of the rows and of the keys of a tile, int64."""
        q_positions, k_positions = self.scores.q_positions, self.scores.k_positions
        assert q_positions is not None and k_positions is not None
        rows, keys = _moved(at.rows, self.piece.row), _moved(at.keys, self.piece.key)
        return q_positions[rows].long(), k_positions[keys].long()


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
