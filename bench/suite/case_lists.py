"""What ``ringattn bench suite`` runs, most important first."""

from __future__ import annotations

from dataclasses import replace

from ..kernels import accuracy, beside, speed, targets
from ..kernels.ours import VARIANTS
from ..predict import turns
from ..timing import OF_RINGS, TIMERS, nearest
from . import comm_cases, device_cases, fp8_cases, ring_cases, timeline_cases, tune_cases, worlds
from .cases import Case, Run

TIMED: dict[Run, tuple[str, ...]] = {
    speed.speed: TIMERS,
    targets.targets: TIMERS,
    device_cases.ceilings: TIMERS,
    fp8_cases.fp8: TIMERS,
    worlds.local_world: OF_RINGS,
    worlds.nccl_to_itself: OF_RINGS,
    ring_cases.whole_ring: OF_RINGS,
    comm_cases.overlap: OF_RINGS,
    comm_cases.links: OF_RINGS,
    comm_cases.host_time: OF_RINGS,
    turns.predicted_local_world: OF_RINGS,
}
"""What can be timed in another way, and how.

Of the others `tune` searches by events whatever is asked, as ``ringattn tune`` does: no graph holds the half of its
runs that are beside a transfer. The rest records events itself, or times nothing of a device.
"""


def timed_by(case: Case, timer: str) -> Case:
    """The same by this timer, or by events where it asks for a graph that there is none of.

    It is an argument of the case, so that a folder's results of another timer are not taken for these. What is by
    the device's own timer has no such argument, and a replayed case is of graphs whatever is asked.
    """
    takes = TIMED.get(case.run)
    if takes is None or "graphs" in case.arguments or nearest(timer, takes) in ("", "events"):
        return case
    return replace(case, arguments={**case.arguments, "timer": nearest(timer, takes)})


def gpu_cases() -> list[Case]:
    """First what no CPU can tell, then whether the kernels are right, then how fast they are."""
    kib = 1024
    sizes = (1 << 20, 1 << 24, 1 << 28)
    lengths = (16 * kib, 8 * kib, 32 * kib, 4 * kib)
    fast = (*(variant.name for variant in VARIANTS), "flash", "cudnn")
    tf32x3 = ("ringattn", "efficient")
    shapes = [(128, True), (128, False), (64, True), (64, False)]
    return [
        Case("launches", "NamedTuple arguments at launch; what a launch costs the host", device_cases.launches, 15),
        Case("beside", "a copy of few blocks on a high-priority stream beside the forward", beside.beside, 25),
        *(
            Case(
                f"right {dtype} D{dim}", "every kernel against float64", accuracy.accuracy, 90,
                {"backend": "triton", "dtype": dtype, "head_dim": dim, "full_worlds": (1, 3) if dim == 128 else (1,)},
                alone=False,
            )
            for dtype in ("bfloat16", "float16", "float32")
            for dim in (128, 64, 256, 40)
        ),
        Case(
            "right, ragged", "odd lengths, no groups, Dv other than D", accuracy.accuracy, 90,
            {
                "backend": "triton", "dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128, "seqlen": 997,
                "heads": (3, 3),
            }, alone=False,
        ),
        *(
            Case(
                f"right hopper {dtype} D{dim}", "the kernels of sm_90 against float64, where the GPU is one",
                accuracy.accuracy, 90,
                {"backend": accuracy.HOPPER, "dtype": dtype, "head_dim": dim, "full_worlds": (1, 3)}, alone=False,
            )
            for dtype, dim in (("bfloat16", 128), ("float16", 64))
        ),
        Case("ceilings", "a large matrix product and a large copy", device_cases.ceilings, 8),
        Case("targets", "floors and goals beside SDPA's flash and cuDNN", targets.targets, 45),
        *(
            Case(
                f"speed D{dim} {'causal' if causal else 'full'}", "kernels beside SDPA's flash and cuDNN", speed.speed,
                18, {"head_dim": dim, "causal": causal, "seqlens": lengths, "by": fast, "seconds": 1.0},
            )
            for dim, causal in shapes
        ),
        Case(
            "kernels, every backend", "efficient, math and flex_attention too", speed.speed, 25,
            {"head_dim": 128, "causal": True, "seqlens": (8 * kib,)},
        ),
        Case("LocalWorld", "four virtual ranks against one launch", worlds.local_world, 18),
        Case(
            "predicted", "virtual ranks against what `ringattn predict` says of them", turns.predicted_local_world, 10,
            {"seqlens": (32 * kib,)},
        ),
        Case(
            "timeline", "virtual ranks recorded, beside what is predicted of a GPU each: traces for the page",
            timeline_cases.timelines, 10, leaves=True,
        ),
        Case("NCCL to itself", "CuPy's communicator with one rank", worlds.nccl_to_itself, 12),
        Case(
            "overlap", "a ring of two processes that take turns on this GPU, blocking and not", comm_cases.overlap, 20,
            {"transport": "copy_engine", "world": 2, "tokens": 8 * kib, "heads": 32},
        ),
        Case(
            "tune", "tiles next to the default's, main shape, beside it", tune_cases.tuned, tune_cases.SECONDS,
            {"seqlens": (8 * kib,)},
        ),
        Case(
            "speed D128 causal, grouped", "32 query heads, 8 of K/V", speed.speed, 12,
            {"head_dim": 128, "causal": True, "seqlens": (8 * kib, 16 * kib), "heads": (32, 8), "by": fast},
        ),
        Case(
            "speed D256 causal", "the widest head", speed.speed, 12,
            {"head_dim": 256, "causal": True, "seqlens": (8 * kib, 16 * kib), "by": fast},
        ),
        Case(
            "speed D64 causal, float32", "tf32x3", speed.speed, 10,
            {"head_dim": 64, "causal": True, "seqlens": (8 * kib,), "dtype": "float32", "by": tf32x3},
        ),
        Case("host time", "the host's time to post a hop of 4k tokens, beside its compute", comm_cases.host_time, 8),
        Case("fp8", "K/V as e4m3: the kernels against the CPU, bit by bit, and their speed", fp8_cases.fp8, 6),
        Case(
            "copy engine, two processes", "copies between two processes on this GPU, alone and beside the forward",
            comm_cases.links, 12, {"transport": "copy_engine", "world": 2, "nbytes": sizes, "beside": "forward"},
        ),
        Case(
            "NCCL to itself, replayed", "the same as a CUDA graph: without the host's time", comm_cases.links, 10,
            {"transport": "nccl", "world": 1, "nbytes": sizes, "graphs": 10},
        ),
        Case(
            "ring", "a ring of two processes that share this GPU, beside one device; they take turns on it",
            ring_cases.whole_ring, 15,
            {
                "seqlens": (16 * kib,), "heads": (16, 16), "head_dim": 128, "dtype": "bfloat16",
                "by": ("ringattn",), "transport": "copy_engine",
            },
        ),
    ]  # fmt: skip


