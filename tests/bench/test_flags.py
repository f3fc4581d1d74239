"""Tests of flags: sizes as typed and as printed, and flags that do not apply."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ringattn.bench.common import attention, flags
from ringattn.bench.common.flags import human_count, parse_size_text, size_text
from ringattn.kernels import checks
from ringattn.ring import arg_checks
from ringattn.ring.schedule import schedule
from ringattn.ring.wire import resolve_grad_wire, resolve_wire


@given(st.integers(0, 2**40))
def test_printed_sizes_are_parsed_back(count: int) -> None:
    assert parse_size_text(size_text(count)) == count


@pytest.mark.parametrize(
    ("count", "unit", "expected"),
    [(0, "B", "0 B"), (67_108_864, "B", "67.1 MB"), (999_499, "", "999 k"), (999_500, "", "1.00 M"),
     (9_996, "", "10.0 k"), (99_960, "", "100 k"), (5e21, "", "5000 E")],
)  # fmt: skip
def test_counts_are_printed_with_si_prefixes(count: float, unit: str, expected: str) -> None:
    assert human_count(count, unit) == expected


def test_flag_values_are_parsed() -> None:
    assert flags.sizes("8k, 2K ,5,1m,2g") == [8192, 2048, 5, 2**20, 2**31] and flags.counts("1,2") == [1, 2]
    assert flags.parse_window("4k,-1") == (4096, -1) and flags.head_dims("1,512") == [1, 512]
    assert flags.dtype_names("bf16, float32") == ["bfloat16", "float32"] and flags.wire_dtype("bf16") == "bfloat16"
    assert flags.parse_pattern("bigbird,block=8,window=2,global=1,random=3,seed=5").parameters["seed"] == 5


@pytest.mark.parametrize(("check", "arguments", "message"), [
    *((parse_size_text, (text,), "is not a size") for text in ("", "-1", "1.5k", "9" * 19)),
    (flags.counts, ("2,0",), "'0' is not valid: it must be"),
    (flags.head_dims, ("64,513",), "'513' is not valid: it must be"),
    (flags.parse_window, ("3",), "'3' is not a window"),
    (flags.dtype_name, ("int8",), "'int8' is not valid: it must be one of fp32, bf16, fp16, float16"),
    (flags.grad_wire_dtype, ("float8_e4m3fn",), "one of fp32, bf16, float32, bfloat16"),
    (flags.parse_pattern, ("spiral,block=3",), "'spiral' is not a pattern"),
    (flags.parse_pattern, ("strided,block=3",), "Write strided,block=SIZE,stride=SIZE"),
    (flags.parse_pattern, ("strided,block=3,stride=4,seed=2",), "'strided,block=3,stride=4,seed=2'"),
    (flags.check_transport_flag, ("magic", "cpu", 2), "--transport is 'magic': it must be one of auto, local"),
    (flags.parse_device_kind, ("tpu",), "--device is 'tpu': it must be"),
    (flags.resolve_timer, ("cuda", "sundial"), "on cuda it must be events or graph or clock"),
])  # fmt: skip
def test_refusals(check: Callable[..., object], arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        check(*arguments)
    assert message in str(refused.value)


def test_default_key_heads_and_timers() -> None:
    assert flags.resolve_kv_heads(8, None) == 8 and flags.resolve_kv_heads(8, 2) == 2
    assert [flags.resolve_timer(kind, "", flags.RING_TIMERS) for kind in ("cpu", "cuda")] == ["clock", "events"]
    flags.check_transport_flag("process_group", "cpu", 2)


@pytest.mark.parametrize(
    ("name", "has_cuda", "device"),
    [(None, True, "cuda:3"), ("cuda", True, "cuda:3"), ("cpu", True, "cpu"), (None, False, "cpu")],
)
def test_the_device_is_the_current_gpu(
    name: str | None, has_cuda: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert str(flags.resolve_device(name)) == device


def test_constants_of_flags_match_the_code() -> None:
    # Flags repeat these constants, because their modules must not import torch.
    assert flags.MAX_HEAD_DIM == checks.MAX_HEAD_DIM and flags.KV_SLOTS == schedule.KV_SLOTS
    assert flags.MAX_CHUNKS == arg_checks.MAX_CHUNKS
    assert {*attention.DTYPES.values()} == {*checks.DTYPES}
    assert {name: dtype.itemsize for name, dtype in attention.DTYPES.items()} == flags.DTYPE_BYTES
    float32 = attention.DTYPES["float32"]
    assert all(resolve_wire(name, float32) is not None for name in flags.WIRE_DTYPES)
    assert resolve_grad_wire("bfloat16") is not None and resolve_grad_wire("float32") is None


@pytest.mark.parametrize(("words", "message"), [
    ([], ""),
    (["--a", "1", "--b", "2", "--json", "-", "--csv", "rows"], ""),
    (["--c", "3"], "--c cannot be used in this mode"),
    (["--b", "2"], "--b has no effect without --a"),
    (["--a", "1", "--d-long", "4"], "--a and --d-long cannot be used together"),
])  # fmt: skip
def test_flags_that_do_not_apply_are_refused(words: list[str], message: str) -> None:
    app = typer.Typer()

    @app.command()
    def run(
        context: typer.Context,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = typer.Option(0, "--d", "--d-long"),
        json: flags.Json = None,
        csv: flags.Csv = None,
    ) -> None:
        flags.check_mode(context, "in this mode", ("a", "b", "d"))
        flags.check_needs(context, {"b": "a"})
        flags.check_exclusive(context, "a", "d")

    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == (2 if message else 0) and message in result.output, result.output
