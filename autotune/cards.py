"""What is tuned for: a GPU, the attention of a model, and the points that both make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from ..kernels.config import SHARED_LIMIT
from ..kernels.tables import DTYPES, TUNED, Gpu, Point


def gpu_of_arch(name: str) -> Gpu:
    """What a table without a GPU is for, ``sm_90``: a compute capability, not a product.

    Raises:
        ValueError: not the name of a supported compute capability.
    """
    known = {f"sm_{arch}": arch for arch in SHARED_LIMIT}
    if name not in known:
        raise ValueError(f"arch is {name!r}: it must be one of {', '.join(known)}")
    return Gpu(name, known[name])


@dataclass(frozen=True)
class Shape:
    """The attention of a model, as one GPU computes it.

    Raises:
        ValueError: heads that are not a multiple of the key heads, a head dim or dtype that no kernel has.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: it must be a multiple of the {self.kv_heads} heads of keys")
        for name in ("head_dim", "value_dim"):
            if not 1 <= getattr(self, name) <= 256:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 to 256")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads


def points_of(shape: Shape, lengths: list[int], *, causal: bool, kernels: Iterable[str] = TUNED) -> list[Point]:
    """Every kernel at every length; with ``causal`` also with bounds: most hops of a causal ring have none.

    Raises:
        ValueError: no length, or one that is not positive.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"seqlen is {lengths}: it takes at least one length, and each at least 1")
    masks = ("full", "bounded") if causal else ("full",)
    return [
        Point(kernel, shape.dtype, shape.head_dim, shape.value_dim, shape.group, mask, length)
        for kernel, mask, length in product(kernels, masks, sorted({*lengths}))
    ]