def cpu_cases() -> list[Case]:
    """The same list where it makes sense; kernels run under Triton's interpreter, and are not timed."""
    small = {"seqlen": 80, "heads": (2, 1)}
    return [
        Case(
            "launches", "NamedTuple arguments at launch, under the interpreter", device_cases.launches, 60,
            {"dtype": "float32", "seqlen": 80},
        ),
        Case(
            "whole ring", "two processes over gloo against one device and the ways around a ring",
            ring_cases.whole_ring, 90, {"seqlens": (2048, 4096), "layouts": ("zigzag", "contiguous")},
        ),
        *(
            Case(
                f"right aten {dtype}", "PyTorch's operator in a ring against float64", accuracy.accuracy, 60,
                {"backend": "aten", "dtype": dtype, "head_dim": 64, "seqlen": 512}, alone=False,
            )
            for dtype in ("float32", "bfloat16", "float16")
        ),
        *(
            Case(
                f"right triton {dtype} D{dim}", "kernels under the interpreter against float64", accuracy.accuracy,
                120, {"backend": "triton", "dtype": dtype, "head_dim": dim, **small}, alone=False,
            )
            for dtype, dim in (("float32", 64), ("float16", 40))
        ),
        Case(
            "LocalWorld", "four virtual ranks against PyTorch's attention in one piece", worlds.local_world, 60,
            {"tokens": 512, "heads": (8, 8), "head_dim": 64, "dtype": "float32", "repeats": 5},
        ),
        Case(
            "ceilings", "a large matrix product and a large copy", device_cases.ceilings, 30,
            {"side": 2048, "dtype": "float32", "nbytes": 1 << 28},
        ),
        Case(
            "kernels", "the aten backend beside the ATen operator", speed.speed, 30,
            {
                "head_dim": 64, "causal": True, "seqlens": (1024, 2048), "heads": (4, 4), "dtype": "float32",
                "seconds": 0.5,
            },
        ),
        Case(
            "links", "gloo between two processes", comm_cases.links, 30,
            {"transport": "process_group", "world": 2, "nbytes": (1 << 16, 1 << 22), "iters": 5},
        ),
        Case(
            "overlap", "a ring of two processes on a throttled link, blocking and not", comm_cases.overlap, 60,
            {
                "transport": "process_group", "world": 2, "tokens": 1024, "heads": 8, "head_dim": 64,
                "dtype": "float32", "link_share": 0.8,
            },
        ),
        Case(
            "memory", "the peak of a rank in rings of 2 and 4", ring_cases.memory, 60,
            {"worlds": (2, 4), "tokens": 2048},
        ),
        Case(
            "timeline", "virtual ranks recorded, beside what is predicted of a core each: traces for the page",
            timeline_cases.timelines, 30, {"seqlen": 4096, "heads": 8, "head_dim": 64, "dtype": "float32"}, leaves=True,
        ),
        Case("host time", "this package's own Python for a hop: a lower bound", comm_cases.host_time, 30),
        Case(
            "fp8", "K/V as e4m3: the kernels under the interpreter against the CPU's own code, bit by bit",
            fp8_cases.fp8, 60, {"dtypes": ("float32", "float16"), "shapes": ((1, 200, 2, 40),)},
        ),
    ]  # fmt: skip
