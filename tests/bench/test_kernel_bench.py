"""``bench kernels`` and the table of targets: what is computed, how errors are judged, and what is told."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn import reference
from ringattn.bench import cli
from ringattn.bench.common import errors, timing
from ringattn.bench.common.flags import Pattern
from ringattn.bench.common.timing import Clock, Samples
from ringattn.bench.kernels import command as kernel_bench
from ringattn.bench.kernels import ours as kernel_ours
from ringattn.bench.kernels import rivals as kernel_rivals
from ringattn.bench.kernels import speed, targets
from ringattn.bench.kernels.contender import OURS, Cannot, Contender, Given, Ready
from ringattn.bench.kernels.ours import VARIANTS
from ringattn.bench.kernels.rivals import CPU_SDPA
from ringattn.bench.kernels.shape import Shape
from ringattn.bench.suite.cases import Number
from ringattn.kernels import attention_forward
from ringattn.reference.masks import by_batch

from ..support.fake_cuda import FakeCuda

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
NOT_HERE = {"ringattn hopper", "ringattn hopper single pass", "ringattn dkdv by descriptors"}
"""They take sm_90."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The contenders of a GPU, played by the interpreter; quick."""
    monkeypatch.setattr(timing, "LEAST", 1)
    monkeypatch.setattr(timing, "MOST", 1)
    monkeypatch.setattr(speed, "PRODUCT_SIDE", {"cpu": 16})
    ours = [Contender(one.name, lambda given, one=one: kernel_ours.triton_kernels(one, given)) for one in VARIANTS]  # type: ignore[misc]
    theirs = [
        Contender(name, lambda given, backend=backend: kernel_rivals.sdpa(backend, given))  # type: ignore[misc]
        for name, backend in kernel_rivals.GPU_SDPA.items()
    ]
    everyone = [*ours, *theirs, Contender(kernel_rivals.FLEX, kernel_rivals.flex)]
    monkeypatch.setattr(speed, "contenders", lambda device: everyone)
    return FakeCuda(monkeypatch)


def values(found: list[Number]) -> dict[tuple[str, object], float | None]:
    return {(number.name, number.labels.get("by")): number.value for number in found}


def longformer(window: int, tokens: int) -> Pattern:
    return Pattern("longformer", {"window": window, "global": tokens})


PADDED = [
    Shape(64, 4, 2, 16, causal=False, batch=3, seqused_k=(20, 64, 47)),
    Shape(64, 4, 2, 16, causal=False, batch=2, seqused_k=(0, 33)),
    Shape(64, 4, 2, 16, causal=True, batch=2, seqused_k=(64, 31), window=(9, 0)),  # rows behind a window see nothing
    Shape(
        64, 4, 2, 16, causal=True, batch=2, seqused_k=(50, 9),
        block_mask=Pattern("strided", {"block": 8, "stride": 16}),
    ),
]  # fmt: skip
IN_PARTS = [
    Shape(64, 4, 2, 16, causal=False, block_mask=longformer(8, 5)),
    Shape(64, 4, 2, 16, causal=True, batch=2, block_mask=longformer(8, 3), seqused_k=(64, 2)),
    Shape(64, 4, 2, 16, causal=False, batch=2, block_mask=longformer(6, 40), cu_seqlens=(0, 20, 64)),
]


def given_of(shape: Shape) -> Given:
    return Given(shape, *(x.float() for x in shape.inputs(CPU)))


def visible(shape: Shape) -> torch.Tensor:
    """``[1 or B, 1, S, S]``."""
    positions = torch.arange(shape.seqlen)
    return by_batch(reference.visible(positions, positions, **shape.options(CPU)))


# the judge


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (5, 0)}, {}])
def test_the_judge_is_the_reference(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "BLOCK_BYTES", 8 * 24 * 2 * 7)  # 7 rows at a time
    q, dout = torch.randn(1, 24, 4, 8), torch.randn(1, 24, 4, 8)
    k, v = torch.randn(1, 24, 2, 8), torch.randn(1, 24, 2, 8)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = reference.attention(*leaves, **options)
    whole = [out, *torch.autograd.grad(out, leaves, dout.double())]
    found = errors.exact_results(q, k, v, dout, (1,), options)
    assert found.heads == (2, 3)
    assert max(found.errors(whole).values()) < 1e-12
    whole[2] = whole[2] + 1e-3
    assert found.errors(whole)["dk"] == pytest.approx(1e-3)
    plain = errors.pytorch_results(q, k, v, dout, found, options)
    limits = errors.tolerances(found, plain)
    assert max(found.differences(plain).values()) < 1e-5 < 1e-3
    assert all(0 < limit < 1e-4 for limit in limits.values())


