"""Tests of adoption: the self-check on stand-ins, the record, and the choice of ``backend="auto"``."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas
from typer.testing import CliRunner

import ringattn
from ringattn import Layout, LocalWorld, RectangleAttention, Supports, reference, ring_attention
from ringattn.autotune import adopt
from ringattn.autotune.adopt import CheckJob, CheckSizes, KernelCandidate, check_candidate, run_checks, save_verdicts
from ringattn.bench import cli
from ringattn.bench.common.attention import AttentionConfig
from ringattn.bench.common.timing import Samples
from ringattn.bench.kernels import contenders
from ringattn.comm.topology import nvml
from ringattn.kernels import PLAIN, Bounds, Scores
from ringattn.kernels.config import BACKWARD_MODES, FORWARD_KERNELS
from ringattn.kernels.gpu import GpuSpec
from ringattn.ring import Mask, adopted, prepare
from ringattn.ring.adopted import (
    FORWARD,
    PHASES,
    TRAINING,
    KernelVerdict,
    Setup,
    find_adoption,
    read_record,
    record_path,
)
from ringattn.ring.args import AttentionArgs
from ringattn.ring.local import registry
from ringattn.ring.local.rectangles import RectangleForward
from ringattn.tools.doctor import adoption as doctor_adoption

from ..support import own_kernels
from ..support.kernel_cases import tiles
from ..support.tune_cases import InlinePool

CPU, NAME, DIM = torch.device("cpu"), "stand-in", 16
SIZES = CheckSizes(tokens=60, heads=(4, 2), runs=4, timed_tokens=64, timed_heads=(2, 1), samples=5)
GPU = GpuSpec("Test GPU", 90, 132, 1 << 20)
SETUP = Setup("Test GPU", "580.1", "3.7.1", "12.8", "2.13.0", "0.1.0")
ON_CPU = Supports(devices=("cpu",), value_dims=(8, DIM))
calls: list[str] = []
LOCK = threading.Lock()


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    calls.append("forward")
    return own_kernels.forward(q, k, v, causal=causal, scale=scale)


def slow_forward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    time.sleep(0.03)
    return own_kernels.forward(*inputs, causal=causal, scale=scale)


def hanging_forward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    time.sleep(10_000)
    raise AssertionError


def crashing_forward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    os._exit(7)


def racy_forward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return a wrong result in one late call of 64."""
    with LOCK:  # virtual ranks are threads
        calls.append("racy")
        number = len(calls)
    out, lse = own_kernels.forward(*inputs, causal=causal, scale=scale)
    return out + (number == 60), lse


def unordered_forward(*inputs: Tensor, causal: bool, scale: float, rows: int) -> tuple[Tensor, Tensor]:
    """Return other last bits in every second call with this number of queries."""
    calls.extend(["unordered"] * (inputs[0].shape[1] == rows))
    out, lse = own_kernels.forward(*inputs, causal=causal, scale=scale)
    return out * (1 + 2**-23 * (len(calls) % 2)), lse


def wrong_backward(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    dq, dk, dv = own_kernels.backward(*inputs, causal=causal, scale=scale)
    return dq, dk if causal else 1.01 * dk, dv


class WrongMiddleForward(RectangleForward):
    """Forward that is wrong only in a hop that is neither the first nor the last."""

    folds = 0

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        self.folds += 1
        super().fold(k, 1.01 * v if self.folds == 2 and not final else v, bounds, scores=scores, final=final)


class WrongMiddle(RectangleAttention):
    def forward(self, q: Tensor, *, config: Any = None, **call: Any) -> WrongMiddleForward:
        return WrongMiddleForward(self, q, **{"start": None, "max_logits": False} | call)


def stand_in(function: Callable[..., Any] = forward, backward: Any = own_kernels.backward) -> RectangleAttention:
    return RectangleAttention(NAME, function, backward, supports=ON_CPU)


def job(kernel: RectangleAttention) -> CheckJob:
    return CheckJob(KernelCandidate(kernel), "fp32", DIM, CPU, SIZES)


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("RINGATTN_CONFIG_DIR", str(tmp_path))
    calls.clear()
    adopted.clear_adoption_cache()
    yield
    adopted.clear_adoption_cache()


# --- the self-check -------------------------------------------------------------------------------------------------


def test_a_right_and_faster_kernel_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "PORTABLE", stand_in(slow_forward))
    verdicts = check_candidate(job(stand_in()))
    assert [(verdict.phase, verdict.adopted) for verdict in verdicts] == [(phase, True) for phase in PHASES]
    assert all(verdict.passed and verdict.repeatable and verdict.speedup > 1 for verdict in verdicts)


