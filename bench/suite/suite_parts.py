"""Parts of ``bench suite``: command lines in order, each run as a process with its share of the time."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...comm.transports.nccl import explain_missing_nccl
from ...comm.transports.nccl_one_sided import one_sided_missing
from ...ring.local.registry import other_backends
from ..common.memory_table import ALL_GATHER, LUCIDRAINS, OURS, ULYSSES
from ..kernels.accuracy import BACKENDS
from ..ring.candidates import CONTEXT_PARALLEL, ZHUZILIN
from . import device_cases

PACKAGE = Path(__file__).absolute().parents[2]
PYTHON, OUT, FILE, SECONDS = "{python}", "{out}", "{file}", "{seconds}"
"""Placeholders in commands: this Python, the folder of results, the part's file, and half of the part's seconds."""
RINGATTN = (PYTHON, "-m", "ringattn")
SHAPE = ("--heads", "32", "--head-dim", "128")
NCCL_LIBRARY = "RINGATTN_NCCL_LIBRARY"
EXCHANGE_RANKS = 4  # GPUs that a mesh with a ring and a Ulysses group needs


@dataclass(frozen=True)
class SuitePart:
    """One part of the suite: a command, and the time that it takes."""

    name: str
    about: str
    command: tuple[str, ...]
    seconds: float  # longest time that it takes if all is well
    parallel_group: str = ""  # consecutive parts with the same name here run in parallel; they time nothing
    missing_reason: str | None = None  # what this machine lacks for this part

    @property
    def command_line(self) -> str:
        """The command as a user types it."""
        return " ".join(repr(word) if " " in word else word for word in self.command).replace(PYTHON, "python")

    @property
    def file(self) -> str:
        """The part's file in the folder of results."""
        return f"{self.name.replace(' ', '_')}.json"


def list_parts(device: str) -> list[SuitePart]:
    """Return all parts for this kind of device."""
    return gpu_parts() if device == "cuda" else cpu_parts()


def gpu_parts() -> list[SuitePart]:
    """Return the parts for a GPU, most important first."""
    gpus, special = torch.cuda.device_count(), tuple(f"right {backend}" for backend in BACKENDS)
    sanitizer = None if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the PATH"
    case = partial(_case, "cuda")
    right = [name for name in device_cases.CASES["cuda"] if name.startswith("right")]
    return [
        case("launches", 15),
        *(case(name, 60, "right") for name in right if not name.startswith(special)),
        *(case(name, 45, "special") for name in right if name.startswith(special)),
        case("ceilings", 8),
        case("targets", 45),
        bench_part("backends", "our kernels next to the kernels of other projects, as a ring calls them", 20,
                   "kernels", "--seqlen", "8k", *SHAPE, "--dtype", "bf16", "--seconds", "2", "--by",
                   ",".join((OURS, *(f"{name} backend" for name in other_backends(torch.device("cuda")))))),
        bench_part("beside NCCL", "the forward beside NCCL's kernels, one rank sending to itself", 20,
                   "links", "--world", "1", "--transport", "nccl", "--channels", "auto,8", "-b", "64M", "-e", "64M",
                   "--beside", "forward", missing=explain_missing_nccl()),
        case("local-4", 135, "calls"),
        case("nccl-1", 135, "calls", missing=explain_missing_nccl()),
        case("nccl_one_sided-2", 135, "calls", missing=one_sided_missing() or _alone(gpus)),
        case("compiled", 135, "calls"),
        case("killed nccl_one_sided", 20, missing=one_sided_missing() or _alone(gpus)),
        case("captured", 20),
        case("nccl-2", 35, missing=explain_missing_nccl() or _sharing_refusal(gpus), shares=gpus < 2),
        case("killed nccl", 20, missing=explain_missing_nccl() or _sharing_refusal(gpus), shares=gpus < 2),
        bench_part("host", "the host's time to post a hop of 4k tokens, next to the hop's compute time", 20, "host",
                   "--tokens", "4k", *SHAPE, missing=explain_missing_nccl()),
        *(
            # Only our kernels: torch's have harmless races, and probe driver features that may be missing.
            SuitePart(tool, "a tiny Hopper forward and backward under compute-sanitizer",
                      ("compute-sanitizer", "--tool", tool, *more, "--kernel-name", "kns=hopper", "--error-exitcode",
                       "9", PYTHON, "-m", device_cases.__name__, "smallest hopper", FILE),
                      40, "sanitizer", missing_reason=sanitizer)
            for tool, *more in (("racecheck",), ("memcheck", "--report-api-errors", "no"))
        ),
        case("fp8", 8),
        case("LocalWorld", 12),
        *(_between_gpus(gpus) if gpus > 1 else ()),
        SuitePart("tune", "tiles close to the default, as time allows",
                  (*RINGATTN, "tune", "--heads", "16", "--head-dim", "128", "--seqlen", "8k", "--causal", "--tiles",
                   "4", "--budget", SECONDS, "--save-dir", f"{OUT}/tables", "--json", FILE), 45),
    ]  # fmt: skip


