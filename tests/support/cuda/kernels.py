"""Stand-ins for the Triton kernels, below their launch, so that the host functions run unchanged.

Each stand-in declares what it reads and writes. Its results are exact in fp32, can be summed over shards in any order,
and are wrong if any input is wrong or not there yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.kernels.device.dq_sum import AddTurns
from ringattn.kernels.gpu import INTERPRETER_GPU

from .recorder import Recorder


def keys(k: Tensor, v: Tensor) -> Tensor:
    """Return the checksum of a shard of keys, ``[B, Hkv]``."""
    return k.float().sum((1, 3)) + 2 * v.float().sum((1, 3))


def rows(x: Tensor) -> Tensor:
    """Return the checksum of each row, ``[B, S, H, 1]``."""
    return x.float().sum(-1, keepdim=True)


def per_head(x: Tensor, heads: int) -> Tensor:
    """Expand ``[B, Hkv]`` to all query heads."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def summed(x: Tensor, kv_heads: int) -> Tensor:
    """Return the sum over rows and over the query heads of a group, ``[B, 1, Hkv, D]``."""
    batch, _, heads, dim = x.shape
    return x.float().sum(1).view(batch, kv_heads, heads // kv_heads, dim).sum(2)[:, None]


def sees(bounds: Any) -> float:
    """Return 1 if any row sees a key, else 0."""
    return 1.0 if bounds[0] is None else float((bounds[1] > bounds[0]).any())


def forward(
    q: Any, k: Any, v: Any, before: Any, result: Any, lse: Tensor, bounds: Any, *rest: Any, **flags: Any
) -> None:
    values, row_max = keys(k[0], v[0]) * sees(bounds), rest[-1]
    if row_max is not None:
        row_max.copy_(torch.maximum(row_max, per_head(values, q[0].shape[2])[:, :, None]))
    heads, start = q[0].shape[2], bool(flags["HAS_STATE"])
    out = per_head(values, heads)[:, None, :, None] * rows(q[0])
    out = out.expand(result[0].shape) + (before[0].float() if start else 0)
    lse.copy_(per_head(values, heads)[:, :, None] + (lse if start else torch.zeros_like(lse)))
    result[0].copy_(out)


def delta(dout: Any, out: Any, dlse: Tensor | None, delta: Tensor, *_: Any, **flags: Any) -> None:
    delta.copy_((rows(dout[0]) + 0 * rows(out[0]))[..., 0].transpose(1, 2) + (0 if dlse is None else dlse))


def dq(
    dout: Any, q: Any, k: Any, v: Any, lse: Tensor, delta: Tensor, sums: Any, target: Any, bounds: Any,
    *_: Any, **flags: Any,
) -> None:  # fmt: skip
    values = per_head(keys(k[0], v[0]) * sees(bounds), q[0].shape[2])[:, None, :, None]
    part = values * (rows(dout[0]) + (delta + 0 * lse).transpose(1, 2)[..., None]) + 0 * q[0].float()
    target[0].copy_(part + sums[0].float() if flags["HAS_SUM"] else part)


def dkdv(
    dout: Any, q: Any, k: Any, v: Any, lse: Tensor, delta: Tensor, dk_sum: Any, dv_sum: Any, dk: Any, dv: Any,
    bounds: Any, *_: Any, **flags: Any,
) -> None:  # fmt: skip
    """Compute dK/dV; with splits over query heads, each part gets its own queries and an equal share of the keys."""
    valid = sees(bounds) + 0 * (lse.sum() + delta.sum())
    for queries, x, total, into in ((q, k, dk_sum, dk), (dout, v, dv_sum, dv)):
        splits = into[0].shape[2] // x[0].shape[2]
        keys_of_part = x[0].float().repeat_interleave(splits, 2) / splits
        part = (summed(queries[0], into[0].shape[2]) + 5 * keys_of_part) * valid
        into[0].copy_(part + total[0].float() if flags["HAS_SUM"] else part)


def reduce(dk_parts: Any, dv_parts: Any, dk_sum: Any, dv_sum: Any, dk: Any, dv: Any, *_: Any, **flags: Any) -> None:
    for parts, total, into in ((dk_parts, dk_sum, dk), (dv_parts, dv_sum, dv)):
        total_of_parts = parts[0].unflatten(2, (into[0].shape[2], -1)).sum(3)
        into[0].copy_(total_of_parts + total[0].float() if flags["HAS_SUM"] else total_of_parts)


def single_pass(
    dout: Any, q: Any, k: Any, v: Any, lse: Tensor, delta: Tensor, dk_sum: Any, dv_sum: Any, dk: Any, dv: Any,
    total: Any, box: Any, turns: AddTurns, bounds: Any, *_: Any, **flags: Any,
) -> None:  # fmt: skip
    """Compute dK/dV and add to dQ; gates that are not 0 at first give a wrong dQ, as they would hang on a GPU."""
    dkdv(dout, q, k, v, lse, delta, dk_sum, dv_sum, dk, dv, bounds, **flags)
    dq(dout, q, k, v, lse, delta, total, total, bounds, HAS_SUM=True)
    if turns.gates is not None:
        total[0].add_(turns.gates.sum())
        turns.gates.add_(1)
    if turns.numbers is not None:
        total[0].add_(0 * turns.numbers.sum())


def quantize(x: Any, out: Any, scale: Tensor, *_: Any, **flags: Any) -> None:
    """Quantise with one scale per head; halves and ones survive exactly."""
    values = x[0].float()
    scale.copy_(values.abs().amax((1, 3))[:, None].expand(scale.shape))
    out[0].view(torch.float8_e4m3fn).copy_(values / scale[:, :1, :, None])


def dequantize(x: Any, scale: Tensor, out: Any, *_: Any, **flags: Any) -> None:
    out[0].copy_(x[0].view(torch.float8_e4m3fn).float() * scale[:, :1, :, None])


KERNELS: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
    "forward_kernel": (forward, (4, 5, 13)),
    "delta_kernel": (delta, (3,)),
    "dq_kernel": (dq, (7,)),
    "dkdv_kernel": (dkdv, (8, 9)),
    "reduce_kernel": (reduce, (4, 5)),
    "single_pass_kernel": (single_pass, (8, 9, 10)),
    "quantize_kernel": (quantize, (1, 2)),
    "dequantize_kernel": (dequantize, (2,)),
}
"""By kernel name: its stand-in, and the places of the arguments that it writes, without the turns' gates."""


