"""What a prediction is made from: the speed of a GPU and its links, by presets, by flags, or as files say."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..common.attention import DTYPES
from ..common.result import read
from .call import Call
from .links import Link, Links, link_of, positive
from .perturbation import NONE, Perturbation
from .program import PASSES, Form
from .ring import form_of
from .speed import CONSTANTS_OF, GPUS, H100, Area, Speed, whole

SPEED_TOKENS = 16384  # of the launch whose TFLOP/s are given, and that is measured
BETWEEN = "ib400"
OURS, FORWARD, BACKWARD, TFLOPS = "ringattn", "forward", "backward", "TFLOP/s"
SQUARE = ("full", "causal")
MOST_TOKENS = 1 << 40  # of a row: what a product of lengths can be made of


@dataclass(frozen=True)
class Inputs:
    """What all ways are predicted from."""

    speed: Speed
    links: Links
    perturbation: Perturbation = NONE
    phases: Sequence[str] = PASSES
    told: tuple[str, ...] = ()
    """What was measured, line by line."""


@dataclass(frozen=True)
class Row:
    """One measured launch of our kernels, as they run by default."""

    what: str
    """``forward``, or ``backward``: both of its kernels, counted as 2.5 forwards."""
    flops: float
    """FLOP/s on the visible area."""
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.what} {self.flops / 1e12:.4g} TFLOP/s of {self.dtype} D{self.head_dim} {mask}, "
            f"{self.seqlen:,} tokens, {self.heads}/{self.kv_heads} heads"
        )

    @property
    def launch(self) -> tuple[float, Area, Form]:
        """As :meth:`Speed.fitted` takes it."""
        form = form_of(
            tokens=self.seqlen, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            dtype=DTYPES[self.dtype],
        )  # fmt: skip
        return self.flops, whole(self.seqlen, causal=self.causal), form

    def distance(self, call: Call) -> tuple[float, ...]:
        """How far it is from what a hop of the call computes: by head dim, mask, length, heads."""
        return (
            abs(math.log2(self.head_dim / call.head_dim)), self.causal != call.mask.causal,
            abs(math.log2(self.seqlen / call.tokens)), abs(math.log2(self.heads / call.heads)),
        )  # fmt: skip


def speed_of(
    gpu: str | None, forward: float | None, backward: float | None, kernels: Path | None, call: Call
) -> tuple[Speed, tuple[str, ...]]:
    """A GPU's constants, with the TFLOP/s given for causal or full attention of 16k tokens, or with measured rows.

    Raises:
        ValueError: an unknown GPU, a speed that is none, or a file that is not of measured kernels; nothing but the
            GPU, and a dtype that its constants are not of.
    """
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}: it must be one of {', '.join(GPUS)}; --tflops says how fast it is")
    above_zero(TFLOPS, tflops=forward, backward_tflops=backward)
    if kernels is not None:
        return measured(kernels, call, gpu)
    base = GPUS[gpu or "h100"]
    if forward is None:
        if call.dtype not in CONSTANTS_OF:
            raise ValueError(
                f"dtype is {call.dtype}: the constants of a GPU are of {' and '.join(CONSTANTS_OF)}; --tflops or "
                "--kernels say how fast its kernels are, or --calibrate where it is here"
            )
        return base, ()
    area = whole(SPEED_TOKENS, causal=call.mask.causal)
    form = replace(call.form, tokens=SPEED_TOKENS, chunks=1)
    told = None if backward is None else (backward * 1e12, area, form)
    return base.fitted(forward=(forward * 1e12, area, form), backward=told), ()


def measured(path: Path, call: Call, gpu: str | None) -> tuple[Speed, tuple[str, ...]]:
    """A speed at which the rows nearest to a call take what `bench kernels` measured, and these rows in words.

    Raises:
        ValueError: another file, a damaged row, no GPU, or no forward of this dtype.
    """
    found = read(path)
    base = base_of(found.provenance.get("gpu"), gpu, str(path))
    rows = [row for place, one in enumerate(found.rows) if (row := _row(one, f"{path}: rows[{place}]")) is not None]
    forward, backward = (_nearest(rows, call, what) for what in (FORWARD, BACKWARD))
    if forward is None:
        dtypes = sorted({row.dtype for row in rows if row.what == FORWARD})
        there = f"there are rows of {', '.join(dtypes)}" if dtypes else "there are none"
        raise ValueError(
            f"{path} has no forward of {OURS} in {call.dtype}, full or causal: {there}; "
            f"`ringattn bench kernels --dtype {call.dtype} --json FILE` measures it"
        )
    try:
        speed = base.fitted(forward=forward.launch, backward=None if backward is None else backward.launch)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from None
    return speed, (f"{path}, {base.name}", *(str(row) for row in (forward, backward) if row is not None))


def _nearest(rows: Sequence[Row], call: Call, what: str) -> Row | None:
    """The row of a pass that is nearest to a call, of its dtype."""
    of_kind = [row for row in rows if row.what == what and row.dtype == call.dtype]
    return min(of_kind, key=lambda row: row.distance(call), default=None)


def base_of(about: object, gpu: str | None, where: str) -> Speed:
    """The constants that no row tells: of the GPU that ``gpu`` names, else of the one whose name the file has.

    Of one that is not known those of an H100; multiprocessors and memory are those of the file.

    Raises:
        ValueError: nothing says on which GPU it was measured.
    """
    if not isinstance(about, dict) or not isinstance(name := about.get("name"), str):
        raise ValueError(f"{where} was not measured on a GPU: it takes what `ringattn bench kernels` wrote on one")
    known = [speed for key, speed in GPUS.items() if all(part in name.lower() for part in key.split("-"))]
    base = GPUS[gpu] if gpu is not None else known[-1] if known else H100
    where = f"{where}: provenance.gpu"
    multiprocessors, capacity = (positive(about, one, where) for one in ("multiprocessors", "memory_gib"))
    return replace(base, name=name, multiprocessors=int(multiprocessors), capacity=capacity * 2**30)


def _row(row: Mapping[str, Any], where: str) -> Row | None:
    """Our default kernels' speed; None: it is another number."""
    if row.get("pass") not in (FORWARD, BACKWARD) or row.get("by") != OURS or row.get("mask") not in SQUARE:
        return None
    if row.get("head_dim_v") not in (None, row.get("head_dim")) or row.get("rate") is None:
        return None
    if row.get("dtype") not in tuple(DTYPES):
        raise ValueError(f"{where}: dtype is {row.get('dtype')!r:.80}: it must be one of {', '.join(DTYPES)}")
    sizes = [positive(row, one, where) for one in ("seqlen", "head_dim")]
    if max(sizes) > MOST_TOKENS or any(one % 1 for one in sizes):
        raise ValueError(f"{where}: a length of {max(sizes):,}: it must be whole, and at most {MOST_TOKENS:,}")
    heads = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", str(row.get("heads")), re.ASCII)
    if heads is None:
        raise ValueError(f"{where}: heads is {row.get('heads')!r:.80}: it must be two counts, as in 16/8")
    return Row(
        str(row["pass"]), positive(row, "rate", where) * 1e12, str(row["dtype"]), int(sizes[1]),
        row["mask"] == "causal", int(sizes[0]), int(heads[1]), int(heads[2]),
    )  # fmt: skip


