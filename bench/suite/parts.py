"""What ``bench suite`` runs: command lines, each in a process of its own with its share of the time, in order."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...comm.transports.copy_engine.copy_engine import copy_engine_missing
from ...comm.transports.nccl import nccl_missing
from ..common.memory_table import ALL_GATHER, LUCIDRAINS, OURS, ULYSSES
from ..kernels.accuracy import BACKENDS
from ..ring.candidates import CONTEXT_PARALLEL, ZHUZILIN
from . import device_cases

PACKAGE = Path(__file__).absolute().parents[2]
CLONE = next((it for it in (Path.cwd(), PACKAGE) if (it / "tests" / "support" / "gpu_cases.py").exists()), PACKAGE)
"""Where the tests are: an installed package has none, but may be started in a clone."""
PYTHON, OUT, FILE, SECONDS = "{python}", "{out}", "{file}", "{seconds}"
"""In a command: this Python, the folder of results, the part's own file there, half of its seconds, to be used up."""
RINGATTN = (PYTHON, "-m", "ringattn")
SHAPE = ("--heads", "32", "--head-dim", "128")
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
    within: Path | None = None  # the folder that it runs in

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
        tests("local", "virtual ranks on CUDA streams: transfers and rings", 105, "transfers or rings", "[local-2-",
              beside="tests"),
        tests("nccl-1", "NCCL, one rank to itself", 105, "transfers or rings", "[nccl-1-", beside="tests",
              missing=nccl_missing()),
        tests("copy_engine-2", "two processes over CUDA IPC", 105, "transfers or rings", "[copy_engine-2-",
              beside="tests", missing=copy_engine_missing()),
        tests("compiled", "ring_attention in torch.compile on CUDA", 105, "by_itself", "[compiled]", beside="tests"),
        tests("killed", "a rank is killed beside a peer whose stream waits for it", 20, "killed", "[copy_engine]",
              missing=copy_engine_missing()),
        tests("captured", "an unrelated graph is captured in global mode beside a ring and its watchdog", 20,
              "by_itself", "[captured]"),
        tests("nccl-2", "two ranks of NCCL 2.30, and one of them killed", 35, "transfers or rings or killed",
              "[nccl-2-", "[nccl]", missing=nccl_missing() or _no_sharing(gpus)),
        bench("host", "the host's time to post a hop of 4k tokens, telemetry and watch on, beside its compute", 20,
              "host", "--tokens", "4k", *SHAPE, missing=nccl_missing()),
        *(
            Part(tool, "a tiny Hopper forward and backward under compute-sanitizer",
                 ("compute-sanitizer", "--tool", tool, *more, "--kernel-name", "kns=hopper", "--error-exitcode", "9",
                  PYTHON, "-m", "tests.support.gpu_cases", "hopper"), 40, "sanitizer", missing=sanitizer or _no_clone(),
                 within=CLONE)
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
        tests("nccl-4", "NCCL, four ranks: transfers, rings and meshes", 90, "transfers or rings", "[nccl-4-",
              missing=nccl_missing()),
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


def _case(device: str, name: str, seconds: float, beside: str = "") -> Part:
    run = device_cases.CASES[device][name]
    about = (getattr(run, "func", run).__doc__ or "").partition("\n")[0].rstrip(".")
    return Part(name, about, (PYTHON, "-m", device_cases.__name__, name, FILE), seconds, beside)


def bench(name: str, about: str, seconds: float, *words: str, missing: str | None = None) -> Part:
    """``ringattn bench …``, whose JSON lies where the report finds it."""
    return Part(name, about, (*RINGATTN, "bench", *words, "--json", FILE), seconds, missing=missing)


def tests(
    name: str, about: str, seconds: float, kinds: str, *ids: str, beside: str = "", missing: str | None = None
) -> Part:
    """Tests on a GPU, by what their names and the ids of their arguments have."""
    command = (PYTHON, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/properties/test_on_a_gpu.py", "-k",
               f"({kinds}) and ({' or '.join(ids)})")  # fmt: skip
    return Part(name, about, command, seconds, beside, _no_clone() or missing, CLONE)


def _no_clone() -> str | None:
    there = (CLONE / "tests" / "support" / "gpu_cases.py").exists()
    return None if there else "the tests are in a clone: start it there"


def _no_sharing(gpus: int) -> str | None:
    """Why two ranks of NCCL cannot run here."""
    if gpus > 1 or os.environ.get("RINGATTN_NCCL_LIBRARY"):
        return None
    return "two ranks on one GPU take NCCL 2.30: name its library in RINGATTN_NCCL_LIBRARY"
