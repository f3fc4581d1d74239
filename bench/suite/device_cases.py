"""Cases that the suite measures itself, one per process.

``python -m ringattn.bench.suite.device_cases NAME FILE`` runs one case. A case yields numbers. FILE gets a result in
the format of every command.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...comm import LocalGroup, LocalWorld
from ...kernels import FULL, attention_forward, dequantize, quantize, scale_shape
from ...ring import Layout, ring_attention
from ...ring.wire import ScaledWire
from ..common import memory
from ..common.attention import DTYPES, forward_backward
from ..common.cases import MeasuredNumber, UnavailableError, case_result, relative_distance
from ..common.flags import resolve_device
from ..common.output import write_json
from ..common.provenance import provenance
from ..common.timing import Step, StepTimer, time_in_turns
from ..kernels import accuracy, speed
from ..kernels.accuracy import draw_inputs
from ..kernels.speed import AGREEMENT_LIMITS, causal_bounds
from . import call_cases, gpu_cases

EXPONENTS = (-14, 8)  # exponents of fp8 inputs: normal and subnormal codes, and values that round to zero
MAX_TIME_RATIOS = {"forward": 1.08, "forward and backward": 1.12}
"""Limits for the time of a ring of virtual ranks on one GPU, relative to a ring of one rank."""
COPIED_SHARE = 4  # a copy takes at most this part of the free memory, twice

TensorShape = tuple[int, int, int, int]
CaseFunction = Callable[..., Iterator[MeasuredNumber]]


def launch_case(
    device: torch.device, *, dtype: str = "bfloat16", seqlen: int = 512, head_dim: int = 64
) -> Iterator[MeasuredNumber]:
    """Launch the forward kernel with and without bounds; yield its first launch's time and its error."""
    for causal in (False, True):
        q, k, v, _, _ = draw_inputs(device, DTYPES[dtype], (seqlen, 4, 2, head_dim, head_dim))
        labels = {"mask": "causal" if causal else "full", "dtype": dtype, "head_dim": head_dim}
        begun = time.perf_counter()
        out, _ = attention_forward(q, k, v, bounds=causal_bounds(q, k) if causal else FULL)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield MeasuredNumber("first launch, compilation included", time.perf_counter() - begun, "s", labels)
        exact, _ = reference.attention(q, k, v, causal=causal)
        distance = relative_distance([out], [exact])
        yield MeasuredNumber("difference from float64", distance, "relative", labels, AGREEMENT_LIMITS[dtype])