def test_which_heads_are_looked_at() -> None:
    assert errors.chosen_heads(1, 8, 4, 64, 64) == (0, 1, 2, 3)
    assert errors.chosen_heads(1, 8, 4, 1 << 14, 1 << 14) == (0, 3)
    assert errors.chosen_heads(1, 8, 1, 1 << 14, 1 << 14) == (0,)


# shapes


@pytest.mark.parametrize(
    "shape",
    [
        Shape(64, 4, 2, 16, causal=True),
        Shape(64, 4, 2, 16, causal=False),
        Shape(64, 4, 2, 16, causal=True, window=(9, 0)),
        Shape(64, 4, 2, 16, causal=True, cu_seqlens=(0, 20, 64)),
        Shape(64, 4, 2, 16, causal=True, prefix_length=11),
        Shape(64, 4, 2, 16, causal=True, block_mask=Pattern("strided", {"block": 8, "stride": 16})),
        *PADDED,
        *IN_PARTS,
    ],
    ids=lambda shape: f"{shape.labels['mask']}, batch {shape.batch}",
)
def test_shapes_count_what_is_visible_and_ours_compute_it(shape: Shape) -> None:
    seen = visible(shape).expand(shape.batch, 1, shape.seqlen, shape.seqlen)
    assert shape.pairs == int(seen.sum())
    assert shape.flops == 4 * int(seen.sum()) * 16 * 4
    assert shape.square == (shape.labels["mask"] in ("causal", "full"))
    given = given_of(shape)
    ready = kernel_ours.aten_backend(given)
    judge = errors.exact_results(given.q, given.k, given.v, given.dout, (0, 1), shape.options(CPU))
    assert max(judge.errors(ready.results).values()) < 1e-4
    assert ready.carried is None or judge.errors([ready.carried])["out"] < 1e-5
    assert (ready.carried is None) == (shape.mask.blocks is not None)
    before = ready.results[0].clone()
    for step in ready.steps.values():
        step()
    assert torch.equal(ready.results[0], before)  # no step writes into what is judged


@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        (Shape(4, 1, 1, 8, causal=False, batch=3), 3 * 16),
        (Shape(4, 1, 1, 8, causal=False, batch=3, seqused_k=(1, 0, 4)), 4 + 0 + 16),
        (Shape(4, 1, 1, 8, causal=True, batch=2, seqused_k=(2, 4)), (1 + 2 + 2 + 2) + (1 + 2 + 3 + 4)),
        (Shape(4, 1, 1, 8, causal=True, batch=2, seqused_k=(2, 2)), 2 * (1 + 2 + 2 + 2)),
        # a window of itself, and the first token sees all and is seen by all
        (Shape(4, 1, 1, 8, causal=False, batch=2, block_mask=longformer(0, 1)), 2 * (4 + 2 + 2 + 2)),
    ],
)
def test_pairs_of_all_batch_rows_by_hand(shape: Shape, pairs: int) -> None:
    assert shape.pairs == pairs
    assert shape.flops == 2 * pairs * (8 + 8)


@pytest.mark.parametrize(
    "shape", [*(Shape(64, 4, 2, 16, causal=causal) for causal in (True, False)), *PADDED, *IN_PARTS]
)
def test_flex_attention_is_told_the_mask(shape: Shape) -> None:
    seen = kernel_rivals.sees(shape, CPU)
    batch, query, key = (torch.arange(length) for length in (shape.batch, 64, 64))
    found = seen(batch[:, None, None, None], torch.tensor(0), query[:, None], key)
    told, whole = (x.expand(shape.batch, 1, 64, 64) for x in (found, visible(shape)))
    assert torch.equal(told, whole)


