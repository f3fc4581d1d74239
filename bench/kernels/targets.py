"""What the kernels must reach beside PyTorch's backends, and whether they do: one table, floors and goals.

Every row is a ratio of medians of one interleaved run, or a rate; more is better. A floor that is missed is told, and
fails nothing: which chip it is decides (the figures were set for an H200).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.transports.lanes import HIGH_PRIORITY, new_stream
from ...kernels import attention_forward
from ..common.attention import DTYPES, forward_flops
from ..common.flags import OF_RINGS
from ..common.timing import Clock, Step, interleaved, nearest, repeats_within
from ..suite.cases import Number
from . import speed
from .beside import LEFT, SIZES, Copy, bytes_for
from .contender import BACKWARD, FORWARD, OURS, STATE, Cannot
from .ours import VARIANTS, Variant
from .shape import Shape
from .speed import captured

FLASH, CUDNN, RATE = "flash", "cudnn", "TFLOP/s"
PLAIN, ALONE = "plain forward", "alone"
UNITS = {RATE: "TFLOP/s"}
COPY_LASTS = 2.0  # times the forward alone: the copy is beside it to its end
TWO_PASSES = (OURS, f"{OURS} dkdv by descriptors")
SINGLE_PASSES = (f"{OURS} single pass", f"{OURS} hopper single pass")


@dataclass(frozen=True)
class Bar:
    """At least so many times what ``over`` reaches, or so many TFLOP/s."""

    over: str
    least: float


@dataclass(frozen=True)
class Target:
    """One row: what is measured, by whom of ours (the best of them counts), the floor and the goals."""

    what: str
    group: str  # which measurement it is read from
    passes: str
    by: tuple[str, ...]
    floor: Bar
    goals: tuple[Bar, ...]


FORWARDS = (OURS, f"{OURS} hopper", f"{OURS} longest first")
WITH_MARGIN = Variant(f"{OURS} persistent with margin", {"persistent": True, "sm_margin": LEFT}, (FORWARD,))
"""Leaves the copy what it takes, as a ring leaves its transfers; alone, nobody would."""
BESIDE = [*(one for one in VARIANTS if one.name in FORWARDS), WITH_MARGIN]
FULL128, CAUSAL128, FULL64, STATE128, BESIDE128 = "full D128", "causal D128", "full D64", "8k keys", "beside"
TARGETS = (
    Target("forward D128, full", FULL128, FORWARD, FORWARDS, Bar(FLASH, 1.25), (Bar(CUDNN, 1.05), Bar(RATE, 650))),
    Target("forward D128, causal", CAUSAL128, FORWARD, FORWARDS, Bar(FLASH, 1.2), (Bar(CUDNN, 1.05), Bar(RATE, 600))),
    Target("forward D64, full", FULL64, FORWARD, FORWARDS, Bar(FLASH, 1.2), (Bar(CUDNN, 1.05),)),
    Target("backward D128, two passes", FULL128, BACKWARD, TWO_PASSES, Bar(FLASH, 0.9), (Bar(FLASH, 1.15),)),
    Target(
        "backward D128, single pass", FULL128, BACKWARD, SINGLE_PASSES, Bar(FLASH, 1.2),
        (Bar(CUDNN, 1.0), Bar(RATE, 500)),
    ),
    Target("carried state, 8k keys per hop", STATE128, STATE, FORWARDS, Bar(PLAIN, 0.93), (Bar(PLAIN, 0.97),)),
    Target(
        "forward beside a transfer", BESIDE128, FORWARD, (*FORWARDS, WITH_MARGIN.name), Bar(ALONE, 0.85),
        (Bar(ALONE, 0.92),),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Of the table; tests take smaller ones."""

    seqlen: int = 16 * 1024
    hop: int = 8 * 1024
    heads: int = 16
    wide: int = 128
    narrow: int = 64
    dtype: str = "bfloat16"
    nbytes: int = SIZES.nbytes  # of the copy that is scaled to last long enough


