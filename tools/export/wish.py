"""What to export, and whether there is such a thing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from triton.runtime.jit import JITFunction

from ...autotune.inspect.compiled import SHARED_LIMIT
from ...autotune.inspect.variant import DTYPES, ROLES
from ...kernels.config import BACKWARDS, FORWARD_KERNELS
from ...kernels.device.forward import forward_kernel
from ...kernels.experimental import hopper_backward_launch, hopper_launch
from ...kernels.tables import options_of
from .tiles import UNASKED, Source, Tiles, tiles_of

HOPPER_ARCH = 90
HOPPER_DTYPES = ("bf16", "fp16")
BACKWARD_WORDS = {"hopper": "hopper_backward"}


@dataclass(frozen=True)
class Wish:
    """What to export."""

    arch: int  # compute capability without the dot
    dtype: str = "bf16"  # one of DTYPES
    head_dim: int = 128
    head_dim_v: int = 128
    bounded: bool = False  # an interval of keys per query, which every mask is
    grouped: bool = True  # any number of query heads per key head
    role: str = "only"  # one of ROLES
    source: Source = UNASKED
    forward_kernel: str | None = "portable"  # one of FORWARD_KERNELS; None: what the table has, else portable
    backward: str = "two_pass"  # one of BACKWARDS

    @property
    def prefix(self) -> str:
        """Of every name in C and of every file."""
        dims = f"d{self.head_dim}" + (f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = ["bounded" if self.bounded else "full", *([] if self.grouped else ["mha"])]
        words += [] if self.role == "only" else [self.role]
        words += ["hopper"] if self.forward_kernel == "hopper" else []
        words += [] if self.backward == "two_pass" else [BACKWARD_WORDS.get(self.backward, self.backward)]
        return "_".join(["ringattn", f"sm{self.arch}", self.dtype, dims, *words])

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of what is exported."""
        return ("forward", "delta", *(("dq", "dkdv") if self.backward == "two_pass" else ("gradients",)))

    @property
    def of_hopper(self) -> tuple[str, ...]:
        """Those of them that are written for Hopper alone."""
        asked = {"forward": self.forward_kernel, "gradients": self.backward}
        return tuple(name for name, kernel in asked.items() if kernel == "hopper")


@lru_cache
def chosen_tiles(wish: Wish) -> Tiles:
    """By kernel: the tile, and in words where it comes from.

    Raises:
        ValueError: see :func:`tiles.tiles_of`.
    """
    return tiles_of(
        wish.source,
        wish.arch,
        wish.dtype,
        (wish.head_dim, wish.head_dim_v),
        bounded=wish.bounded,
        forward_kernel=wish.forward_kernel,
        backward=wish.backward,
    )


def settled(wish: Wish) -> Wish:
    """The same, with the forward kernel that a tuned table has where nobody said which; checked.

    Raises:
        ValueError: what there is not.
    """
    check(wish)
    tile, _ = chosen_tiles(wish)["forward"]
    if wish.forward_kernel is None:
        chosen = options_of(tile).get("forward_kernel", "portable")
        wish = replace(wish, forward_kernel=str(chosen))
    check_hopper(wish)
    return wish


def check(wish: Wish) -> None:
    """Refuse what is not there: ValueError."""
    if not isinstance(forward_kernel, JITFunction):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted and there is nothing to compile, unset it")
    for what, got, known in (
        ("arch", wish.arch, SHARED_LIMIT),
        ("dtype", wish.dtype, DTYPES),
        ("role", wish.role, ROLES),
        ("forward_kernel", wish.forward_kernel, (None, *FORWARD_KERNELS)),
        ("backward", wish.backward, BACKWARDS),
    ):
        if got not in known:
            raise ValueError(f"{what} is {got}: it must be one of {', '.join(map(str, known))}")
    for what, got in (("head_dim", wish.head_dim), ("head_dim_v", wish.head_dim_v)):
        if not 1 <= got <= 256:
            raise ValueError(f"{what} is {got}: it must be 1 to 256")
    if wish.backward == "hopper":
        check_kind(wish, "backward='hopper'", hopper_backward_launch.HEAD_DIMS, "two_pass")
        if not wish.grouped:
            raise ValueError("grouped is False: backward='hopper' takes any number of query heads per key head")


def check_hopper(wish: Wish) -> None:
    """Refuse what the Hopper forward is not written for, where it is asked for: ValueError."""
    if wish.forward_kernel == "hopper":
        check_kind(wish, "forward_kernel='hopper'", hopper_launch.HEAD_DIMS, "portable")
        hopper_launch.check_tile(wish.head_dim, chosen_tiles(wish)["forward"][0])


def check_kind(wish: Wish, hopper: str, head_dims: tuple[int, ...], other: str) -> None:
    """Refuse what a Hopper kernel is not written for, in words that say which kernel is: ValueError."""
    for what, got, known in (
        ("arch", f"sm_{wish.arch}", (f"sm_{HOPPER_ARCH}",)),
        ("dtype", wish.dtype, HOPPER_DTYPES),
        ("head_dim", wish.head_dim, head_dims),
        ("head_dim_v", wish.head_dim_v, (wish.head_dim,)),
    ):
        if got not in known:
            raise ValueError(f"{what} is {got}: {hopper} takes {', '.join(map(str, known))}; {other!r} takes any")
