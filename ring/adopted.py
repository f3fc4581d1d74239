"""Kernels that passed a self-check on this GPU, as ``ringattn doctor --adopt`` recorded them.

``backend="auto"`` uses them in place of the portable kernels. The choice is local to a rank: ranks compare and transfer
the same as without it. A record is read once per process and GPU.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import __version__
from ..comm.topology import nvml
from ..kernels import KernelConfig, Scores
from ..kernels.gpu import GpuSpec, gpu_specs
from ..kernels.json_files import convert_json, read_object
from ..kernels.launch import check_tma_alignment
from ..kernels.tables import DTYPES, gpu_slug, resolve_config_dir, user_table_folder
from .backends import check_kernel_features, skip_nan_check
from .local.protocol import LocalAttention
from .local.rectangles import RectangleAttention
from .local.registry import resolve_backend
from .schedule.layout import Layout
from .schedule.mask import Mask

SCHEMA, VERSION = "ringattn adoption", 1
FORWARD, TRAINING = PHASES = ("forward", "training")
OPTIONS = ("forward_kernel", "backward")
HOPPER, UNKNOWN = "hopper", "unknown"
REGULAR_SPANS = 2  # a zigzag rank has two spans; rectangles of a hop grow with their square
HOW_TO_ADOPT = "`ringattn doctor --adopt` checks faster kernels on this GPU and adopts those that pass"

logger = logging.getLogger(__name__)


class Setup(NamedTuple):
    """GPU and versions that a verdict depends on. A record of another setup is not used."""

    gpu: str
    driver: str
    triton: str
    assembler: str
    torch: str
    ringattn: str


def kernel_name(backend: str, options: Iterable[tuple[str, str]]) -> str:
    """Return a name such as ``flash`` or ``triton backward=single_pass``."""
    return " ".join([backend, *(f"{name}={value}" for name, value in options)])


@lru_cache(maxsize=64)
def build_kernel_config(options: tuple[tuple[str, str], ...]) -> KernelConfig | None:
    """Return the config with these fields, or None without fields."""
    return KernelConfig(**dict(options)) if options else None  # type: ignore[arg-type]


def is_faster(seconds: float | None, portable_seconds: float | None, spread: float | None) -> bool:
    """Return True if a kernel was timed and is faster than the portable one by more than the spread."""
    if seconds is None or portable_seconds is None or spread is None:
        return False
    return 0 < seconds < portable_seconds - max(spread, 0.0)


@dataclass(frozen=True)
class KernelVerdict:
    """Result of the self-check of one kernel, for one dtype, head dim and phase."""

    backend: str
    options: Mapping[str, str]
    """Fields of the ``KernelConfig``; empty for backends of other projects."""
    phase: str
    """"forward" for calls without gradients, or "training"."""
    dtype: str
    head_dim: int
    passed: bool
    reason: str
    """Reason why the kernel is not adopted, or ""."""
    repeatable: bool
    """Whether repeated calls gave the same bits."""
    seconds: float | None
    portable_seconds: float | None
    spread: float | None
    """Seconds by which the difference of the two times may vary."""
    adopted: bool

    def __post_init__(self) -> None:
        if self.phase not in PHASES or self.dtype not in DTYPES:
            raise ValueError(
                f"phase is {self.phase!r:.60} and dtype {self.dtype!r:.60}: they must be one of {', '.join(PHASES)} "
                f"and one of {', '.join(DTYPES)}"
            )
        if unknown := sorted(self.options.keys() - {*OPTIONS}):
            raise ValueError(f"options has {unknown[0]!r:.60}: it may contain only {', '.join(OPTIONS)}")
        build_kernel_config(tuple(self.options.items()))  # raises for a wrong value
        if self.adopted and not (self.passed and is_faster(self.seconds, self.portable_seconds, self.spread)):
            raise ValueError("adopted is true: passed must be true, and seconds + spread below portable_seconds")

    @property
    def name(self) -> str:
        return kernel_name(self.backend, self.options.items())

    @property
    def speedup(self) -> float:
        """Time of the portable kernels over that of this kernel; 0 if they were not timed."""
        return self.portable_seconds / self.seconds if self.seconds and self.portable_seconds else 0.0

    @property
    def config(self) -> KernelConfig | None:
        return build_kernel_config(tuple(self.options.items()))


class AdoptionRecord(NamedTuple):
    """Content of a record file."""

    schema: str
    version: int
    setup: Setup
    date: str
    command: str
    verdicts: tuple[KernelVerdict, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that :func:`read_record` reads."""
        return self._asdict() | {"setup": self.setup._asdict(), "verdicts": [asdict(each) for each in self.verdicts]}


@dataclass(frozen=True)
class Adoption:
    """Record of a GPU, or the reason why there is none that can be used."""

    path: Path | None
    record: AdoptionRecord | None = None
    problem: str = ""
    is_refused: bool = False
    """True if the file is no valid record."""

    @cached_property
    def fastest(self) -> dict[tuple[str, torch.dtype, int], list[KernelVerdict]]:
        """Adopted kernels by phase, dtype and head dim, fastest first."""
        result: dict[tuple[str, torch.dtype, int], list[KernelVerdict]] = {}
        for verdict in sorted(self.record.verdicts if self.record else (), key=lambda each: -each.speedup):
            if verdict.adopted:
                result.setdefault((verdict.phase, DTYPES[verdict.dtype], verdict.head_dim), []).append(verdict)
        return result


