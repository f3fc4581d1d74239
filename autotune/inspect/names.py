"""Variants by name: ``90:bf16:128:middle:dq:alibi``, ``90:bf16:128:forward:order=longest``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from ...kernels import KernelConfig, Tile
from ...kernels.config import LEAST_SIDE
from ...kernels.experimental import hopper_backward_launch
from ...kernels.launch import COPY_ENGINE_ARCH, fills_boxes
from ...kernels.strict import one_of
from ...kernels.tables import OPTIONS, Option, Options
from .compiled import SHARED_LIMIT
from .variant import ATTENTION, DTYPES, FEATURES, KERNELS, ROLES, Variant, default_tile, launchable

HOPPER = {
    "hopper": ("forward", (("forward_kernel", "hopper"),)),
    "hopper_backward": ("single_pass", (("backward", "hopper"),)),
}
"""In a name and as a kernel: the two that ``KernelConfig`` selects so; which kernel each takes the place of."""

CHECKS = {**OPTIONS, "single_pass": {**OPTIONS["single_pass"], "backward": one_of("hopper")}}
"""By kernel, the options that a compiler may be asked for. No table has the last one: it is no tuned kernel."""

OF_GROUPS = ("pack_gqa", "dkdv_splits")
"""Options that say something where several query heads share a key head."""

OF_LAUNCHES = ("sm_margin",)
"""Options that no compiler is told of."""

FROM_ARCH = {"dkdv_epilogue": COPY_ENGINE_ARCH}
"""Options that say something from a compute capability on."""

DEFAULTS = {one.name: one.default for one in fields(KernelConfig)}
WORDS: dict[str, Option] = {"True": True, "False": False}


def select(name: str) -> Iterator[Variant]:
    """The variants that ``arch:dtype:D[/Dv][:role][:kernel][:feature …][:OPTION=VALUE …]`` names.

    Options are fields of ``KernelConfig``: ``order=longest``, ``persistent=True``, ``pack_gqa=True``,
    ``dkdv_splits=2``, ``dkdv_epilogue=descriptors``, ``forward_kernel=hopper``, which ``hopper`` is short for, and
    ``backward=hopper``, for which it is ``hopper_backward``. Left out are kernels that do not have one, heads that are
    not grouped where they are packed or split, and where descriptors are asked for GPUs without a copy engine and head
    dims that fill no box.

    Raises:
        ValueError: less than three parts, or an arch, dtype, head dim, role, kernel, feature or option that is not
            there.
    """
    if name.count(":") < 2:
        raise ValueError(f"spec is {name!r}: it must be ARCH:DTYPE:D, as 90:bf16:128, and what narrows it")
    arch, dtype, head_dims, *words = name.split(":")
    if not (arch.isdecimal() and all(dim.isdecimal() for dim in head_dims.split("/", 1))):
        raise ValueError(f"spec is {name!r}: its ARCH must be a number, as 90, its D one or two, as 128 or 192/128")
    words = [part for word in words for part in (spelled_out(word) if word in HOPPER else (word,))]
    options = options_of_words([word for word in words if "=" in word])
    words = [word for word in words if "=" not in word]
    asked: list[tuple[str, int | str, list[int] | list[str]]] = [
        ("arch", int(arch), list(SHARED_LIMIT)),
        ("dtype", dtype, list(DTYPES)),
        *(("role, kernel, feature or option", word, [*ROLES, *KERNELS, *FEATURES]) for word in words),
    ]
    for what, got, known in asked:
        if got not in known:
            raise ValueError(f"{what} is {got!r}: it must be one of {', '.join(map(str, known))}")
    features = tuple(word for word in words if word in FEATURES)
    for variant in launchable(int(arch), dtype, *map(int, head_dims.split("/"))):
        if not {variant.role, variant.kernel} >= {*words} - {*features}:
            continue
        if variant.kernel not in ATTENTION:
            if not options and not features:
                yield variant
        elif not options:
            yield replace(variant, features=features)
        elif not variant.options and lacking(variant, options) is None:
            tile = tile_of_options(options, variant.head_dim) or variant.tile
            yield replace(variant, tile=tile, features=features, options=options)


def spelled_out(word: str) -> tuple[str, ...]:
    """``hopper`` as ``forward`` and ``forward_kernel=hopper``."""
    kernel, options = HOPPER[word]
    return kernel, *(f"{name}={value}" for name, value in options)


def default_tile_of(kernel: str, options: Options, arch: int, dtype: str, head_dim: int) -> Tile | None:
    """As :func:`default_tile`, of the kernel with these options."""
    return tile_of_options(options, head_dim) or default_tile(kernel, arch, dtype, head_dim)


def tile_of_options(options: Options, head_dim: int) -> Tile | None:
    """The default tile of a kernel that has its own; any at a head dim that it does not take, as it then says so."""
    if dict(options).get("backward") != "hopper":
        return None
    known = hopper_backward_launch.HEAD_DIMS
    return hopper_backward_launch.default_tile(head_dim if head_dim in known else known[-1])


def lacking(variant: Variant, options: Options) -> str | None:
    """The first of the options that a kernel of such heads does not have on such a GPU, and who has it; or None."""
    for name, value in options:
        told, needed = f"option is {name}={value}", FROM_ARCH.get(name, 0)
        if name not in CHECKS.get(variant.kernel, {}):
            having = [kernel for kernel, known in CHECKS.items() if name in known]
            return f"{told}: it is of {', '.join(having)}, not of {word_of(variant)}"
        if name in OF_GROUPS and not variant.grouped:
            return f"{told}: it is of several query heads per key head; pass --gqa"
        if variant.arch < needed:
            return f"{told}: sm_{variant.arch} has no copy engine; it takes sm_{needed} or higher"
        if name == "dkdv_epilogue" and not all(map(fills_boxes, (variant.head_dim, variant.head_dim_v))):
            dims = f"{variant.head_dim}/{variant.head_dim_v}"
            return f"{told}: head dims are {dims}; it takes powers of two of at least {LEAST_SIDE}"
    return None


def word_of(variant: Variant) -> str:
    """What the kernel is called: as in :func:`select`, the short name where there is one."""
    options = {*variant.options}
    short = (word for word, (kernel, own) in HOPPER.items() if kernel == variant.kernel and {*own} <= options)
    return next(short, variant.kernel)


def options_of_words(words: Sequence[str]) -> Options:
    """``order=longest``, ``pack_gqa=True`` as fields of ``KernelConfig``, sorted; what is the default is left out.

    Raises:
        ValueError: no such field that the compiler is told of, or no value of it.
    """
    checks = {name: check for known in CHECKS.values() for name, check in known.items() if name not in OF_LAUNCHES}
    made: dict[str, Option] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in checks or "=" not in word:
            raise ValueError(f"option is {word!r}: it must be NAME=VALUE with one of {', '.join(checks)}")
        value = WORDS.get(text, int(text) if text.isdecimal() else text)
        if (needs := checks[name](value)) is not None:
            raise ValueError(f"option {name} is {text!r}: it must be {needs}")
        if value != DEFAULTS[name]:
            made[name] = value
    return tuple(sorted(made.items()))
