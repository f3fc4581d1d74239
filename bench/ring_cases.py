"""A whole ring of real processes as a case of the suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .candidates import PEER, Problem
from .cases import Number
from .launching import cores, launch
from .ring_bench import spawned


def whole_ring(device: torch.device, *, seqlen: int, world: int = 2, repeats: int = 3) -> Iterator[Number]:
    """``bench ring``, small: errors of all candidates, then their times."""
    problem = Problem(seqlen, world, threads=max(1, cores() // world))
    report = launch(world, spawned, problem, repeats)
    assert report is not None
    baseline = next(iter(report.times.values())).median
    for name, samples in report.times.items():
        labels = {"by": name, "world": world, "seqlen": seqlen}
        wrong = report.disagreements[name]
        limit = None if name == PEER else 0
        yield Number("results that disagree", len(wrong), "tensors", labels, limit, note=", ".join(wrong) or None)
        yield Number("forward and backward", samples.median, "s", labels, spread=samples.spread)
        yield Number("times SDPA", samples.median / baseline, "times", labels)
