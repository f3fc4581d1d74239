"""Compilation of kernel launches for a GPU that need not be present.

A :class:`KernelVariant` describes one call of a kernel's host entry. The entry is called with tensors on the meta
device (``kernels.target``), checks its arguments as usual, and passes its launch to a recorder. Triton then compiles
the recorded launch with a stand-in driver that reports the wanted GPU. A real launch has the same key in Triton's
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
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
    hopper_forward_launch,
)
from ..kernels.attention import DELTA_BLOCK, REDUCE_WARPS, ForwardLauncher, delta_warps
from ..kernels.bounds import BlockSparseIndex
from ..kernels.checks import MAX_HEAD_DIM
from ..kernels.config import MIN_TILE_SIDE, built_in_config, single_pass_tile
from ..kernels.gpu import MULTIPROCESSOR_SPECS, arch_name, assumed_gpu, is_amd
from ..kernels.launch import TMA_ARCH, TMA_LOAD_HEAD_DIMS, has_tma, is_tma_head_dim
from ..kernels.quantize import SCALE_TOKENS, dequantize, num_warps, quantize, scale_shape
from ..kernels.scores import PLAIN
from ..kernels.tables import DTYPES, SINGLE_PASS_KERNELS, TUNABLE_OPTIONS, OptionItems, OptionValue, tuned_options
from ..kernels.warm_up import collect_launches

META = torch.device("meta")

# recorded launches


@dataclass(frozen=True)
class RecordedLaunch:
    """Kernel launch that a host entry has requested."""

    kernel: Any
    grid: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    """Constexpr arguments of the kernel, and options of the compiler."""
    binary: Any = None
    """Triton's compiled kernel, or None before compilation."""

    @property
    def name(self) -> str:
        name: str = self.kernel.fn.__name__
        return name

    @property
    def signature(self) -> str:
        """Text of all compiler inputs; launches with equal signatures share a binary."""
        return f"{self.name} {_compiler_view(self.arguments)} {self.options}"


def _compiler_view(value: object) -> str:
    """Return the properties of an argument for which Triton compiles a kernel, as text.

    For an integer these are its width, and whether it is 1 or a multiple of 16.
    """
    if isinstance(value, tuple):
        return f"({' '.join(map(_compiler_view, value))})"
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    if hasattr(value, "block_shape"):
        return f"descriptor {_compiler_view(value.base)}{value.block_shape}"  # type: ignore[attr-defined]
    if isinstance(value, int) and not isinstance(value, bool):
        width = "i64" if abs(value) >= 2**31 else "i32"
        return "1" if value == 1 else f"{width}/16" if value % 16 == 0 else width
    return "float" if isinstance(value, float) else str(value)


def record_launches(entry: Callable[..., object], arch: int, *call: Any, **named: Any) -> list[RecordedLaunch]:
    """Call a kernel's host entry as ``entry(*call, **named)``, and return the launches that it requests on ``arch``.

    The tensors are on the meta device, and nothing runs.
    """
    launches = collect_launches(assumed_gpu(arch), partial(entry, *call, **named))
    return [RecordedLaunch(*launch) for launch in launches]


def compile_launch(launch: RecordedLaunch, arch: int) -> RecordedLaunch:
    """Compile a launch, and return a copy with its binary.

    Raises:
        ValueError: Triton's interpreter is on.
        RuntimeError: Triton or ptxas rejects the kernel.
    """
    if not isinstance(launch.kernel, JITFunction):
        raise ValueError("TRITON_INTERPRET is set, so kernels are interpreted and cannot be compiled; unset it")
    with patch.object(driver, "_active", StandInDriver(arch, device=1000 + arch)):
        binary = launch.kernel.warmup(*launch.arguments, grid=(launch.grid,), **launch.options)
    return replace(launch, binary=binary)


