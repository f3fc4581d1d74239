"""Tests of ``bench kernels``: results, errors, rates and the table of targets."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn import reference
from ringattn.bench import cli
from ringattn.bench.common import attention, errors, timing
from ringattn.bench.common.attention import AttentionConfig, mask_label
from ringattn.bench.common.cases import MeasuredNumber, UnavailableError
from ringattn.bench.common.flags import PatternFlag
from ringattn.bench.common.result import Result, read_result
from ringattn.bench.common.timing import Samples, StepTimer
from ringattn.bench.kernels import accuracy, background_copy, command, speed
from ringattn.bench.kernels import contenders as contender
from ringattn.bench.kernels.contenders import FORWARD, OURS, STATE, Contender, ContenderInputs, PreparedContender
from ringattn.comm.cuda_threads import HIGH_PRIORITY
from ringattn.kernels import FULL, Bounds, KernelConfig, Tile
from ringattn.reference.masks import add_head_dim
from ringattn.ring import slices

from ..support.cuda.device import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
NOT_HERE = {"ringattn hopper", "ringattn hopper single pass", "ringattn dkdv by descriptors"}
"""Contenders that need sm_90."""
TINY: dict[str, Any] = {"seqlen": 24, "heads": (2, 1)}
SIZES = speed.TargetSizes(32, 16, 1, 16, 16, "float32", 1 << 12)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure one run of each contender and a small matrix product."""
    monkeypatch.setattr(timing, "MIN_SAMPLES", 1)
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)
    monkeypatch.setattr(speed, "PRODUCT_SIDE", {"cpu": 16})


def config(seqlen: int = 64, heads: int = 4, kv_heads: int = 2, **more: Any) -> AttentionConfig:
    named: dict[str, Any] = {"head_dim": 16, "layout": "contiguous", **more}
    return AttentionConfig(seqlen, heads=heads, kv_heads=kv_heads, **named)


def longformer(window: int, tokens: int) -> PatternFlag:
    return PatternFlag("longformer", {"window": window, "global": tokens})


STRIDED = PatternFlag("strided", {"block": 8, "stride": 16})
MASKS = [
    config(),
    config(causal=False),
    config(prefix_length=11),
    config(causal=False, batch=2, seqused_k=(0, 33)),
    config(batch=2, seqused_k=(64, 31), window=(9, 0)),  # rows past a window see no key
    config(batch=2, seqused_k=(50, 9), block_mask=STRIDED),
    config(batch=2, block_mask=longformer(8, 3), seqused_k=(64, 2)),
    config(causal=False, batch=2, block_mask=longformer(6, 40), cu_seqlens=(0, 20, 64)),
    config(islands=((4, 20), (30, 41))),
    config(causal=False, intervals=slices([((0, 20), (0, 9), 0), ((20, 64), (5, 64), 1)], 64)),
]


def named(config: AttentionConfig) -> str:
    return f"{mask_label(config.mask)}, batch {config.batch}"


def random_inputs(config: AttentionConfig) -> ContenderInputs:
    return ContenderInputs(config, *config.random_shard(0, CPU))


def largest_error(inputs: ContenderInputs, results: Sequence[torch.Tensor]) -> float:
    judge = errors.build_judge(
        errors.AttentionInputs(inputs.q, inputs.k, inputs.v, inputs.dout), inputs.config.reference_masks(CPU)
    )
    return max(judge.errors(dict(zip(errors.RESULTS, results, strict=False))).values())


@pytest.mark.parametrize("case", MASKS, ids=named)
def test_every_mask_is_counted_computed_and_named(case: AttentionConfig) -> None:
    positions = torch.arange(64)
    visible = add_head_dim(reference.visible(positions, positions, **case.reference_masks(CPU))).expand(
        case.batch, 1, 64, 64
    )
    assert case.pairs == int(visible.sum()) and case.flops == 4 * case.pairs * 16 * 4
    assert case.is_plain == (mask_label(case.mask) in ("causal", "full")) == (case.flash_flops is not None)
    function = contender.flex_mask_mod(case, CPU)
    batch, query, key = (torch.arange(length) for length in (case.batch, 64, 64))
    by_mask_mod = function(batch[:, None, None, None], torch.tensor(0), query[:, None], key)
    assert torch.equal(by_mask_mod.expand(case.batch, 1, 64, 64), visible)
    inputs = random_inputs(case)
    ready = contender.local_kernel_contender("aten", inputs)
    assert largest_error(inputs, ready.results) < 1e-4
    assert (ready.carried_out is None) == (case.mask.blocks is not None)
    assert ready.carried_out is None or largest_error(inputs, [ready.carried_out]) < 1e-5
    before = ready.results[0].clone()
    for step in ready.steps.values():
        step()
    assert torch.equal(ready.results[0], before)  # no step overwrites the judged results
    expected = contender.sdpa_contender(contender.CPU_SDPA["math"], inputs)
    out: Any = expected.steps[FORWARD]()
    assert largest_error(inputs, expected.results) < 1e-4 and not out.requires_grad
    if not case.is_plain:
        with pytest.raises(UnavailableError, match="full and causal"):
            contender.sdpa_contender(contender.CPU_SDPA["ATen operator"], inputs)


