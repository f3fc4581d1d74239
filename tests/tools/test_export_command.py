"""Tests of ``ringattn export`` that compile nothing: its options, its checks of a binary, and its manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from typer.testing import CliRunner

from ringattn.kernels import Tile
from ringattn.kernels.tables import DTYPES
from ringattn.tools.export import command, kernels
from ringattn.tools.export.c import refusal_conditions, struct_field, to_c_expression
from ringattn.tools.export.config import ExportConfig, chosen_tiles
from ringattn.tools.export.kernels import Argument, ExportedKernel, TensorMap, parameter_offsets

MAP = TensorMap("q", "q", "bf16", ("batch", "rows", "heads", 128), (1, 64, 1, 64), 3, by_pointer=False)
INPUTS = (
    Argument("q", "*bf16", multiple=16), Argument("dq_stride_s", "i32", multiple=8), Argument("rows", "i32"),
    Argument("heads", "i32"), Argument("group", "i32"), Argument("softmax_scale", "fp32"), Argument("lo", "*i32"),
)  # fmt: skip
PARAMETERS = (
    *MAP.parameters(),
    *INPUTS,
    Argument("columns", "i32", same_as="rows"),
    Argument("bounds", "*i32", made_of="0"),
)


def exported(name: str = "forward", maps: tuple[TensorMap, ...] = (MAP,)) -> ExportedKernel:
    layout = tuple(parameter_offsets(PARAMETERS, 0x210))
    return ExportedKernel(name, "symbol", b"code", PARAMETERS, INPUTS, maps, layout, 128, Tile(64, 32, 4, 2), 9000)


def test_every_option_reaches_the_export(tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    configs, written = list[Any](), list[Any]()

    def export(config: ExportConfig, name: str) -> ExportedKernel:
        configs.append((config, name))
        return exported(name)

    def write(config: ExportConfig, found: list[ExportedKernel], folder: Path) -> dict[str, Any]:
        written.append((config, [kernel.name for kernel in found], folder))
        return {"sha256": {"a": "", "b": ""}}

    monkeypatch.setattr(kernels, "export", export)
    monkeypatch.setattr(command, "write_export", write)
    monkeypatch.setattr(
        "ringattn.tools.export.config.chosen_tiles", lambda config: dict.fromkeys(config.kernels, (0, "a table"))
    )

    def run(*flags: str) -> Any:
        flags = "--arch", "80", *flags, "--out-dir", str(tmp_path / "out")
        return CliRunner().invoke(command.app, flags, env={"COLUMNS": "300"})

    done = run()
    assert done.exit_code == 0, done.output
    plain = ExportConfig(80, "bf16", 128, 128)
    assert written == [(plain, ["forward", "delta", "dq", "dkdv"], tmp_path / "out")]
    assert configs == [(plain, name) for name in ("forward", "delta", "dq", "dkdv")]
    lines = done.output.splitlines()
    assert lines[0] == f"forward   {len(PARAMETERS)} arguments, 9000 bytes of shared memory; tile: a table"
    assert len(lines) == 5 and lines[-1].startswith(f"wrote 3 files to {tmp_path / 'out'}; ")
    every = "--head-dim 64 --value-dim 32 --dtype fp16 --causal --no-grouped --role last --forward-kernel hopper"
    every += f" --backward single_pass --gpu H100 --config-dir {tmp_path}"
    done = run(*every.split(), "--json", "-")
    config = ExportConfig(
        80, "fp16", 64, 32, bounded=True, grouped=False, role="last", forward_kernel="hopper", backward="single_pass",
        gpu="H100", config_dir=tmp_path,
    )  # fmt: skip
    assert written[1][:2] == (config, ["forward", "delta", "gradients"]) and json.loads(done.output)
    assert run("--json", str(tmp_path / "x.json")).exit_code == 0
    assert json.loads((tmp_path / "x.json").read_text()) == {"sha256": {"a": "", "b": ""}}
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run().output == "" and len(written) == 3, "rank 0 alone writes"


def test_the_manifest_describes_every_parameter(tmp_path: Path) -> None:
    config = ExportConfig(90, bounded=True)
    data = command.write_export(config, [exported()], tmp_path)
    assert data == json.loads((tmp_path / f"{config.prefix}.json").read_text())
    for name, digest in data["sha256"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    names = {f"{config.prefix}{end}" for end in ("_forward.cubin", ".h", ".c")} | {"LICENSE"}
    assert {*data["sha256"]} == names and (tmp_path / f"{config.prefix}_forward.cubin").read_bytes() == b"code"
    assert {name: data[name] for name in ("arch", "dtype", "head_dim", "bounded", "grouped", "role", "schema")} == {
        "arch": "sm_90", "dtype": "bf16", "head_dim": [128, 128], "bounded": True, "grouped": True, "role": "only",
        "schema": 2,
    }  # fmt: skip
    (entry,) = data["kernels"]
    assert entry["grid"] == ["ceil(rows / 64) * batch * heads", 1, 1] and entry["tile_from"].startswith("built-in")
    assert (entry["threads"], entry["shared_memory"], entry["symbol"]) == (128, 9000, "symbol")
    first, *_, columns, bounds, scratch, other = entry["parameters"]
    encoded = first.pop("tensor_map")
    assert first == {
        "name": "q_map", "type": "CUtensorMap", "size": 128, "alignment": 64, "made_of": "q", "offset": 0x30,
    }  # fmt: skip
    assert (columns["same_as"], bounds["made_of"]) == ("rows", "0") and scratch["offset"] + 8 == other["offset"]
    assert {name: encoded[name] for name in ("rank", "sizes", "strides", "box", "element_strides")} == {
        "rank": 4, "sizes": ["128", "heads", "rows", "batch"], "box": [64, 1, 64, 1], "element_strides": [1] * 4,
        "strides": ["q_stride_h * 2", "q_stride_s * 2", "q_stride_b * 2"],
    }  # fmt: skip
    sizes_and_strides = ["batch", "rows", "heads", "128", *(f"q_stride_{axis}" for axis in "bsh"), "1"]
    assert [one["made_of"] for one in entry["parameters"][1:9]] == sizes_and_strides
    assert [one.at for one in PARAMETERS[1:9:3]] == ["&q_tensor.size[0]", "&q_tensor.size[3]", "&q_tensor.stride[2]"]
    own = [(one.name, one.type, one.multiple) for one in MAP.inputs()]
    strides = [(f"q_stride_{axis}", "i64" if axis == "b" else "i32", 8) for axis in "bsh"]
    assert own == [("q", "*bf16", 16), *strides]
    assert encoded["data_type"].endswith("BFLOAT16") and encoded["swizzle"].endswith("128B")
    assert entry["arguments"][:3] == [
        {"name": "q", "type": "*bf16", "size": 8, "multiple_of": 16},
        {"name": "dq_stride_s", "type": "i32", "size": 4, "multiple_of": 8}, {"name": "rows", "type": "i32", "size": 4},
    ]  # fmt: skip


def test_a_launch_refuses_what_the_kernel_cannot_take() -> None:
    shared = ["batch < 0", "args->rows < 0", "args->heads < 0", "args->group < 1"]
    scale = "!(args->softmax_scale > 0)"  # also true for NaN
    assert refusal_conditions(exported()) == [*shared, "args->heads % args->group", scale]
    limit = (2**31 - 1) // 64
    strides = [f"args->{name}_stride_s > {limit} || args->{name}_stride_s < -{limit}" for name in ("dout", "dq")]
    overflow = "(int64_t)args->heads * args->group > INT32_MAX"
    assert refusal_conditions(exported("gradients")) == [*shared, scale, *strides, overflow]
    assert len(refusal_conditions(exported("gradients", maps=()))) == len([*shared, scale, *strides, overflow]) + 1
    assert refusal_conditions(exported("dkdv")) == [*shared, scale]
    assert exported("dkdv").block == 32 and exported("dq").block == 64
    fields = [struct_field(kernel, argument) for kernel in (exported(), exported("dkdv")) for argument in INPUTS[:3]]
    assert fields == [
        "CUdeviceptr q; /* bf16, queries [B, Sq, H, D]; a multiple of 16 */",
        "int32_t dq_stride_s; /* in elements; a multiple of 8 */", "int32_t rows; /* Sq */",
        "CUdeviceptr q; /* bf16, queries [B, Sq, H, D]; a multiple of 16 */",
        "int32_t dq_stride_s; /* in elements; a multiple of 8 */", "int32_t rows; /* Sk */",
    ]  # fmt: skip
    by_key = [INPUTS[-1], *(Argument(name, "i32") for name in ("columns", "heads", "turns_numbers"))]
    assert [struct_field(exported("dkdv"), argument) for argument in by_key] == [
        "CUdeviceptr lo; /* first query of each key, int32 [Sk], never decreasing */", "int32_t columns; /* Sq */",
        "int32_t heads; /* Hkv */",
        "int32_t turns_numbers; /* int32 [ceil(Sk / 32), ceil(Sq / 64)], filled by the function above */",
    ]  # fmt: skip
    last = struct_field(exported(), Argument("hi", "*i32"))
    assert last == "CUdeviceptr hi; /* one past the last key of each query, int32 [Sq], never decreasing */"
    assert to_c_expression("heads * group") == "args->heads * args->group" and to_c_expression("batch") == "batch"


def test_binaries_have_no_paths_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs, seen = triton.knobs.compilation, list[Any]()
    monkeypatch.setattr(kernels, "export_launch", lambda config, name: name)
    monkeypatch.setattr(kernels, "compile_launch", lambda *how: seen.append((*how, knobs.disable_line_info)))
    before = knobs.disable_line_info
    kernels.compiled_launch(ExportConfig(80), "dq")
    assert seen == [("dq", 80, True)] and knobs.disable_line_info == before


def test_every_descriptor_of_the_binary_has_a_map() -> None:
    source = SimpleNamespace(attrs={(0,): [["tt.divisibility", 16]]}, signature={"rows": "i32", "A": "constexpr"})
    names = [SimpleNamespace(name=name) for name in source.signature]
    maps: list[list[Any]] = [[], [{}]]
    for described in maps:
        metadata = SimpleNamespace(tensordesc_meta=described)
        launch: Any = SimpleNamespace(
            binary=SimpleNamespace(src=source, metadata=metadata), kernel=SimpleNamespace(params=names), name="k",
            arguments=(31, 5),
        )  # fmt: skip
        if described:
            with pytest.raises(RuntimeError, match="k has 0 descriptors, but Triton's metadata has 1"):
                kernels.split_arguments(launch, {})
        else:
            rows = Argument("rows", "i32", multiple=16)
            assert kernels.split_arguments(launch, {}) == ((rows,), (rows,), ())


def test_every_size_has_its_own_expression() -> None:
    queries, keys = kernels.SIZES.queries, kernels.SIZES.keys
    by_query = {7: "batch", queries: "rows", keys: "columns", 3: "group", 105: "heads", 35: "heads / group"}
    by_key = {7: "batch", queries: "columns", keys: "rows", 3: "group", 105: "heads * group", 35: "heads"}
    for names, symbols in ((("forward", "dq", "delta"), by_query), (("dkdv", "gradients"), by_key)):
        for name in names:
            assert kernels.size_symbols(ExportConfig(90), name) == symbols
            one = {size: word for size, word in symbols.items() if size not in (3, 35, 105)}
            assert kernels.size_symbols(ExportConfig(90, grouped=False), name) == one | {1: "group", 105: "heads"}
    configs = [
        ExportConfig(90, "bf16", 128, dim, bounded, grouped, role, forward, backward)
        for role in ("only", "last") for forward in ("portable", "hopper")
        for bounded in (False, True) for dim in (128, 64)
        for backward, grouped in (("two_pass", True), ("two_pass", False), ("single_pass", True), ("hopper", True))
    ]  # fmt: skip
    assert len({config.prefix for config in configs}) == len(configs)
    assert configs[0].prefix == "ringattn_sm90_bf16_d128_full"


@pytest.mark.parametrize(("changed", "message"), [
    ({"global_scratch_size": 1}, "needs scratch memory or a cluster"), ({"num_ctas": 2}, "needs scratch memory"),
    ({"profile_scratch_size": 8}, "needs scratch memory"), ({"offset": 4}, r"takes parameters at \(offset, bytes\)"),
    ({}, None),
])  # fmt: skip
def test_a_binary_that_the_launcher_cannot_serve_is_refused(
    changed: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"shared": 9000, "global_scratch_size": 0, "profile_scratch_size": 0, "num_ctas": 1, "name": "symbol"}
    binary = SimpleNamespace(
        metadata=SimpleNamespace(**values | changed), asm={"cubin": b"code", "ptx": ".reqntid 128"}
    )
    layout = [(start + changed.get("offset", 0), size) for start, size in exported().layout]
    monkeypatch.setattr(kernels, "compiled_launch", lambda *_: SimpleNamespace(binary=binary))
    monkeypatch.setattr(kernels, "split_arguments", lambda *_: (PARAMETERS, INPUTS, (MAP,)))
    monkeypatch.setattr(kernels, "read_parameter_layout", lambda cubin: (0x210, layout))
    if message is None:
        tile = chosen_tiles(ExportConfig(90))["forward"][0]
        found = kernels.export(ExportConfig(90), "forward")
        assert vars(found) == vars(exported()) | {"tile": tile}
    else:
        with pytest.raises(RuntimeError, match=message):
            kernels.export(ExportConfig(90), "forward")


@pytest.mark.parametrize(("changed", "message"), [
    ({"elem_size": 4}, "elem_size 4; the launcher supports only 2"),
    ({"block_size": [64, 64]}, "number of dimensions 2"),
    ({"fp4_padded": True}, "fp4_padded True"), ({"is_im2col": 1}, "is_im2col True"), ({}, None),
])  # fmt: skip
def test_a_descriptor_that_the_launcher_cannot_encode_is_refused(changed: dict[str, Any], message: str | None) -> None:
    value = SimpleNamespace(base=SimpleNamespace(dtype=DTYPES["bf16"]), shape=[7, 31, 105, 128])
    metadata: dict[str, Any] = {"elem_size": 2, "block_size": [1, 64, 1, 64], "swizzle": 3} | changed
    symbols = {7: "batch", 31: "rows", 105: "heads"}
    if message is None:
        assert kernels._tensor_map(value, "q", "q", symbols, metadata, by_pointer=False) == MAP
    else:
        with pytest.raises(RuntimeError, match=message):
            kernels._tensor_map(value, "q", "q", symbols, metadata, by_pointer=False)
