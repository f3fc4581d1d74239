"""Run as a script: by their keys in Triton's cache, what `tune` launches beside what its workers compile; no GPU.

And launches whose scores are modified, beside what `inspect` compiles for them.

Nothing is compiled: a launch and a worker are both stopped where Triton would look into its cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.compiler.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver

from ringattn.autotune import Job, Journal, Shape, Verdict, ranking, space
from ringattn.autotune.inspect.arguments import ast_source
from ringattn.autotune.inspect.gate import compile_and_ask
from ringattn.autotune.inspect.variant import Variant
from ringattn.autotune.ranking import point_text, tile_text
from ringattn.autotune.tune import measure
from ringattn.autotune.tune.compile import as_a_launch_says_it, source_of, variant_of
from ringattn.autotune.tune.measure import DeviceTrials
from ringattn.autotune.tune.run import Wish, compile_part
from ringattn.bench.kernels.accuracy import Inputs, Results
from ringattn.kernels import Scores, Tile, attention, attention_dkdv, attention_dq, attention_forward, choice, order
from ringattn.kernels import launch as launching
from ringattn.kernels.config import config_for
from ringattn.kernels.experimental import hopper_launch, single_pass
from ringattn.kernels.order import Chip, l2_of
from ringattn.kernels.tables import Gpu, Point, options_of

from .gluon_arguments import Hopper
from .tune_cases import NoBars, at_once

H200, CPU, TARGET = Gpu("NVIDIA H200", 90), torch.device("cpu"), GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132
OTHERS = ("delta_kernel", "reduce_kernel")
"""Launched beside the kernels that are tuned: compiled on the GPU's machine, a second each, shared by candidates."""

SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": torch.empty(16)},
    "dropout": {"dropout_p": 0.25},  # a threshold that 16 divides
}
"""Of a launch, by what `inspect` calls them."""

Key = tuple[str, str, str]


class Found(Exception):
    """The key under which Triton would look."""


def key_of(source: Any, target: GPUTarget, options: dict[str, Any]) -> Key:
    """What of a key is not the same for all that one Triton compiles."""
    made = make_backend(target).parse_options({**options, **source.parse_options()})
    return source.fn.__name__, source.hash(), made.hash()


def stop(source: Any, target: GPUTarget = TARGET, options: dict[str, Any] | None = None, **_: Any) -> Any:
    """In the place of ``triton.compile``."""
    raise Found(key_of(source, target, options or {}))


def launched() -> list[Key]:
    """What is launched from now on, in the order of launches."""
    keys: list[Key] = []

    def launch(kernel: Any, grid: int, device: torch.device, *given: Any, **options: Any) -> None:
        try:
            kernel.warmup(*given, grid=(grid,), **options)
        except Found as found:
            keys.append(found.args[0])

    for module in (attention, single_pass, hopper_launch):
        vars(module)["launch"] = launch
    return keys


def pose_as_hopper() -> None:
    """Let the CPU pass for an H200 up to the driver, and Triton for one that compiles nothing."""
    driver.set_active(Hopper())
    vars(triton)["compile"] = vars(triton.compiler.compiler)["compile"] = vars(triton.compiler)["compile"] = stop
    vars(single_pass)["gpu_of"] = vars(launching)["gpu_of"] = lambda device: H200
    vars(hopper_launch)["is_hopper"] = lambda device: True
    vars(choice)["chip_of"] = vars(order)["chip_of"] = lambda device: Chip(MULTIPROCESSORS, l2_of(90))
    vars(measure)["exactly"] = vars(measure)["by_pytorch"] = nothing
    vars(ranking)["run_jobs"] = at_once


def nothing(given: Inputs, causal: bool) -> Results:
    """In the place of the reference, of which the launches take no more than sizes."""
    out, lse = torch.zeros_like(given.dout), torch.zeros_like(given.dlse)
    return Results(out, lse, *map(torch.zeros_like, given[:3]))


def compiled_key(job: Job) -> Key:
    """As a worker of ``tune`` asks for it."""
    return key_in_cache(variant_of(job), source_of(job))


def small_space(point: Point, arch: int) -> list[Tile]:
    """Of every kernel at the point a tile whose sides differ, so that neither passes for the other."""
    tiles = space(point, arch)
    return [
        *[one for one in tiles if options_of(one)][:1],
        *[one for one in tiles if not options_of(one) and one.block_q != one.block_k][:1],
    ]


def compare(shape: Shape, length: int, causal: bool) -> Iterator[str]:
    """What is launched and was not compiled."""
    asked: list[Job] = []

    def compiles(job: Job) -> Verdict:
        asked.append(job)
        return Verdict((), 1.0)

    with tempfile.TemporaryDirectory() as folder:
        wish = Wish(shape, (length,), causal, H200, None, Path(folder), 1.0, 1)
        found = compile_part(wish, Journal(Path(folder) / "journal", ""), NoBars(), compile_with=compiles)
    keys = launched()
    for one in found:
        trials = DeviceTrials(one.point, shape, CPU)
        for tile in dict.fromkeys([one.default, *one.ranked.tiles]):
            compiled = {compiled_key(job) for job in asked if job.kernel == one.point.kernel and job.tile == tile}
            for part, launch in (("timed", trials._launch), ("checked", trials._results)):
                keys.clear()
                launch(tile)
                mine = [key for key in keys if key[0] not in OTHERS]
                missing = sum(key not in compiled for key in mine)
                says = "MISSING" if missing else "found"
                yield f"{says}: {part} {len(mine)}, {point_text(one.point)}, {tile_text(tile)}"


def modified(feature: str) -> Iterator[str]:
    """A launch of each kernel in one piece, and of `inspect` the variant of that name."""
    keys, length, heads, dim = launched(), 64, 16, 64  # of sizes that 16 divides
    q, k, v, dout = (torch.empty(1, length, heads, dim, dtype=torch.bfloat16) for _ in range(4))
    lse, at = torch.empty(1, heads, length), torch.arange(length, dtype=torch.int32)
    scores = Scores(**SCORES[feature], q_positions=at, k_positions=at)
    given: Any = (dout, q, k, v, lse, lse)
    config = config_for(90, q.dtype, dim)
    kernels = {
        "forward": lambda: attention_forward(q, k, v, scores=scores, config=config),
        "dq": lambda: attention_dq(*given, scores=scores, config=config),
        "dkdv": lambda: attention_dkdv(*given, scores=scores, config=config),
    }
    for kernel, step in kernels.items():
        keys.clear()
        step()
        tile = getattr(config, kernel)
        variant = Variant(kernel, 90, "bf16", dim, dim, tile, "only", full=True, grouped=False, features=(feature,))
        wanted = key_in_cache(variant, as_a_launch_says_it(ast_source(variant)))
        yield f"{'found' if keys == [wanted] else 'MISSING'}: {kernel} with {feature}"


def key_in_cache(variant: Variant, source: Any) -> Key:
    """Under which Triton would look for what is compiled of this."""
    try:
        compile_and_ask(variant, source)
    except Found as found:
        key: Key = found.args[0]
        return key
    raise AssertionError(f"{variant} was not compiled")


def main(cases: Iterable[tuple[Shape, int, bool]]) -> None:
    torch.set_num_threads(1)
    pose_as_hopper()
    vars(ranking)["space"] = small_space
    for case in cases:
        print(*compare(*case), sep="\n")
    for feature in SCORES:
        print(*modified(feature), sep="\n")


if __name__ == "__main__":
    main([(Shape(32, 8, 128, 128), 8192, True), (Shape(6, 6, 64, 64), 8192, True), (Shape(16, 1, 64, 64), 2048, False)])