def install_kernels(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Replace the launches of all host functions of `ringattn.kernels` by the stand-ins."""

    def launch(kernel: Any, grid: int, device: torch.device, *args: Any, **options: Any) -> None:
        if grid == 0:
            return
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        stand_in, written = KERNELS[name]
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for place, argument in enumerate(args):
            if isinstance(argument, AddTurns) and argument.gates is not None:
                writes.append(argument.gates)
                argument = argument._replace(gates=None)
            torch.utils._pytree.tree_map_only(Tensor, (writes if place in written else reads).append, argument)
        recorder.operation(
            "kernel", name, reads=reads, writes=writes, arguments=(args, options),
            action=lambda arguments: stand_in(*arguments[0], **arguments[1]),
        )  # fmt: skip

    # One multiprocessor is always busy, so dK/dV is not split unless a config asks for splits.
    gpu = INTERPRETER_GPU._replace(multiprocessors=1, l2_bytes=1 << 20)
    monkeypatch.setattr("ringattn.kernels.tile_schedule.gpu_or_interpreter", lambda device: gpu)
    monkeypatch.setattr("ringattn.ring.ops.compile_kernels", lambda *_: None)  # there is nothing to compile
    for module_name in [name for name in sys.modules if name.startswith("ringattn.kernels.")]:
        if hasattr(sys.modules[module_name], "launch") and not module_name.endswith(".launch"):
            monkeypatch.setattr(sys.modules[module_name], "launch", launch)
