"""One device's attention: how fast and how right every contender is, on the same inputs, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels import Bounds
from ...ring import Layout, Mask, bounds
from ..common.attention import BACKWARD_FLOPS, BY_SQUARE, DTYPES
from ..common.errors import RESULTS, Exact, chosen_heads, exact_results, pytorch_results, tolerances
from ..common.timing import Clock, Samples, Step, interleaved, repeats_within
from ..suite.cases import Number
from .contender import BACKWARD, FORWARD, PASSES, STATE, Cannot, Contender, Given
from .rivals import contenders
from .shape import Shape

# 16-bit results of two sums of the same terms: each is off by a few of its own roundings (2^-8 in bfloat16)
AGREE = {"bfloat16": 2e-2, "float16": 2e-2, "float32": 1e-3}
PRODUCT = "matrix product"
PRODUCT_SIDE = {"cuda": 8192, "cpu": 1024}
ABSENT = "not there"
CARRIED = "out over two hops"


def measured(shape: Shape, clock: Clock, *, seconds: float, by: Sequence[str] = ()) -> Iterator[Number]:
    """Errors against float64, then times of every pass of every contender, and what a matrix product takes beside."""
    found = Field(shape, clock)
    chosen = [one for one in contenders(clock.device) if not by or one.name in by]
    with clock.stage():
        for one in chosen:
            yield from found.enter(one)
        product = product_of(clock.device, shape.dtype)
        found.steps[PRODUCT] = clock.prepared(product)
        for step in found.steps.values():
            step()  # compiles, and lets cuDNN choose its plan
        one_round = sum(clock(step) for step in found.steps.values())
        taken = interleaved(found.steps, clock, warmup=1, repeats=repeats_within(seconds, one_round))
    yield from numbers(taken, shape, product_flops(clock.device))


def captured(clock: Clock, steps: Mapping[str, Step]) -> dict[str, Step]:
    """What to time in the place of each step: by graph its replay, else itself.

    Raises:
        Cannot: no graph can be made of one.
    """
    if clock.timer != "graph":
        return dict(steps)
    try:
        return {what: clock.prepared(step) for what, step in steps.items()}
    except torch.AcceleratorError:
        raise
    except RuntimeError as refused:
        raise Cannot(f"no CUDA graph of it: {str(refused).splitlines()[0]}") from None


@dataclass
class Field:
    """The contenders of one shape, as they enter: checked, and prepared to be timed."""

    shape: Shape
    clock: Clock
    steps: dict[str, Step] = field(default_factory=dict)  # by "<pass>:<who>"
    _given: Given | None = None
    _judge: Exact | None = None
    _limits: dict[str, float] = field(default_factory=dict)

    def enter(self, one: Contender) -> Iterator[Number]:
        """What it errs by; or why it is not there."""
        labels = {**self.shape.labels, "by": one.name}
        try:
            ready = one.make(self.given)
            ready = replace(ready, steps=captured(self.clock, ready.steps))
        except Cannot as reason:
            yield Number(ABSENT, None, "", labels, note=str(reason))
            return
        self.steps |= {f"{what}:{one.name}": step for what, step in ready.steps.items()}
        for name, error in self.judge.errors(ready.results).items():
            limit = self.limits[name] if one.ours else None
            yield Number(f"error of {name}", error, "absolute", labels, limit)
        if ready.carried is not None:
            error = self.judge.errors([ready.carried])["out"]
            yield Number(f"error of {CARRIED}", error, "absolute", labels, self.limits["out"])

    @property
    def given(self) -> Given:
        if self._given is None:
            self._given = Given(self.shape, *self.shape.inputs(self.clock.device))
        return self._given

    @property
    def judge(self) -> Exact:
        """float64 of the heads that are looked at."""
        if self._judge is None:
            shape, given = self.shape, self.given
            heads = chosen_heads(shape.batch, shape.heads, shape.kv_heads, shape.seqlen, shape.seqlen)
            options = shape.options(given.device)
            self._judge = exact_results(given.q, given.k, given.v, given.dout, heads, options)
        return self._judge

    @property
    def limits(self) -> dict[str, float]:
        """What each of our results may err by."""
        if not self._limits:
            given, options = self.given, self.shape.options(self.given.device)
            plain = pytorch_results(given.q, given.k, given.v, given.dout, self.judge, options)
            self._limits = tolerances(self.judge, plain)
        return self._limits


def product_of(device: torch.device, dtype: str) -> Step:
    """A large matrix product through PyTorch, on random data: what percentages refer to."""
    side = PRODUCT_SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(DTYPES[dtype]) for _ in range(2))
    return lambda: a @ b


def product_flops(device: torch.device) -> int:
    return 2 * PRODUCT_SIDE[device.type] ** 3


def causal_bounds(q: Tensor, k: Tensor) -> Bounds:
    """Bounds of a causal mask on one rank."""
    rows, keys = (Layout.contiguous(x.shape[1], 1).positions(0) for x in (q, k))
    return bounds(Mask(causal=True), rows, keys).to(q.device)


def numbers(taken: Mapping[str, Samples], shape: Shape, product: int) -> Iterator[Number]:
    """Milliseconds of every step; TFLOP/s and percent of the product of what computes a whole pass."""
    counted = {FORWARD: 1.0, STATE: 1.0, BACKWARD: BACKWARD_FLOPS}
    ceiling = product / taken[PRODUCT].median / 1e12 if PRODUCT in taken else None
    if ceiling is not None:
        yield Number(PRODUCT, ceiling, "TFLOP/s", {"dtype": shape.dtype}, spread=taken[PRODUCT].spread)
    for name, samples in taken.items():
        what, _, who = name.partition(":")
        if not who:
            continue
        told = {**shape.labels, "by": who}
        yield Number(f"{what} time", samples.median * 1e3, "ms", told, spread=samples.spread)
        if what not in counted:
            continue
        rate = counted[what] * shape.flops / samples.median / 1e12
        yield Number(what, rate, "TFLOP/s", told, spread=samples.spread)
        if shape.flash_flops is not None:
            by_square = counted[what] * shape.flash_flops / samples.median / 1e12
            yield Number(what + BY_SQUARE, by_square, "TFLOP/s", told)
        if ceiling is not None:
            yield Number(f"{what} of the matrix product", 100 * rate / ceiling, "%", told)


def rows(found: Sequence[Number]) -> list[dict[str, Any]]:
    """A row per pass and contender, and one with the reason for each that is not there."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    errors: dict[tuple[Any, ...], str] = {}
    for number in found:
        of = dict(number.labels)
        who = of.pop("by", None)
        key = (*of.values(), who)
        if number.name.startswith("error of "):
            errors[*key, number.name.removeprefix("error of ")] = f"{number.value:.2g}" + " !" * number.fails
        elif number.name == ABSENT:
            made[*key, ""] = {**of, "pass": "", "by": who, **_empty(), "note": number.note}
        elif number.unit == "ms":
            what = number.name.removesuffix(" time")
            spread = f"±{number.spread or 0:.1%}"
            made[*key, what] = {**of, "pass": what, "by": who, **_empty(), "ms": number.value, "±": spread}
        elif who is not None:
            what, column = _column(number)
            made[*key, what][column] = None if number.value is None else float(f"{number.value:.4g}")
    for key, row in made.items():
        kinds = {BACKWARD: RESULTS[1:], FORWARD: RESULTS[:1], STATE: (CARRIED,)}.get(row["pass"], ())
        told = [f"{name} {errors[*key[:-1], name]}" for name in kinds if (*key[:-1], name) in errors]
        row["error against float64"] = ", ".join(told)
    return sorted(made.values(), key=lambda row: _order(row))


def _empty() -> dict[str, Any]:
    return {"ms": None, "±": "", "TFLOP/s": None, "TFLOP/s, S²/2": None, "% of product": None,
            "error against float64": "", "note": ""}  # fmt: skip


def _column(number: Number) -> tuple[str, str]:
    """The pass that a number is of, and its column."""
    if number.unit == "%":
        return number.name.removesuffix(" of the matrix product"), "% of product"
    if number.name.endswith(BY_SQUARE):
        return number.name.removesuffix(BY_SQUARE), "TFLOP/s, S²/2"
    return number.name, "TFLOP/s"


def _order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shape by shape, pass by pass, the reasons last."""
    place = PASSES.index(row["pass"]) if row["pass"] in PASSES else len(PASSES) + (not row["pass"])
    return str(row["dtype"]), row["head_dim"], str(row["mask"]), row["seqlen"], str(row["heads"]), place
