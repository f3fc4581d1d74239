"""Tests that launch an export: on a GPU by the driver, and on a CPU by a driver that records the calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels import Bounds, Tile
from ringattn.kernels.single_pass import dq_add_order

from ..support.export.exports import EXPORTED, Export, exported, needs_compiler

BATCH, ROWS, HEADS, KEY_HEADS, HEAD_DIM = 2, 200, 4, 2, 64
SCALE = 0.125
TOLERANCE = 2e-2  # bf16 rounds to 2^-8; the rest allows for sums of rounded weights


class Case:
    """Inputs of causal attention, forward and backward, and the tensors that an export writes."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        shapes = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS, "dout": HEADS}
        tensors = {name: torch.randn(BATCH, ROWS, n, HEAD_DIM, device=device).bfloat16() for name, n in shapes.items()}
        results = {"out": "q", "dq_out": "q", "dk_out": "k", "dv_out": "v"}
        tensors |= {name: torch.full_like(tensors[like], torch.nan) for name, like in results.items()}
        tensors |= {name: torch.full((BATCH, HEADS, ROWS), torch.nan, device=device) for name in ("lse", "delta")}
        tensors["dq"] = torch.zeros(tensors["q"].shape, device=device)  # fp32, accumulated in place
        self.tensors = tensors
        ends = torch.arange(ROWS, device=device, dtype=torch.int32)
        zero, last = torch.zeros_like(ends), torch.full_like(ends, ROWS)
        self.bounds = {"by query": {"lo": zero, "hi": ends + 1}, "by key": {"lo": ends, "hi": last}}

    def turns(self, tile: Tile) -> dict[str, Tensor]:
        """Return the order in which key tiles add to dq, and gates that the launch has to clear."""
        by_query, device = self.bounds["by query"], self.tensors["q"].device
        table = dq_add_order(Bounds(by_query["lo"], by_query["hi"]), BATCH, ROWS, ROWS, tile, device)
        assert table is not None
        gates = torch.full((BATCH, HEADS, -(-ROWS // tile.block_q)), 9, device=device, dtype=torch.int32)
        return {"turns_numbers": table, "turns_gates": gates}

    def arguments(self, kernel: dict[str, Any]) -> dict[str, Any]:
        """Return a value for every argument that a kernel may have."""
        by_key = kernel["name"] in ("dkdv", "gradients")
        shape = {"rows": ROWS, "columns": ROWS, "heads": KEY_HEADS if by_key else HEADS, "softmax_scale": SCALE}
        values: dict[str, Any] = {**shape, "group": HEADS // KEY_HEADS}
        self.turn_tensors = self.turns(Tile(**kernel["tile"])) if kernel["name"] == "gradients" else {}
        for argument, x in (self.tensors | self.bounds["by key" if by_key else "by query"] | self.turn_tensors).items():
            values[argument] = x.data_ptr()
            if x.dim() == 4:
                values |= {f"{argument}_stride_{axis}": x.stride(i) for i, axis in enumerate("bsh")}
        return values

    def expected(self) -> dict[str, Tensor]:
        """Return the results that PyTorch computes."""
        q, k, v = (self.tensors[name].float().transpose(1, 2).requires_grad_() for name in ("q", "k", "v"))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(out, (q, k, v), self.tensors["dout"].float().transpose(1, 2))
        named = {"out": out.detach()} | dict(zip(("dq_out", "dk_out", "dv_out"), grads, strict=True))
        return {name: x.transpose(1, 2) for name, x in named.items()}


@needs_compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "flags",
    ["", "--forward-kernel hopper --backward single_pass", "--backward single_pass_deterministic", "--backward hopper"],
)
def test_exported_kernels_compute_attention(flags: str, tmp_path: Path) -> None:
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    if "hopper" in flags and arch != "90":
        pytest.skip("Hopper kernels are for sm_90")
    export = Export(f"--arch sm_{arch} --head-dim {HEAD_DIM} --causal {flags}", tmp_path / "export")
    library, case = export.compiled(options=("-l:libcuda.so.1",)), Case("cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for name, kernel in export.kernels.items():
        assert export.launch(library, name, case.arguments(kernel), BATCH, stream) == 0
        torch.cuda.synchronize()
    for name, truth in case.expected().items():
        atol = TOLERANCE * max(1.0, truth.abs().max().item())
        actual = case.tensors["dq" if name == "dq_out" and "gradients" in export.kernels else name]
        torch.testing.assert_close(actual.float(), truth, rtol=TOLERANCE, atol=atol)


@EXPORTED
@needs_compiler
@pytest.mark.parametrize("name", ["causal", "described"])
def test_the_same_calls_without_a_gpu(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    export, case = exported(name, tmp_path_factory), Case("cpu")
    library, record = export.recording()
    for kernel in export.kernels.values():
        record.expect([parameter["size"] for parameter in kernel["parameters"]])
        assert export.launch(library, kernel["name"], case.arguments(kernel), BATCH) == 0