@pytest.mark.parametrize("shape", [*PADDED, *IN_PARTS])
def test_a_backend_by_a_dense_mask_computes_the_same(shape: Shape) -> None:
    given = given_of(shape)
    ready = kernel_rivals.sdpa(CPU_SDPA["math"], given)
    judge = errors.exact_results(given.q, given.k, given.v, given.dout, (0, 1), shape.options(CPU))
    assert max(judge.errors(ready.results).values()) < 1e-4
    with pytest.raises(Cannot, match="full and causal"):
        kernel_rivals.sdpa(CPU_SDPA["ATen operator"], given)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(40, 2, 1, 16, causal=True, batch=2, seqused_k=(40, 17), window=(9, 0)),
        Shape(40, 2, 1, 16, causal=True, batch=2, block_mask=longformer(8, 3), seqused_k=(40, 2)),
    ],
)
@pytest.mark.parametrize("variant", [one for one in VARIANTS if one.name not in NOT_HERE], ids=lambda one: one.name)
def test_every_variant_computes_padding_and_parts(variant: kernel_ours.Variant, shape: Shape) -> None:
    given = given_of(shape)
    ready = kernel_ours.triton_kernels(variant, given)
    judge = errors.exact_results(given.q, given.k, given.v, given.dout, (0,), shape.options(CPU))
    assert max(judge.errors(ready.results).values()) < 1e-4
    assert ready.carried is not None and judge.errors([ready.carried])["out"] < 1e-5
    parts = variant.parts if len(given.bounds) == 1 else ()
    assert set(ready.steps) == {*variant.passes, *parts}


def test_a_variant_that_is_not_here_says_so_of_several_parts() -> None:
    with pytest.raises(Cannot, match=r"9\.0"):
        kernel_ours.triton_kernels(VARIANTS[1], given_of(IN_PARTS[0]))


def test_limits_hold_where_rows_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch's attention makes NaN of such rows."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor, **_: Any) -> Any:
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~attn_mask, -math.inf).softmax(-1) @ v

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    shape = PADDED[1]
    given = given_of(shape)
    assert not visible(shape).any(-1).all()
    judge = errors.exact_results(given.q, given.k, given.v, given.dout, (0, 1), shape.options(CPU))
    plain = errors.pytorch_results(given.q, given.k, given.v, given.dout, judge, shape.options(CPU))
    assert max(judge.differences(plain).values()) < 1e-5


def test_flops_by_the_square() -> None:
    assert Shape(64, 2, 2, 16, causal=False).flash_flops == Shape(64, 2, 2, 16, causal=False).flops
    assert Shape(64, 2, 2, 16, causal=True).flash_flops == 4 * 64 * 64 // 2 * 16 * 2
    assert Shape(64, 2, 2, 16, window=(3, 0)).flash_flops is None
    assert PADDED[0].flash_flops is None


# contenders


def test_what_does_not_compute_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(32, 2, 2, 16, dtype="float32", window=(4, 0))
    given = Given(shape, *shape.inputs(CPU))
    with pytest.raises(Cannot, match="full and causal"):
        kernel_rivals.sdpa(CPU_SDPA["ATen operator"], given)
    monkeypatch.setattr(kernel_rivals, "free_memory", lambda device: 1000)
    with pytest.raises(Cannot, match="GB free"):
        kernel_rivals.sdpa(CPU_SDPA["math"], given)
    with pytest.raises(Cannot, match="GPU"):
        kernel_rivals.flex(given)
    with pytest.raises(Cannot, match=r"9\.0"):
        kernel_ours.triton_kernels(VARIANTS[1], given)
    (single_pass,) = (one for one in VARIANTS if one.name == "ringattn hopper single pass")
    with pytest.raises(Cannot, match=r"backward='hopper' takes GPUs of compute capability 9\.0"):
        kernel_ours.triton_kernels(single_pass, given)