class StandInDriver:
    """Driver that reports a GPU of ``arch`` to Triton's compiler.

    Triton's JIT caches binaries by device number, so each ``arch`` needs its own ``device``.
    """

    def __init__(self, arch: int, device: int) -> None:
        self._arch, self._device = arch, device

    def get_current_target(self) -> GPUTarget:
        if is_amd(self._arch):
            return GPUTarget("hip", arch_name(self._arch), MULTIPROCESSOR_SPECS[self._arch].warp_size)
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0


# variants and the calls of host entries


@dataclass(frozen=True)
class Role:
    """Position of a launch in the ring, which determines its accumulators and the dtype of its result."""

    carried: bool  # continues the state or the partial gradients of the previous hop
    in_place: bool  # updates them in place
    final: bool  # writes the model dtype instead of fp32


ROLES = {
    "only": Role(carried=False, in_place=False, final=True),
    "first": Role(carried=False, in_place=False, final=False),
    "middle": Role(carried=True, in_place=True, final=False),
    "last": Role(carried=True, in_place=False, final=True),
}
FEATURES = ("softcap", "alibi", "dropout", "seqused_k", "block_sparse")
"""Optional features of a launch besides bounds, which add code to its loop."""

MAX_LOGITS = "max_logits"
"""Feature of the forward that adds no code to its loop."""

ATTENTION = ("forward", "dq", "dkdv", *SINGLE_PASS_KERNELS)
FP8 = ("quantize", "dequantize")
MEMORY_BOUND = (*FP8, "reduce", "delta")
KERNELS = (*ATTENTION, *MEMORY_BOUND)

HOPPER = {
    "hopper": ("forward", (("forward_kernel", "hopper"),)),
    "hopper_backward": ("single_pass", (("backward", "hopper"),)),
}
"""Word of a Hopper kernel: the kernel that it replaces, and the options of ``KernelConfig`` that select it."""

BLOCK = 256  # block size of a block mask, a multiple of every tile side


class CallSizes(NamedTuple):
    """Batch, tokens and heads of a call."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int


GROUPED = CallSizes(2, 4096, 4096, 256, 16)
UNGROUPED = CallSizes(2, 4096, 4096, 32, 32)
"""Sizes that are multiples of 16, as in most models, because Triton specialises kernels for them."""


@dataclass(frozen=True)
class KernelVariant:
    """Parameters that select one binary of a kernel."""

    kernel: str  # one of KERNELS
    arch: int  # such as 90 or 0x942
    dtype: str  # bf16, fp16 or fp32
    head_dim: int
    head_dim_v: int
    tile: Tile
    role: str = "middle"  # one of ROLES
    full: bool = False  # no bounds
    grouped: bool = True  # several query heads per key head
    features: tuple[str, ...] = ()  # enabled ones of FEATURES and MAX_LOGITS
    options: OptionItems = ()  # fields of KernelConfig, except tiles, that are not the default
    sizes: CallSizes | None = None

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        tile = f"{self.tile.block_q}x{self.tile.block_k} {self.tile.num_warps}w {self.tile.num_stages}s"
        flags = [self.role, *["full"] * self.full, *["gqa"] * self.grouped, *self.features]
        word, own = self._word
        options = [f"{name}={value}" for name, value in self.options if (name, value) not in own]
        return " ".join([word, arch_name(self.arch), self.dtype, dims, tile, *flags, *options])

    @property
    def _word(self) -> tuple[str, OptionItems]:
        """Name of the kernel in texts, such as ``hopper``, and the options that the name implies."""
        for word, (_, own) in HOPPER.items():
            if {*own} <= {*self.options}:
                return word, own
        return self.kernel, ()

    @property
    def function(self) -> str:
        """Name of the Triton function that this variant launches."""
        word, _ = self._word
        return f"{'single_pass' if word in SINGLE_PASS_KERNELS else word}_kernel"

    @property
    def launch(self) -> RecordedLaunch:
        """Launch of this variant.

        Raises:
            ValueError: The host entry rejects the variant or launches another kernel.
        """
        recorded = record_launches(call_entry, self.arch, self)
        for launch in recorded:
            if launch.name == self.function:
                return launch
        names = ", ".join(launch.name for launch in recorded)
        raise ValueError(f"variant {self} needs {self.function}, but a launch with these options uses {names}")


def empty_tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an empty contiguous tensor on the meta device; ``name`` has no effect."""
    return torch.empty(shape, dtype=dtype, device=META)