@pytest.mark.parametrize(("case", "full", "parts"), [
    (config(), False, True), (config(causal=False), True, True),
    (config(causal=False, block_mask=longformer(6, 4)), False, False),
])  # fmt: skip
def test_kernels_of_a_backward_are_timed_one_by_one_under_a_single_mask(
    case: AttentionConfig, full: bool, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def prepare(backend: str, given: ContenderInputs, config: object, passes: object) -> PreparedContender:
        asked.append((backend, config, passes))
        if "refused" in asked:
            raise TypeError("no such kernel")
        return PreparedContender({FORWARD: print})

    monkeypatch.setattr(contender, "local_kernel_contender", prepare)
    monkeypatch.setattr(contender, "_parts_of_backward", lambda *_: {"dq": print})
    monkeypatch.setattr(contender.TritonVariant, "config", lambda variant, q, v, *, full: full)
    default, *_, packed = contender.VARIANTS
    inputs = random_inputs(case)
    assert {*contender.triton_contender(default, inputs).steps} == {FORWARD, *(["dq"] if parts else [])}
    assert {*contender.triton_contender(packed, inputs).steps} == {FORWARD}
    assert asked == [("triton", full, one.passes) for one in (default, packed)]
    asked.append("refused")
    with pytest.raises(UnavailableError, match="no such kernel"):
        contender.triton_contender(default, inputs)


def test_a_carried_state_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels continue it in place, and the backward reads lse.
    inputs = random_inputs(config(16, 1, 1, head_dim_v=32))
    folded = Mock(wraps=contender._fold)
    monkeypatch.setattr(contender, "_fold", folded)
    ready = contender.local_kernel_contender("triton", inputs)
    assert largest_error(inputs, ready.results) < 1e-4
    assert [call.kwargs["final"] for call in folded.call_args_list] == [True, False, True]  # the last two carry a state
    before: Any = ready.steps["backward"]()
    before = [x.clone() for x in before]
    opened = Mock(wraps=vars(contender)["forward_backends"])
    monkeypatch.setattr(contender, "forward_backends", opened)
    ready.steps[STATE]()
    assert opened.call_args.kwargs["start"] and not folded.call_args.kwargs["final"]  # as in the middle of a ring
    after: Any = ready.steps["backward"]()
    assert all(map(torch.equal, before, after))
    parts = contender._parts_of_backward(inputs, inputs.bounds[0], None)
    kernels: Any = parts["dq"](), *parts["dkdv"]()  # type: ignore[misc]
    assert all(map(torch.equal, before, kernels))
    assert contender.local_kernel_contender("aten", random_inputs(config(1, 1, 1))).carried_out is None


def test_options_keep_the_tuned_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = KernelConfig(Tile(64, 64, 4, 1), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3))
    asked: Any = []
    monkeypatch.setattr(contender, "default_config", lambda q, v, full: asked.append(full) or tuned)
    q: Any = None
    variants = {one.name: one.config(q, q, full=one.name == OURS + " hopper") for one in contender.VARIANTS}
    assert variants.pop(OURS) is None and asked == [True] + [False] * (len(variants) - 1)
    for name, made in variants.items():
        assert made is not None and (made.dq, made.dkdv) == (tuned.dq, tuned.dkdv)
        assert made.forward == (None if name == f"{OURS} hopper" else tuned.forward)  # it takes few tiles