def ptxas_release(arch: int) -> str:
    """Return the release of the ptxas with which Triton assembles kernels for a compute capability (90 is 9.0)."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        return str(get_ptxas(arch).version)
    except Exception:  # Triton has no stable name for it
        return UNKNOWN


def current_setup(gpu: GpuSpec) -> Setup:
    """Return the setup of this process."""
    driver = UNKNOWN
    with suppress(nvml.NvmlUnavailableError):
        driver = nvml.driver_version()
    versions = str(triton.__version__), ptxas_release(gpu.arch), str(torch.__version__), __version__
    return Setup(gpu.name, driver, *versions)


def record_path(gpu: GpuSpec) -> Path | None:
    """Return the path of a GPU's record in the user's table folder, or None if there is no such folder."""
    config_dir = resolve_config_dir(None)
    folder = Path(config_dir) if config_dir else user_table_folder()
    return None if folder is None else folder / f"{gpu_slug(gpu.name)}_adopted.json"


def read_record(path: Path) -> AdoptionRecord:
    """Return the record in a file.

    Raises:
        ValueError: If the file is not this user's, cannot be read, or is no valid record.
    """
    try:
        owner = path.stat().st_uid
    except OSError as error:
        raise ValueError(error.strerror) from None
    if owner not in (os.geteuid(), 0):  # a record selects the kernels of this user's training
        raise ValueError(f"it belongs to user {owner}, not to {os.geteuid()}")
    data = read_object(path)
    for name, expected in (("schema", SCHEMA), ("version", VERSION)):
        if data.get(name) != expected:
            raise ValueError(f"{name} is {data.get(name)!r:.60}: it must be {expected!r}")
    record: AdoptionRecord = convert_json(AdoptionRecord, data, "record")
    return record


def find_adoption(gpu: GpuSpec) -> Adoption:
    """Return the record of a GPU if it can be used here, or the reason why not."""
    path = record_path(gpu)
    if path is None or not os.path.lexists(path):
        return Adoption(path, problem="no kernel has been checked on this GPU")
    try:
        record = read_record(path)
    except ValueError as error:
        return Adoption(path, problem=f"{path} is rejected: {error}", is_refused=True)
    now = current_setup(gpu)
    if changes := [
        f"{name} {old}, now {new}"
        for name, old, new in zip(Setup._fields, record.setup, now, strict=True)
        if old != new
    ]:
        return Adoption(path, problem=f"{path} was made with {', '.join(changes)}: run the checks again")
    return Adoption(path, record)


_LOADING = threading.Lock()


@lru_cache(maxsize=64)
def _cached_adoption(gpu: GpuSpec, config_dir: str | None) -> Adoption:
    adoption = find_adoption(gpu)
    if adoption.is_refused:
        warnings.warn(f"{adoption.problem}. Using the portable kernels.", UserWarning, stacklevel=2)
    elif adoption.problem:
        logger.info("%s: using the portable kernels. %s.", adoption.problem, HOW_TO_ADOPT)
    return adoption


def clear_adoption_cache() -> None:
    """Clear the cache, so that the next call reads a newly written record."""
    _cached_adoption.cache_clear()


def find_adopted_kernel(
    q: Tensor, k: Tensor, v: Tensor, args: Any, layouts: Iterable[Layout], mask: Mask, scores: Scores, *,
    needs_backward: bool, by_row: bool,
) -> tuple[LocalAttention, KernelConfig | None] | None:  # fmt: skip
    """Return the fastest adopted kernel that supports a call, with its config, or None for the default kernels.

    Kernels of other projects compute rectangles. They were timed with full and causal masks, so they get no others.
    """
    gpu = gpu_specs(q.device)
    if gpu is None or q.shape[3] != v.shape[3]:
        return None
    with _LOADING:  # virtual ranks are threads, and each message should appear once
        adoption = _cached_adoption(gpu, resolve_config_dir(None))
    for verdict in adoption.fastest.get((TRAINING if needs_backward else FORWARD, q.dtype, q.shape[3]), ()):
        if not verdict.repeatable and torch.are_deterministic_algorithms_enabled():
            continue
        try:
            kernel = resolve_backend(verdict.backend, q.device)
            if isinstance(kernel, RectangleAttention) and (by_row or not _is_regular(mask, layouts)):
                continue
            if HOPPER in verdict.options.values():  # without adoption such tensors do not raise in the first hop
                check_tma_alignment(f"{verdict.name} supports", q=q, k=k, v=v)
            call_args, has_backward = args._replace(config=verdict.config), needs_backward
            check_kernel_features(kernel, q, v, mask, scores, call_args, has_backward=has_backward, by_row=by_row)
        except Exception as refused:  # unsupported, or no longer installed
            logger.debug("%s is adopted, but not for this call: %s", verdict.name, refused)
            continue
        skip_nan_check(kernel)
        return kernel, verdict.config
    return None


def _is_regular(mask: Mask, layouts: Iterable[Layout]) -> bool:
    """Return True if each hop makes only a few rectangles."""
    if mask not in (Mask(), Mask(causal=True)):
        return False
    return all(len(spans) <= REGULAR_SPANS for layout in layouts for spans in layout.spans_per_rank)
