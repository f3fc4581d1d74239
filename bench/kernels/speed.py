"""Speed and errors of every contender on one device, on the same inputs, timed in turns; and speed targets.

A target is a rate, or our rate relative to that of a PyTorch backend in the same interleaved run. A missed target is
reported and is not a failure, because the targets were set for one GPU model, an H200.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.cuda_threads import HIGH_PRIORITY, new_stream
from ...kernels import Bounds, attention_forward
from ...ring import Layout, Mask, bounds
from ..common.attention import BACKWARD_FLOPS, DTYPES, AttentionConfig, forward_flops, mask_label
from ..common.cases import MeasuredNumber, UnavailableError
from ..common.errors import RESULTS, AttentionInputs, ErrorJudge, build_judge, judged_heads
from ..common.result import Result, Row
from ..common.timing import Samples, Step, StepTimer, repeats_within, time_in_turns
from .background_copy import COPY_BYTES, FREE_MULTIPROCESSORS, BackgroundCopy, copy_bytes_for
from .contenders import (
    BACKWARD,
    FORWARD,
    OURS,
    PARTS,
    PASSES,
    STATE,
    VARIANTS,
    ContenderInputs,
    PreparedContender,
    TritonVariant,
    list_contenders,
)

# Two sums of the same terms differ by a few roundings of the result (2^-8 in bfloat16).
AGREEMENT_LIMITS = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3}
PRODUCT = "matrix product"
PRODUCT_SIDE = {"cuda": 8192, "cpu": 1024}
SHAPE = ("dtype", "head_dim", "head_dim_v", "mask", "seqlen", "heads", "batch")
UNITS = {
    "pass": "", "by": "", "seqlen": "", "head_dim": "", "time": "ms", "rate": "TFLOP/s", "error/allowed": "",
    "of product": "%", "mask": "", "dtype": "", "heads": "", "batch": "", "head_dim_v": "", "spread": "", "error": "",
    "rate by S²/2": "TFLOP/s", "note": "",
}  # fmt: skip
"""Units by column. A row is one pass of one contender on one shape; ``bench/kernels/README.md`` has the columns."""


def config_labels(config: AttentionConfig) -> dict[str, Any]:
    """Return the columns that describe the problem of a row: dtype, head dims, mask, length, heads, batch."""
    dims = {} if config.value_dim == config.head_dim else {"head_dim_v": config.value_dim}
    return {
        "dtype": config.dtype, "head_dim": config.head_dim, **dims,
        "mask": mask_label(config.mask), "seqlen": config.seqlen, "heads": f"{config.heads}/{config.kv_heads}",
        "batch": config.batch,
    }  # fmt: skip


def measure_kernels(
    config: AttentionConfig, clock: StepTimer, *, seconds: float, prefixes: Sequence[str] = ()
) -> Result:
    """Check every contender against float64, then time every pass in turns with a matrix product.

    ``seconds`` limits the timing, and ``prefixes`` are the names of the contenders to measure (default: all). A result
    of ours that is missing or above its error limit is a failure. Other contenders that cannot run have a note instead.
    """
    result, labels = Result("bench kernels", UNITS), config_labels(config)
    steps, errors = dict[str, Step](), dict[str, dict[str, float]]()
    side = PRODUCT_SIDE[clock.device.type]
    with clock.capture_stream():
        inputs = ContenderInputs(config, *config.random_shard(0, clock.device))
        heads = judged_heads(config.batch, config.heads, config.kv_heads, config.seqlen, config.seqlen)
        judge = build_judge(
            AttentionInputs(inputs.q, inputs.k, inputs.v, inputs.dout), config.reference_masks(clock.device), heads
        )
        for contender in list_contenders(clock.device):
            if prefixes and contender.name not in prefixes:
                continue
            try:
                ready = contender.make(inputs)
                for what, step in ready.steps.items():
                    steps[f"{what}:{contender.name}"] = _prepare_or_skip_graph(clock, step)
            except UnavailableError as reason:
                result.rows.append({**labels, "by": contender.name, "pass": "", "note": str(reason)})
                if contender.name == OURS:
                    result.failed.append(f"{OURS} is not available: {reason}")
                continue
            for what, name, error in _errors(ready, judge):
                limit = judge.limits[name]
                if contender.is_ours and judge.failing_results({name: error}):
                    shape = ", ".join(f"{key} {value}" for key, value in labels.items())
                    message = f"the error of {name} is {error:.3g}. At most {limit:.3g} is allowed ({shape})."
                    result.failed.append(f"{what} by {contender.name}: {message}")
                worst = errors.setdefault(f"{what}:{contender.name}", {"error": 0.0, "error/allowed": 0.0})
                worst["error"] = max(worst["error"], error)
                worst["error/allowed"] = max(worst["error/allowed"], error / limit)
        a, b = (torch.randn(side, side, device=clock.device).to(DTYPES[config.dtype]) for _ in range(2))
        steps[PRODUCT] = clock.prepare_step(lambda: a @ b)
        for step in steps.values():
            step()  # compile, and let cuDNN choose its plan
        one_round = sum(clock(step) for step in steps.values())
        times = time_in_turns(steps, clock, warmup=1, repeats=repeats_within(seconds, one_round))
    ceiling = 2 * side**3 / times.pop(PRODUCT).median / 1e12
    rows = [_row(name, samples, config, ceiling) | errors.get(name, {}) for name, samples in times.items()]
    result.rows += sorted(rows, key=lambda row: [*PASSES, *PARTS].index(row["pass"]))
    result.notes.append(f"matrix product in the same runs: {config.dtype} {ceiling:.4g} TFLOP/s")
    return result


def _errors(ready: PreparedContender, judge: ErrorJudge) -> Iterator[tuple[str, str, float]]:
    """Yield (pass, name of a result, its largest error against float64) for every result of a contender."""
    for name, error in judge.errors(dict(zip(RESULTS, ready.results, strict=False))).items():
        yield FORWARD if name == RESULTS[0] else BACKWARD, name, error
    if ready.carried_out is not None:
        yield STATE, RESULTS[0], judge.errors({RESULTS[0]: ready.carried_out})[RESULTS[0]]


def _prepare_or_skip_graph(clock: StepTimer, step: Step) -> Step:
    """Return what ``clock.prepare_step`` returns; UnavailableError if the step cannot be captured."""
    try:
        return clock.prepare_step(step)
    except torch.AcceleratorError:
        raise
    except RuntimeError as refused:
        raise UnavailableError(f"CUDA graphs cannot capture it: {str(refused).splitlines()[0]}") from None


def _row(name: str, samples: Samples, config: AttentionConfig, ceiling: float) -> dict[str, Any]:
    """Build a row; ``name`` is ``pass:contender``, and ``ceiling`` the matrix product's TFLOP/s.

    One kernel of a backward has only a time.
    """
    what, _, who = name.partition(":")
    row = {**config_labels(config), "pass": what, "by": who, "time": samples.median * 1e3, "spread": samples.spread}
    if what in PASSES:
        per_second = (BACKWARD_FLOPS if what == BACKWARD else 1.0) / samples.median / 1e12
        row["rate"] = per_second * config.flops
        row["of product"] = 100 * row["rate"] / ceiling
        if config.flash_flops is not None:
            row["rate by S²/2"] = per_second * config.flash_flops
    return row


def comparison_line(rows: Sequence[Row]) -> str:
    """Return the summary line: per pass, our best rate divided by the best rate of other contenders."""
    ratio_texts = []
    for what in (FORWARD, BACKWARD):
        best: dict[str, list[float]] = {}  # best rates by shape: ours, others
        for row in rows:
            if row["pass"] == what:
                rates = best.setdefault(str([row.get(name) for name in SHAPE]), [0.0, 0.0])
                theirs = not row["by"].startswith(OURS)
                rates[theirs] = max(rates[theirs], row["rate"])
        if ratios := [ours / others for ours, others in best.values() if ours and others]:
            ratio_texts.append(f"{what} {' to '.join(dict.fromkeys(f'{end(ratios):.2f}' for end in (min, max)))}")
    return f"our best rate / best of the others: {', '.join(ratio_texts)}" if ratio_texts else "no other contender"


def causal_bounds(q: Tensor, k: Tensor) -> Bounds:
    """Return the bounds of a causal mask for the whole q and k ``[B, S, H, D]``."""
    rows, keys = (Layout.contiguous(x.shape[1], 1).positions(0) for x in (q, k))
    return bounds(Mask(causal=True), rows, keys).to(q.device)


FLASH, CUDNN, RATE = "flash", "cudnn", "TFLOP/s"
ALONE = "alone"
COPY_LASTS = 2.0  # times the forward's own time, so that the copy outlasts it
TWO_PASSES = (OURS, f"{OURS} dkdv by descriptors")
SINGLE_PASSES = (f"{OURS} single pass", f"{OURS} hopper single pass")
FORWARDS = (OURS, f"{OURS} hopper", f"{OURS} longest first")
MARGIN_VARIANT = TritonVariant(
    f"{OURS} persistent with margin", {"persistent": True, "sm_margin": FREE_MULTIPROCESSORS}, (FORWARD,)
)
"""Variant that leaves multiprocessors to a transfer, as a ring does; only timed beside one."""
BESIDE_VARIANTS = [*(variant for variant in VARIANTS if variant.name in FORWARDS), MARGIN_VARIANT]
FULL128, CAUSAL128, FULL64, STATE128, BESIDE128 = "full D128", "causal D128", "full D64", "8k keys", "beside"


class SpeedTarget(NamedTuple):
    """A speed target: what is measured, our variants of which the fastest counts, and the bars to reach."""

    what: str
    group: str  # name of the measurement with the rates
    passes: str
    by: tuple[str, ...]
    bars: tuple[tuple[str, str, float], ...]
    """(floor or goal, divisor, minimum ratio), or a minimum in TFLOP/s if the divisor is ``RATE``."""


TARGETS = (
    SpeedTarget("forward D128, full", FULL128, FORWARD, FORWARDS,
           (("floor", FLASH, 1.25), ("goal", CUDNN, 1.05), ("goal", RATE, 650))),
    SpeedTarget("forward D128, causal", CAUSAL128, FORWARD, FORWARDS,
           (("floor", FLASH, 1.2), ("goal", CUDNN, 1.05), ("goal", RATE, 600))),
    SpeedTarget("forward D64, full", FULL64, FORWARD, FORWARDS, (("floor", FLASH, 1.2), ("goal", CUDNN, 1.05))),
    SpeedTarget(
        "backward D128, two passes", FULL128, BACKWARD, TWO_PASSES, (("floor", FLASH, 0.9), ("goal", FLASH, 1.15))
    ),
    SpeedTarget("backward D128, single pass", FULL128, BACKWARD, SINGLE_PASSES,
           (("floor", FLASH, 1.2), ("goal", CUDNN, 1.0), ("goal", RATE, 500))),
    SpeedTarget("carried state, 8k keys per hop", STATE128, STATE, FORWARDS,
           (("floor", FORWARD, 0.93), ("goal", FORWARD, 0.97))),
    SpeedTarget("forward beside a transfer", BESIDE128, FORWARD, (*FORWARDS, MARGIN_VARIANT.name),
           (("floor", ALONE, 0.85), ("goal", ALONE, 0.92))),
)  # fmt: skip


class TargetSizes(NamedTuple):
    """Sizes of the problems in the table of targets."""

    seqlen: int = 16 * 1024
    hop: int = 8 * 1024
    heads: int = 16
    wide: int = 128
    narrow: int = 64
    dtype: str = "bfloat16"
    nbytes: int = COPY_BYTES  # of the copy, which is scaled to last long enough


def measure_targets(
    device: torch.device, *, seconds: float = 1.5, sizes: TargetSizes | None = None
) -> Iterator[MeasuredNumber]:
    """Yield the measured rates and the verdicts of ``TARGETS``."""
    sizes, clock = sizes or TargetSizes(), StepTimer(device)
    measurements: dict[str, Iterator[MeasuredNumber]] = {
        FULL128: _shape(clock, sizes, sizes.seqlen, sizes.wide, False, seconds),
        CAUSAL128: _shape(clock, sizes, sizes.seqlen, sizes.wide, True, seconds),
        FULL64: _shape(clock, sizes, sizes.seqlen, sizes.narrow, False, seconds),
        STATE128: _shape(clock, sizes, sizes.hop, sizes.wide, False, seconds),
        BESIDE128: _beside_a_transfer(clock, sizes, seconds),
    }
    for group, numbers in measurements.items():
        rates: dict[str, float] = {}  # TFLOP/s, by "<pass>:<who>"
        for number in numbers:
            yield number
            if number.unit == RATE and number.value is not None:
                rates[f"{number.name}:{number.labels['by']}"] = number.value
        for target in TARGETS:
            if target.group == group:
                yield from judge_target(target, rates)


def judge_target(speed_target: SpeedTarget, rates: Mapping[str, float]) -> Iterator[MeasuredNumber]:
    """Yield a number per bar of a target: our best rate over the bar's divisor, and whether it is reached.

    ``rates`` are TFLOP/s by ``pass:contender``.
    """
    ours = {name: rates.get(f"{speed_target.passes}:{name}", 0.0) for name in speed_target.by}
    best_name = max(ours, key=ours.__getitem__)
    for kind, divisor, minimum in speed_target.bars:
        other = _reference_rate(divisor, speed_target.passes, best_name, rates)
        reached = ours[best_name] / other if ours[best_name] and other else None
        verdict = "not measured" if reached is None else "reached" if reached >= minimum else "missed"
        labels = {"by": best_name, "over": divisor, "bar": kind, "at least": minimum, "verdict": verdict}
        yield MeasuredNumber(speed_target.what, reached, RATE if divisor == RATE else "times", labels)


def _reference_rate(divisor: str, what: str, our_name: str, rates: Mapping[str, float]) -> float | None:
    """Return the rate by which ours is divided, or 1 if the divisor is ``RATE``; None if it was not measured."""
    if divisor == RATE:
        return 1.0
    if divisor == ALONE:
        # Take the fastest of all: a variant that leaves room for transfers is slow alone, so its ratio would look good.
        return max((rate for name, rate in rates.items() if name.startswith(f"{ALONE}:")), default=None)
    return rates.get(f"{FORWARD}:{our_name}" if divisor == FORWARD else f"{what}:{divisor}")


def _shape(
    clock: StepTimer, sizes: TargetSizes, seqlen: int, head_dim: int, causal: bool, seconds: float
) -> Iterator[MeasuredNumber]:
    """Yield rates of our variants and of SDPA's flash and cuDNN backends for one shape, as ``bench kernels`` does."""
    config = AttentionConfig(
        seqlen, heads=sizes.heads, kv_heads=sizes.heads, head_dim=head_dim, dtype=sizes.dtype, causal=causal,
        layout="contiguous", device=clock.device.type,
    )  # fmt: skip
    wanted = {name for target in TARGETS for name in target.by}
    names = (*(variant.name for variant in VARIANTS if variant.name in wanted), FLASH, CUDNN)
    result = measure_kernels(config, clock, seconds=seconds, prefixes=names)
    labels = config_labels(config)
    for row in result.rows:
        row_labels = {**labels, "by": row["by"]}
        if not row["pass"]:
            yield MeasuredNumber("not available", None, "", row_labels, note=row["note"])
        elif "rate" in row:
            yield MeasuredNumber(row["pass"], row["rate"], RATE, row_labels, spread=row["spread"])
    for failure in result.failed:
        yield MeasuredNumber("wrong results", 1, "", labels, limit=0, note=failure)