def test_unavailable_contenders_state_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(config(32, window=(4, 0)))
    with pytest.raises(UnavailableError, match="only for a GPU"):
        contender.flex_contender(inputs)
    with pytest.raises(UnavailableError, match="'flash'"):
        contender.backend_contender("flash", inputs)
    assert largest_error(inputs, contender.backend_contender("aten", inputs).results) < 1e-4
    monkeypatch.setattr(contender, "free_memory", lambda device: 1000)
    with pytest.raises(UnavailableError, match=r"more than 40% of the free \S+ GB"):
        contender.sdpa_contender(contender.CPU_SDPA["math"], inputs)
    monkeypatch.setattr(contender, "free_memory", lambda device: 2 * 32**2 / contender.DENSE_SHARE)
    contender._check_square(inputs, 2, "scores")
    with pytest.raises(UnavailableError, match="its scores would take"):
        contender._check_square(random_inputs(config(32, batch=2)), 2, "scores")
    # Four fp32 score tensors of four heads.
    monkeypatch.setattr(contender, "free_memory", lambda device: (4 * 4 * 4 * 32**2 - 1) / contender.DENSE_SHARE)
    with pytest.raises(UnavailableError, match="its scores would take"):
        contender.sdpa_contender(contender.CPU_SDPA["math"], random_inputs(config(32)))


@pytest.mark.parametrize("case", [MASKS[0], MASKS[1], MASKS[4], config(heads=2)], ids=named)
def test_flex_attention_gets_the_mask(case: AttentionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(ContenderInputs):
        device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]

    made: Any = []
    made_masks: Any = []

    def compiled(function: object, *, dynamic: bool) -> Any:
        return lambda q, k, v, **named: made.append((function, dynamic, named)) or attend(q, k, v, enable_gqa=True)

    flex: Any = SimpleNamespace(
        flex_attention="flex",
        create_block_mask=lambda mod, *sizes, device: made_masks.append((sizes, device)) or "mask",
    )
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", flex)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(contender, "flex_mask_mod", lambda *_: None)
    attend = torch.nn.functional.scaled_dot_product_attention
    ready = contender.flex_contender(OnGpu(case, *case.random_shard(0, CPU)))
    assert {*ready.steps} == {FORWARD, "backward"} and len(ready.results) == 4
    options = {"enable_gqa": case.heads != case.kv_heads}
    masked = case.causal or not case.is_plain
    assert made == [("flex", False, options | ({"block_mask": "mask"} if masked else {}))]
    rows = None if case.seqused_k is None else case.batch
    assert made_masks == ([((rows, None, 64, 64), "cuda")] if masked else [])


@pytest.mark.usefixtures("quick")
def test_every_pass_is_timed_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    contenders = contender.list_contenders(torch.device("cuda"))
    monkeypatch.setattr(speed, "list_contenders", lambda device: contenders)
    each, zeros = speed._errors, [(what, "out", 0.0) for what in contender.PASSES]
    monkeypatch.setattr(speed, "_errors", lambda *given: [*each(*given), *zeros])  # the largest error counts
    rows = speed.measure_kernels(config(32, 1, 1, head_dim_v=16), StepTimer(CPU), seconds=0.0)
    assert rows.failed == [] and all(row.keys() <= speed.UNITS.keys() for row in rows.rows)
    by = {(row["by"], row["pass"]): row for row in rows.rows}
    order = [what for row in rows.rows if (what := row["pass"])]
    assert order == sorted(order, key=[*contender.PASSES, *contender.PARTS].index)
    assert {what for who, what in by if who == OURS} == {*contender.PASSES, *contender.PARTS}
    assert {what for who, what in by if who == "flash"} == {"forward", "backward"}
    assert all(0 < by[OURS, what]["error/allowed"] <= 1 and by[OURS, what]["error"] > 0 for what in contender.PASSES)
    absent = {row["by"]: row["note"] for row in rows.rows if row["pass"] == ""}
    others = {"cudnn", "efficient", "flex_attention", *(f"{name} backend" for name in ("flash", "cudnn", "fa3", "fa4"))}
    assert NOT_HERE | others == {*absent} and all(absent.values())
    assert speed.comparison_line(rows.rows).startswith("our best rate / best of the others: forward ")


@pytest.mark.parametrize("name", ["dtype", "head_dim", "head_dim_v", "mask", "seqlen", "heads", "batch"])
def test_the_best_of_ours_is_compared_shape_by_shape(name: str) -> None:
    def row(by: str, size: int, rate: float) -> dict[str, Any]:
        return {"pass": "forward", "by": by, name: size, "rate": rate}

    rows = [row(f"{OURS} hopper", 1, 30), row(OURS, 1, 10), row("flash", 1, 20), row(OURS, 2, 10), row("flash", 2, 20)]
    assert speed.comparison_line([*rows, row(OURS, 3, 1)]).endswith(": forward 0.50 to 1.50")
    assert speed.comparison_line(rows[:2]) == "no other contender"