def test_every_pass_is_timed_and_judged(on_gpu: FakeCuda) -> None:
    shapes = [Shape(tokens, 1, 1, 16, dtype="float32", causal=True) for tokens in (32, 48)]
    found = [number for shape in shapes for number in speed.measured(shape, Clock(CPU), seconds=0.0)]
    assert not any(number.fails for number in found)
    ours = {number.name for number in found if number.labels.get("by") == OURS}
    assert {"forward", "forward with state", "backward", "delta time", "dq time", "dkdv time"} <= ours
    assert {f"error of {name}" for name in ("out", "dq", "dk", "dv", "out over two hops")} <= ours
    assert {"forward of the matrix product", "backward of the matrix product"} <= ours
    theirs = {number.name for number in found if number.labels.get("by") == "flash"}
    assert {"forward", "backward", "error of dq"} <= theirs and "dq time" not in theirs
    absent = {number.labels["by"]: number.note for number in found if number.name == speed.ABSENT}
    assert NOT_HERE | {"cudnn", "efficient", "flex_attention"} == set(absent) and all(absent.values())
    limited = {number.labels["by"] for number in found if number.limit is not None}
    assert limited == {one.name for one in VARIANTS} - NOT_HERE  # others are told, not judged
    rows = speed.rows(found)
    assert {row["note"] for row in rows if row["by"] == "cudnn"} == {absent["cudnn"]}
    wanted = (OURS, "forward with state", 32)
    (state,) = (row for row in rows if (row["by"], row["pass"], row["seqlen"]) == wanted)
    assert state["error against float64"].startswith("out over two hops")


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LEAST", 1)
    right = kernel_ours.aten_backend

    def wrong(given: Given) -> Ready:
        ready = right(given)
        ready.results[1] = ready.results[1] * (1 + 1e-3)
        return ready

    monkeypatch.setattr(speed, "contenders", lambda device: [Contender(OURS, wrong)])
    found = list(speed.measured(Shape(40, 1, 1, 16, dtype="float32"), Clock(CPU), seconds=0))
    assert {number.name for number in found if number.fails} == {"error of dq"}


def test_rates_are_of_the_visible_area() -> None:
    shape = Shape(4096, 16, 16, 64, causal=False)
    taken = {"forward:x": Samples((1e-3,)), "backward:x": Samples((2.5e-3,)), speed.PRODUCT: Samples((1.0,))}
    found = values(list(speed.numbers(taken, shape, int(1e14))))
    rate = 4 * 4096**2 * 64 * 16 / 1e-3 / 1e12
    assert found["forward", "x"] == pytest.approx(rate) and found["backward", "x"] == pytest.approx(rate)
    assert found["forward of the matrix product", "x"] == pytest.approx(rate / 100 * 100)
    assert found["forward, S² / 2", "x"] == pytest.approx(rate)


# timers


def test_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(ValueError, match="must be one of clock"):
        Clock(CPU, timer="events")
    with pytest.raises(ValueError, match="must be one of events, graph, clock"):
        Clock(torch.device("cuda"), timer="stopwatch")
    assert Clock(torch.device("cuda")).timer == "events" and Clock(CPU).timer == "clock"
    clock = Clock(torch.device("cuda"), timer="graph")
    clock._flush = torch.ones(4, dtype=torch.uint8)
    with clock.stage():
        step = clock.prepared(lambda: cuda.calls.append("step"))
    assert cuda.calls == ["stream of priority 0", "step", "synchronize", "capture", "step"]
    cuda.calls.clear()
    clock(step)
    assert cuda.calls == ["synchronize", "sleep", "replay"]
    cuda.calls.clear()
    host = Clock(torch.device("cuda"), timer="clock", _flush=clock._flush)
    host(lambda: cuda.calls.append("step"))
    assert cuda.calls == ["synchronize", "step", "synchronize"]


