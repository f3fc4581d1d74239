"""Tests of the calls of a GPU run: every feature is covered, calls agree with float64, and errors are found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import ring_attention
from ringattn.bench.common.cases import MeasuredNumber
from ringattn.bench.common.ranks import LaunchedRank
from ringattn.bench.suite import call_cases, device_cases, gpu_cases
from ringattn.bench.suite.call_cases import CALL_CASES, measure_calls
from ringattn.comm.watchdog.watch import EXIT_CODE

from ..support.nightly import rest_nightly

CPU = torch.device("cpu")
OFTEN = ("fp32, uneven", "K/V as fp8", "fp32, sinks and a window", "Ulysses")


def run(name: str) -> list[MeasuredNumber]:
    world = 2 if name in OFTEN else 4
    return [*measure_calls(CPU, transport="local", world=world, call_names=(name,))]


def test_calls_cover_every_argument() -> None:
    all_calls = CALL_CASES.values()
    assert {call.dtype for call in all_calls} == {"bfloat16", "float16", "float32"}
    assert {call.layout for call in all_calls} == {"contiguous", "zigzag", "striped", "uneven"}
    assert {name for call in all_calls for name in call.options} == {
        "causal", "window_size", "cu_seqlens", "prefix_length", "seqused_k", "leftpad_k", "key_mask", "block_mask",
        "islands", "intervals", "softcap", "alibi_slopes", "dropout_p", "dropout_seed",
    }  # fmt: skip
    rings = {(name, value) for call in all_calls for name, value in call.ring.items()}
    assert {("wire_dtype", "bfloat16"), ("wire_dtype", "float8_e4m3fn"), ("grad_wire_dtype", "bfloat16")} <= rings
    assert {("chunks", 2), ("direction", -1), ("prefetch", 0)} <= rings
    assert {call.nodes for call in all_calls} == {call.ulysses for call in all_calls} == {1, 2}
    assert {call.head_dims for call in all_calls} == {(64, 64), (128, 128), (40, 40), (192, 128)}
    assert {q // kv for q, kv in (call.heads for call in all_calls)} == {1, 2, 4}
    assert {call.sink for call in all_calls} == {call.max_logits for call in all_calls} == {True, False}
    worlds = {name: [n for n in range(1, 9) if CALL_CASES[name].fits(n)] for name in ("flat", "two levels", "Ulysses")}
    assert worlds == {"flat": [*range(1, 9)], "two levels": [4, 6, 8], "Ulysses": [2, 4, 6, 8]}
    on_one_gpu = device_cases.CASES["cuda"]["local-4"]
    assert isinstance(on_one_gpu, partial) and on_one_gpu.func is measure_calls
    # including two-level rings and meshes
    assert all(call.fits(on_one_gpu.keywords["world"]) for call in all_calls)


@pytest.mark.parametrize("name", rest_nightly(CALL_CASES, *OFTEN))
def test_every_call_is_right_and_deterministic(name: str) -> None:
    numbers = run(name)
    assert [number.name for number in numbers] == ["difference of a row", "changed in a second call"]
    assert not any(number.fails for number in numbers), numbers


def swap_keys(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Attend with keys shifted by one position, on every rank."""
    return ring_attention(q, k.roll(1, 1), v, **options)


