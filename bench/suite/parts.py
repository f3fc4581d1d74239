"""What ``bench suite`` runs: command lines, each in a process of its own with its share of the time, in order."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...comm.transports.nccl import nccl_missing
from ...comm.transports.nccl_one_sided import one_sided_missing
from ..common.memory_table import ALL_GATHER, LUCIDRAINS, OURS, ULYSSES
from ..kernels.accuracy import BACKENDS
from ..ring.candidates import CONTEXT_PARALLEL, ZHUZILIN
from . import device_cases

PACKAGE = Path(__file__).absolute().parents[2]
PYTHON, OUT, FILE, SECONDS = "{python}", "{out}", "{file}", "{seconds}"
"""In a command: this Python, the folder of results, the part's own file there, half of its seconds, to be used up."""
RINGATTN = (PYTHON, "-m", "ringattn")
SHAPE = ("--heads", "32", "--head-dim", "128")
NCCL_LIBRARY = "RINGATTN_NCCL_LIBRARY"
EXCHANGING = 4  # GPUs: with fewer no mesh has a ring and an exchange


@dataclass(frozen=True)
class Part:
    """One thing to find out."""

    name: str
    about: str
    command: tuple[str, ...]
    seconds: float  # that it takes at most where all is well
    beside: str = ""  # parts of one such name that follow each other run side by side: nothing is timed
    missing: str | None = None  # what this machine lacks for it

    @property
    def command_line(self) -> str:
        """The command as a reader types it."""
        return " ".join(repr(word) if " " in word else word for word in self.command).replace(PYTHON, "python")

    @property
    def file(self) -> str:
        """The file of the folder of results that its rows are in, of commands that have some."""
        return f"{self.name.replace(' ', '_')}.json"


def parts_of(device: str) -> list[Part]:
    """Everything for this kind of device."""
    return gpu_parts() if device == "cuda" else cpu_parts()


def gpu_parts() -> list[Part]:
    """First what no CPU can tell, then whether it is right, then how fast it is; what may hang comes late."""
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
        bench("beside NCCL", "the forward beside NCCL's own kernels, one rank to itself", 20,
              "links", "--world", "1", "--transport", "nccl", "--channels", "auto,8", "-b", "64M", "-e", "64M",
              "--beside", "forward", missing=nccl_missing()),
        case("local-4", 135, "calls"),
        case("nccl-1", 135, "calls", missing=nccl_missing()),
        case("nccl_one_sided-2", 135, "calls", missing=one_sided_missing() or _alone(gpus)),
        case("compiled", 135, "calls"),
        case("killed nccl_one_sided", 20, missing=one_sided_missing() or _alone(gpus)),
        case("captured", 20),
        case("nccl-2", 35, missing=nccl_missing() or _no_sharing(gpus), shares=gpus < 2),
        case("killed nccl", 20, missing=nccl_missing() or _no_sharing(gpus), shares=gpus < 2),
        bench("host", "the host's time to post a hop of 4k tokens, telemetry and watch on, beside its compute", 20,
              "host", "--tokens", "4k", *SHAPE, missing=nccl_missing()),
        *(
            Part(tool, "a tiny Hopper forward and backward under compute-sanitizer",
                 ("compute-sanitizer", "--tool", tool, *more, "--kernel-name", "kns=hopper", "--error-exitcode", "9",
                  PYTHON, "-m", device_cases.__name__, "smallest hopper", FILE), 40, "sanitizer", missing=sanitizer)
            # of our kernels alone: torch's have races that are harmless, and ask the driver for what it has not
            for tool, *more in (("racecheck",), ("memcheck", "--report-api-errors", "no"))
        ),
        case("fp8", 8),
        case("LocalWorld", 12),
        *(_between_gpus(gpus) if gpus > 1 else ()),
        Part("tune", "tiles next to the default's, by what time is left",
             (*RINGATTN, "tune", "--heads", "16", "--head-dim", "128", "--seqlen", "8k", "--causal", "--tiles", "4",
              "--budget", SECONDS, "--save-dir", f"{OUT}/tables", "--json", FILE), 45),
    ]  # fmt: skip


