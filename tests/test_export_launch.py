"""An export for this GPU, launched by its own launcher and the driver; without one, by a driver that records."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.bench.export.kernels import parameter_sizes

from .test_export import DATA, KERNELS, Export, Record, arguments_type, asked, needs_compiler

BATCH, ROWS, HEADS, KEY_HEADS, HEAD_DIM = 2, 200, 4, 2, 64
SCALE = 0.125
TOLERANCE = 2e-2  # bf16 has 8 bits: 2^-8 for rounding what is of size 1, and room for sums of rounded weights


class Case:
    """Causal attention, forward and backward, and where an export writes its results."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        shapes = {"q": HEADS, "k": KEY_HEADS, "v": KEY_HEADS, "dout": HEADS}
        made = {name: torch.randn(BATCH, ROWS, n, HEAD_DIM, device=device).bfloat16() for name, n in shapes.items()}
        results = {"out": "q", "dq_out": "q", "dk_out": "k", "dv_out": "v"}
        made |= {name: torch.full_like(made[like], torch.nan) for name, like in results.items()}
        made |= {name: torch.full((BATCH, HEADS, ROWS), torch.nan, device=device) for name in ("lse", "delta")}
        self.tensors = made
        ends = torch.arange(ROWS, device=device, dtype=torch.int32)
        zero, last = torch.zeros_like(ends), torch.full_like(ends, ROWS)
        self.bounds = {"by query": {"lo": zero, "hi": ends + 1}, "by key": {"lo": ends, "hi": last}}

    def arguments(self, name: str) -> dict[str, Any]:
        """All that a kernel may be asked for."""
        by_key = name == "dkdv"
        numbers = {"rows": ROWS, "columns": ROWS, "heads": KEY_HEADS if by_key else HEADS, "softmax_scale": SCALE}
        values: dict[str, Any] = {**numbers, "group": HEADS // KEY_HEADS}
        for argument, x in (self.tensors | self.bounds["by key" if by_key else "by query"]).items():
            values[argument] = x.data_ptr()
            if x.dim() == 4:
                values |= {f"{argument}_stride_{axis}": x.stride(i) for i, axis in enumerate("bsh")}
        return values

    def expected(self) -> dict[str, Tensor]:
        """What torch has for the results."""
        q, k, v, dout = (self.tensors[name].float() for name in ("q", "k", "v", "dout"))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        group = HEADS // KEY_HEADS
        heads = [q.transpose(1, 2), *(x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))]
        scores = torch.einsum("bhqd,bhkd->bhqk", heads[0], heads[1]) * SCALE
        scores = scores.masked_fill(torch.ones(ROWS, ROWS, device=q.device).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ heads[2]).transpose(1, 2)
        grads = dict(zip(("dq_out", "dk_out", "dv_out"), torch.autograd.grad(out, leaves, dout), strict=True))
        return {"out": out.detach(), "lse": scores.logsumexp(-1).detach(), **grads}


def launched(export: Export, library: ctypes.CDLL, name: str, case: Case, stream: int) -> None:
    """One kernel of it."""
    kernel, function, values = export.kernels[name], export.loaded(library, name), case.arguments(name)
    arguments = arguments_type(kernel)(**{one["name"]: values[one["name"]] for one in asked(kernel)})
    launch = getattr(library, f"{export.prefix}_{name}_launch")
    assert launch(function, ctypes.byref(arguments), BATCH, ctypes.c_void_p(stream)) == 0


@needs_compiler
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_launches(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    export = Export(f"--arch sm_{major}{minor} --head-dim {HEAD_DIM} --causal", tmp_path)
    library, case = ctypes.CDLL(str(export.compiled("-l:libcuda.so.1"))), Case("cuda")
    for name in KERNELS:
        launched(export, library, name, case, torch.cuda.current_stream().cuda_stream)
    for name, truth in case.expected().items():
        atol = TOLERANCE * max(1.0, truth.abs().max().item())
        torch.testing.assert_close(case.tensors[name].float(), truth, rtol=TOLERANCE, atol=atol)


@needs_compiler
def test_the_same_calls_without_a_gpu(tmp_path: Path) -> None:
    """That the launches above are complete, where there is nothing to launch on."""
    export = Export(f"--arch sm_90 --head-dim {HEAD_DIM} --causal", tmp_path)
    library, case = ctypes.CDLL(str(export.compiled(DATA / "driver.c"))), Case("cpu")
    record = Record.in_dll(library, "record")
    for count, name in enumerate(KERNELS, 1):
        kernel = export.kernels[name]
        sizes = parameter_sizes((export.folder / kernel["cubin"]).read_bytes())
        record.sizes[:] = sizes + [0] * (65 - len(sizes))
        launched(export, library, name, case, 5)
        assert record.launches == count
        first = kernel["parameters"][0]["name"]
        assert int.from_bytes(bytes(record.values[0]), "little") == case.tensors[first].data_ptr()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launches themselves are compared")
def test_the_case_is_attention() -> None:
    case = Case("cpu")
    q, k, v = (case.tensors[name].float().transpose(1, 2) for name in ("q", "k", "v"))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(case.expected()["out"], truth.transpose(1, 2), rtol=1e-5, atol=1e-5)
