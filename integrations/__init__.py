"""Adapters that offer ring attention under the names of other frameworks, one module per framework.

A module imports its framework, so nothing is imported until you import the module. For example,
``import ringattn.integrations.transformers`` needs transformers. No framework is a dependency of ringattn.
"""

from torch import Tensor


def unit_stride(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if its last stride is not 1, as ``ring_attention`` requires."""
    return x if not isinstance(x, Tensor) or x.ndim == 0 or x.stride(-1) == 1 else x.contiguous()
