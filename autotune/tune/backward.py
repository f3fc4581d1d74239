"""One pass or two: what the answers of a run say of the backward as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...kernels.tables import ONE_PASS, SINGLE_PASS, TWO_PASSES
from ..search import median
from .run import Found

PRODUCTS = {"dq": 3, "dkdv": 4, **dict.fromkeys(SINGLE_PASS, 5)}
"""Matrix products per pair of tiles."""

COUNTED = 5
"""Of a backward, by everybody's convention: two passes make the scores and their gradient twice."""


def counted_bound(bounds: Mapping[str, float]) -> float:
    """Percent of peak in the products that count, of kernels that run one after the other at these bounds."""
    return COUNTED / sum(PRODUCTS[kernel] / bound for kernel, bound in bounds.items())


def backward_lines(found: Sequence[Found]) -> list[str]:
    """A line per mask and length that has both ways: in seconds where all were measured, else by their bounds."""
    by_point = {one.point: one for one in found if one.tile is not None}
    lines = []
    for point in by_point:
        ways = {kernel: by_point.get(point._replace(kernel=kernel)) for kernel in (*TWO_PASSES, *SINGLE_PASS)}
        there = {kernel: one for kernel, one in ways.items() if one is not None}
        if point.kernel == ONE_PASS and len(there) == len(ways):
            lines.append(f"backward, {point.mask}, {point.length} tokens: {_compared(there)}")
    return lines


def _compared(ways: Mapping[str, Found]) -> str:
    measured = {kernel: median(one.measured.alone) for kernel, one in ways.items() if one.measured is not None}
    if len(measured) == len(ways):
        told = {kernel: f"{measured[kernel] * 1e3:.4g} ms" for kernel in SINGLE_PASS}
        both = f"{sum(measured[kernel] for kernel in TWO_PASSES) * 1e3:.4g} ms"
    else:
        bounds = {kernel: _bound(one) for kernel, one in ways.items()}
        told = {kernel: f"{counted_bound({kernel: bounds[kernel]}):.1f}%" for kernel in SINGLE_PASS}
        both = f"at most {counted_bound({kernel: bounds[kernel] for kernel in TWO_PASSES}):.1f}% in products that count"
    one, fixed = (told[kernel] for kernel in SINGLE_PASS)
    return f"two passes {both}; a single pass {one}, in a fixed order {fixed}"


def _bound(found: Found) -> float:
    assert found.tile is not None
    return found.bound_of(found.tile) or 1e-9
