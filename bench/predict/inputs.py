"""Inputs of a prediction: GPU speed and links, from presets, flags or measured files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...kernels.gpu import find_model
from ...ring.schedule.mask import Mask
from ..common.result import read_result
from .links import ClusterLinks, positive_number
from .predicted_call import PredictedCall
from .program import PASSES
from .speed import GPUS, MODELLED_DTYPES, NO_PERTURBATION, Perturbation, Speed, gpu_speed

SPEED_TOKENS = 16384  # length to which --tflops refers
OURS, FORWARD, BACKWARD = "ringattn", "forward", "backward"


@dataclass(frozen=True)
class PredictionInputs:
    """Hardware of a prediction, and the passes to predict."""

    speed: Speed
    links: ClusterLinks
    perturbation: Perturbation = NO_PERTURBATION
    phases: Sequence[str] = PASSES
    measured_rows: tuple[str, ...] = ()
    """Description of the measured rows, line by line."""

    @property
    def has_backward(self) -> bool:
        """True if a backward is predicted."""
        return len(self.phases) > 1


def resolve_speed(
    call: PredictedCall, gpu: str | None, forward: float | None, backward: float | None, kernels: Path | None
) -> tuple[Speed, tuple[str, ...]]:
    """Return a GPU's speed, and lines that describe the measured rows it comes from (none without ``kernels``).

    The speed comes from the file ``kernels``, or from ``forward`` and ``backward`` in TFLOP/s at 16k tokens, or from
    the bound of the default kernels on ``gpu``.

    Raises:
        ValueError: The GPU is unknown, a rate is not positive, the file does not hold measured kernels, or the
            bounds do not cover the dtype.
    """
    gpu = gpu and gpu.lower()
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"--gpu is {gpu!r}: it must be one of {', '.join(GPUS)}. For another GPU set --tflops.")
    check_above_zero("TFLOP/s", tflops=forward, backward_tflops=backward)
    if kernels is not None:
        return speed_from_file(kernels, call, gpu)
    base = gpu_speed(gpu or "h100", call.head_dim)
    if forward is not None:
        alone = replace(call, tokens=SPEED_TOKENS, world=1, nodes=1, chunks=1, mask=Mask(causal=call.mask.causal))
        return base.fit_speeds((forward * 1e12, alone), None if backward is None else (backward * 1e12, alone)), ()
    if call.dtype not in MODELLED_DTYPES:
        raise ValueError(
            f"--dtype is {call.dtype}: the bounds of the default kernels cover only {' and '.join(MODELLED_DTYPES)}. "
            "Set --tflops or --kernels for this dtype."
        )
    return base, ()


def speed_from_file(path: Path, call: PredictedCall, gpu: str | None) -> tuple[Speed, tuple[str, ...]]:
    """Return the speed that fits the rows of ``bench kernels`` most similar to the call, and their description."""
    result = read_result(path)
    base = _base_speed(result.provenance.get("gpu"), gpu, str(path))
    rows = [(row, _measured_launch(row, f"{path}: rows[{n}]")) for n, row in enumerate(result.rows) if _is_ours(row)]
    chosen = []
    for phase in PASSES:
        launches = [launch for row, launch in rows if row["pass"] == phase and launch[1].dtype == call.dtype]
        chosen += sorted(launches, key=lambda launch: _distance(launch[1], call))[:1]
        if not chosen:
            dtypes = sorted({launched.dtype for row, (_, launched) in rows if row["pass"] == FORWARD})
            available = f"its rows are for {', '.join(dtypes)}" if dtypes else "it has none"
            raise ValueError(
                f"{path} has no timing of a full or causal forward of {OURS} in {call.dtype}: {available}. "
                f"Measure it with `ringattn bench kernels --dtype {call.dtype} --json FILE`."
            )
    try:
        speed = base.fit_speeds(*chosen)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from None
    lines = (_row_text(phase, *launch) for phase, launch in zip(PASSES, chosen, strict=False))
    return speed, (f"{path}, {base.name}", *lines)


def _base_speed(about: object, gpu: str | None, where: str) -> Speed:
    """Return the preset of ``gpu`` (None: the file's GPU, or an H100) with multiprocessors and memory of the file.

    ``about`` is the GPU in the file's provenance, and ``where`` the file's name.
    """
    if not isinstance(about, dict) or not isinstance(name := about.get("name"), str):
        raise ValueError(f"{where} was not measured on a GPU. Run `ringattn bench kernels` on a GPU.")
    model = gpu or find_model(name)
    base = gpu_speed(model if model in GPUS else "h100")
    where = f"{where}: provenance.gpu"
    multiprocessors, capacity = (positive_number(about, name, where) for name in ("multiprocessors", "memory_gib"))
    return replace(base, name=name, multiprocessors=int(multiprocessors), capacity=capacity * 2**30)


def _is_ours(row: Mapping[str, Any]) -> bool:
    """Return True for a row of our default kernels with a full or causal mask."""
    square = row.get("mask") in ("full", "causal") and row.get("head_dim_v") in (None, row.get("head_dim"))
    return row.get("pass") in PASSES and row.get("by") == OURS and square and row.get("rate") is not None


def _measured_launch(row: Mapping[str, Any], where: str) -> tuple[float, PredictedCall]:
    """Return a row's FLOP/s on the visible pairs, and its call; ValueError for a damaged row, which ``where`` names."""
    try:
        heads, kv_heads = map(int, row["heads"].split("/"))
        call = PredictedCall(
            int(row["seqlen"]), 1, mask=Mask(causal=row["mask"] == "causal"), heads=heads, kv_heads=kv_heads,
            head_dim=int(row["head_dim"]), dtype=row["dtype"],
        )  # fmt: skip
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a row written by `bench kernels`: {error}") from None
    return positive_number(row, "rate", where) * 1e12, call


def _distance(measured: PredictedCall, call: PredictedCall) -> tuple[float, ...]:
    """Return the differences of two calls in head dim, mask, length and heads, the most important first."""
    return (
        abs(math.log2(measured.head_dim / call.head_dim)), measured.mask.causal != call.mask.causal,
        abs(math.log2(measured.tokens / call.tokens)), abs(math.log2(measured.heads / call.heads)),
    )  # fmt: skip


def _row_text(phase: str, flops: float, call: PredictedCall) -> str:
    mask = "causal" if call.mask.causal else "full"
    return (
        f"{phase} {flops / 1e12:.4g} TFLOP/s ({call.dtype}, D{call.head_dim}, {mask}, {call.tokens:,} tokens, "
        f"{call.heads}/{call.kv_heads} heads)"
    )


def check_above_zero(unit: str, **given: float | None) -> None:
    """Raise ValueError if a flag in ``given`` is a number but not finite and above 0; ``unit`` is its unit."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}: it must be a positive, finite number of {unit}")
