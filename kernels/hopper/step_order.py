"""Step order of the Hopper kernels: the tile of a step, its slot in the ring, and the parity of its barrier phase.

The forward visits key tiles from the last to the first, here with two slots::

    step      0  1  2  3  4
    key tile  4  3  2  1  0
    slot      0  1  0  1  0
    parity    0  0  1  1  0

The functions are integer arithmetic. The kernel compiles them, and tests call them in Python.
"""

from __future__ import annotations

CONSUMERS = 2
"""Number of consumer warpgroups, which compute the matrix products."""

CONSUMER_ROWS = 64
"""Rows per consumer warpgroup, those of one wgmma."""


def step_slot(step, SLOTS):
    """Return the slot of a ring that holds the tile of ``step``."""
    return step % SLOTS


def step_parity(step, SLOTS):
    """Return the parity of the barrier phase that completes when the tile of ``step`` has arrived.

    Each round of the ring is one phase. The completion of the previous phase means that the slot is free; a new barrier
    counts as if it had completed one.
    """
    return step // SLOTS & 1


def turn_parity(turn, CONSUMER):
    """Return the parity of the phase that lets a consumer begin ``turn``; the first turn of consumer 0 never waits."""
    return (turn ^ 1 ^ CONSUMER) & 1


def step_column(step, past, BLOCK_K):
    """Return the first key of the tile of ``step``; step 0 is the last tile, which ends at ``past``."""
    return past - (step + 1) * BLOCK_K


def step_phases(start, full_start, full_end, end, columns, BLOCK_K):
    """Return (past, tail, full, steps) of a ``device.tiles.TileRange``.

    Steps below ``tail`` and from ``full`` on need the mask. There is at least one step, and step 0 always needs the
    mask. If no tile is visible, step 0 is a tile past the last key, which TMA fills with zeros.
    """
    if end > start:
        past = end
    else:
        past = (columns + BLOCK_K - 1) // BLOCK_K * BLOCK_K + BLOCK_K
    tail = (end - full_end) // BLOCK_K
    full = tail + (full_end - full_start) // BLOCK_K
    return past, max(tail, 1), max(full, 1), max((end - start) // BLOCK_K, 1)