def _between_gpus(gpus: int) -> list[Part]:
    """Of a machine of several GPUs: each rank has one of its own."""
    world = ("--world", str(gpus))
    return [
        bench("links", "every transport over every edge", 60, "links", *world, "-b", "1M", "-e", "256M", "-f", "16",
              "--channels", "auto,8"),
        bench("overlap", "a ring that prefetches and one that blocks", 40, "overlap", *world, "--tokens", "8k", *SHAPE,
              "--slots", "3", "--prefetch", "0,2"),
        *(_rings(*world) if gpus < EXCHANGING else _rings_and_meshes(*world)),
    ]  # fmt: skip


def _rings(*words: str) -> list[Part]:
    return [
        bench("ring", "a whole ring beside one device and the ways around a ring", 60, "ring", "--seqlen", "16k,64k",
              *SHAPE, *words),
    ]  # fmt: skip


def _rings_and_meshes(*words: str) -> list[Part]:
    """Candidates that exchange heads apart from the others: every mesh opens communicators of its own."""
    others = ",".join((OURS, ALL_GATHER, CONTEXT_PARALLEL, ZHUZILIN, LUCIDRAINS))
    return [
        _case("cuda", "nccl-4", 90, missing=nccl_missing()),
        *_rings(*words, "--by", others),
        bench("Ulysses x ring", "heads for tokens among some ranks, rings of the rest, beside Ulysses alone", 60,
              "ring", "--seqlen", "16k,64k", *SHAPE, *words, "--by", ULYSSES),
    ]  # fmt: skip


def cpu_parts() -> list[Part]:
    """The same where it makes sense."""
    case = partial(_case, "cpu")
    right = [name for name in device_cases.CASES["cpu"] if name.startswith("right")]
    small = ("--heads", "8", "--head-dim", "64")
    return [
        case("launches", 60),
        *(case(name, 120, "right") for name in right),
        bench("ring", "two processes over gloo against one device and the ways around a ring", 180, "ring", "--world",
              "2", "--seqlen", "2k,4k", "--layout", "zigzag,contiguous", "--repeats", "3"),
        case("LocalWorld", 60),
        case("ceilings", 30),
        bench("kernels", "the aten backend beside the ATen operator", 90, "kernels", "--seqlen", "1k,2k",
              "--head-dim", "64", "--seconds", "0.5"),
        bench("links", "gloo between two processes", 60, "links", "--world", "2", "--transport", "process_group",
              "-b", "64K", "-e", "4M", "-f", "64", "-n", "5"),
        bench("overlap", "a ring of two processes on a throttled link, blocking and not", 60, "overlap", "--world",
              "2", "--tokens", "1k", *small, "--slots", "3", "--prefetch", "0,2"),
        bench("memory", "the peak of a rank in rings of 2 and 4", 90, "memory", "--world", "2,4", "--tokens", "2k"),
        bench("timeline", "when each rank of a ring computed, sent, received and waited", 60, "timeline", "--world",
              "2", "--seqlen", "4k", *small, "--trace", f"{OUT}/trace.json"),
        bench("host", "this package's own Python for a hop: a lower bound", 30, "host", "--device", "cpu"),
        case("fp8", 60),
    ]  # fmt: skip


def _case(
    device: str, name: str, seconds: float, beside: str = "", *, missing: str | None = None, shares: bool = False
) -> Part:
    """A case of :mod:`.device_cases`; ranks that share a GPU load the NCCL that lets them before torch's."""
    run = device_cases.CASES[device][name]
    about = (getattr(run, "func", run).__doc__ or "").partition("\n")[0].rstrip(".")
    library = os.environ.get(NCCL_LIBRARY)
    before = ("env", f"LD_PRELOAD={Path(library).absolute()}") if shares and library else ()
    return Part(name, about, (*before, PYTHON, "-m", device_cases.__name__, name, FILE), seconds, beside, missing)


def bench(name: str, about: str, seconds: float, *words: str, missing: str | None = None) -> Part:
    """``ringattn bench …``, whose JSON lies where the report finds it."""
    return Part(name, about, (*RINGATTN, "bench", *words, "--json", FILE), seconds, missing=missing)


def _alone(gpus: int) -> str | None:
    """Why two ranks with a GPU each cannot run here."""
    return None if gpus > 1 else "each rank takes a GPU of its own, and here is one"


def _no_sharing(gpus: int) -> str | None:
    """Why two ranks of NCCL cannot run here."""
    if gpus > 1 or os.environ.get(NCCL_LIBRARY):
        return None
    return "two ranks on one GPU take NCCL 2.30: name its library in RINGATTN_NCCL_LIBRARY"