def test_rates_count_only_visible_pairs() -> None:
    full = config(4096, 16, 8, head_dim=64, causal=False)
    row = speed._row("backward:x", Samples((2e-3, 2.5e-3, 3e-3)), full, 100.0)
    assert row["spread"] == pytest.approx(0.1) and row["heads"] == "16/8"
    rate = 4 * 4096**2 * 64 * 16 / 1e-3 / 1e12
    assert row["rate"] == row["rate by S²/2"] == pytest.approx(rate) and row["of product"] == pytest.approx(rate)
    for passed in ("forward", "forward with state"):
        assert speed._row(f"{passed}:x", Samples((1e-3,)), full, 100.0)["rate"] == pytest.approx(rate)
    assert speed.config_labels(config(head_dim_v=8))["head_dim_v"] == 8
    row = speed._row("forward:x", Samples((1.0,)), config(64, 2, 2), 100.0)
    assert row["rate by S²/2"] == pytest.approx(row["rate"] * 32 / 32.5)  # of the S (S + 1) / 2 visible pairs
    assert config(64, 2, 2).flash_flops == 4 * 64 * 64 // 2 * 16 * 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("who", "wrong"), [(OURS, 1 + 1e-3), (OURS, math.nan), (f"{OURS} packed heads", math.nan)])
