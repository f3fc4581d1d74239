"""Tests of an export's launcher against Triton's: the same driver calls, byte for byte, on a recording driver."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import triton

from ringattn.kernels import Bounds, Tile
from ringattn.kernels.single_pass import dq_add_order
from ringattn.tools.export.kernels import read_parameter_layout

from ..support.export.exports import (
    CONFIGS,
    DATA,
    EXPORTED,
    NIGHTLY_CONFIGS,
    STREAM,
    Export,
    Map,
    built,
    command,
    exported,
    needs_compiler,
)
from ..support.nightly import rest_nightly

pytestmark = [needs_compiler, EXPORTED]

OLD, NEW = 13010, 13020  # CUDA versions of a driver that sets one descriptor bit wrongly, and of a driver that is right
# Triton 3.6 does not correct the bit
KNOWN = OLD if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) else NEW
CASES = [
    {"batch": 2, "rows": 300, "columns": 260, "key_heads": 2, "group": 3, "driver": NEW},
    {"batch": 1, "rows": 40, "columns": 1, "key_heads": 1, "group": 2, "driver": KNOWN},
    {"batch": 3, "rows": 1, "columns": 129, "key_heads": 1, "group": 1, "driver": KNOWN},
]


@pytest.fixture(scope="module")
def triton_calls_by_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function from a config's name to the calls that Triton's launcher makes in each case."""
    folder = tmp_path_factory.mktemp("driver")
    # the name that Triton loads
    built(folder / "libcuda.so.1", DATA / "driver.c", options=("-Wl,-soname,libcuda.so.1",))

    @cache
    def triton_calls(nightly: bool) -> dict[str, list[dict[str, Any]]]:
        names = [*(NIGHTLY_CONFIGS if nightly else CONFIGS)]
        configs = {name: exported(name, tmp_path_factory).config for name in names}
        done = command(
            "tests.support.export.triton_launcher", json.dumps({"configs": configs, "cases": CASES}), str(folder)
        )
        recorded: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
        return recorded

    return lambda name: triton_calls(name in NIGHTLY_CONFIGS)[name]


@pytest.fixture(scope="module", params=rest_nightly([*CONFIGS, *NIGHTLY_CONFIGS], *CONFIGS))
def export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Export:
    return exported(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return exported("described", tmp_path_factory)


def test_it_passes_what_tritons_own_launcher_passes(
    export: Export, triton_calls_by_config: Callable[[str], list[dict[str, Any]]]
) -> None:
    library, record = export.recording()
    for kernel in export.kernels.values():
        layout = read_parameter_layout((export.folder / kernel["cubin"]).read_bytes())[1]
        assert layout == [(parameter["offset"], parameter["size"]) for parameter in kernel["parameters"]]
    for case, calls in zip(CASES, triton_calls_by_config(export.config_name), strict=True):
        assert {*calls} == {*export.kernels}
        for name, call in calls.items():
            record.expect([len(value) // 2 for value in call["values"]], case["driver"])
            assert export.launch(library, name, call["arguments"], case["batch"]) == 0
            assert ([*record.numbers], record.stream) == (call["numbers"], STREAM), name
            kernel = export.kernels[name]
            assert record.symbol.decode() == kernel["symbol"]
            assert record.allowed == kernel["shared_memory"] or kernel["shared_memory"] <= 48 * 1024
            names = [parameter["name"] for parameter in export.kernels[name]["parameters"]]
            passed = [*zip(names, (value.hex() for value in record.passed()), strict=True)]
            assert passed == [*zip(names, call["values"], strict=True)], (name, case)


def launched(export: Export, name: str, **changed: int) -> tuple[int, dict[str, Map]]:
    """Launch with 2 batch rows, 300 queries, 260 keys and 6 heads on 2; return the status and tensor maps."""
    library, record = export.recording()
    record.expect([size_of["size"] for size_of in export.kernels[name]["parameters"]])
    rows, columns, heads = (260, 300, 2) if name == "gradients" else (300, 260, 6)
    values: dict[str, Any] = {"rows": rows, "columns": columns, "heads": heads, "group": 3, "softmax_scale": 0.125}
    for i, argument in enumerate(export.kernels[name]["arguments"]):
        strides = {"b": 1 << 20, "s": 8192, "h": 512}
        values.setdefault(argument["name"], strides.get(argument["name"][-1], 1 << 16) + 16 * i)
    batch = changed.pop("batch", 2)
    result = export.launch(library, name, values | changed, batch)
    parameters = zip(export.kernels[name]["parameters"], record.passed(), strict=True)
    return result, {entry["made_of"]: Map.from_buffer_copy(got) for entry, got in parameters if entry["size"] == 128}


NO_MAP = (
    {"q_stride_s": 0}, {"k_stride_h": -512}, {"v_stride_b": 0}, {"q_stride_b": 1 << 39}, {"columns": 0},
    {"k_stride_s": 8196}, {"q": 24},
)  # fmt: skip


def test_unsupported_descriptor_maps_are_refused(described: Export) -> None:
    record = described.recording()[1]
    before = record.launches
    assert [launched(described, "forward", **wrong)[0] for wrong in NO_MAP] == [1] * len(NO_MAP)
    assert record.launches == before
    # a stride of a dimension of size 1 is replaced, not refused
    result, maps = launched(described, "forward", batch=1, q_stride_b=0, k_stride_b=-(1 << 30))
    assert result == 0
    assert maps["q"].strides[2] == maps["k"].strides[2] == 256


def test_the_gates_are_zero_before_every_launch(described: Export) -> None:
    _, record = described.recording()
    launched(described, "gradients", turns_gates=1 << 12)
    assert [*record.set] == [1 << 12, 0, 2 * 6 * -(-300 // 32), STREAM]


TURNS = """
#include "{header}"
void turns(int32_t *numbers, const int32_t *lo, const int32_t *hi, int32_t queries, int32_t keys) {{
  {prefix}_gradients_turns(numbers, lo, hi, queries, keys);
}}
"""


def test_order_of_turns(described: Export) -> None:
    folder = described.folder.parent / "turns"
    folder.mkdir(exist_ok=True)
    (folder / "turns.c").write_text(TURNS.format(header=f"{described.prefix}.h", prefix=described.prefix))
    library = ctypes.CDLL(str(built(folder / "turns.so", folder / "turns.c", options=(f"-I{described.folder}",))))
    tile = Tile(**described.kernels["gradients"]["tile"])
    for queries, keys, window in ((300, 260, 1000), (1000, 1000, 90), (128, 512, 40), (33, 700, 1)):
        ends = (torch.arange(queries) * keys // queries + 1).int()
        bounds = Bounds((ends - window).clamp(min=0), ends)
        expected = dq_add_order(bounds, 1, queries, keys, tile, torch.device("cpu"))
        assert expected is not None
        turns, by_key = torch.full_like(expected, -1), bounds.transposed(keys)
        assert by_key.lo is not None
        assert by_key.hi is not None
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (turns, by_key.lo, by_key.hi)]
        library.turns(*pointers, queries, keys)
        assert torch.equal(turns, expected)
        assert expected.max() > 0