def _between_gpus(gpus: int) -> list[SuitePart]:
    """Return the parts for ``gpus`` ranks: links, overlap, rings, and meshes from ``EXCHANGE_RANKS`` GPUs on."""
    world = ("--world", str(gpus))
    return [
        bench_part("links", "every transport over every edge", 60,
                   "links", *world, "-b", "1M", "-e", "256M", "-f", "16", "--channels", "auto,8"),
        bench_part("overlap", "a ring that prefetches and one that blocks", 40,
                   "overlap", *world, "--tokens", "8k", *SHAPE, "--slots", "3", "--prefetch", "0,2"),
        *(_rings(*world) if gpus < EXCHANGE_RANKS else _rings_and_meshes(*world)),
    ]  # fmt: skip


def _rings(*words: str) -> list[SuitePart]:
    about = "a whole ring next to one device and to other methods"
    return [bench_part("ring", about, 60, "ring", "--seqlen", "16k,64k", *SHAPE, *words)]


def _rings_and_meshes(*words: str) -> list[SuitePart]:
    """Return the parts for 4 or more GPUs: every kind of call over NCCL, rings, and meshes of rings and Ulysses groups.

    Meshes have a part of their own, because every mesh opens communicators. ``words`` are flags for both benchmarks.
    """
    others = ",".join((OURS, ALL_GATHER, CONTEXT_PARALLEL, ZHUZILIN, LUCIDRAINS))
    return [
        _case("cuda", "nccl-4", 90, missing=explain_missing_nccl()),
        *_rings(*words, "--by", others),
        bench_part("Ulysses x ring", "meshes of Ulysses groups and rings, next to Ulysses alone", 60,
                   "ring", "--seqlen", "16k,64k", *SHAPE, *words, "--by", ULYSSES),
    ]  # fmt: skip


def cpu_parts() -> list[SuitePart]:
    """Return parts for the CPU."""
    case = partial(_case, "cpu")
    right = [name for name in device_cases.CASES["cpu"] if name.startswith("right")]
    small = ("--heads", "8", "--head-dim", "64")
    return [
        case("launches", 60),
        *(case(name, 120, "right") for name in right),
        bench_part("ring", "two processes over gloo next to one device and to other methods", 180, "ring", "--world",
                   "2", "--seqlen", "2k,4k", "--layout", "zigzag,contiguous", "--repeats", "3"),
        case("LocalWorld", 60),
        case("ceilings", 30),
        bench_part("kernels", "the aten backend next to the ATen operator", 90, "kernels", "--seqlen", "1k,2k",
                   "--head-dim", "64", "--seconds", "0.5"),
        bench_part("links", "gloo between two processes", 60, "links", "--world", "2", "--transport", "process_group",
                   "-b", "64K", "-e", "4M", "-f", "64", "-n", "5"),
        bench_part("overlap", "a ring of two processes on a throttled link, blocking and not", 60, "overlap", "--world",
                   "2", "--tokens", "1k", *small, "--slots", "3", "--prefetch", "0,2"),
        bench_part("memory", "peak memory of a rank in rings of 2 and 4", 90, "memory", "--world", "2,4", "--tokens",
                   "2k"),
        bench_part("timeline", "when each rank of a ring computed, sent, received and waited", 60, "timeline",
                   "--world", "2", "--seqlen", "4k", *small, "--trace", f"{OUT}/trace.json"),
        bench_part("host", "the time of this package's Python per hop, a lower bound", 30, "host", "--device", "cpu"),
        case("fp8", 60),
    ]  # fmt: skip


def _case(
    device: str, name: str, seconds: float, beside: str = "", *, missing: str | None = None, shares: bool = False
) -> SuitePart:
    """Return the part for a case of :mod:`.device_cases`; with ``shares`` it preloads an NCCL that shares GPUs.

    ``beside`` is the part's ``parallel_group``.
    """
    run = device_cases.CASES[device][name]
    about = (getattr(run, "func", run).__doc__ or "").partition("\n")[0].rstrip(".")
    library = os.environ.get(NCCL_LIBRARY)
    before = ("env", f"LD_PRELOAD={Path(library).absolute()}") if shares and library else ()
    return SuitePart(name, about, (*before, PYTHON, "-m", device_cases.__name__, name, FILE), seconds, beside, missing)


def bench_part(name: str, about: str, seconds: float, *words: str, missing: str | None = None) -> SuitePart:
    """Return the part for ``ringattn bench`` with these words; it writes JSON into the folder of results."""
    return SuitePart(name, about, (*RINGATTN, "bench", *words, "--json", FILE), seconds, missing_reason=missing)


def _alone(gpus: int) -> str | None:
    """Return why two ranks with a GPU each cannot run here, or None."""
    return None if gpus > 1 else "each rank needs its own GPU, but this machine has one"


def _sharing_refusal(gpus: int) -> str | None:
    """Return why two NCCL ranks cannot run here, or None."""
    if gpus > 1 or os.environ.get(NCCL_LIBRARY):
        return None
    return "two ranks on one GPU need NCCL 2.30. Set RINGATTN_NCCL_LIBRARY to its library."
