"""What a prediction is made from: the speed of a GPU and its links, by presets, by flags, or as files say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...kernels.gpu import find_model
from ...ring.schedule.mask import Mask
from ..common.result import read
from .call import Call
from .links import Links, positive
from .program import PASSES
from .speed import CONSTANTS_OF, GPUS, NONE, Perturbation, Speed, gpu_speed

SPEED_TOKENS = 16384  # of the launch whose TFLOP/s are given
OURS, FORWARD, BACKWARD = "ringattn", "forward", "backward"


@dataclass(frozen=True)
class Inputs:
    """What all ways are predicted from."""

    speed: Speed
    links: Links
    perturbation: Perturbation = NONE
    phases: Sequence[str] = PASSES
    measured: tuple[str, ...] = ()
    """What was measured, line by line."""

    @property
    def backward(self) -> bool:
        """Whether there is a backward."""
        return len(self.phases) > 1


def speed_of(
    call: Call, gpu: str | None, forward: float | None, backward: float | None, kernels: Path | None
) -> tuple[Speed, tuple[str, ...]]:
    """A GPU's constants, with the TFLOP/s given for causal or full attention of 16k tokens, or with measured rows.

    Raises:
        ValueError: an unknown GPU, a speed that is none, or a file that is not of measured kernels; nothing but the
            GPU, and a dtype that its constants are not of.
    """
    gpu = gpu and gpu.lower()
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: it must be one of {', '.join(GPUS)}; --tflops says how fast it is")
    above_zero("TFLOP/s", tflops=forward, backward_tflops=backward)
    if kernels is not None:
        return measured(kernels, call, gpu)
    base = gpu_speed(gpu or "h100")
    if forward is not None:
        alone = replace(call, tokens=SPEED_TOKENS, world=1, nodes=1, chunks=1, mask=Mask(causal=call.mask.causal))
        return base.fitted((forward * 1e12, alone), None if backward is None else (backward * 1e12, alone)), ()
    if call.dtype not in CONSTANTS_OF:
        raise ValueError(
            f"dtype is {call.dtype}: the constants of a GPU are of {' and '.join(CONSTANTS_OF)}; --tflops or "
            "--kernels say how fast its kernels are"
        )
    return base, ()


def measured(path: Path, call: Call, gpu: str | None) -> tuple[Speed, tuple[str, ...]]:
    """A speed at which the rows nearest to a call take what `bench kernels` measured, and these rows in words.

    Raises:
        ValueError: another file, a damaged row, no GPU, or no forward of this dtype.
    """
    result = read(path)
    base = _base(result.provenance.get("gpu"), gpu, str(path))
    rows = [(row, _launch(row, f"{path}: rows[{n}]")) for n, row in enumerate(result.rows) if _is_ours(row)]
    chosen = []
    for phase in PASSES:
        launches = [one for row, one in rows if row["pass"] == phase and one[1].dtype == call.dtype]
        chosen += sorted(launches, key=lambda one: _distance(one[1], call))[:1]
        if not chosen:
            dtypes = sorted({one.dtype for row, (_, one) in rows if row["pass"] == FORWARD})
            there = f"there are rows of {', '.join(dtypes)}" if dtypes else "there are none"
            raise ValueError(
                f"{path} has no forward of {OURS} in {call.dtype}, full or causal: {there}; "
                f"`ringattn bench kernels --dtype {call.dtype} --json FILE` measures it"
            )
    try:
        speed = base.fitted(*chosen)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from None
    lines = (_words(phase, *one) for phase, one in zip(PASSES, chosen, strict=False))
    return speed, (f"{path}, {base.name}", *lines)


def _base(about: object, gpu: str | None, where: str) -> Speed:
    """The constants that no row tells: of the GPU that ``gpu`` names, else of the one whose name the file has.

    Of one that is not known those of an H100; multiprocessors and memory are those of the file.
    """
    if not isinstance(about, dict) or not isinstance(name := about.get("name"), str):
        raise ValueError(f"{where} was not measured on a GPU: it takes what `ringattn bench kernels` wrote on one")
    model = gpu or find_model(name)
    base = gpu_speed(model if model in GPUS else "h100")
    where = f"{where}: provenance.gpu"
    multiprocessors, capacity = (positive(about, one, where) for one in ("multiprocessors", "memory_gib"))
    return replace(base, name=name, multiprocessors=int(multiprocessors), capacity=capacity * 2**30)


def _is_ours(row: Mapping[str, Any]) -> bool:
    """Whether it is our default kernels' speed, of attention that a hop computes."""
    square = row.get("mask") in ("full", "causal") and row.get("head_dim_v") in (None, row.get("head_dim"))
    return row.get("pass") in PASSES and row.get("by") == OURS and square and row.get("rate") is not None


def _launch(row: Mapping[str, Any], where: str) -> tuple[float, Call]:
    """FLOP/s on the visible area, and of what; ValueError where the row is damaged."""
    try:
        heads, kv_heads = map(int, row["heads"].split("/"))
        call = Call(
            int(row["seqlen"]), 1, mask=Mask(causal=row["mask"] == "causal"), heads=heads, kv_heads=kv_heads,
            head_dim=int(row["head_dim"]), dtype=row["dtype"],
        )  # fmt: skip
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is no row of `bench kernels`: {error}") from None
    return positive(row, "rate", where) * 1e12, call


def _distance(measured: Call, call: Call) -> tuple[float, ...]:
    """How far it is from what a hop of the call computes: by head dim, mask, length, heads."""
    return (
        abs(math.log2(measured.head_dim / call.head_dim)), measured.mask.causal != call.mask.causal,
        abs(math.log2(measured.tokens / call.tokens)), abs(math.log2(measured.heads / call.heads)),
    )  # fmt: skip


def _words(phase: str, flops: float, call: Call) -> str:
    mask = "causal" if call.mask.causal else "full"
    return (
        f"{phase} {flops / 1e12:.4g} TFLOP/s of {call.dtype} D{call.head_dim} {mask}, {call.tokens:,} tokens, "
        f"{call.heads}/{call.kv_heads} heads"
    )


def above_zero(unit: str, **given: float | None) -> None:
    """Refuse flags that are no numbers above 0, or not finite: ValueError."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name.replace('_', '-')} is {value:g}: it must be above 0 and finite, in {unit}")