def test_a_slower_kernel_passes_and_is_not_adopted() -> None:
    for verdict in check_candidate(job(stand_in(slow_forward))):
        assert verdict.passed and not verdict.adopted and verdict.speedup < 1
        assert verdict.reason == "it is not faster than the portable kernels"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (WrongMiddle(NAME, forward, own_kernels.backward, supports=ON_CPU), "(3 ranks"),
        (stand_in(backward=wrong_backward), "error of dk is "),
        (stand_in(racy_forward), "in run "),
        (stand_in(backward=None), "does not support gradients"),
    ],
)
def test_a_wrong_kernel_fails_with_a_reason(kernel: RectangleAttention, reason: str) -> None:
    verdicts = check_candidate(job(kernel))
    assert not any(verdict.passed or verdict.adopted for verdict in verdicts)
    assert all(reason in verdict.reason for verdict in verdicts)


def test_a_candidate_is_refused_for_its_own_dtype_and_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    supports = Supports(devices=("cpu",), dtypes=(torch.float16,), head_dims=(24,))
    given = job(RectangleAttention(NAME, forward, own_kernels.backward, supports=supports))
    for dtype, dim, reason in (("fp16", 24, ""), ("bf16", 24, "dtype torch.bfloat16"), ("fp16", 16, "head dim 16")):
        found = adopt.find_refusal(fit := given._replace(dtype=dtype, head_dim=dim))
        assert reason in found and bool(found) is bool(reason)
    monkeypatch.setattr(adopt, "check_dlse_support", Mock(side_effect=ValueError("no gradient of lse\nat all")))
    assert adopt.find_refusal(fit._replace(head_dim=24)) == "ValueError: no gradient of lse"


