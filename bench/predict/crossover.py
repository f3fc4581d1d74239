"""What people ask of a prediction: how many tokens hide the links, and what a slow GPU costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from .apart import MOST_RANKS
from .call import DTYPES, Call
from .launch import Device
from .links import Links
from .program import PASSES
from .ring import Pass, cases, predicted
from .speed import Speed
from .trouble import Trouble

HIDDEN = 0.01  # of a pass: what may be exposed of links that are called hidden
LEAST, MOST = 256, 1 << 22  # tokens per GPU between which the answer is looked for
BACKWARD_SHARE = 2.4  # of the closed form: K/V and fp32 sums, against what a backward computes


@dataclass(frozen=True)
class Needed:
    """Tokens per GPU from which on links are hidden."""

    forward: int | None
    """None: more than ``MOST``."""
    backward: int | None
    closed_forward: float
    """g F / B, twice that where the mask is causal; g key heads per head, F FLOP/s, B bytes/s."""
    closed_backward: float


def tokens_needed(call: Call, device: Speed, links: Links) -> Needed:
    """Solved on the clock by halving, beside the closed form, which knows no latency, no edge and no state."""
    forward, backward = (_least_hidden(call, device, links, phase) for phase in PASSES)
    rail = call.topology is not None
    g, size = call.kv_heads / call.heads, DTYPES[call.dtype].itemsize / 2
    half = 2 if call.mask.causal else 1
    rate = links.inside.rate if call.nodes == 1 else links.between.rate * (call.per_node if rail else 1)
    closed = half * size * g * device.forward / rate
    return Needed(forward, backward, closed, BACKWARD_SHARE / 2 * half * g * device.backward / rate)


def _least_hidden(call: Call, device: Device, links: Links, phase: str) -> int | None:
    """The lanes of one run are lengths, eight to an octave, so that one run finds the answer within 9%."""
    lengths = sorted({2 * round(LEAST * 2 ** (step / 8) / 2) for step in range(8 * 14 + 1)})
    calls = [replace(call, tokens=length) for length in lengths]
    found = cases(calls, device, links, phase)
    hidden = found.waited <= HIDDEN * found.seconds
    if not hidden[-1]:
        return None
    return lengths[0] if hidden.all() else lengths[int(np.flatnonzero(~hidden)[-1]) + 1]


@dataclass(frozen=True)
class Straggling:
    """Seconds of a step, forward and backward, where one GPU is slow."""

    even: float
    """All are as fast."""
    slow: float
    """One is not, and all shards are equal."""
    balanced: float
    """Its shard is smaller."""


def straggling(call: Call, device: Device, links: Links, trouble: Trouble, passes: Sequence[Pass] = ()) -> Straggling:
    """What slow GPUs cost, with equal shards and with ``Layout.balanced``, their launches varying as all others do.

    ``passes`` are those of the call with this trouble, where they are known.

    Above ``MOST_RANKS`` the balanced ring is the even one, stretched by what speed is missing: every rank's work is in
    proportion to its speed by construction.
    """

    def step(found: Sequence[Pass]) -> float:
        return sum(one.seconds for one in found)

    even = step(predicted(call, device, links, replace(trouble, slow={})))
    with_slow = step(passes or predicted(call, device, links, trouble))
    speeds = tuple(float(Fraction(1) / Fraction(trouble.slow.get(rank, 1.0))) for rank in range(call.world))
    if call.world > MOST_RANKS // 2:
        return Straggling(even, with_slow, even * call.world / sum(speeds))
    held = replace(call, layout="balanced", speeds=speeds)
    return Straggling(even, with_slow, step(predicted(held, device, links, trouble)))
