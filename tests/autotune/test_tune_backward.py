"""What a run of `tune` says of one pass and of two."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ringattn.autotune import Measured, Ranked, Reading, Verdict
from ringattn.autotune.tune.backward import backward_lines, counted_bound
from ringattn.autotune.tune.run import Found
from ringattn.kernels import Tile
from ringattn.kernels.tables import Point

TILE = Tile(64, 64, 4, 2)
POINT = Point("dq", "bf16", 128, 128, 4, "full", 8192)
KERNELS = ("dq", "dkdv", "single_pass", "single_pass_deterministic")


def found(bounds: Mapping[str, float], seconds: Mapping[str, float]) -> list[Found]:
    made = []
    for kernel, bound in bounds.items():
        point, ranked = POINT._replace(kernel=kernel), Ranked((TILE,), {}, {TILE: Verdict((), bound, "percent")})
        told = (Reading(seconds[kernel]),) if kernel in seconds else ()
        made.append(Found(point, 1, ranked, TILE, 1.0, Measured(TILE, told, (), (), {}, True) if told else None))
    return made


def test_two_passes_make_seven_products_where_five_count() -> None:
    assert counted_bound({"single_pass": 56.0}) == pytest.approx(56.0)
    assert counted_bound({"dq": 70.0, "dkdv": 70.0}) == pytest.approx(50.0)
    # three products at 90 and four at 60 take 1 / 30 and 1 / 15 of a hundredth: a tenth for five
    assert counted_bound({"dq": 90.0, "dkdv": 60.0}) == pytest.approx(50.0)


def test_the_ways_are_compared_by_their_bounds_or_by_their_times() -> None:
    bounds = dict(zip(KERNELS, (90.0, 60.0, 56.0, 54.0), strict=True))
    (line,) = backward_lines(found(bounds, {}))
    assert line == (
        "backward, full, 8192 tokens: two passes at most 50.0% in products that count; a single pass 56.0%, "
        "in a fixed order 54.0%"
    )
    seconds = dict(zip(KERNELS, (1e-3, 2e-3, 2.2e-3, 2.5e-3), strict=True))
    (line,) = backward_lines(found(bounds, seconds))
    assert line.endswith("two passes 3 ms; a single pass 2.2 ms, in a fixed order 2.5 ms")
    (line,) = backward_lines(found(bounds, {"dq": 1e-3}))
    assert "at most" in line, "cut short: times of some say nothing"
    assert backward_lines(found({"dq": 90.0, "dkdv": 60.0}, {})) == []