def drift(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Return a slightly different result in every call."""
    drifted.append(None)
    out, lse = ring_attention(q, k, v, **options)
    return out + out.new_zeros(out.shape).index_fill(0, torch.tensor([0]), 2.0**-8 * len(drifted)), lse


drifted: list[None] = []


@pytest.mark.parametrize(("wrong", "number"), [(swap_keys, 0), (drift, 1)])
@pytest.mark.parametrize("name", rest_nightly(CALL_CASES, "fp32, sinks and a window"))
def test_a_planted_error_is_found(
    name: str, wrong: Callable[..., Any], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cases, "ring_attention", wrong)
    assert run(name)[number].fails


def test_difference_of_a_wrong_row() -> None:
    exact = torch.randn(2, 50, 3, 8, dtype=torch.float64)
    result = exact.float().clone()
    assert call_cases.row_difference(result, exact) < 1e-6
    result[1, 7, 2] *= 1.1
    norms = exact.norm(dim=-1)
    size = max(norms[1, 7, 2], norms.square().mean().sqrt())  # a row counts as at least the mean row
    assert call_cases.row_difference(result, exact) == pytest.approx(float(0.1 * norms[1, 7, 2] / size), rel=1e-4)
    assert call_cases.row_difference(torch.full((1, 1, 1, 4), 0.5), torch.zeros(1, 1, 1, 4)) == 1.0
    result[0, 0, 0, 0] = torch.nan
    assert call_cases.row_difference(result, exact) == torch.inf
    lse = torch.tensor([[[1.0, -torch.inf]]])
    assert call_cases.row_difference(lse, lse.double()) == 0
    assert call_cases.row_difference(lse, torch.ones(1, 1, 2).double()) == torch.inf
    assert call_cases.row_difference(torch.ones(1, 1, 2), lse.double()) == torch.inf


def test_the_worst_rank_and_every_change_count() -> None:
    errors = torch.zeros(2, len(call_cases.RESULTS) + 2, dtype=torch.float64)
    errors[1, 3], errors[0, 1], errors[:, -2], errors[:, -1] = 0.5, 0.25, torch.tensor([1.0, 2.0]), 7
    worst, changed = call_cases.judge_call("K/V as fp8", "nccl", [*errors])
    assert (worst.value, worst.limit, worst.fails) == (0.5, 0.25, True)
    assert worst.labels == {"call": "K/V as fp8", "by": "nccl", "ranks": 2, "of": "dk"}
    assert (changed.value, changed.limit, changed.fails) == (3.0, 0, True)
    errors[1, -1] = 8  # a checksum of another rank
    assert next(call_cases.judge_call("flat", "nccl", [*errors])).note != worst.note


def test_processes_run_every_call_and_the_conformance_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="the world"))

    def run_call(call: Any, *given: Any) -> Tensor:
        ran.append((call, *given))
        return torch.tensor([float(len(ran))])

    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        for rank, row in enumerate(rows):
            row.copy_(own + rank / 4)

    monkeypatch.setattr(call_cases, "run_call", run_call)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(call_cases, "check_transfers", lambda *given: ran.append(given))
    names, place = ("flat", "Ulysses"), LaunchedRank(1, 2, 1, 2)
    gathered = call_cases.run_calls(place, CPU, "nccl", names)
    assert [[float(row) for row in rows] for rows in gathered] == [[1.0, 1.25], [2.0, 2.25]]
    calls = [(CALL_CASES[name], "nccl", CPU, "the world") for name in names]
    assert ran == [*calls, ("nccl", CPU, "the world")]
    started: list[Any] = []

    def run_process_group(*given: Any, device: str) -> Any:
        started.append((*given, device))
        return [[torch.zeros(9)] * 3] * 2

    monkeypatch.setattr(call_cases, "run_process_group", run_process_group)
    numbers = [*measure_calls(CPU, transport="nccl", world=3, call_names=("flat", "Ulysses", "sinks"))]
    # two ranks of a Ulysses group do not divide three ranks
    assert started == [(3, call_cases.run_calls, "nccl", ["flat", "sinks"], "cpu")]
    assert [number.labels["call"] for number in numbers] == ["flat"] * 2 + ["sinks"] * 2


def test_cases_of_a_gpu_run_before_the_conformance_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = []
    opened = SimpleNamespace(close=lambda: calls.append("close"))
    monkeypatch.setattr(call_cases, "open_transport", lambda group, **named: calls.append(named) or opened)
    monkeypatch.setattr(call_cases, "check_transport", lambda *given, **named: calls.append((*given, named)))
    cases = {"nccl": (lambda given, device: calls.append(given is opened),)}
    monkeypatch.setattr(gpu_cases, "TRANSFER_CASES", cases)
    group: Any = "a group"
    for device in (torch.device("cuda"), CPU):
        call_cases.check_transfers("nccl", device, group)
    cuda = {"device": torch.device("cuda")}
    last = [("nccl", group, {"device": device}) for device in (cuda["device"], CPU)]
    assert calls == [{"transport": "nccl", **cuda}, True, "close", *last]


@pytest.mark.parametrize(
    ("codes", "late", "values"),
    [([1, EXIT_CODE, -9], 4.0, (0, 4.0)), ([1, 0, -9], 0.5, (1, 0.5)), ([3, 1, 0], 6.0, (2, 6.0))],
)
def test_ranks_must_end_with_an_error_soon_after_a_peer_is_killed(
    codes: list[int], late: float, values: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    ends = [10.0 + late, 10.0, 10.0]
    ranks = [
        SimpleNamespace(returncode=code, poll=lambda end=end, code=code: code if now[0] >= end else None)
        for code, end in zip(codes, ends, strict=True)
    ]
    started: list[Any] = []

    def start(*given: Any) -> Any:
        started.append(given)
        return nullcontext(("folder", ranks))

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 0.25))
    monkeypatch.setattr(gpu_cases, "time", clock)
    monkeypatch.setattr(gpu_cases, "start_processes", start)
    numbers = [*gpu_cases.killed_rank_case(CPU, transport="nccl", world=3)]
    assert started == [(3, gpu_cases.train_until_killed, "nccl", "cpu")]
    assert tuple(number.value for number in numbers) == values
    assert [number.fails for number in numbers] == [values[0] > 0, late > gpu_cases.DEADLINE + gpu_cases.GRACE]


@pytest.mark.nightly
def test_processes_and_virtual_ranks_agree_bitwise() -> None:
    results = {
        transport: [*measure_calls(CPU, transport=transport, world=2, call_names=tuple(CALL_CASES))]
        for transport in ("process_group", "local")
    }
    assert not any(number.fails for number in results["process_group"])
    notes = [[number.note for number in numbers] for numbers in results.values()]
    assert notes[0] == notes[1] and any(notes[0])


def test_a_transport_that_spoils_bytes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringattn.comm import LocalTransport

    post = LocalTransport.post

    def spoil(transport: LocalTransport, **messages: Any) -> Any:
        fence = post(transport, **messages)
        fence.wait()
        for message in messages["receives"]:
            message.tensor.view(-1)[:1].zero_()
        return fence

    monkeypatch.setattr(LocalTransport, "post", spoil)
    with pytest.raises(Exception, match=r"the received value|wrong bytes"):
        run("flat")


@pytest.mark.nightly
def test_a_killed_rank_is_reported_on_the_cpu() -> None:
    numbers = [*gpu_cases.killed_rank_case(CPU, transport="process_group", world=3)]
    assert [number.value for number in numbers[:1]] == [0] and not any(number.fails for number in numbers)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_compiled_call_is_compared_with_eager(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(function: Any, *, fullgraph: bool) -> Any:
        return lambda *leaves: function(*leaves) * factor

    monkeypatch.setattr(torch, "compile", compile_)
    (number,) = gpu_cases.torch_compile_case(CPU)
    assert number.fails is (factor != 1.0)
    assert factor == 1.0 or (number.value or 0) >= 96 * 4 * 64  # every element of out, and of gradients
