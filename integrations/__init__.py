"""Other people's names for ring attention: one file per framework, imported only when asked for.

``import ringattn.integrations.transformers`` needs transformers, and so on; none is a dependency of this package.
"""

from torch import Tensor


def unit_stride(x: Tensor) -> Tensor:
    """``x``, a copy where the last stride is another: these frameworks take any, ``ring_attention`` does not."""
    return x if not isinstance(x, Tensor) or x.ndim == 0 or x.stride(-1) == 1 else x.contiguous()
