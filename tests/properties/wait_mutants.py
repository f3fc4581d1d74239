"""Mutate code that orders transfers and compute, or that compares the ranks' calls; count surviving mutants.

Run ``python -m tests.properties.wait_mutants`` from the root; ``--sample 20`` tests only so many. The mutants come from
the syntax trees of the transports, the ring loop, the preflight, the watchdog, the control and the mesh. Each mutant
runs in its own process, in which one function has other code. A test of the module may catch the mutant. So may a case
of the proof, which looks for races, deadlocks, another order of posts, exposed transfers, extra kernels, other results,
and changes in which waits are needed.

The exit code is 1 if a survivor has no reason in tests/properties/wait_mutants.md, or if a mutant listed there is gone
or caught.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("RINGATTN_TEST_HANGS", "15")  # end mutants that hang sooner

import argparse
import multiprocessing
import random
import shlex
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from ..support.cuda.cases import CACHED, CASES
from ..support.cuda.ring import Recording, record
from .mutations import Mutant, apply, mutants

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
REASONS = Path(__file__).with_name("wait_mutants.md")
PROCESSES, FORK = 2, multiprocessing.get_context("fork")
SECONDS = 120  # per mutant; a mutant that hangs counts as caught

NCCL = (
    "contiguous, other direction", "two slots, no prefetch", "full, contiguous, full", "2 x 3, full, then documents",
    "two chunks", "2 x 2, bfloat16 by wire", "forward twice", "full, then a longer window", "tokens that all see",
    "3 x 2, contiguous, then full", "bfloat16 by wire, skipped hops", "fp8 by wire, two chunks", "unshard", "halo",
    "nodes of 1 and 3, contiguous, two chunks, two slots", "nodes of 2 and 1, unshard",
    "keys that stay", "2 x 2, keys that stay", "2 x 3, window, three runs of tokens",
)  # fmt: skip
OTHERS = (
    "contiguous, other direction", "two slots, no prefetch", "2 x 2, contiguous", "forward twice", "documents",
    "full, contiguous, full",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Functions of one module, and the cases and tests that must catch their mutants."""

    module: str
    functions: tuple[str, ...]  # a class means all of its methods, "" the whole module
    transports: tuple[str, ...]
    tests: tuple[str, ...]  # arguments of successive pytest runs
    names: tuple[str, ...] = ()  # names of cases; empty means the transport's default cases

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Transports and names of the proof's cases."""
        return [(by, name) for by in self.transports for name in self.names or (NCCL if by == "nccl" else OTHERS)]


HALO = ("halo", "halo, striped")
RING = ("ring/test_loop.py",)
LANES = ("comm/test_copy_streams.py", "comm/test_nccl.py", "comm/test_transport.py -k test_local")
LOCAL = ("comm/test_copy_streams.py", "comm/test_transport.py -k test_local", "comm/test_local.py")
ONE_SIDED = ("comm/test_nccl_one_sided.py",)
BACKWARDS = "ring/test_disagreements.py -k another_order_are"
MESH = (
    "ring/test_ulysses.py -k 'joined or exchange or seed or uses_the_ring or shard or missing or differing'",
    "ring/test_args.py -k on_both_ranks",
    "ring/test_shards.py",
    BACKWARDS,
)
SHARED = ("kernels/test_shared_cache.py",)
PREFLIGHT = ("comm/test_preflight.py", "comm/test_watch.py -k does_not_come", BACKWARDS)
COPY_STREAMS = ("StreamFence", "CudaCopyStream", "HostCopyStream")
NCCL_POST = ("NcclTransport.mark", "NcclTransport.post", "NcclTransport._enqueue", "NcclTransport._group")
NODE_POST = ("ByNodeTransport.post", "ByNodeTransport._is_in_node")
LOCAL_POST = (
    *("_LocalFence.wait", "_LocalFence.order", "_LocalFence._parts"),
    *(f"LocalTransport.{name}" for name in ("mark", "post", "_publish", "_receive", "_take")),
)
ONE_SIDED_POST = tuple(
    f"NcclOneSidedTransport.{name}" for name in ("_enqueue", "_make_room", "_put", "_rounds", "_pieces", "_box")
)

TARGETS = (
    Target("ring.loop", ("",), ("nccl",), RING),
    Target("ring.buffers", ("RingCall", "Arrival", "RingBuffer"), ("nccl",), RING),
    Target("ring.key_values", ("",), ("nccl",), RING),
    Target("ring.dkv", ("",), ("nccl",), RING),
    Target("ring.shards", ("exchange_all", "transfer"), ("nccl",), ("ring/test_shards.py",)),
    Target("ring.moves", ("exchange_rows", "_sum_rows"), ("nccl",), ("ring/test_moves.py",), HALO),
    Target("comm.slots", ("Slots",), ("nccl", "nccl_one_sided"), ("comm/test_slots.py", *ONE_SIDED)),
    Target("comm.transports.copy_streams", COPY_STREAMS, ("nccl", "local"), LANES),
    Target("comm.transports.nccl", NCCL_POST, ("nccl",), ("comm/test_nccl.py",)),
    Target("comm.transports.nccl", NODE_POST, ("nccl",), ("comm/test_nccl.py",)),
    Target("comm.transports.nccl_one_sided", ONE_SIDED_POST, ("nccl_one_sided",), ONE_SIDED),
    Target("comm.transports.local", LOCAL_POST, ("local",), LOCAL),
    Target("comm.world", ("LocalWorld._rank_stream",), ("local",), LOCAL),
    Target("kernels.shared_cache", ("SharedValue", "SharedCache"), ("local",), SHARED, tuple(CACHED)),
    Target("comm.watchdog.preflight", ("",), (), PREFLIGHT),
    Target("comm.watchdog.watch", ("Watch",), (), ("comm/test_watch.py", "comm/test_telemetry.py")),
    Target("comm.control", ("CheckSchedule", "Control"), (), ("comm/test_control.py",)),
    Target("ring.mesh", ("",), (), MESH),
)