@pytest.mark.parametrize("world", [1, 3])  # the first case, and the last
def test_changing_last_bits_are_not_repeatable(world: int) -> None:
    kernel = stand_in(partial(unordered_forward, rows=SIZES.tokens // world))
    assert [(it.passed, it.repeatable) for it in check_candidate(job(kernel))] == [(True, False)] * 2


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_check_covers_every_role_and_mask(is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned, runs = list[bool](), list[Any]()

    @contextmanager
    def poison() -> Iterator[None]:
        poisoned.append(True)
        yield
        poisoned.clear()

    def run(inputs: Any, world: int, *, backend: Any, config: Any, **masks: Any) -> dict[str, Tensor]:
        runs.append((inputs, world, backend, config, masks, bool(poisoned)))
        return {"out": torch.zeros(1)}

    judge = SimpleNamespace(head_errors=lambda results: {"out": 0.0}, failing_results=lambda errors: [])
    for name, stand_in_function in {
        "poison_allocations": poison, "ring_results": run, "build_judge": lambda inputs, masks: judge,
        "draw_inputs": lambda device, dtype, sizes: (device, dtype, sizes),
    }.items():  # fmt: skip
        monkeypatch.setattr(adopt, name, stand_in_function)
    candidate = KernelCandidate(options=(("backward", "hopper"),)) if is_ours else KernelCandidate("other")
    assert adopt.find_wrong_result(CheckJob(candidate, "bf16", 64, CPU)) == ("", True)
    masks = [{"causal": True}, {"causal": False}, {"causal": True, "window_size": (100, 0)}, {"causal": True}]
    expected = [
        (
            (CPU, torch.bfloat16, (1008, 8, 4, 64, 64)),
            world,
            candidate.backend,
            candidate.config,
            mask,
            is_ours and not at,
        )
        for world, mask, count in zip((1, 3, 2, 3), masks, (2, 2, 2, 20), strict=True)
        for at in range(count)
    ]
    assert runs == expected


def test_a_phase_takes_the_time_of_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    problems, devices = list[Any](), list[Any]()
    seconds = {contenders.FORWARD: 1.0, contenders.STATE: 2.0, contenders.BACKWARD: 4.0}

    def contender(backend: Any, given: Any, config: Any = None) -> Any:
        problems.append((backend, given.problem, config))
        factor = 1.0 if backend == "mine" else 10.0
        return SimpleNamespace(steps={name: factor * value for name, value in seconds.items()})

    def timed(steps: Any, clock: Any, *, repeats: int) -> dict[str, Samples]:
        assert repeats == 20
        return {name: Samples((0.9 * step, step, 1.1 * step)) for name, step in steps.items()}

    monkeypatch.setattr(adopt, "local_kernel_contender", contender)
    monkeypatch.setattr(adopt, "time_in_turns", timed)
    monkeypatch.setattr(adopt, "ContenderInputs", lambda problem, *_: SimpleNamespace(problem=problem))
    monkeypatch.setattr(AttentionConfig, "random_shard", lambda *_: ())
    monkeypatch.setattr(adopt, "find_refusal", lambda job: "")
    monkeypatch.setattr(adopt, "find_wrong_result", lambda job: ("", True))
    given = CheckJob(KernelCandidate("mine"), "fp16", 64, CPU)
    forward, training = check_candidate(given)
    assert (forward.seconds, forward.portable_seconds) == (2 * 3.0, 2 * 30.0)
    assert (training.seconds, training.portable_seconds) == (2 * 7.0, 2 * 70.0)
    assert forward.spread == pytest.approx(2 * 0.05 * 33.0) and training.repeatable and training.adopted
    sizes = {(x.seqlen, x.heads, x.kv_heads, x.head_dim, x.dtype) for _, x, _ in problems}
    assert sizes == {(8192, 16, 4, 64, "float16")}
    assert [(name, x.causal) for name, x, _ in problems] == [
        (name, causal) for causal in (True, False) for name in ("mine", adopt.PORTABLE)
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(adopt, "find_refusal", lambda job: "no" if devices else "not set")
    assert {x.reason for x in check_candidate(given._replace(device=torch.device("cuda", 3)))} == {"no"}
    assert devices == [torch.device("cuda", 3)]


@pytest.mark.parametrize(
    ("function", "seconds", "reason"),
    [
        pytest.param(hanging_forward, 12.0, "it did not end in time and was killed", marks=pytest.mark.nightly),
        (crashing_forward, 300.0, "its process died with exit code 7"),
    ],
)
def test_a_hang_or_crash_costs_only_its_candidate(function: Any, seconds: float, reason: str) -> None:
    checked: list[CheckJob] = []
    verdicts = run_checks([job(stand_in(function))], seconds, checked.append)
    assert [(verdict.phase, verdict.reason) for verdict in verdicts] == [(phase, reason) for phase in PHASES]
    assert len(checked) == 1 and not multiprocessing.active_children()


def test_a_failed_job_gets_the_next_one_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[int, float]]()

    class CountedPool(InlinePool):
        def __init__(self, work: Any, workers: int, seconds: float) -> None:
            super().__init__(work)
            begun.append((workers, seconds))

        def run(self, jobs: Any, done: Any, left: Any = lambda: 1.0) -> None:
            super().run(jobs, done, left)

    def work(given: CheckJob) -> list[KernelVerdict]:
        if given.head_dim == 128:
            raise RuntimeError("the device is lost")
        return [given.verdict(TRAINING, "slow")]

    monkeypatch.setattr(adopt, "Pool", CountedPool)
    monkeypatch.setattr(adopt, "check_candidate", work)
    jobs = [CheckJob(KernelCandidate(options=(("backward", "hopper"),)), "bf16", dim, CPU) for dim in (64, 128, 64, 64)]
    assert [verdict.reason for verdict in run_checks(jobs, 9.0)] == ["slow", "the device is lost", "slow", "slow"]
    assert begun == [(1, 9.0)] * 2


def test_every_experimental_kernel_is_a_candidate() -> None:
    jobs = adopt.adoption_jobs(torch.device("cuda"))
    configs = [job.candidate.config for job in jobs]
    assert {config.backward for config in configs if config} == {*BACKWARD_MODES}
    assert {config.forward_kernel for config in configs if config} == {*FORWARD_KERNELS}
    phases = {job.candidate.options: job.candidate.phases for job in jobs}
    hopper, deterministic = ("forward_kernel", "hopper"), ("backward", "single_pass_deterministic")
    assert phases[(hopper,)] == phases[(hopper, deterministic)] == phases[()] == (FORWARD, TRAINING)
    assert phases[(deterministic,)] == (TRAINING,), "the forward is the portable one"
    kinds = {(job.dtype, job.head_dim, job.device.type) for job in jobs}
    assert kinds == {(dtype, dim, "cuda") for dtype in ("bf16", "fp16") for dim in (64, 128)}
    assert len({*jobs}) == len(jobs) == 4 * len({job.candidate for job in jobs})
    names = {job.candidate.backend_name for job in jobs}
    assert names >= {"triton", "flash", "cudnn", "fa3", "fa4"} and "aten" not in names


# --- the record -----------------------------------------------------------------------------------------------------


def verdict(phase: str, **changes: Any) -> KernelVerdict:
    fields: dict[str, Any] = {"backend": NAME, "options": {}, "dtype": "fp32", "head_dim": DIM, "passed": True}
    fields |= {"reason": "", "repeatable": True, "adopted": True}
    return KernelVerdict(phase=phase, **fields | {"seconds": 1.0, "portable_seconds": 2.0, "spread": 0.1} | changes)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU count as a GPU with a registered kernel of another project."""
    monkeypatch.setattr(adopted, "gpu_specs", lambda device: GPU)
    for module in (adopted, adopt):
        monkeypatch.setattr(module, "current_setup", lambda gpu: SETUP)
    monkeypatch.setitem(registry._FACTORIES, NAME, stand_in)
    monkeypatch.setitem(registry._KERNELS, NAME, stand_in())


def save(*verdicts: KernelVerdict) -> Path:
    return save_verdicts(GPU, verdicts or [verdict(phase) for phase in PHASES], "ringattn doctor --adopt")[0]


def attend(needs_grad: bool = True, *, dim: int = DIM, value_dim: int = 0, **options: Any) -> bool:
    """Run a call, compare it with the reference, and return whether the stand-in computed it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 48, 2, each).requires_grad_(needs_grad) for each in (dim, dim, value_dim or dim))
    calls.clear()
    out = ring_attention(q, k, v, **options)
    masks = {name: value for name, value in options.items() if name in ("causal", "window_size", "key_mask")}
    expected = reference.attention(*(x.detach().double() for x in (q, k, v)), **masks)[0]
    torch.testing.assert_close(out.detach().double(), expected, atol=1e-5, rtol=1e-5)
    if needs_grad:
        out.sum().backward()
    return bool(calls)


@pytest.mark.usefixtures("on_gpu")
def test_auto_uses_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not attend(), "nothing is adopted"
    path, skipped = save(), list[Any]()
    monkeypatch.setattr(adopted, "skip_nan_check", skipped.append)  # on a GPU this check waits for the device
    assert path == record_path(GPU) and path.stat().st_mode & 0o777 == 0o600
    assert find_adoption(GPU).record == read_record(path)
    assert attend(causal=True) and attend(needs_grad=False)
    assert [kernel.name for kernel in skipped] == [NAME] * 2
    assert not attend(backend="aten"), "a named backend is not replaced"
    assert not attend(dim=8) and not attend(value_dim=8), "no verdict for this head dim"
    holes = torch.arange(48)[None] % 3 > 0
    assert not attend(causal=True, window_size=(4, 0)) and not attend(key_mask=holes), (
        "rectangles were timed with full and causal masks"
    )
    scattered = Layout([[(0, 10), (12, 10), (24, 28)]])
    for queries in (scattered, Layout.contiguous(48, 1)):
        assert not attend(needs_grad=False, layout=queries, kv_layout=scattered), "many spans make many rectangles"
    assert attend(needs_grad=False, layout=Layout([[(0, 20), (24, 28)]])), "two spans, as in a zigzag layout"
    monkeypatch.setitem(registry._DEFAULTS, "cpu", "triton")
    assert attend() and not attend(config=tiles(32, 32)), "a given config is not replaced"


@pytest.mark.usefixtures("on_gpu")
def test_a_record_that_a_reader_would_refuse_is_not_written() -> None:
    with pytest.raises(ValueError, match="adopted is true"):
        save(verdict(FORWARD, seconds=3.0))
    with pytest.raises(ValueError, match="repeatable is 'yes'"):
        save(verdict(FORWARD, repeatable="yes"))
    path = record_path(GPU)
    assert path is not None and not path.exists()


@pytest.mark.usefixtures("on_gpu")
def test_auto_uses_a_phase_only_as_checked() -> None:
    save(verdict(FORWARD), verdict(TRAINING, adopted=False, reason="slow"))
    assert attend(needs_grad=False) and not attend(needs_grad=True)
    torch._dynamo.reset()  # graphs of other tests count towards the recompile limit
    compiled = torch.compile(ring_attention, backend="eager", fullgraph=True)
    calls.clear()
    compiled(*torch.randn(3, 1, 48, 2, DIM))
    assert not calls, "a graph does not know whether it needs gradients"


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("repeatable", [True, False])
def test_only_a_repeatable_kernel_is_deterministic(repeatable: bool) -> None:
    save(*(verdict(phase, repeatable=repeatable) for phase in PHASES))
    assert attend()
    torch.use_deterministic_algorithms(True)
    try:
        assert attend() is repeatable
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("on_gpu")
def test_an_unsupported_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"backend": "triton", "options": {"backward": "hopper"}}
    save(verdict(TRAINING, seconds=1.5), verdict(TRAINING, **options), verdict(TRAINING, backend="gone"))
    assert [each.seconds for each in find_adoption(GPU).fastest[TRAINING, torch.float32, DIM]] == [1.0, 1.0, 1.5]
    assert attend(), "the slowest supports the call"
    with monkeypatch.context() as patched:
        patched.setitem(registry._KERNELS, NAME, stand_in(backward=None))
        assert not attend()
    save(verdict(TRAINING, options={"backward": "single_pass"}))
    assert not attend(), "a kernel of another project takes no config"


