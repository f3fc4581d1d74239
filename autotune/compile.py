"""Compiles what a launch compiles: the host entries of the kernels, called for a GPU that need not be here.

An entry is called with tensors on the meta device, which stand for that GPU (``kernels.target``): it checks, chooses a
kernel and hands over its launch, and Triton compiles that launch under a driver that names the GPU. Nothing is spelled
twice: whatever an entry would launch is what is compiled, to the key in Triton's cache. A :class:`Variant` is what
``inspect`` and ``tune`` call an entry with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ..kernels import (
    FULL,
    Bounds,
    KernelConfig,
    Scores,
    Tile,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    attention_gradients,
    hopper_backward_launch,
)
from ..kernels.attention import DELTA_BLOCK, REDUCE_WARPS
from ..kernels.bounds import BlockSparseIndex
from ..kernels.config import LEAST_SIDE, config_for, single_pass_tile
from ..kernels.gpu import ARCHS, assumed_gpu
from ..kernels.launch import COPY_ENGINE_ARCH, fills_boxes
from ..kernels.quantize import SCALE_TOKENS, dequantize, num_warps, quantize, scale_shape
from ..kernels.scores import PLAIN
from ..kernels.tables import DTYPES, OPTIONS, SINGLE_PASS, Option, Options, options_of
from ..kernels.target import Target, compiling_for

META = torch.device("meta")

# what an entry launches, compiled


@dataclass(frozen=True)
class Launch:
    """What an entry hands to Triton."""

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """Constants of the kernel and what the compiler is asked for."""
    binary: Any = None
    """What Triton made of it; None before."""

    @property
    def name(self) -> str:
        """Of the function."""
        name: str = self.kernel.fn.__name__
        return name

    @property
    def signature(self) -> str:
        """What the compiler is told: launches with the same one share a binary."""
        return f"{self.name} {_told(self.arguments)} {self.options}"


def _told(value: object) -> str:
    """What Triton tells its compiler of an argument: of a number its width, and whether it is 1 or a multiple of 16."""
    if isinstance(value, tuple):
        return f"({' '.join(map(_told, value))})"
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if hasattr(value, "block_shape"):
        return f"descriptor {_told(value.base)}{value.block_shape}"  # type: ignore[attr-defined]
    if isinstance(value, int) and not isinstance(value, bool):
        wide = "i64" if abs(value) >= 2**31 else "i32"
        return "1" if value == 1 else f"{wide}/16" if value % 16 == 0 else wide
    return "float" if isinstance(value, float) else str(value)


def launches(entry: Callable[..., object], arch: int, *call: Any, **named: Any) -> list[Launch]:
    """What ``entry(*call, **named)`` launches on a GPU of ``arch`` where its tensors are on the meta device."""
    found: list[Launch] = []

    def take(kernel: Any, grid: int, *arguments: Any, **options: Any) -> None:
        found.append(Launch(kernel, grid, arguments, options))

    with compiling_for(Target(assumed_gpu(arch), take)):
        entry(*call, **named)
    return found


def compiled(launch: Launch, arch: int) -> Launch:
    """The same, with its binary.

    Raises:
        ValueError: under Triton's interpreter there is nothing to compile.
        RuntimeError: Triton or ptxas refuses it.
    """
    if not isinstance(launch.kernel, JITFunction):
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted and there is nothing to compile; unset it")
    with patch.object(driver, "_active", StandInDriver(arch, device=1000 + arch)):
        binary = launch.kernel.warmup(*launch.arguments, grid=(launch.grid,), **launch.options)
    return replace(launch, binary=binary)


class StandInDriver:
    """What Triton asks a driver before a launch, of a GPU that need not be here."""

    def __init__(self, arch: int, device: int) -> None:
        """``device``: the JIT keeps binaries by it, so each kind of GPU has a number that no other has."""
        self._arch, self._device = arch, device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


# what entries are called with


@dataclass(frozen=True)
class Role:
    """Where in a ring a launch stands: what it continues, and in which dtype it leaves its result."""

    carried: bool  # continues a state or sums
    in_place: bool  # and writes them back
    final: bool  # leaves the model dtype, not fp32


ROLES = {
    "only": Role(carried=False, in_place=False, final=True),
    "first": Role(carried=False, in_place=False, final=False),
    "middle": Role(carried=True, in_place=True, final=False),
    "last": Role(carried=True, in_place=False, final=True),
}
FEATURES = ("softcap", "alibi", "dropout", "seqused_k", "block_sparse")
"""What a launch may have beside bounds."""

ATTENTION = ("forward", "dq", "dkdv", *SINGLE_PASS)
FP8 = ("quantize", "dequantize")
MEMORY_BOUND = (*FP8, "reduce", "delta")
KERNELS = (*ATTENTION, *MEMORY_BOUND)

HOPPER = {
    "hopper": ("forward", (("forward_kernel", "hopper"),)),
    "hopper_backward": ("single_pass", (("backward", "hopper"),)),
}
"""In a name and as a kernel: the two that ``KernelConfig`` selects so; which kernel each takes the place of."""

BLOCK = 256  # of a block mask: a multiple of every side of a tile


class Sizes(NamedTuple):
    """Of a call."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int