def test_what_no_graph_can_be_made_of_is_told(on_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Clock, step: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    clock = Clock(CPU)
    clock.timer = "graph"
    monkeypatch.setattr(Clock, "prepared", refuse)
    (told,) = speed.Field(Shape(32, 1, 1, 16, dtype="float32"), clock).enter(Contender("x", kernel_ours.aten_backend))
    assert (
        told.name == speed.ABSENT
        and told.note == "no CUDA graph of it: operation not permitted when stream is capturing"
    )


# the table of targets


def test_targets_run_and_are_judged(on_gpu: FakeCuda) -> None:
    sizes = targets.Sizes(32, 16, 1, 16, 16, "float32", 1 << 12)
    found = list(targets.targets(CPU, seconds=0, sizes=sizes))
    assert not any(number.fails for number in found)
    rows = targets.brief(found)
    assert [row["to reach"] for row in rows] == [target.what for target in targets.TARGETS]
    verdicts = {(number.name, number.labels["over"]): number for number in found if "verdict" in number.labels}
    assert verdicts["forward D128, full", "flash"].value is not None
    assert verdicts["forward D128, full", "cudnn"].labels["verdict"] == "not measured"
    assert verdicts["carried state, 8k keys per hop", "plain forward"].value is not None
    assert verdicts["forward beside a transfer", "alone"].value is not None
    assert "not measured" not in rows[4]["floor"]  # the single pass
    assert "stream of priority -1" in on_gpu.calls
    told = [
        (number.name, number.labels["by"]) for number in found if number.unit == "TFLOP/s" and "keys" in number.labels
    ]
    beside = ["ringattn", "ringattn longest first", "ringattn persistent with margin"]
    assert told[-6:] == [(what, by) for by in beside for what in ("alone", "forward")]  # the default first


def test_targets_are_captured_but_for_the_transfer(on_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a forward beside a copy would end with the copy."""
    monkeypatch.setattr(timing, "timer_on", lambda kind, timer: timer or "events")  # as on a GPU
    asked = list[str]()

    def measured(shape: Shape, clock: Clock, **named: object) -> Iterator[Number]:
        asked.append(clock.timer)
        return iter(())

    monkeypatch.setattr(speed, "measured", measured)
    sizes = targets.Sizes(32, 16, 1, 16, 16, "float32", 1 << 12)
    found = list(targets.targets(CPU, seconds=0, sizes=sizes, timer="graph"))
    assert asked == ["graph"] * 3
    hops = {number.labels["by"] for number in found if number.name == "forward with state time"}
    captures = [index for index, call in enumerate(on_gpu.calls) if call == "capture"]
    assert hops and len(captures) == 2 * len(hops) and "replay" in on_gpu.calls
    assert captures[-1] < on_gpu.calls.index("stream of priority -1")


@pytest.mark.parametrize("carrying", [True, False])
def test_what_refuses_costs_its_own_row_of_the_table(
    carrying: bool, on_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch with a state refuses, or every launch, the first of them where a state is made."""
    launch = attention_forward

    def refuse(*given: Any, config: Any = None, state: Any = None, **named: Any) -> Any:
        if config is not None and config.order == "longest" and (state is not None or not carrying):
            raise ValueError("takes more shared memory than there is")
        return launch(*given, config=config, state=state, **named)

    monkeypatch.setattr(targets, "attention_forward", refuse)
    sizes = targets.Sizes(32, 16, 1, 16, 16, "float32", 1 << 12)
    found = list(targets.hop_with_state(Clock(CPU), sizes, 0))
    refused = {number.labels["by"]: number.note for number in found if number.name == speed.ABSENT}
    longest = "ringattn longest first"
    assert refused[longest] == "takes more shared memory than there is"
    timed = {number.labels["by"] for number in found if number.name == "forward with state"}
    assert OURS in timed and longest not in timed


def test_nothing_is_copied_where_every_forward_refuses(on_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise NotImplementedError("not on this GPU")

    monkeypatch.setattr(targets, "attention_forward", refuse)
    sizes = targets.Sizes(32, 16, 1, 16, 16, "float32", 1 << 12)
    found = list(targets.beside_a_transfer(Clock(CPU), sizes, 0))
    assert {number.name for number in found} == {speed.ABSENT} and len(found) == len(targets.BESIDE)


def test_who_is_beside_a_transfer_counts_against_the_fastest_alone() -> None:
    """One that leaves room, and is slow alone, does not seem to lose nothing."""
    target = targets.TARGETS[6]
    margin = "ringattn persistent with margin"
    rates = {"forward:ringattn": 80.0, "alone:ringattn": 100.0, f"forward:{margin}": 88.0, f"alone:{margin}": 89.0}
    floor, goal = targets.judged(target, rates)
    assert floor.labels["by"] == margin and (floor.value, goal.value) == (0.88, 0.88)
    assert (floor.labels["verdict"], goal.labels["verdict"]) == ("reached", "missed")


def test_two_passes_are_the_better_epilogue() -> None:
    described = "ringattn dkdv by descriptors"
    rates = {"backward:ringattn": 90.0, f"backward:{described}": 100.0, "backward:flash": 100.0}
    floor, _ = targets.judged(targets.TARGETS[3], rates)
    assert (floor.labels["by"], floor.value, floor.labels["verdict"]) == (described, 1.0, "reached")
    del rates[f"backward:{described}"]  # where descriptors are not taken
    assert next(targets.judged(targets.TARGETS[3], rates)).labels["by"] == "ringattn"


@pytest.mark.parametrize(
    ("mine", "words"),
    [(660.0, ["reached", "reached", "reached"]), (500.0, ["reached", "missed", "missed"]), (300.0, ["missed"] * 3)],
)
def test_floors_and_goals(mine: float, words: list[str]) -> None:
    target = targets.TARGETS[0]
    rates = {"forward:ringattn": 100.0, "forward:ringattn hopper": mine, "forward:flash": 400.0, "forward:cudnn": 600.0}
    found = list(targets.judged(target, rates))
    assert [number.labels["verdict"] for number in found] == words
    assert all(number.labels["by"] == "ringattn hopper" for number in found)  # the better one of ours
    assert [number.value for number in found] == pytest.approx([mine / 400, mine / 600, mine])


def test_the_best_single_pass_counts() -> None:
    target = targets.TARGETS[4]
    portable, hopper = ("backward:ringattn single pass", "backward:ringattn hopper single pass")
    rates = {"backward:ringattn": 700.0, portable: 400.0, "backward:flash": 400.0, "backward:cudnn": 500.0}
    assert {number.value for number in targets.judged(target, rates)} == {1.0, 0.8, 400.0}
    assert {number.labels["by"] for number in targets.judged(target, rates | {hopper: 300.0})} == {portable[9:]}
    found = list(targets.judged(target, rates | {hopper: 600.0}))
    assert {number.labels["by"] for number in found} == {hopper[9:]}
    assert [number.value for number in found] == pytest.approx([1.5, 1.2, 600.0])


def test_a_ratio_is_of_the_same_variant() -> None:
    rates = {"forward with state:ringattn": 95.0, "plain forward:ringattn": 100.0, "plain forward:ringattn hopper": 1.0}
    floor, goal = targets.judged(targets.TARGETS[5], rates)
    assert (floor.value, goal.value) == (0.95, 0.95)
    assert (floor.labels["verdict"], goal.labels["verdict"]) == ("reached", "missed")


def test_what_was_not_measured_is_not_missed() -> None:
    found = list(targets.judged(targets.TARGETS[0], {}))
    assert {number.labels["verdict"] for number in found} == {"not measured"} and not any(n.fails for n in found)


# the command


def test_the_command(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "k.json"), "--csv", str(tmp_path / "k.csv")]
    flags = ["--seqlen", "64,96", "--heads", "2", "--head-dim", "16", "--seconds", "0", "--dtype", "fp32,bf16"]
    result = CliRunner().invoke(cli.app, ["bench", "kernels", *flags, *files])
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "k.json").read_text())
    assert told["schema"] == kernel_bench.SCHEMA and told["timer"] == "clock"
    assert {number["labels"]["dtype"] for number in told["numbers"]} == {"float32", "bfloat16"}
    with (tmp_path / "k.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["by"] for row in rows} == {OURS, "ATen operator", "math"} and len(rows) == 4 * 7
    assert "ATen operator" in result.stdout and "% of product" in result.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--timer", "graph"], "must be one of clock"),
        (["--by", "magic"], "there are ringattn"),
        (["--heads", "4", "--kv-heads", "3"], "multiple"),
        (["--cu-seqlens", "0,10"], "cu_seqlens ends at 10"),
        (["--documents-seed", "3"], "documents-seed is given without documents: it draws their lengths"),
        (["--dtype", "int8"], "no dtype"),
        (["--block-mask", "longformer,window=5,global=2"], "window is 5: it must be even"),
        (["--seqused-k", "10,20"], "seqused_k has 2 lengths: it must have 1, one per batch row"),
        (["--batch", "2", "--seqlen", "64", "--seqused-k", "64,65"], "seqused_k[1] is 65: it must be 0 to 64"),
        (["--seqused-k", "x"], "not a size"),
        (["--seqlen", "64,0"], "'0' is too small: it must be at least 1"),
        (["--head-dim", "64,512"], "512 is no head dim: it must be 1 to 256"),
        (["--head-dim", "0"], "0 is no head dim: it must be 1 to 256"),
        (["--value-dim", "257"], "'--value-dim'"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], told: str) -> None:
    result = CliRunner().invoke(kernel_bench.app, flags, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2 and told in result.output, result.output


def test_a_failure_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def found(**more: Any) -> Iterator[Number]:
        yield Number("forward time", 1.0, "ms", {**Shape(64).labels, "by": OURS})
        yield Number("error of out", math.nan, "absolute", {**Shape(64).labels, "by": OURS}, **more)

    with pytest.raises(typer.Exit):
        kernel_bench.finish(list(found(limit=1.0)), Clock(CPU), None, None)
    absent = Number(speed.ABSENT, None, "", {**Shape(64).labels, "by": OURS}, note="no such GPU")
    with pytest.raises(typer.Exit):
        kernel_bench.finish([absent], Clock(CPU), None, None)
    assert "no such GPU" in capsys.readouterr().out
