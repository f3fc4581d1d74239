"""What the suite finds out itself: numbers that no other command tells."""

from __future__ import annotations

from ..kernels import accuracy, beside, speed
from . import device_cases, fp8_cases, worlds
from .cases import Case


def gpu_cases() -> list[Case]:
    """Those of a GPU."""
    return [
        Case("launches", "NamedTuple arguments at launch; what a launch costs the host", device_cases.launches),
        *(
            Case(
                f"right {dtype} D{dim}", "every kernel against float64", accuracy.accuracy,
                {"backend": "triton", "dtype": dtype, "head_dim": dim, "full_worlds": (1, 3) if dim == 128 else (1,)},
            )
            for dtype in ("bfloat16", "float16")
            for dim in (128, 64, 256, 40)
        ),
        Case(
            "right float32 D64", "tf32x3 against float64", accuracy.accuracy,
            {"backend": "triton", "dtype": "float32", "head_dim": 64},
        ),
        Case(
            "right ragged", "odd lengths, no groups, Dv other than D", accuracy.accuracy,
            {"backend": "triton", "dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128, "seqlen": 997,
             "heads": (3, 3)},
        ),
        *(
            Case(
                f"right {backend} {dtype} D{dim}", f"{accuracy.BACKENDS[backend]}, against float64", accuracy.accuracy,
                {"backend": backend, "dtype": dtype, "head_dim": dim, "full_worlds": (1, 3)},
            )
            for backend in accuracy.BACKENDS
            for dtype, dim in (("bfloat16", 128), ("float16", 64))
        ),
        Case("ceilings", "a large matrix product and a large copy", device_cases.ceilings),
        Case("targets", "floors and goals beside SDPA's flash and cuDNN", speed.targets),
        Case("beside", "a copy of a few blocks on a high-priority stream beside the forward", beside.beside),
        Case("fp8", "K/V as e4m3: the kernels against the CPU, bit by bit, and their speed", fp8_cases.fp8),
        Case("LocalWorld", "four virtual ranks against one launch", worlds.local_world),
    ]  # fmt: skip


def cpu_cases() -> list[Case]:
    """The same where it makes sense; kernels run under Triton's interpreter, and are not timed."""
    small = {"seqlen": 80, "heads": (2, 1)}
    return [
        Case(
            "launches", "NamedTuple arguments at launch, under the interpreter", device_cases.launches,
            {"dtype": "float32", "seqlen": 80},
        ),
        *(
            Case(
                f"right aten {dtype}", "PyTorch's operator in a ring against float64", accuracy.accuracy,
                {"backend": "aten", "dtype": dtype, "head_dim": 64, "seqlen": 512},
            )
            for dtype in ("float32", "bfloat16", "float16")
        ),
        *(
            Case(
                f"right {backend} {dtype} D{dim}", "kernels under the interpreter against float64", accuracy.accuracy,
                {"backend": backend, "dtype": dtype, "head_dim": dim, **small},
            )
            for backend, dtype, dim in (
                ("triton", "float32", 64), ("triton", "float16", 40), ("single_pass", "float16", 40)
            )
        ),
        Case(
            "ceilings", "a large matrix product and a large copy", device_cases.ceilings,
            {"side": 2048, "dtype": "float32", "nbytes": 1 << 28},
        ),
        Case(
            "fp8", "K/V as e4m3: the kernels under the interpreter against the CPU's own code, bit by bit",
            fp8_cases.fp8, {"dtypes": ("float32", "float16"), "shapes": ((1, 200, 2, 40),)},
        ),
        Case(
            "LocalWorld", "four virtual ranks against PyTorch's attention in one piece", worlds.local_world,
            {"tokens": 512, "heads": (8, 8), "head_dim": 64, "dtype": "float32", "repeats": 5},
        ),
    ]  # fmt: skip


def cases_of(device: str) -> list[Case]:
    """By the kind of device."""
    return gpu_cases() if device == "cuda" else cpu_cases()