def call_entry(
    variant: KernelVariant, make_tensor: Callable[..., torch.Tensor] = empty_tensor, bounds: Bounds | None = None
) -> Any:
    """Call the host entry of a variant with tensors of ``make_tensor``, and return its result.

    ``make_tensor`` is called with a name, a shape and a dtype. ``bounds`` replaces the variant's own bounds.
    """
    batch, queries, keys, heads, kv_heads = variant.sizes or (GROUPED if variant.grouped else UNGROUPED)
    role, dtype, kernel = ROLES[variant.role], DTYPES[variant.dtype], variant.kernel
    dim, dim_v = variant.head_dim, variant.head_dim_v
    out_dtype = dtype if role.final else torch.float32
    q = make_tensor("q", batch, queries, heads, dim, dtype=dtype)
    k = make_tensor("k", batch, keys, kv_heads, dim, dtype=dtype)
    v = make_tensor("v", batch, keys, kv_heads, dim_v, dtype=dtype)
    dout = make_tensor("dout", *q.shape[:3], dim_v, dtype=dtype)
    lse = make_tensor("lse", batch, heads, queries)
    if kernel in FP8:
        codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=META)
        scale = make_tensor("scale", *scale_shape(tuple(q.shape)))
        return quantize(q, codes, scale) if kernel == "quantize" else dequantize(codes, scale, q)
    if kernel == "delta":
        return attention_delta(dout, make_tensor("out", *dout.shape, dtype=dtype), make_tensor("dlse", *lse.shape))
    tile, options = variant.tile, variant.options or ((("dkdv_splits", 2),) if kernel == "reduce" else ())
    settings: dict[str, Any] = tuned_options(tile) | dict(options)
    if kernel in SINGLE_PASS_KERNELS:
        settings = {"backward": kernel, "single_pass": tile} | settings
    shared: dict[str, Any] = {
        "config": KernelConfig(tile, tile, tile, **settings),
        "bounds": variant_bounds(variant, queries, keys, batch) if bounds is None else bounds,
        "scores": feature_scores(variant.features, queries, keys, heads),
    }
    if kernel == "forward":
        state = (make_tensor("state", *dout.shape), lse) if role.carried else None
        if MAX_LOGITS in variant.features:
            launcher = ForwardLauncher(q, dim**-0.5, shared["config"], state, max_logits=True)
            return launcher.fold(k, v, shared["bounds"], scores=shared["scores"], final=role.final)
        return attention_forward(q, k, v, state=state, final=role.final, **shared)
    inputs = dout, q, k, v, lse, make_tensor("delta", *lse.shape)
    if kernel == "dq":
        accum = make_tensor("dq_in", *q.shape) if role.carried else None
        out = accum if role.in_place else make_tensor("dq_out", *q.shape, dtype=out_dtype)
        return attention_dq(*inputs, accum=accum, out=out, **shared)
    pair = (make_tensor("dk_in", *k.shape), make_tensor("dv_in", *v.shape)) if role.carried else None
    shared["accum"] = shared["out"] = pair
    if not role.in_place:
        shared["out"] = (
            make_tensor("dk_out", *k.shape, dtype=out_dtype),
            make_tensor("dv_out", *v.shape, dtype=out_dtype),
        )
    if kernel in SINGLE_PASS_KERNELS:
        return attention_gradients(*inputs, dq=make_tensor("dq", *q.shape), **shared)
    return attention_dkdv(*inputs, **shared)