def inputs_of(
    call: Call, *, gpu: str | None, tflops: float | None, backward: float | None, kernels: Path | None, calibrate: bool,
    link: str | None, between: str | None, nics: int | None, beside: float | None, perturbation: Perturbation,
    phases: Sequence[str],
) -> Inputs:  # fmt: skip
    """What the flags say, or what is usual: by itself a GPU brings the link of its kind.

    Raises:
        ValueError: one of them says nothing, or not of this call.
    """
    if calibrate:
        speed, told, inside = calibrated(call, link)
    else:
        speed, told = speed_of(gpu, tflops, backward, kernels, call)
        inside = link_of(speed.link if link is None else link)
    if beside is not None:
        speed = replace(speed, beside=beside)
    links = Links(inside, link_of(BETWEEN if between is None else between, "link-between"), nics)
    return Inputs(speed, links, perturbation, phases, told)


def calibrated(call: Call, link: str | None) -> tuple[Speed, tuple[str, ...], Link]:
    """What `bench kernels` and, where no link is given, `bench links` measure on this machine now.

    Raises:
        ValueError: there is no GPU, or one alone and no link is given, or a bench fails.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError("calibrate finds no GPU here: --gpu names one, --tflops and --link say how fast it is")
    if link is None and gpus < 2:
        raise ValueError("calibrate finds one GPU here, which tells no link: pass --link")
    with TemporaryDirectory() as folder:
        kernels, links = Path(folder) / "kernels.json", Path(folder) / "links.json"
        _bench(
            kernels, "kernels", "--seqlen", str(min(call.tokens, SPEED_TOKENS)), "--heads", str(call.heads),
            "--kv-heads", str(call.kv_heads), "--head-dim", str(call.head_dim), "--dtype", call.dtype,
            "--causal" if call.mask.causal else "--full", "--by", OURS,
        )  # fmt: skip
        if link is None:
            _bench(links, "links", "-b", "1m", "-e", "128m", "-f", "8", "--transport", "nccl,copy_engine")
        return *measured(kernels, call, None), link_of(str(links) if link is None else link)


def _bench(target: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", __name__.rpartition(".bench.")[0], "bench", *arguments, "--json", str(target)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(f"calibrate ran `bench {arguments[0]}`, which failed: {(ended.stderr or ended.stdout)[-400:]}")


def above_zero(unit: str, **given: float | None) -> None:
    """Flags that are numbers.

    Raises:
        ValueError: one is not above 0, or not finite.
    """
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name.replace('_', '-')} is {value:g}: it must be above 0 and finite, in {unit}")