Counts = tuple[Counter[str], Counter[str]]  # waits by name: all of them, and the implied ones


def counted(recording: Recording) -> Counts:
    """Return the waits of one case: all of them, and the implied ones."""
    implied = Counter(wait.name for wait in recording.graph.redundant_waits())
    return Counter(wait.name for wait in recording.graph.waits), implied


def verdicts(counts: Iterable[Counts]) -> dict[str, bool]:
    """Return, for each wait that is implied in some case, whether it is implied in all."""
    there, implied = Counter[str](), Counter[str]()
    for all_of_it, some in counts:
        there, implied = there + all_of_it, implied + some
    return {name: implied[name] == there[name] for name in implied}


def proved(transport: str, name: str, counts: list[Counts]) -> str:
    """Run one case of the proof, add its waits to `counts`, and return the reason of a failure or ""."""
    recording = record(CASES[transport][name])
    problems = recording.problems() or recording.wrong(1)
    if problems:
        return f"{transport}, {name}: {problems[0]}"
    counts.append(counted(recording))
    return ""


def tested(arguments: str) -> str:
    """Run tests of a module, and return the reason of a failure or ""."""
    file, *options = shlex.split(arguments)
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", str(SECONDS)]
    quiet += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # some modules are imported already
    code = pytest.main([str(ROOT / "tests" / file), *options, *quiet])
    return "" if code == pytest.ExitCode.OK else f"pytest {arguments}"


def examined(target: Target, mutant: Mutant | None) -> str | list[Counts]:
    """Return why a mutant is caught, or the waits of every case. None means the unchanged code."""
    if mutant is not None:
        apply(mutant)
    counts: list[Counts] = []
    checks = [partial(proved, *case, counts) for case in target.cases]
    checks[1:1] = [
        partial(tested, arguments) for arguments in target.tests
    ]  # the first case and the tests catch most mutants, so they run first
    try:
        for check in checks:
            reason = check()
            if reason:
                return reason
    except BaseException as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return counts


def unchanged(targets: Iterable[Target]) -> dict[Target, dict[str, bool]]:
    """Return the verdicts on the unchanged code. All tests must pass there, or mutants would count as caught."""
    by_target = {}
    for target, counts in run((target, partial(examined, target, None)) for target in dict.fromkeys(targets)):
        assert isinstance(counts, list), f"{target.module} without a mutant: {counts}"
        by_target[target] = verdicts(counts)
    return by_target


def survivors(chosen: list[tuple[Target, Mutant]], show: bool) -> list[str]:
    """Return the mutants that nothing catches, as text."""
    left, before = [], unchanged(target for target, _ in chosen)
    for (target, mutant), reason in run((pair, partial(examined, *pair)) for pair in chosen):
        if isinstance(reason, list):
            reason = "" if verdicts(reason) == before[target] else "the set of implied waits changed"
        assert not reason.startswith("Traceback"), f"applying the mutant {mutant} failed: {reason}"
        if show:
            print(f"{'caught' if reason else 'SURVIVED'}  {mutant}\n    {reason}"[:400], flush=True)
        if not reason:
            left.append(str(mutant))
    return left


def serve(work: Callable[[], object], connection: Connection) -> None:
    """Run `work`, send its result, and discard its output."""
    try:
        torch.set_num_threads(1)  # the first call after a fork replaces the thread pool, and is not thread-safe
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        result: object = work()
    except BaseException:
        result = traceback.format_exc()
    connection.send(result)
    connection.close()
    os._exit(0)  # do not wait for threads that a mutant left behind


def in_process(work: Callable[[], object]) -> Any:
    """Run `work` in a process of its own, and return its result or the reason that there is none."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=serve, args=(work, theirs))  # not a daemon, because tests start processes
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(SECONDS) else "hangs"
    except EOFError:
        result = "its process died"
    process.kill()
    process.join()
    return result


def run(jobs: Iterable[tuple[T, Callable[[], Any]]]) -> Iterator[tuple[T, Any]]:
    """Run the jobs in processes, and yield each job with its result."""
    listed = [*jobs]
    with ThreadPoolExecutor(PROCESSES) as pool:
        yield from zip((job for job, _ in listed), pool.map(in_process, (work for _, work in listed)), strict=True)


def main(arguments: list[str]) -> int:
    """Run the mutants and print the survivors; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sample", type=int, help="test only this many mutants, chosen with a fixed seed")
    parser.add_argument("--only", default="", help="test only mutants whose text contains this")
    parser.add_argument("--show", action="store_true", help="print how each mutant was caught")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record(CASES["nccl"]["world 2"])  # import lazily loaded modules once, before forking
    chosen = [
        (target, mutant)
        for target in TARGETS
        for mutant in mutants(f"ringattn.{target.module}", target.functions)
        if options.only in str(mutant)
    ]
    if options.sample:
        chosen = random.Random(0).sample(chosen, options.sample)
    left = survivors(chosen, options.show)
    print(f"{len(chosen) - len(left)} of {len(chosen)} mutants caught")
    known = {line.strip() for line in REASONS.read_text().splitlines() if line.startswith("    ")}
    unknown = [text for text in left if text not in known]
    requested = {str(mutant) for _, mutant in chosen} if options.sample or options.only else known
    gone = sorted(known & requested - {*left})
    for title, texts in (("survived, but has no reason in", unknown), ("caught or gone, but listed in", gone)):
        for text in texts:
            print(f"{title} tests/properties/{REASONS.name}:\n    {text}")
    return int(bool(unknown or gone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