@pytest.mark.usefixtures("on_gpu")
def test_hopper_kernels_are_used_only_for_tensors_that_tma_can_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "check_kernel_features", lambda *_, **__: None)  # without a GPU none has this kernel
    save(verdict(FORWARD, backend="triton", options={"forward_kernel": "hopper"}))
    fit, odd = torch.zeros(1, 48, 2, DIM), torch.zeros(48 * 2 * DIM + 1)[1:].view(1, 48, 2, DIM)
    call: dict[str, Any] = {"args": AttentionArgs(), "layouts": (), "mask": Mask(), "scores": PLAIN}
    for odd_one in (None, "q", "k", "v"):
        q, k, v = (odd if name == odd_one else fit for name in "qkv")
        kernel = adopted.find_adopted_kernel(q, k, v, **call, needs_backward=False, by_row=False)
        assert (kernel is None) == (odd_one is not None), odd_one


@pytest.mark.usefixtures("on_gpu")
def test_ranks_may_adopt_different_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    save()
    find, seen = adopted.find_adopted_kernel, list[str]()

    def of_rank(group: Any) -> Tensor:
        q, k, v = (layout.shard(x, group.rank()) for x in inputs)
        return ring_attention(q, k, v, layout=layout, group=group, causal=True)

    def find_first(*args: Any, **options: Any) -> Any:
        seen.append("call")
        return find(*args, **options) if len(seen) == 1 else None

    monkeypatch.setattr(prepare, "find_adopted_kernel", find_first)
    torch.manual_seed(0)
    layout, inputs = Layout.zigzag(48, 2), torch.randn(3, 1, 48, 2, DIM)
    with LocalWorld(2) as ranks:
        out = layout.unshard(ranks.run(of_rank))
    assert calls and len(seen) == 2
    expected = reference.attention(*inputs.double(), causal=True)[0]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("on_gpu")