def variant_bounds(variant: KernelVariant, queries: int, keys: int, batch: int) -> Bounds:
    """Return the bounds of a variant on the meta device, with padding and a block mask if it has these features."""
    lo, hi = (None if variant.full else empty_tensor(name, queries, dtype=torch.int32) for name in ("lo", "hi"))
    seqused_k = empty_tensor("seqused_k", batch, dtype=torch.int32) if "seqused_k" in variant.features else None
    sparse = None
    if "block_sparse" in variant.features:
        blocks = (-(-length // BLOCK) for length in (queries, keys))
        sparse = BlockSparseIndex(torch.ones(*blocks, dtype=torch.bool), BLOCK, META)
    return FULL if (lo, seqused_k, sparse) == (None,) * 3 else Bounds(lo, hi, seqused_k, sparse)


def feature_scores(features: Sequence[str], queries: int, keys: int, heads: int) -> Scores:
    """Return scores with those of softcap, ALiBi and dropout that ``features`` names, on the meta device."""
    if not {"softcap", "alibi", "dropout"} & {*features}:
        return PLAIN
    return Scores(
        softcap=30.0 if "softcap" in features else 0.0,
        alibi_slopes=empty_tensor("slopes", heads) if "alibi" in features else None,
        dropout_p=0.25 if "dropout" in features else 0.0,
        q_positions=empty_tensor("q_positions", queries, dtype=torch.int32),
        k_positions=empty_tensor("k_positions", keys, dtype=torch.int32),
    )


# variants by name

GROUPED_OPTIONS = ("pack_gqa", "dkdv_splits")
"""Options for grouped heads (GQA) only."""

LAUNCH_OPTIONS = ("sm_margin",)
"""Options that do not change the compiled binary."""

COMPILED_OPTIONS: dict[str, dict[str, Sequence[OptionValue]]] = {
    **TUNABLE_OPTIONS,
    "single_pass": {"backward": ("hopper",)},
}
"""Options of each kernel with their values. ``backward=hopper`` is not tuned, so tables do not contain it."""

DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(KernelConfig)}
"""Defaults of ``KernelConfig``, which variants and candidates leave out."""

MASKS, HEADS = ("full", "bounded"), ("gqa", "mha")
TILE = "QxKxWARPSxSTAGES"


def parse_variants(spec: str) -> list[KernelVariant]:
    """Return the variants that match ``arch:dtype:D[/Dv][:word …]``, such as ``90:bf16:128:middle:dq:order=longest``.

    A word is a role, a kernel, ``hopper``, ``hopper_backward``, a feature, ``full``, ``bounded``, ``gqa`` or ``mha``. A
    tile such as ``128x64x8x2`` replaces the default. Fields of ``KernelConfig`` are ``order=longest``,
    ``persistent=True``, ``pack_gqa=True``, ``loads=pointers``, ``dkdv_splits=2`` and ``dkdv_epilogue=descriptors``.

    Variants that do not support an option are left out. For example, only grouped heads can be packed or split, and
    descriptors need sm_90 or later and head dims that are powers of two.

    Raises:
        ValueError: A word is unknown, or no variant matches all words.
    """
    arch, dtype, dims, words = _parse_spec(spec)
    plain = [word for word in words if "=" not in word]
    options = parse_options([word for word in words if "=" in word])
    features = tuple(word for word in plain if word in (*FEATURES, MAX_LOGITS))
    tiles = [word for word in plain if word[:1].isdecimal()]
    tile = parse_tile_word(tiles[-1]) if tiles else None
    for field in ("forward_kernel", "backward"):
        if tile is None and (field, "hopper") in options:
            tile = hopper_tile(field, dims[0])
    required = {*plain} - {*features, *tiles}
    required |= {"forward"} if MAX_LOGITS in features else set()
    selected: list[KernelVariant] = []
    reasons: list[str] = []
    for variant in default_variants(arch, dtype, *dims, tile):
        flags = {
            variant.role,
            variant.kernel,
            "full" if variant.full else "bounded",
            "gqa" if variant.grouped else "mha",
        }
        if not flags >= required:
            continue
        if variant.kernel in MEMORY_BOUND or variant.options:  # these accept no further words
            selected += [] if options or features or tile else [variant]
        elif (reason := unsupported_option(variant, options)) is None:
            selected.append(replace(variant, features=features, options=options))
        else:
            reasons.append(reason)
    if not selected:
        reasons = reasons or [f"no kernel with a built-in tile takes all of these words. Add a tile as {TILE}"]
        raise ValueError(f"spec is {spec!r}: {min(reasons, key=lambda reason: ' not of ' in reason)}")
    return selected


def _parse_spec(spec: str) -> tuple[int, str, tuple[int, int], list[str]]:
    """Split a spec into architecture, dtype, (D, Dv) and further words, and check them.

    Raises:
        ValueError: A part is missing or unknown.
    """
    arch, dtype, dims, *words = [*spec.split(":"), "", ""] if spec.count(":") < 2 else spec.split(":")
    archs = {arch_name(known).removeprefix("sm_"): known for known in MULTIPROCESSOR_SPECS}
    arch, parts = arch.removeprefix("sm_"), dims.split("/")
    is_valid = all(dim.isdecimal() and 1 <= int(dim) <= MAX_HEAD_DIM for dim in parts)
    if not (arch and len(parts) <= 2 and is_valid):
        raise ValueError(
            f"spec is {spec!r}: it must be ARCH:DTYPE:D or ARCH:DTYPE:D/Dv with head dims from 1 to {MAX_HEAD_DIM}, "
            "such as 90:bf16:128, optionally followed by words"
        )
    for word, (kernel, options) in HOPPER.items():
        if word in words:
            words += [kernel, *(f"{name}={value}" for name, value in options)]
    words = [word for word in words if word not in HOPPER]
    allowed_words = [*ROLES, *KERNELS, *HOPPER, *FEATURES, MAX_LOGITS, *MASKS, *HEADS]
    for name, value, allowed in (
        ("arch", arch, [*archs]),
        ("dtype", dtype, [*DTYPES]),
        *(("word", word, allowed_words) for word in words if "=" not in word and not word[:1].isdecimal()),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(allowed)}")
    return archs[arch], dtype, (int(parts[0]), int(parts[-1])), words


def parse_tile_word(word: str) -> Tile:
    """Parse ``128x64x8x2``: queries, keys, warps and pipeline stages.

    Raises:
        ValueError: The word is not of this form.
    """
    parts = word.split("x")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"tile is {word!r}: it must be {TILE}, such as 128x64x8x2")
    return Tile(*map(int, parts))