def _beside_a_transfer(clock: StepTimer, sizes: TargetSizes, seconds: float) -> Iterator[MeasuredNumber]:
    """Yield rates of the forward alone, and beside a copy of few blocks on a high-priority stream."""
    device, shape = clock.device, (1, sizes.seqlen, sizes.heads, sizes.wide)
    q, k, v = (torch.randn(shape, device=device).to(DTYPES[sizes.dtype]) for _ in range(3))
    alone: dict[str, Step] = {}
    for variant in BESIDE_VARIANTS:
        try:
            forward = partial(attention_forward, q, k, v, config=variant.config(q, v, full=True))
            forward()
        except (ValueError, NotImplementedError, TypeError) as refused:
            yield MeasuredNumber("not available", None, "", {"by": variant.name}, note=str(refused))
        else:
            alone[variant.name] = forward
    if not alone:
        return
    slowest = max(statistics.median(clock(step) for _ in range(3)) for step in alone.values())
    copy = BackgroundCopy(device, copy_bytes_for(device, COPY_LASTS * slowest, sizes.nbytes))
    stream = new_stream(device, HIGH_PRIORITY)
    steps: dict[str, Step] = {}
    for name, step in alone.items():
        steps |= {f"{ALONE}:{name}": step, f"{FORWARD}:{name}": copy.run_alongside(step, stream)}
    repeats = repeats_within(seconds, sum(clock(step) for step in steps.values()))
    samples_by_name = time_in_turns(steps, clock, repeats=repeats)
    flops = forward_flops(sizes.seqlen**2, heads=sizes.heads, head_dim=sizes.wide)
    for name, samples in samples_by_name.items():
        what, _, who = name.partition(":")
        labels = {"by": who, "head_dim": sizes.wide, "queries": sizes.seqlen, "keys": sizes.seqlen}
        yield MeasuredNumber(what, flops / samples.median / 1e12, RATE, labels, spread=samples.spread)
    yield MeasuredNumber("wrong in the copy", copy.count_wrong(), "elements", limit=0)