def test_without_a_record_the_log_says_once_how_to_adopt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ringattn.ring.adopted")
    assert not attend() and not attend()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "ringattn doctor --adopt" in caplog.text


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", Setup._fields)
def test_a_record_of_another_setup_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save()
    monkeypatch.setattr(adopted, "current_setup", lambda gpu: SETUP._replace(**{name: "other"}))
    assert not attend()
    assert f"was made with {name} {getattr(SETUP, name)}, now other: run" in find_adoption(GPU).problem


def test_a_setup_names_the_gpu_and_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")
    assembler = str(get_ptxas(GPU.arch).version)
    expected = Setup("Test GPU", "580.1", triton.__version__, assembler, torch.__version__, ringattn.__version__)
    assert adopted.current_setup(GPU) == expected and assembler[0].isdigit()
    monkeypatch.setattr(nvml, "driver_version", Mock(side_effect=nvml.NvmlUnavailableError))
    assert adopted.current_setup(GPU) == expected._replace(driver="unknown")


@pytest.mark.parametrize(("portable", "spread", "faster"), [(1.5, 0.4, True), (1.5, 0.5, False), (1.0, -0.5, False)])
def test_a_kernel_is_faster_by_more_than_the_spread(portable: float, spread: float, faster: bool) -> None:
    assert adopted.is_faster(1.0, portable, spread) is faster


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("owner", "problem"), [(0, ""), (1234, ""), (4321, "belongs to user 4321, not to 1234")])
def test_only_records_of_this_user_and_root_are_used(owner: int, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status = save().stat()
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: os.stat_result((*status[:4], owner, *status[5:10])))
    adoption = find_adoption(GPU)
    assert (problem in adoption.problem) and (adoption.record is None) is adoption.is_refused is bool(problem)


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text("adopt everything"), "Expecting value"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "delimiter"),
        (lambda path: path.write_text("[]"), "must be a JSON object"),
        (lambda path: path.write_bytes(b"\xff"), "can't decode"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (lambda path: (path.unlink(), path.symlink_to("/nowhere")), "No such file"),
        (replace_by_fifo, "not a regular file"),
        (edit(lambda data: data.update(extra=1)), "unknown field 'extra'"),
        (edit(lambda data: data.update(version=2)), "version is 2"),
        (edit(lambda data: data.pop("setup")), "setup"),
        (edit(lambda data: data["setup"].update(driver=5)), "setup.driver is 5"),
        (edit(lambda data: data["verdicts"][0].update(seconds=3.0)), "adopted is true"),
        (edit(lambda data: data["verdicts"][0].update(seconds=None)), "adopted is true"),
        (edit(lambda data: data["verdicts"][0].update(passed=False)), "adopted is true"),
        (edit(lambda data: data["verdicts"][0].update(phase="dreaming")), "phase is 'dreaming'"),
        (edit(lambda data: data["verdicts"][0].update(options={"forward": "x"})), "options has 'forward'"),
        (edit(lambda data: data["verdicts"][0].update(options={"backward": "x"})), "backward is 'x'"),
    ],
)
def test_a_bad_record_is_named_and_not_used(damage: Callable[[Path], object], reason: str) -> None:
    damage(path := save())
    with pytest.warns(UserWarning, match="is rejected") as caught:
        assert not attend()
    (message,) = (str(warning.message) for warning in caught)
    assert message.startswith(str(path)) and reason in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not attend(), "the warning is given once"


