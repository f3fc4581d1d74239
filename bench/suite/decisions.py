"""What the parts of a suite decide: whether a kernel or a transport may become a default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..kernels.contender import BACKWARD, FORWARD, OURS
from ..kernels.speed import RATE

FULL128, CAUSAL128, FULL64 = ("full", 128), ("causal", 128), ("full", 64)
YES, NO, OPEN = "yes", "no", "open"
QUESTIONS = {
    "portable kernels are right in bf16 and fp16": ("right bfloat16", "right float16"),
    "Hopper kernels are right": ("right hopper", "racecheck", "memcheck"),
    "the single pass is right": ("right single_pass ",),
    "the single pass in a fixed order is right": ("right single_pass_deterministic",),
    "local passes on CUDA streams": ("local",),
    "nccl passes, one rank to itself": ("nccl-1",),
    "nccl passes, two ranks": ("nccl-2",),
    "copy_engine passes, two processes": ("copy_engine-2", "killed"),
    "the watch leaves other people's captures alone": ("captured",),
    "ring_attention compiles on CUDA": ("compiled",),
    "the host is ahead of the device at 4k tokens": ("host",),
}
"""Answered by parts whose names begin so: yes where all of them passed, no where one failed, else open."""
FASTER = {
    "the Hopper forward": ("Hopper kernels are right", FORWARD, f"{OURS} hopper", (FULL128, CAUSAL128, FULL64)),
    "the Hopper backward": ("Hopper kernels are right", BACKWARD, f"{OURS} hopper single pass", (FULL128,)),
    "the single pass": ("the single pass is right", BACKWARD, f"{OURS} single pass", (FULL128,)),
}
"""What is to be the default where it is right and, in the table of targets, faster than what is the default now."""


def decisions(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row per question: the answer, and why."""
    found = {what: passed([one for one in cases if one["name"].startswith(names)]) for what, names in QUESTIONS.items()}
    rates = dict(measured(cases))
    for what, (question, passes, by, shapes) in FASTER.items():
        found[f"{what} is to be the default of sm_90"] = faster(found[question][0], rates, passes, by, shapes)
    return [{"question": what, "answer": answer, "why": why} for what, (answer, why) in found.items()]


def passed(cases: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Whether all passed; which did not."""
    failed = [one["name"] for one in cases if one["state"] == "failed" or any(n.get("fails") for n in one["numbers"])]
    if failed:
        return NO, f"failed: {', '.join(failed)}"
    left = [f"{one['name']} {one['state']}" for one in cases if one["state"] != "done"]
    return (OPEN, ", ".join(left) or "not run") if left or not cases else (YES, "")


def measured(cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[object, ...], float]]:
    """TFLOP/s of the table of targets."""
    for number in (number for case in cases if case["name"] == "targets" for number in case["numbers"]):
        if number["unit"] == RATE and number["value"]:
            of = number["labels"]
            yield (number["name"], of.get("by"), of.get("mask"), of.get("head_dim")), number["value"]


def faster(
    right: str, rates: Mapping[tuple[object, ...], float], passes: str, by: str, shapes: Sequence[tuple[str, int]]
) -> tuple[str, str]:
    """Whether it is right, and faster than the default on every shape; by how much."""
    both = {shape: (rates.get((passes, by, *shape)), rates.get((passes, OURS, *shape))) for shape in shapes}
    times = {f"{mask} D{dim}": a / b for (mask, dim), (a, b) in both.items() if a and b}
    told = ", ".join(f"{one:.3f} on {shape}" for shape, one in times.items()) or "not measured"
    answer = OPEN if right != YES or len(times) < len(shapes) else YES
    if right == NO or any(one <= 1 for one in times.values()):
        answer = NO
    return answer, f"right: {right}; times the default's TFLOP/s: {told}"