GROUPED = Sizes(2, 4096, 4096, 256, 16)
UNGROUPED = Sizes(2, 4096, 4096, 32, 32)
"""Numbers that 16 divides, as those of most models are."""


@dataclass(frozen=True)
class Variant:
    """Everything that selects one binary of a kernel."""

    kernel: str  # one of KERNELS
    arch: int  # compute capability without the dot: 90
    dtype: str  # bf16, fp16 or fp32
    head_dim: int
    head_dim_v: int
    tile: Tile
    role: str = "middle"  # one of ROLES
    full: bool = False  # no bounds
    grouped: bool = True  # several query heads per key head
    features: tuple[str, ...] = ()  # some of FEATURES that are on
    options: Options = ()  # fields of KernelConfig beside the tiles that are not the default
    sizes: Sizes | None = None

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        tile = f"{self.tile.block_q}x{self.tile.block_k} {self.tile.num_warps}w {self.tile.num_stages}s"
        flags = [self.role, *["full"] * self.full, *["gqa"] * self.grouped, *self.features]
        word, own = self._word
        options = [f"{name}={value}" for name, value in self.options if (name, value) not in own]
        return " ".join([word, f"sm_{self.arch}", self.dtype, dims, tile, *flags, *options])

    @property
    def _word(self) -> tuple[str, Options]:
        """What the kernel is called, and the options that this says."""
        for word, (_, own) in HOPPER.items():
            if {*own} <= {*self.options}:
                return word, own
        return self.kernel, ()

    @property
    def function(self) -> str:
        """The name of the function that is launched."""
        word, _ = self._word
        return f"{'single_pass' if word in SINGLE_PASS else word}_kernel"

    @property
    def launch(self) -> Launch:
        """What is launched for it.

        Raises:
            ValueError: the entry refuses it, or hands it to another kernel.
        """
        found = launches(call, self.arch, self)
        for one in found:
            if one.name == self.function:
                return one
        raise ValueError(f"{self} is launched as {', '.join(one.name for one in found)}, not as {self.function}")


def config_of(kernel: str, tile: Tile, options: Options = ()) -> KernelConfig:
    """As a launch of one kernel takes a tile, its own options included."""
    chosen: dict[str, Any] = options_of(tile) | dict(options)
    if kernel in SINGLE_PASS:
        chosen = {"backward": kernel, "single_pass": tile} | chosen
    return KernelConfig(tile, tile, tile, **chosen)


Make = Callable[..., torch.Tensor]
"""A tensor of a name, a shape and a dtype."""