def targets(
    device: torch.device, *, seconds: float = 1.5, sizes: Sizes | None = None, timer: str = ""
) -> Iterator[Number]:
    """The table of ``TARGETS`` on this device; ``seconds`` of timing for each of its measurements.

    Beside a transfer there is no graph: it would be over when the transfer is, and not when the forward is.
    """
    sizes, clock = sizes or Sizes(), Clock(device, timer=timer)
    beside = Clock(device, timer=nearest(timer, OF_RINGS))
    measure: dict[str, Callable[[], Iterator[Number]]] = {
        FULL128: partial(beside_pytorch, clock, sizes, sizes.wide, False, seconds),
        CAUSAL128: partial(beside_pytorch, clock, sizes, sizes.wide, True, seconds),
        FULL64: partial(beside_pytorch, clock, sizes, sizes.narrow, False, seconds),
        STATE128: partial(hop_with_state, clock, sizes, seconds),
        BESIDE128: partial(beside_a_transfer, beside, sizes, seconds),
    }
    for group, run in measure.items():
        rates: dict[str, float] = {}  # TFLOP/s, by "<pass>:<who>"
        for number in run():
            yield number
            if number.unit == RATE and number.value is not None and "by" in number.labels:
                rates[f"{number.name}:{number.labels['by']}"] = number.value
        for target in TARGETS:
            if target.group == group:
                yield from judged(target, rates)


def judged(target: Target, rates: Mapping[str, float]) -> Iterator[Number]:
    """The floor, then the goals: what is reached, and in a word whether that is enough."""
    ours = {who: rates[f"{target.passes}:{who}"] for who in target.by if f"{target.passes}:{who}" in rates}
    who = max(ours, key=ours.__getitem__, default=target.by[0])
    for kind, bar in (("floor", target.floor), *(("goal", goal) for goal in target.goals)):
        reached = reaches(bar, target.passes, who, rates) if ours else None
        verdict = "not measured" if reached is None else "reached" if reached >= bar.least else "missed"
        labels = {"by": who, "over": bar.over, "bar": kind, "at least": bar.least, "verdict": verdict}
        yield Number(target.what, reached, UNITS.get(bar.over, "times"), labels)


def reaches(bar: Bar, what: str, who: str, rates: Mapping[str, float]) -> float | None:
    """A rate as the bar counts it; None where the other one was not measured."""
    if bar.over == RATE:
        return rates[f"{what}:{who}"]
    if bar.over == ALONE:
        # of all: one that leaves room to a transfer is slow without it, and would seem to lose nothing beside it
        alone = [rate for name, rate in rates.items() if name.startswith(f"{ALONE}:")]
        return rates[f"{what}:{who}"] / max(alone) if alone else None
    other = f"{PLAIN}:{who}" if bar.over == PLAIN else f"{what}:{bar.over}"
    return rates[f"{what}:{who}"] / rates[other] if rates.get(other) else None


def beside_pytorch(clock: Clock, sizes: Sizes, head_dim: int, causal: bool, seconds: float) -> Iterator[Number]:
    """Our variants beside SDPA's flash and cuDNN backends: ``bench kernels`` of one shape."""
    shape = Shape(sizes.seqlen, sizes.heads, sizes.heads, head_dim, dtype=sizes.dtype, causal=causal)
    wanted = {name for target in TARGETS for name in target.by}
    everyone = (*(variant.name for variant in VARIANTS if variant.name in wanted), FLASH, CUDNN)
    yield from speed.measured(shape, clock, seconds=seconds, by=everyone)


def hop_with_state(clock: Clock, sizes: Sizes, seconds: float) -> Iterator[Number]:
    """A hop in the middle of a ring, all keys visible, against the same launch without a state."""
    with clock.stage():
        q, k, v = drawn(clock.device, sizes, sizes.hop)

        def steps_of(variant: Variant) -> dict[str, Step]:
            plain = partial(attention_forward, q, k, v, config=variant.config(q, v, full=True))
            carrying = partial(plain, state=plain(final=False), final=False)
            named: dict[str, Step] = {f"{PLAIN}:{variant.name}": plain, f"{STATE}:{variant.name}": carrying}
            return captured(clock, named)

        steps, absent = launched([one for one in VARIANTS if STATE in one.passes], steps_of)
        yield from absent
        yield from told(clock, sizes, sizes.hop, steps, seconds)


