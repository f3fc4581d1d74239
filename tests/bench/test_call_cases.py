"""Tests of the calls of a GPU run: every feature is covered, calls agree with float64, and errors are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import ring_attention
from ringattn.bench.common.cases import MeasuredNumber
from ringattn.bench.suite import call_cases, device_cases, gpu_cases
from ringattn.bench.suite.call_cases import CALL_CASES, measure_calls

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
    assert 0.01 < call_cases.row_difference(result, exact) < 0.2
    result[0, 0, 0, 0] = torch.nan
    assert call_cases.row_difference(result, exact) == torch.inf
    lse = torch.tensor([[[1.0, -torch.inf]]])
    assert call_cases.row_difference(lse, lse.double()) == 0
    assert call_cases.row_difference(lse, torch.ones(1, 1, 2).double()) == torch.inf


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


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_compiled_call_is_compared_with_eager(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(function: Any, *, fullgraph: bool) -> Any:
        return lambda *leaves: function(*leaves) * factor

    monkeypatch.setattr(torch, "compile", compile_)
    (number,) = gpu_cases.torch_compile_case(CPU)
    assert number.fails is (factor != 1.0)
