"""The order of the Hopper forward: which tile a step is about, in which slot, behind which phase of a barrier.

Plain arithmetic on integers: the kernel compiles these functions, and tests run them as they are.
"""

from __future__ import annotations

CONSUMERS = 2
"""Warpgroups that multiply."""

ROWS = 64
"""Query rows of each: what one wgmma takes."""


def slot_of(step, SLOTS):
    """The slot of a ring that holds the tile of ``step``."""
    return step % SLOTS


def parity_of(step, SLOTS):
    """Parity of the phase that completes when the tile of ``step`` is there: one more phase each time round the ring.

    The phase before that one, which a fresh barrier is taken to have completed, says that the slot is free.
    """
    return step // SLOTS & 1


def turn_parity(turn, CONSUMER):
    """Parity of the phase that lets a consumer begin ``turn``; the first consumer's first turn waits for nobody."""
    return (turn ^ 1 ^ CONSUMER) & 1


def column_of(step, past, BLOCK_K):
    """First key of the tile of ``step``: from the last tile, which ends at ``past``, to the first."""
    return past - (step + 1) * BLOCK_K


def phases_of(start, full_start, full_end, end, columns, BLOCK_K):
    """(past, tail, full, steps) of a tile range, see ``bounds.TileRange``.

    Steps below ``tail`` and from ``full`` on need the mask. At least one step, which needs it too: where no tile is
    seen, it is about one past the last key, which the copy engine fills with zeros.
    """
    if end > start:
        past = end
    else:
        past = (columns + BLOCK_K - 1) // BLOCK_K * BLOCK_K + BLOCK_K
    tail = (end - full_end) // BLOCK_K
    full = tail + (full_end - full_start) // BLOCK_K
    return past, max(tail, 1), max(full, 1), max((end - start) // BLOCK_K, 1)