def test_a_wrong_result_fails(who: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(inputs: ContenderInputs) -> PreparedContender:
        ready = contender.local_kernel_contender("aten", inputs)
        ready.results[1] = ready.results[1] * wrong
        return ready

    contenders = [Contender(who, make), Contender("math", make)]
    monkeypatch.setattr(speed, "list_contenders", lambda device: contenders)
    # errors of other libraries are only reported
    (why,) = speed.measure_kernels(config(40, 1, 1), StepTimer(CPU), seconds=0).failed
    assert why.startswith(f"backward by {who}: the error of dq is ")


@pytest.mark.usefixtures("quick")
def test_our_contenders_run_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = StepTimer.prepare_step

    def refuse(clock: StepTimer, step: Any) -> Any:
        if step.__name__ == "forward":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return prepared(clock, step)

    monkeypatch.setattr(StepTimer, "prepare_step", refuse)
    rows = speed.measure_kernels(config(40, 1, 1), StepTimer(CPU), seconds=0, prefixes=[OURS])
    why = "CUDA graphs cannot capture it: operation not permitted when stream is capturing"
    assert rows.failed == [f"{OURS} is not available: {why}"] and [row["note"] for row in rows.rows] == [why]


HOPPER, MARGIN = "ringattn hopper", "ringattn persistent with margin"


@pytest.mark.parametrize(("row", "rates", "by", "values", "words"), [
    (0, {"forward:ringattn": 100, f"forward:{HOPPER}": 500, "forward:flash": 400, "forward:cudnn": 600}, HOPPER,
     [1.25, 500 / 600, 500], ["reached", "missed", "missed"]),
    (0, {}, OURS, [None] * 3, ["not measured"] * 3),
    (5, {"forward with state:ringattn": 95, "forward:ringattn": 100, f"forward:{HOPPER}": 1}, OURS, [0.95, 0.95],
     ["reached", "missed"]),
    (5, {"forward:ringattn": 200, f"forward:{HOPPER}": 100, f"forward with state:{HOPPER}": 95}, HOPPER, [0.95, 0.95],
     ["reached", "missed"]),
    # A kernel that leaves multiprocessors free and is slow alone must not look lossless.
    (6, {"forward:ringattn": 80, "alone:ringattn": 100, f"forward:{MARGIN}": 88, f"alone:{MARGIN}": 89}, MARGIN,
     [0.88, 0.88], ["reached", "missed"]),
])  # fmt: skip
def test_speeds_are_judged_against_floors_and_goals(
    row: int, rates: Any, by: str, values: list[float], words: list[str]
) -> None:
    verdicts = list(speed.judge_target(speed.TARGETS[row], rates))
    assert {number.labels["by"] for number in verdicts} == {by} and not any(number.fails for number in verdicts)
    assert [number.value for number in verdicts] == pytest.approx(values)
    assert [number.labels["verdict"] for number in verdicts] == words


def test_rates_of_every_shape_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []

    def shape(clock: StepTimer, sizes: speed.TargetSizes, *given: Any) -> Iterator[MeasuredNumber]:
        shapes.append(given)
        yield MeasuredNumber("not available", None, "", {"by": "cudnn"})
        yield MeasuredNumber(STATE if given[0] == 16 else FORWARD, 700.0, speed.RATE, {"by": OURS})
        yield MeasuredNumber(FORWARD, 350.0 * len(shapes), speed.RATE, {"by": "flash"})

    def beside(clock: StepTimer, sizes: speed.TargetSizes, seconds: float) -> Iterator[MeasuredNumber]:
        for what in (speed.ALONE, FORWARD):
            yield MeasuredNumber(what, 80.0, speed.RATE, {"by": OURS})

    monkeypatch.setattr(speed, "_shape", shape)
    monkeypatch.setattr(speed, "_beside_a_transfer", beside)
    numbers = list(speed.measure_targets(CPU, seconds=0.5, sizes=SIZES))
    assert shapes == [(32, 16, False, 0.5), (32, 16, True, 0.5), (32, 16, False, 0.5), (16, 16, False, 0.5)]
    verdicts = {(n.name, n.labels["over"]): n.labels["verdict"] for n in numbers if "verdict" in n.labels}
    assert len(verdicts) == sum(len({over for _, over, _ in target.bars}) for target in speed.TARGETS)
    assert [what for what, verdict in verdicts.items() if verdict == "reached"] == [
        ("forward D128, full", "flash"), ("forward D128, full", speed.RATE), ("forward D128, causal", speed.RATE),
        ("forward beside a transfer", speed.ALONE),
    ]  # fmt: skip
    assert verdicts["forward D64, full", "flash"] == "missed"
    assert (
        verdicts["forward D64, full", "cudnn"] == verdicts["carried state, 8k keys per hop", FORWARD] == "not measured"
    )


def test_rates_of_one_shape_are_those_of_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows: list[Any] = [
        {"pass": "", "by": "cudnn", "note": "why"}, {"pass": "dq", "by": OURS, "time": 1.0},
        {"pass": FORWARD, "by": OURS, "rate": 5.0, "spread": 0.1},
    ]  # fmt: skip

    def measure(config: AttentionConfig, clock: StepTimer, **named: Any) -> Result:
        asked.append((config, named))
        return Result("bench kernels", {}, rows, ["it is wrong"])

    monkeypatch.setattr(speed, "measure_kernels", measure)
    missing, rate, failure = speed._shape(StepTimer(CPU), SIZES, 32, 24, True, 0.5)
    assert (missing.name, missing.value, missing.note, missing.labels["by"]) == ("not available", None, "why", "cudnn")
    assert (rate.name, rate.value, rate.unit, rate.spread, rate.labels["by"]) == (FORWARD, 5.0, speed.RATE, 0.1, OURS)
    assert failure.fails and failure.note == "it is wrong" and rate.labels["seqlen"] == 32
    ((asked_config, named),) = asked
    assert asked_config == config(32, 1, 1, head_dim=24) and named["seconds"] == 0.5
    wanted = {name for target in speed.TARGETS for name in target.by} - {speed.MARGIN_VARIANT.name}
    assert {*named["prefixes"]} == wanted | {"flash", "cudnn"}


@pytest.mark.usefixtures("quick")
def test_percentages_refer_to_the_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, budgets = {"forward:math": 4e-3, "backward:math": 8e-3, speed.PRODUCT: 2e-3}, list[Any]()
    monkeypatch.setattr(StepTimer, "__call__", lambda *_: 0.5)
    monkeypatch.setattr(speed, "repeats_within", lambda *given: budgets.append(given))
    monkeypatch.setattr(speed, "time_in_turns", lambda steps, *_, **named: {n: Samples((seconds[n],)) for n in steps})
    shape = config(40, 1, 1)
    result = speed.measure_kernels(shape, StepTimer(CPU), seconds=7.0, prefixes=["math"])
    assert budgets == [(7.0, 3 * 0.5)]
    product = 2 * 16**3 / 2e-3
    forward, backward = result.rows
    assert (forward["time"], backward["time"]) == pytest.approx((4, 8))
    assert forward["of product"] == pytest.approx(100 * shape.flops / 4e-3 / product)
    assert backward["of product"] == pytest.approx(100 * 2.5 * shape.flops / 8e-3 / product)
    assert result.notes == [f"matrix product in the same runs: float32 {product / 1e12:.4g} TFLOP/s"]


def test_the_copy_kernel_copies_every_element() -> None:
    copy = background_copy.BackgroundCopy(CPU, 4 * (background_copy.COPY_BLOCKS * background_copy.CHUNK + 5))
    assert copy.count_wrong() == copy.source.numel() - int((copy.source == 0).sum())
    copy.launch()
    assert copy.count_wrong() == 0


def test_a_copy_starts_with_the_step_and_lasts_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = []
    event, stream = SimpleNamespace(record=lambda: calls.append("record")), Mock()
    stream.wait_event.side_effect = lambda given: calls.append(("wait", given is event))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: calls.append(given is stream) or nullcontext())
    copy = background_copy.BackgroundCopy(CPU, 8)
    monkeypatch.setattr(copy, "launch", lambda: calls.append("copy"))
    copy.run_alongside(lambda: calls.append("step"), stream)()
    assert calls == ["record", ("wait", True), True, "copy", "step"]
    for seconds, most, expected in ((5e-3, 1 << 30, 20480), (1e-5, 1 << 30, 4096), (5e-3, 10003, 10000)):
        laps = iter([9.0, 2e-3, 1e-3, 4e-3])
        watch = SimpleNamespace(count_block=nullcontext, lap_seconds=lambda laps=laps: next(laps))
        monkeypatch.setattr(background_copy, "DeviceStopwatch", lambda device, watch=watch: watch)
        monkeypatch.setattr(background_copy, "BackgroundCopy", lambda device, nbytes: copy)
        monkeypatch.setattr(background_copy, "MOST_BYTES", most)
        assert background_copy.copy_bytes_for(CPU, seconds, 4096) == expected


