"""How far from the exact result we may be. One rule for every test, and no constants of a test's own."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_exact_as_pytorch(
    name: str, ours: Tensor, pytorch: Tensor, exact: Tensor, *, magnitude: float | None = None
) -> None:
    """Our largest error is at most twice PyTorch's in the same dtype, plus rounding.

    ``ours`` and ``pytorch`` are the results of the same inputs in the same dtype, ``exact`` is the float64 reference of
    those inputs. Twice, because a sum of the same terms in another order errs differently by about as much; it is the
    rule of FlashAttention's own tests.

    Rounding is ``eps * max|exact|`` with the ``eps`` of our dtype: to store the result costs up to half of that, to
    round the weights (or their gradients) to that dtype before the last product up to the other half. It decides
    only where PyTorch's error happens to be tiny, as with a single key. ``magnitude`` takes the place of
    ``max|exact|`` where terms of that size cancel: there the error is relative to the terms, not to what is left.

    Infinities (``lse`` of a row that saw nothing) must be the same; NaN, in any of the three, fails.
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
