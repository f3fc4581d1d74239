"""What is measured of masks, and against what."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ringattn.bench import mask_speed
from ringattn.bench.common.launching import launch


def test_pairs_of_what_is_measured() -> None:
    every = mask_speed.calls(4096)
    assert mask_speed.pairs(4096, every["causal"]) == 4096 * 4097 // 2
    assert mask_speed.pairs(4096, every["window"]) == sum(min(p, 1024) + 1 for p in range(4096))
    boundaries = every["documents"]["cu_seqlens"]
    lengths = [end - start for start, end in pairwise(boundaries)]
    assert mask_speed.pairs(4096, every["documents"]) == sum(length * (length + 1) // 2 for length in lengths)


def test_every_mask_is_timed_against_the_causal_one() -> None:
    rows = launch(mask_speed.WORLD, mask_speed.spawned, 512, 2)
    assert rows is not None
    assert [row.name for row in rows] == [*mask_speed.calls(512)]
    whole = rows[0]
    assert (whole.share, whole.ratio) == (1.0, 1.0)
    for row in rows:
        assert len(row.times.seconds) == 2
        assert row.ratio == pytest.approx(row.times.median / whole.times.median / row.share)
