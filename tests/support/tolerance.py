"""The error bound of our results: one rule for every test, without per-test constants."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_exact_as_pytorch(
    name: str, ours: Tensor, pytorch: Tensor, exact: Tensor, *, magnitude: float | None = None
) -> None:
    """Check that our largest error is at most twice PyTorch's in the same dtype, plus rounding.

    ``ours`` and ``pytorch`` are results of the same inputs in the same dtype; ``exact`` is the float64 reference. The
    factor of two allows for another order of summation. FlashAttention's own tests use the same rule.

    Rounding is ``eps * max|exact|`` with ``eps`` of our dtype. To store the result costs up to half of that; to round
    the weights or their gradients before the last product costs the other half. Rounding decides only if PyTorch's
    error happens to be tiny, as with a single key.

    Infinities (``lse`` of a row without visible keys) must be equal. NaN in any of the three tensors fails.
    ``magnitude`` replaces ``max|exact|`` if larger terms cancel, because the error is relative to these terms.
    """
    assert ours.shape == exact.shape == pytorch.shape, f"{name}: {ours.shape}, {pytorch.shape}, {exact.shape}"
    exact = exact.detach().to(torch.float64)
    finite = exact.isfinite()
    same = ours.detach().to(torch.float64)[~finite].equal(exact[~finite])
    assert same, f"{name}: differs where the reference is infinite (or the reference has NaN)"
    if not finite.any():
        return
    error, baseline = ((x.detach().to(torch.float64) - exact)[finite].abs().max().item() for x in (ours, pytorch))
    size = exact[finite].abs().max().item() if magnitude is None else magnitude
    allowed = 2 * baseline + torch.finfo(ours.dtype).eps * size
    # NaN on either side makes the comparison false
    assert error <= allowed, f"{name}: error {error:.3g}, PyTorch's {baseline:.3g}, allowed {allowed:.3g}"