def unsupported_option(variant: KernelVariant, options: OptionItems) -> str | None:
    """Return the reason why a variant does not support one of the options, or None."""
    for name, value in options:
        option = f"option is {name}={value}"
        if name not in COMPILED_OPTIONS.get(variant.kernel, {}):
            kernels = [kernel for kernel, its_options in COMPILED_OPTIONS.items() if name in its_options]
            return f"{option}: it is an option of {', '.join(kernels)}, not of {variant.kernel}"
        if name in GROUPED_OPTIONS and not variant.grouped:
            return f"{option}: it needs several query heads per key head, as with gqa"
        has_boxes = has_tma(variant.arch) and all(map(is_tma_head_dim, (variant.head_dim, variant.head_dim_v)))
        if name == "dkdv_epilogue" and not has_boxes:
            return f"{option}: it needs sm_{TMA_ARCH} or higher, and power-of-two head dims of at least {MIN_TILE_SIDE}"
        widest = TMA_LOAD_HEAD_DIMS.get(variant.kernel, {})
        if name == "loads" and (variant.arch not in widest or variant.dtype == "fp32"):
            return f"{option}: it needs 16 bits and one of {', '.join(f'sm_{arch}' for arch in widest)}"
    return None


def parse_options(words: Sequence[str]) -> OptionItems:
    """Parse words such as ``order=longest`` and ``pack_gqa=True`` to sorted options, without defaults.

    Raises:
        ValueError: The name or the value of an option is unknown.
    """
    values = {
        name: allowed
        for kernel_options in COMPILED_OPTIONS.values()
        for name, allowed in kernel_options.items()
        if name not in LAUNCH_OPTIONS
    }
    options: dict[str, OptionValue] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in values:
            raise ValueError(f"option is {word!r}: it must be NAME=VALUE, where NAME is one of {', '.join(values)}")
        value = next((option for option in values[name] if str(option) == text), None)
        if value is None:
            first, *_, last = texts = [*map(str, values[name])]
            allowed = f"an integer from {first} to {last}" if first.isdecimal() else f"one of {', '.join(texts)}"
            raise ValueError(f"option {name} is {text!r}: it must be {allowed}")
        if value != DEFAULTS[name]:
            options[name] = value
    return tuple(sorted(options.items()))