def empty(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Without values, and contiguous."""
    return torch.empty(shape, dtype=dtype, device=META)


def call(variant: Variant, make: Make = empty, bounds: Bounds | None = None) -> Any:
    """Call the entry of a variant, with bounds in place of its own; what that returns."""
    batch, queries, keys, heads, kv_heads = variant.sizes or (GROUPED if variant.grouped else UNGROUPED)
    role, dtype, kernel = ROLES[variant.role], DTYPES[variant.dtype], variant.kernel
    dim, dim_v = variant.head_dim, variant.head_dim_v
    left = dtype if role.final else torch.float32
    q, k = make("q", batch, queries, heads, dim, dtype=dtype), make("k", batch, keys, kv_heads, dim, dtype=dtype)
    v, dout = make("v", batch, keys, kv_heads, dim_v, dtype=dtype), make("dout", *q.shape[:3], dim_v, dtype=dtype)
    lse = make("lse", batch, heads, queries)
    if kernel in FP8:
        codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=META)
        scale = make("scale", *scale_shape(tuple(q.shape)))
        return quantize(q, codes, scale) if kernel == "quantize" else dequantize(codes, scale, q)
    if kernel == "delta":
        return attention_delta(dout, make("out", *dout.shape, dtype=dtype), make("dlse", *lse.shape))
    options = variant.options or ((("dkdv_splits", 2),) if kernel == "reduce" else ())
    how: dict[str, Any] = {
        "config": config_of(kernel, variant.tile, options),
        "bounds": bounds_of(variant, queries, keys, batch) if bounds is None else bounds,
        "scores": scores_of(variant.features, queries, keys, heads),
    }
    if kernel == "forward":
        state = (make("state", *dout.shape), lse) if role.carried else None
        return attention_forward(q, k, v, state=state, final=role.final, **how)
    given = dout, q, k, v, lse, make("delta", *lse.shape)
    if kernel == "dq":
        accum = make("dq_in", *q.shape) if role.carried else None
        out = accum if role.in_place else make("dq_out", *q.shape, dtype=left)
        return attention_dq(*given, accum=accum, out=out, **how)
    pair = (make("dk_in", *k.shape), make("dv_in", *v.shape)) if role.carried else None
    how |= {
        "accum": pair,
        "out": pair if role.in_place else (make("dk_out", *k.shape, dtype=left), make("dv_out", *v.shape, dtype=left)),
    }
    if kernel in SINGLE_PASS:
        return attention_gradients(*given, dq=make("dq", *q.shape), **how)
    return attention_dkdv(*given, **how)


def bounds_of(variant: Variant, queries: int, keys: int, batch: int) -> Bounds:
    """Of the mask that a variant has."""
    lo, hi = (None if variant.full else empty(name, queries, dtype=torch.int32) for name in ("lo", "hi"))
    seqused_k = empty("seqused_k", batch, dtype=torch.int32) if "seqused_k" in variant.features else None
    sparse = None
    if "block_sparse" in variant.features:
        blocks = (-(-length // BLOCK) for length in (queries, keys))
        sparse = BlockSparseIndex(torch.ones(*blocks, dtype=torch.bool), BLOCK, META)
    return FULL if (lo, seqused_k, sparse) == (None,) * 3 else Bounds(lo, hi, seqused_k, sparse)


def scores_of(features: Sequence[str], queries: int, keys: int, heads: int) -> Scores:
    """What modifies the scores of a launch with these features."""
    if not {"softcap", "alibi", "dropout"} & {*features}:
        return PLAIN
    return Scores(
        softcap=30.0 if "softcap" in features else 0.0,
        alibi_slopes=empty("slopes", heads) if "alibi" in features else None,
        dropout_p=0.25 if "dropout" in features else 0.0,
        q_positions=empty("q_positions", queries, dtype=torch.int32),
        k_positions=empty("k_positions", keys, dtype=torch.int32),
    )


# variants by name

OF_GROUPS = ("pack_gqa", "dkdv_splits")
"""Options that say something where several query heads share a key head."""

OF_LAUNCHES = ("sm_margin",)
"""Options that no compiler is told of."""

COMPILED: dict[str, dict[str, Sequence[Option]]] = {**OPTIONS, "single_pass": {"backward": ("hopper",)}}
"""By kernel, options and values that a compiler may be asked for. No table has the last one: it is no tuned kernel."""

DEFAULTS: dict[str, object] = {one.name: one.default for one in fields(KernelConfig)}
"""Of ``KernelConfig``: what a variant or a candidate need not say."""

MASKS, HEADS = ("full", "bounded"), ("gqa", "mha")
TILE = "QxKxWARPSxSTAGES"


def select(spec: str) -> list[Variant]:
    """The variants that ``arch:dtype:D[/Dv][:word …]`` names, as ``90:bf16:128:middle:dq:alibi:order=longest``.

    A word is a role, a kernel, ``hopper`` or ``hopper_backward``, a feature, ``full`` or ``bounded``, ``gqa`` or
    ``mha``, a tile as ``128x64x8x2`` in the place of the default one, or a field of ``KernelConfig``:
    ``order=longest``, ``persistent=True``, ``pack_gqa=True``, ``dkdv_splits=2``, ``dkdv_epilogue=descriptors``. Left
    out is what does not have the option: kernels, heads that are not grouped where they are packed or split, and where
    descriptors are asked for GPUs without a copy engine and head dims that fill no box.

    Raises:
        ValueError: a word that is not known, or nothing that has all of them; the message says why.
    """
    arch, dtype, dims, words = _parsed(spec)
    plain = [word for word in words if "=" not in word]
    options = options_of_words([word for word in words if "=" in word])
    features = tuple(word for word in plain if word in FEATURES)
    tiles = [word for word in plain if word[:1].isdecimal()]
    tile = tile_of(tiles[-1]) if tiles else None
    own_tile = hopper_tile(dims[0]) if tile is None and ("backward", "hopper") in options else tile
    asked = {*plain} - {*features, *tiles}
    found: list[Variant] = []
    reasons: list[str] = []
    for one in launchable(arch, dtype, *dims, own_tile):
        flags = {one.role, one.kernel, "full" if one.full else "bounded", "gqa" if one.grouped else "mha"}
        if not flags >= asked:
            continue
        if one.kernel in MEMORY_BOUND or one.options:  # which is what it is
            found += [] if options or features or tile else [one]
        elif (why := lacking(one, options)) is None:
            found.append(replace(one, features=features, options=options))
        else:
            reasons.append(why)
    if not found:
        reasons = reasons or [f"no kernel takes all of these words, or it has no default tile: a tile is one, {TILE}"]
        raise ValueError(f"spec is {spec!r}: {min(reasons, key=lambda why: ' not of ' in why)}")
    return found


def _parsed(spec: str) -> tuple[int, str, tuple[int, int], list[str]]:
    arch, dtype, dims, *words = [*spec.split(":"), "", ""] if spec.count(":") < 2 else spec.split(":")
    arch, parts = arch.removeprefix("sm_"), dims.split("/")
    if not (arch.isdecimal() and len(parts) <= 2 and all(one.isdecimal() and 1 <= int(one) <= 256 for one in parts)):
        raise ValueError(
            f"spec is {spec!r}: it must be ARCH:DTYPE:D or ARCH:DTYPE:D/Dv, as 90:bf16:128, with head dims of 1 to "
            "256, and words that narrow it"
        )
    for word, (kernel, options) in HOPPER.items():
        if word in words:
            words += [kernel, *(f"{name}={value}" for name, value in options)]
    words = [word for word in words if word not in HOPPER]
    known = [*ROLES, *KERNELS, *HOPPER, *FEATURES, *MASKS, *HEADS]
    for what, got, takes in (
        ("arch", arch, [*map(str, ARCHS)]),
        ("dtype", dtype, [*DTYPES]),
        *(("word", word, known) for word in words if "=" not in word and not word[:1].isdecimal()),
    ):
        if got not in takes:
            raise ValueError(f"{what} is {got!r}: it must be one of {', '.join(takes)}")
    return int(arch), dtype, (int(parts[0]), int(parts[-1])), words


def tile_of(word: str) -> Tile:
    """``128x64x8x2``: rows of queries and of keys, warps, pipeline stages."""
    parts = word.split("x")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"tile is {word!r}: it must be {TILE}, as 128x64x8x2")
    return Tile(*map(int, parts))


def lacking(variant: Variant, options: Options) -> str | None:
    """The first of the options that a kernel of such heads does not have on such a GPU, and who has it; or None."""
    for name, value in options:
        told = f"option is {name}={value}"
        if name not in COMPILED.get(variant.kernel, {}):
            having = [kernel for kernel, known in COMPILED.items() if name in known]
            return f"{told}: it is of {', '.join(having)}, not of {variant.kernel}"
        if name in OF_GROUPS and not variant.grouped:
            return f"{told}: it is of several query heads per key head, gqa"
        boxes = variant.arch >= COPY_ENGINE_ARCH and all(map(fills_boxes, (variant.head_dim, variant.head_dim_v)))
        if name == "dkdv_epilogue" and not boxes:
            return f"{told}: it takes sm_{COPY_ENGINE_ARCH} or higher, head dims of powers of two from {LEAST_SIDE} on"
    return None


def options_of_words(words: Sequence[str]) -> Options:
    """``order=longest``, ``pack_gqa=True`` as fields of ``KernelConfig``, sorted; what is the default is left out.

    Raises:
        ValueError: no such field that the compiler is told of, or no value of it.
    """
    values = {name: each for known in COMPILED.values() for name, each in known.items() if name not in OF_LAUNCHES}
    made: dict[str, Option] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in values:
            raise ValueError(f"option is {word!r}: it must be NAME=VALUE with one of {', '.join(values)}")
        value = next((one for one in values[name] if str(one) == text), None)
        if value is None:
            first, *_, last = words = [*map(str, values[name])]
            takes = f"a whole number from {first} to {last}" if first.isdecimal() else f"one of {', '.join(words)}"
            raise ValueError(f"option {name} is {text!r}: it must be {takes}")
        if value != DEFAULTS[name]:
            made[name] = value
    return tuple(sorted(made.items()))


def launchable(arch: int, dtype: str, head_dim: int, dim_v: int, tile: Tile | None) -> Iterator[Variant]:
    """Every variant that a default config, or ``tile``, can launch: kernels x roles x bounds x GQA, and memory-bound.

    dK/dV of grouped heads is cut into parts where programs are few, and the parts are reduced.
    """
    for kernel, role, full, grouped in product(ATTENTION, ROLES, (False, True), (False, True)):
        if (own := tile or default_tile(kernel, arch, dtype, max(head_dim, dim_v))) is not None:
            yield Variant(kernel, arch, dtype, head_dim, dim_v, own, role, full, grouped)
    dkdv = default_tile("dkdv", arch, dtype, max(head_dim, dim_v))
    assert dkdv is not None
    for role, full in product(ROLES, (False, True)):
        yield Variant("dkdv", arch, dtype, head_dim, dim_v, tile or dkdv, role, full, options=(("dkdv_splits", 2),))
        reduced = replace(dkdv, num_warps=REDUCE_WARPS, num_stages=1)
        yield Variant("reduce", arch, dtype, head_dim, dim_v, reduced, role, full)
    of_delta = Tile(DELTA_BLOCK, DELTA_BLOCK, 4, 1)
    yield Variant("delta", arch, dtype, head_dim, dim_v, of_delta, "only", full=True, grouped=False)
    for kernel, dim in product(FP8, dict.fromkeys((head_dim, dim_v))):
        of_codes = Tile(SCALE_TOKENS, SCALE_TOKENS, num_warps(dim), 1)
        yield Variant(kernel, arch, dtype, dim, dim, of_codes, "only", full=True, grouped=False)


def default_tile(kernel: str, arch: int, dtype: str, head_dim: int) -> Tile | None:
    """The built-in tile of a kernel of ``ATTENTION`` at the larger head dim; None where it has none that fits."""
    if kernel in SINGLE_PASS:
        return single_pass_tile(arch, DTYPES[dtype], head_dim)
    tile: Tile = getattr(config_for(arch, DTYPES[dtype], head_dim), kernel)
    return tile


def hopper_tile(head_dim: int) -> Tile:
    """Of the Hopper backward; any at a head dim that it does not take, as it then says so."""
    known = hopper_backward_launch.HEAD_DIMS
    return hopper_backward_launch.default_tile(head_dim if head_dim in known else known[-1])