def beside_a_transfer(clock: Clock, sizes: Sizes, seconds: float) -> Iterator[Number]:
    """The forward alone, and with a copy of few blocks on a high-priority stream beside it from start to end."""
    device = clock.device
    q, k, v = drawn(device, sizes, sizes.seqlen)

    def step_of(variant: Variant) -> dict[str, Step]:
        return {variant.name: partial(attention_forward, q, k, v, config=variant.config(q, v, full=True))}

    alone, absent = launched(BESIDE, step_of)
    yield from absent
    if not alone:
        return
    slowest = max(statistics.median(clock(step) for _ in range(3)) for step in alone.values())
    copy = Copy(device, bytes_for(device, COPY_LASTS * slowest, sizes.nbytes))
    stream = new_stream(device, HIGH_PRIORITY)
    steps: dict[str, Step] = {}
    for name, step in alone.items():
        steps |= {f"{ALONE}:{name}": step, f"{FORWARD}:{name}": copy.beside(step, stream)}
    yield from told(clock, sizes, sizes.seqlen, steps, seconds)
    yield Number("wrong in the copy", copy.wrong(), "elements", limit=0)


def launched(
    variants: Sequence[Variant], steps_of: Callable[[Variant], dict[str, Step]]
) -> tuple[dict[str, Step], list[Number]]:
    """The steps of variants that were launched once, compiled with that; why the others are not there."""
    steps: dict[str, Step] = {}
    absent = []
    for variant in variants:
        try:
            found = steps_of(variant)
            for step in found.values():
                step()
        except (ValueError, NotImplementedError, TypeError, Cannot) as refused:
            absent.append(Number(speed.ABSENT, None, "", {"by": variant.name}, note=str(refused)))
        else:
            steps |= found
    return steps, absent


def drawn(device: torch.device, sizes: Sizes, keys: int) -> list[Tensor]:
    """q of the whole length, and k and v of some keys."""
    rows = (sizes.seqlen, keys, keys)
    return [torch.randn(1, n, sizes.heads, sizes.wide, device=device).to(DTYPES[sizes.dtype]) for n in rows]


def told(clock: Clock, sizes: Sizes, keys: int, steps: Mapping[str, Step], seconds: float) -> Iterator[Number]:
    """Time the steps, which compute the same, in turns; ms and TFLOP/s of each."""
    one_round = sum(clock(step) for step in steps.values())
    taken = interleaved(steps, clock, repeats=repeats_within(seconds, one_round))
    flops = forward_flops(sizes.seqlen * keys, heads=sizes.heads, head_dim=sizes.wide)
    for name, samples in taken.items():
        what, _, who = name.partition(":")
        labels = {"by": who, "head_dim": sizes.wide, "queries": sizes.seqlen, "keys": keys}
        yield Number(f"{what} time", samples.median * 1e3, "ms", labels, spread=samples.spread)
        yield Number(what, flops / samples.median / 1e12, RATE, labels, spread=samples.spread)


def brief(found: Sequence[Number]) -> list[dict[str, Any]]:
    """A row per target: by whom, the floor, the goals."""
    rows: dict[str, dict[str, Any]] = {}
    names = [target.what for target in TARGETS]
    for number in found:
        of = number.labels
        if number.name not in names:
            continue
        row = rows.setdefault(number.name, {"to reach": number.name, "by": of["by"], "floor": "", "goal": ""})
        unit = f"{of['at least']} TFLOP/s" if of["over"] == RATE else f"{of['at least']}x {of['over']}"
        value = "" if number.value is None else f"{number.value:.3g} "
        row[str(of["bar"])] += ("; " if row[str(of["bar"])] else "") + f"{unit}: {value}{of['verdict']}"
    return sorted(rows.values(), key=lambda row: names.index(str(row["to reach"])))