def default_variants(arch: int, dtype: str, head_dim: int, dim_v: int, tile: Tile | None) -> Iterator[KernelVariant]:
    """Yield every variant that the default config, or ``tile``, can launch.

    The variants are all combinations of kernels, roles, bounds and GQA, split dK/dV of grouped heads with its
    reduction, and the memory-bound kernels.
    """
    for kernel, role, full, grouped in product(ATTENTION, ROLES, (False, True), (False, True)):
        if (kernel_tile := tile or builtin_tile(kernel, arch, dtype, max(head_dim, dim_v))) is not None:
            yield KernelVariant(kernel, arch, dtype, head_dim, dim_v, kernel_tile, role, full, grouped)
    dkdv = builtin_tile("dkdv", arch, dtype, max(head_dim, dim_v))
    assert dkdv is not None
    for role, full in product(ROLES, (False, True)):
        yield KernelVariant(
            "dkdv", arch, dtype, head_dim, dim_v, tile or dkdv, role, full, options=(("dkdv_splits", 2),)
        )
        reduce_tile = replace(dkdv, num_warps=REDUCE_WARPS, num_stages=1)
        yield KernelVariant("reduce", arch, dtype, head_dim, dim_v, reduce_tile, role, full)
    delta_tile = Tile(DELTA_BLOCK, DELTA_BLOCK, delta_warps(dim_v), 1)
    yield KernelVariant("delta", arch, dtype, head_dim, dim_v, delta_tile, "only", full=True, grouped=False)
    for kernel, dim in product(FP8, dict.fromkeys((head_dim, dim_v))):
        fp8_tile = Tile(SCALE_TOKENS, SCALE_TOKENS, num_warps(dim), 1)
        yield KernelVariant(kernel, arch, dtype, dim, dim, fp8_tile, "only", full=True, grouped=False)


def builtin_tile(kernel: str, arch: int, dtype: str, head_dim: int) -> Tile | None:
    """Return the built-in tile of an attention kernel, or None if none fits; ``head_dim`` is the larger of D and Dv."""
    if kernel in SINGLE_PASS_KERNELS:
        return single_pass_tile(arch, DTYPES[dtype], head_dim)
    tile: Tile = getattr(built_in_config(arch, DTYPES[dtype], head_dim), kernel)
    return tile


def hopper_tile(field: str, head_dim: int) -> Tile:
    """Return the default tile of the Hopper kernel that ``field`` of ``KernelConfig`` selects.

    For an unsupported head dim it is any tile, so that the launch raises.
    """
    if field == "forward_kernel":
        return hopper_forward_launch.default_forward_tile(head_dim)
    supported = hopper_backward_launch.BACKWARD_HEAD_DIMS
    return hopper_backward_launch.default_backward_tile(head_dim if head_dim in supported else supported[-1])