def ceilings_case(
    device: torch.device, *, side: int = 8192, dtype: str = "bfloat16", nbytes: int = 4 << 30
) -> Iterator[MeasuredNumber]:
    """Time a large matrix product and a large copy in PyTorch, to which percentages refer."""
    nbytes = min(nbytes, memory.free_memory(device) // COPIED_SHARE)
    clock = StepTimer(device)
    with clock.capture_stream():
        a, b = (torch.randn(side, side, device=device).to(DTYPES[dtype]) for _ in range(2))
        source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        steps: dict[str, Step] = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
        prepared = {name: clock.prepare_step(step) for name, step in steps.items()}
        times = time_in_turns(prepared, clock, repeats=10, warmup=3)
    matmul, copy = times["product"], times["copy"]
    rate, labels = 2 * side**3 / matmul.median / 1e12, {"side": side, "dtype": dtype}
    yield MeasuredNumber("matrix product", rate, "TFLOP/s", labels, spread=matmul.spread)
    rate = 2 * nbytes / copy.median / 1e9
    yield MeasuredNumber("copy, bytes read and written", rate, "GB/s", {"bytes": nbytes}, spread=copy.spread)


def fp8_case(
    device: torch.device,
    *,
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
    shapes: tuple[TensorShape, ...] = ((2, 1000, 4, 128), (1, 200, 2, 40)),
) -> Iterator[MeasuredNumber]:
    """Convert K/V to e4m3 and back on the device; count elements whose bits differ from the CPU's code."""
    for dtype, shape in product(dtypes, shapes):
        labels = {"dtype": dtype, "shape": "x".join(map(str, shape))}
        for part, count in fp8_differences(fp8_inputs(shape, DTYPES[dtype]), device).items():
            yield MeasuredNumber(f"wrong {part}", count, "elements", labels, limit=0)


def fp8_inputs(shape: TensorShape, dtype: torch.dtype) -> Tensor:
    """Return CPU numbers of many magnitudes, with zeros, a NaN and an infinity; heads are strided."""
    batch, tokens, heads, dim = shape
    wide = torch.randn(batch, tokens, heads, 2 * dim)
    wide *= torch.exp2(torch.randint(*EXPONENTS, wide.shape))
    wide[torch.rand(wide.shape) < 0.01] = 0.0
    wide[0, tokens // 2, 0, 1] = torch.nan
    wide[0, tokens - 1, heads - 1, 0] = -torch.inf
    return wide.to(dtype)[..., :dim]


def fp8_differences(x: Tensor, device: torch.device) -> dict[str, int]:
    """Count codes, scales and decoded numbers that differ between the kernels and the CPU's code."""
    codes, scales = fp8_buffers(x, x.device)
    ScaledWire().encode(x, (codes, scales))
    back = torch.empty(x.shape, dtype=x.dtype)
    ScaledWire().decode((codes, scales), back)
    on_device = x.to(device) if device.type != "cpu" else x  # a copy would lose the strides
    ours, our_scales = fp8_buffers(x, device)
    quantize(on_device, ours, our_scales)
    returned = torch.full(x.shape, torch.nan, dtype=x.dtype, device=device)
    dequantize(ours, our_scales, returned)
    pairs = {"codes": (ours, codes), "scales": (our_scales, scales), "numbers": (returned, back)}
    return {name: count_differing_bits(*pair) for name, pair in pairs.items()}


def fp8_buffers(x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return buffers for the fp8 codes and the scales of ``x``, filled with wrong values."""
    codes = torch.full(x.shape, 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return codes, torch.full(scale_shape((x.shape[0], *x.shape[1:])), torch.nan, device=device)


def count_differing_bits(ours: Tensor, other: Tensor) -> int:
    """Return the number of elements with different bits; all NaNs are equal."""
    a, b = ours.cpu().float(), other.cpu().float()
    return int((((a != b) | (a.signbit() != b.signbit())) & ~(a.isnan() & b.isnan())).sum())


def local_world_case(
    device: torch.device,
    *,
    world: int = 4,
    tokens: int = 8192,
    heads: int = 32,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    repeats: int = 10,
) -> Iterator[MeasuredNumber]:
    """Compare a causal zigzag ring of virtual ranks with one rank, to measure the overhead of hops."""
    seqlen = world * tokens
    inputs = [torch.randn(1, seqlen, heads, head_dim, device=device).to(DTYPES[dtype]) for _ in range(4)]
    labels = {"world": world, "tokens per rank": tokens, "dtype": dtype, "head_dim": head_dim}
    with LocalWorld(world, device=device) as ring, LocalWorld(1, device=device) as alone:
        steps: dict[str, Step] = {}
        results = []
        for name, ranks, count in (("ring", ring, world), ("one rank", alone, 1)):
            layout = Layout.zigzag(seqlen, count)
            # Shard outside the timed step, because ranks keep their shards in training.
            shards = [[layout.shard(x, rank) for x in inputs] for rank in range(count)]
            step: Callable[[], Any]
            for pass_name in MAX_TIME_RATIOS:
                step = partial(ranks.run, partial(rank_pass, shards, layout, backward=pass_name != "forward"))
                steps[f"{pass_name}:{name}"] = step
            results.append([layout.unshard(parts) for parts in zip(*step(), strict=True)])
        distance = relative_distance(*results)
        yield MeasuredNumber("difference from one rank", distance, "relative", labels, AGREEMENT_LIMITS[dtype])
        del results
        times = time_in_turns(steps, StepTimer(device), repeats=repeats)
    for pass_name, max_ratio in MAX_TIME_RATIOS.items():
        ring_time, alone_time = times[f"{pass_name}:ring"], times[f"{pass_name}:one rank"]
        for name, samples in (("ring", ring_time), ("one rank", alone_time)):
            by = {**labels, "by": name}
            yield MeasuredNumber(f"{pass_name} time", samples.median * 1e3, "ms", by, spread=samples.spread)
        limit = max_ratio if device.type == "cuda" else None
        ratio = ring_time.median / alone_time.median
        yield MeasuredNumber(f"{pass_name}, ring over one rank", ratio, "times", labels, limit)


def rank_pass(shards: list[list[Tensor]], layout: Layout, group: LocalGroup, *, backward: bool) -> Any:
    """Run one virtual rank's forward, or forward and backward; return out, or out, dq, dk and dv."""
    attend, (*inputs, dout) = partial(ring_attention, layout=layout, group=group, causal=True), shards[group.rank()]
    return forward_backward(attend, inputs, dout) if backward else attend(*inputs)


def accuracy_entry(backend: str, dtype: str, head_dim: int, **more: Any) -> tuple[str, CaseFunction]:
    """Return name and function of the case that compares a backend's kernels with float64."""
    run = partial(accuracy.accuracy_case, backend=backend, dtype=dtype, head_dim=head_dim, **more)
    return f"right {'' if backend == 'triton' else f'{backend} '}{dtype} D{head_dim}", run


def rings_entry(transport: str, world: int) -> tuple[str, CaseFunction]:
    """Return name and function of the case that runs every kind of call over a transport."""
    return f"{transport}-{world}", partial(call_cases.measure_calls, transport=transport, world=world)


SMALLEST_HOPPER: dict[str, Any] = {
    "backend": "hopper", "dtype": "bfloat16", "head_dim": 64, "seqlen": 512, "heads": (1, 1), "causal_worlds": (1,),
    "full_worlds": (),
}  # fmt: skip
"""Smallest problem in which the Hopper kernels use every shared-memory buffer twice, with bounds."""
INTERPRETED = {"seqlen": 80, "heads": (2, 1)}
WORLDS = (1, 3)  # one launch, or three shards with a first, a middle and a last hop
CASES: dict[str, dict[str, CaseFunction]] = {
    "cuda": dict(
        [
            ("launches", launch_case),
            *(
                accuracy_entry("triton", dtype, dim, full_worlds=WORLDS if dim == 128 else (1,))
                for dtype in ("bfloat16", "float16")
                for dim in (128, 64, 256, 40)
            ),
            accuracy_entry("triton", "float32", 64),
            accuracy_entry("triton", "bfloat16", 192, head_dim_v=128, seqlen=997, heads=(3, 3)),
            *(
                accuracy_entry(backend, dtype, dim, full_worlds=WORLDS)
                for backend in accuracy.BACKENDS
                for dtype, dim in (("bfloat16", 128), ("float16", 64))
            ),
            ("ceilings", ceilings_case),
            ("targets", speed.measure_targets),
            rings_entry("local", 4),
            *(rings_entry("nccl", world) for world in (1, 2, 4)),
            rings_entry("nccl_one_sided", 2),
            ("compiled", gpu_cases.torch_compile_case),
            ("captured", gpu_cases.capture_case),
            ("killed nccl_one_sided", partial(gpu_cases.killed_rank_case, transport="nccl_one_sided")),
            ("killed nccl", partial(gpu_cases.killed_rank_case, transport="nccl")),
            ("smallest hopper", partial(accuracy.accuracy_case, **SMALLEST_HOPPER)),
            ("fp8", fp8_case),
            ("LocalWorld", local_world_case),
        ]
    ),
    "cpu": dict(
        [
            ("launches", partial(launch_case, dtype="float32", seqlen=80)),
            *(accuracy_entry("aten", dtype, 64, seqlen=512) for dtype in ("float32", "bfloat16", "float16")),
            accuracy_entry("triton", "float32", 64, **INTERPRETED),
            accuracy_entry("triton", "float16", 40, **INTERPRETED),
            accuracy_entry("single_pass", "float16", 40, **INTERPRETED),
            ("ceilings", partial(ceilings_case, side=2048, dtype="float32", nbytes=1 << 28)),
            ("fp8", partial(fp8_case, dtypes=("float32", "float16"), shapes=((1, 200, 2, 40),))),
            ("LocalWorld", partial(local_world_case, tokens=512, heads=8, head_dim=64, dtype="float32", repeats=5)),
        ]
    ),
}
"""Cases by kind of device and by name. On the CPU, Triton's interpreter runs the kernels untimed."""


def main(name: str, run: CaseFunction, device: torch.device, file: str) -> int:
    """Run a case and print its result; write the numbers so far to ``file`` after each. Return the exit code."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current device
    torch.manual_seed(0)  # every run draws the same inputs
    about, numbers = provenance(device), list[MeasuredNumber]()
    try:
        for number in run(device):
            numbers.append(number)
            write_json(file, case_result(f"bench suite: {name}", numbers, about).as_json())
    except (UnavailableError, torch.OutOfMemoryError) as missing:
        print(missing)
        return os.EX_UNAVAILABLE
    result = case_result(f"bench suite: {name}", numbers, about)
    print(result.text())
    return 1 if result.failed else 0


if __name__ == "__main__":
    here = resolve_device(None)
    sys.exit(main(sys.argv[1], CASES[here.type][sys.argv[1]], here, sys.argv[2]))