def save_often(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        save_verdicts(GPU, [verdict(phase, seconds=seconds / 100) for phase in PHASES], f"by {seconds}")


@pytest.mark.nightly
def test_two_processes_that_write_at_once_leave_one_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=save_often, args=(seconds,)) for seconds in (2.0, 2.1)]
    for writer in writers:
        writer.start()
    commands, path = set[str](), record_path(GPU)
    assert path is not None
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            commands.add(read_record(path).command)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert commands <= {"by 2.0", "by 2.1"} and read_record(path).command in commands
    assert [*tmp_path.iterdir()] == [path]


# --- the command ----------------------------------------------------------------------------------------------------


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["doctor", *arguments])


def test_adoption_needs_a_gpu() -> None:
    result = doctor("--adopt")
    assert result.exit_code == 2 and "--adopt needs a CUDA GPU" in result.stderr
    assert "--seqlen cannot be used with --adopt" in doctor("--adopt", "--seqlen", "128").stderr
    with pytest.raises(ValueError, match="device is cpu: kernels can be adopted only"):
        adopt.adopt("cpu")


@pytest.mark.usefixtures("on_gpu")
def test_a_record_that_cannot_be_written_is_refused_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt, "gpu_specs", lambda device: GPU)
    monkeypatch.setattr(adopt, "run_checks", lambda *_, **__: pytest.fail("kernels were checked"))
    path = record_path(GPU)
    assert path is not None
    path.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"^{path} cannot be written"):
        adopt.adopt(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(adopt, "record_path", lambda gpu: path.parent / "new" / "record.json")
        patch.setattr(os, "access", lambda folder, mode: (folder, mode) != (path.parent / "new", os.W_OK))
        with pytest.raises(ValueError, match=r"record\.json cannot be written"):
            adopt.adopt(CPU)
    monkeypatch.setattr(adopt, "record_path", lambda gpu: None)
    with pytest.raises(ValueError, match="set RINGATTN_CONFIG_DIR"):
        adopt.adopt(CPU)
    monkeypatch.setattr(adopt, "record_path", record_path)
    monkeypatch.setenv("RINGATTN_CONFIG_DIR", __file__)
    with pytest.raises(ValueError, match="cannot be used as a folder"):
        adopt.adopt(CPU)


@pytest.mark.usefixtures("on_gpu", "alone")
def test_doctor_adopts_and_shows_what_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adopt, doctor_adoption):
        monkeypatch.setattr(module, "gpu_specs", lambda device: GPU)
        monkeypatch.setattr(module, "adoption_jobs", lambda device: [job(stand_in())] * 2)
    verdicts = [*map(verdict, PHASES), verdict(FORWARD, backend="other", adopted=False, passed=False, reason="wrong")]

    def check(jobs: list[CheckJob], progress: Callable[[CheckJob], None]) -> list[KernelVerdict]:
        progress(jobs[0])
        return verdicts

    def words(*arguments: str) -> str:
        return " ".join(doctor("--seqlen", "128", "--bytes", "4k", *arguments).stdout.split())

    monkeypatch.setattr(adopt, "run_checks", check)
    assert "skipped adopted kernels: no kernel has been checked on this GPU. `ringattn doctor --adopt`" in words()
    result = doctor("--adopt")
    assert result.exit_code == 0, result.output
    summary = "adopted: forward fp32 D16 stand-in (2.00x), training fp32 D16 stand-in (2.00x)"
    assert summary in result.stdout and "checked 1 of 2" in result.stderr
    assert f"ok adopted kernels: {summary}; not adopted for every call: other (wrong)" in words()
    path = record_path(GPU)
    assert path is not None
    path.write_text("{")
    assert "FAIL adopted kernels" in words() and "`ringattn doctor --adopt`, which replaces it" in words()