def test_only_the_last_part_of_the_last_shard_is_final() -> None:
    finals: list[bool] = []
    work: Any = SimpleNamespace(fold=lambda k, v, part, scores, final: finals.append(final))
    for final in (True, False):
        contender._fold(work, *torch.ones(2), [FULL, Bounds(None, None)], final=final)  # type: ignore[arg-type, misc]
    assert finals == [False, True, False, False]


@pytest.mark.parametrize("error", [torch.AcceleratorError("broken"), RuntimeError("not supported")])
def test_a_broken_device_is_not_an_unavailable_contender(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fails: Any = Mock(side_effect=error, __name__="fails")
    monkeypatch.setattr(attention, "ring_attention", fails)
    given = random_inputs(config(32, 1, 1, causal=False))
    for attempt in (
        lambda: attention.check_backend("auto", given.config, CPU),
        lambda: contender._autograd_contender(fails, given),
        lambda: speed._prepare_or_skip_graph(SimpleNamespace(prepare_step=fails), fails),  # type: ignore[arg-type]
    ):
        broken = isinstance(error, torch.AcceleratorError)
        with pytest.raises(torch.AcceleratorError if broken else UnavailableError, match=str(error)):
            attempt()
    assert fails.call_args_list[0].kwargs["causal"] is False  # of the probe


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_forward_is_timed_beside_a_longer_copy(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lasts: Any = []
    seconds = {one.name: number for number, one in enumerate(speed.BESIDE_VARIANTS[-2:], 1)}
    variants = [SimpleNamespace(name=name, config=lambda *_, name=name, **how: name) for name in seconds]
    variants.append(SimpleNamespace(name="x", config=Mock(side_effect=TypeError("no kernel"))))
    copy = SimpleNamespace(run_alongside=lambda step, stream: partial(step, stream=stream), count_wrong=lambda: wrong)
    stand_ins = {
        "BESIDE_VARIANTS": variants, "attention_forward": lambda *_, **named: None, "BackgroundCopy": lambda *_: copy,
        "new_stream": lambda device, priority: priority,
        "copy_bytes_for": lambda device, seconds, nbytes: lasts.append(seconds) or nbytes,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(speed, name, stand_in)

    def timed(clock: StepTimer, step: Any) -> float:
        return float(seconds[step.keywords["config"]]) * (2 if step.keywords.get("stream") == HIGH_PRIORITY else 1)

    monkeypatch.setattr(StepTimer, "__call__", timed)
    absent, *rates, copied = speed._beside_a_transfer(StepTimer(CPU), SIZES._replace(heads=3), 0.0)
    assert lasts == [speed.COPY_LASTS * 2.0] and copied.fails == (wrong > 0)
    assert (absent.name, absent.labels, absent.note) == ("not available", {"by": "x"}, "no kernel")
    parts = [(number.name, number.labels["by"]) for number in rates]
    assert parts == [(what, name) for name in seconds for what in (speed.ALONE, FORWARD)]
    flops = 4 * 32**2 * 16 * 3
    assert [number.value for number in rates] == pytest.approx([flops / n / 1e12 for n in (1, 2, 2, 4)])


@pytest.mark.parametrize(
    ("backend", "dtype", "dims"),
    [pytest.param("triton", "float32", (16, 24), marks=pytest.mark.nightly), ("aten", "bfloat16", (24, 24))],
)
def test_accuracy_cases_pass(backend: str, dtype: str, dims: tuple[int, int]) -> None:
    rows = list(accuracy.accuracy_case(CPU, backend=backend, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1], **TINY))
    assert len(rows) == 3 * 6
    assert [number for number in rows if number.fails] == []


@pytest.mark.parametrize(
    ("backend", "changes", "count"),
    [("aten", "dq", 1), ("single_pass", "dq", 0), ("single_pass", "dk", 1), ("single_pass_deterministic", "dq", 1)],
)
def test_a_second_run_must_repeat_the_first(
    backend: str, changes: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    compute = accuracy.ring_results

    def run(given: errors.AttentionInputs, world: int, **options: Any) -> dict[str, torch.Tensor]:
        assert not given.q.is_contiguous() and given.q.stride(-1) == 1  # as a fused projection produces it
        asked.append((world, options["causal"], options["backend"], options["config"] and options["config"].backward))
        results = compute(given, 1, causal=options["causal"], backend="aten")
        results[changes].view(-1)[0] += len(asked) % 2 == 0
        return results

    monkeypatch.setattr(accuracy, "ring_results", run)
    sizes: dict[str, Any] = {"dtype": "float32", "head_dim": 16, "causal_worlds": (2,), **TINY}
    rows = list(accuracy.accuracy_case(CPU, backend=backend, **sizes))
    changed = [number for number in rows if number.name == "changed in a second run"]
    assert [(number.value, number.labels["mask"]) for number in changed] == [(count, "causal"), (count, "full")]
    assert [number.fails for number in changed] == [count > 0] * 2
    kind = "aten" if backend == "aten" else "triton"
    expected = [(2, True, kind), (1, False, kind)]
    assert asked == [(*one, None if kind == "aten" else backend) for one in expected for _ in range(2)]


def test_kernels_of_another_gpu_are_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"compute capability 9\.0"):
        next(accuracy.accuracy_case(CPU, backend=accuracy.HOPPER, dtype="float16", head_dim=16, **TINY))


@pytest.mark.usefixtures("quick")
def test_the_command_writes_rows_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender, "other_backends", lambda device: [])  # other tests register some
    flags = ["--seqlen", "64,96", "--heads", "2", "--head-dim", "16", "--seconds", "0", "--dtype", "fp32,bf16"]
    result = CliRunner().invoke(cli.app, ["bench", "kernels", *flags, "--json", str(tmp_path / "k.json")])
    assert result.exit_code == 0, result.output
    report = read_result(tmp_path / "k.json")
    assert {row["dtype"] for row in report.rows} == {"float32", "bfloat16"} and len(report.rows) == 4 * 7
    assert {row["by"] for row in report.rows} == {OURS, "ATen operator", "math"}
    assert "runs, timed by clock" in report.notes[0] and "matrix product in the same runs" in report.notes[1]
    assert result.stdout.splitlines()[-1] == report.notes[-1]


def test_the_help_states_the_defaults_of_both_devices() -> None:
    helps = {parameter.name: getattr(parameter, "help", "") for parameter in typer.main.get_command(command.app).params}
    gpu, cpu = command.DEFAULTS["cuda"], command.DEFAULTS["cpu"]
    for name, here, there in zip(("seqlen", "dtype", "heads"), gpu, cpu, strict=True):
        words = helps[name].partition("default: ")[2].rstrip(".").replace(";", ",")
        assert [part.strip(", ") for part in words.split("on the CPU")] == [str(here), str(there)], name
