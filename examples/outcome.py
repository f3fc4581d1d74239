"""What ``ringattn demo`` found: do the sharded and the whole run agree, how fast was each, and what did each take."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from ..bench.common.flags import human
from .model import BYTES
from .training import Job, RingRun, Run


@dataclass(frozen=True)
class Setting:
    """Where a job ran."""

    document: str
    world: int
    ranks: str  # what a rank is: "processes of 1 thread"
    whole: str  # what ran the whole: "1 process of 2 threads"
    shared_memory: bool  # all ranks are in one process: their memory is counted together


@dataclass(frozen=True)
class Check:
    """A number or tensor of the sharded run beside the same of the whole run and of float64; the largest elements."""

    name: str
    step: int
    difference: float  # of sharded and whole
    error: float | None  # of sharded, against float64; None where float64 was not computed
    pytorch_error: float | None  # of whole, against float64
    allowed: float  # error where there is one, else difference

    @property
    def measured(self) -> float:
        return self.difference if self.error is None else self.error

    @property
    def agrees(self) -> bool:
        return self.measured <= self.allowed  # false for NaN on either side


@dataclass(frozen=True)
class Outcome:
    """Three runs of one job.

    The tolerance is argued, not tuned: an error against float64 may be twice PyTorch's own in the same dtype (the same
    terms summed in another order err differently by about as much), plus rounding of the numbers themselves: ``eps`` of
    the dtype times the largest element. All runs start each step from the same weights, so that it holds at every step.
    """

    job: Job
    setting: Setting
    ring: RingRun
    whole: Run
    exact: Run
    provenance: dict[str, Any]

    @cached_property
    def losses(self) -> list[Check]:
        """The loss of every step; where float64 was not computed, PyTorch's error is the larger one of where it was."""
        known = {step: abs(self.whole.losses[step] - exact) for step, exact in self.exact.losses.items()}
        return [self._loss(step, known.get(step), max(known.values())) for step in range(self.job.steps)]

    def _loss(self, step: int, known: float | None, largest: float) -> Check:
        sharded, whole = self.ring.losses[step], self.whole.losses[step]
        # a token's loss is the difference of two numbers of this size: log-sum-exp of its logits, and one of them
        size = self.whole.logits[step] + math.log(BYTES)
        error = None if known is None else abs(sharded - self.exact.losses[step])
        return Check("loss", step, abs(sharded - whole), error, known, 2 * largest + self.job.eps * size)

    @cached_property
    def gradients(self) -> list[Check]:
        """Of every parameter, at every compared step."""
        return [self._gradient(step, name) for step in self.job.compared for name in self.exact.gradients[step]]

    def _gradient(self, step: int, name: str) -> Check:
        sharded, whole, exact = (run.gradients[step][name].double() for run in (self.ring, self.whole, self.exact))
        error, pytorch_error = ((x - exact).abs().max().item() for x in (sharded, whole))
        allowed = 2 * pytorch_error + self.job.eps * exact.abs().max().item()
        return Check(name, step, (sharded - whole).abs().max().item(), error, pytorch_error, allowed)

    @property
    def disagreements(self) -> list[Check]:
        return [check for check in (*self.losses, *self.gradients) if not check.agrees]

    @property
    def worst_gradients(self) -> list[Check]:
        """Of each parameter the check that is nearest to its tolerance, or beyond."""
        worst: dict[str, Check] = {}
        for check in self.gradients:
            best = worst.get(check.name)
            if best is None or not check.agrees or (best.agrees and _share(check) > _share(best)):
                worst[check.name] = check
        return list(worst.values())

    def steps(self) -> list[dict[str, Any]]:
        """A row per step."""
        return [
            {
                "step": check.step + 1,
                "loss_sharded": self.ring.losses[check.step],
                "loss_whole": self.whole.losses[check.step],
                "difference": check.difference,
                "allowed": check.allowed,
                "seconds_sharded": self.ring.seconds[check.step],
                "seconds_whole": self.whole.seconds[check.step],
            }
            for check in self.losses
        ]

    def data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        runs = {"sharded": self.ring, "whole": self.whole}
        return {
            "agrees": not self.disagreements,
            "job": asdict(self.job),
            "setting": asdict(self.setting) | {"transport": self.ring.transport},
            "steps": self.steps(),
            "gradients": [asdict(check) | {"step": check.step + 1, "agrees": check.agrees} for check in self.gradients],
            "tokens_per_second": {name: self.job.seqlen / run.step_seconds for name, run in runs.items()},
            "peak_bytes": {"sharded": self.ring.peaks, "whole": self.whole.peak},
            "seconds_per_step": self.ring.hops,
            "provenance": self.provenance,
        }

    def text(self) -> str:
        """Everything, for the terminal."""
        tables = self._heading(), _columns(self._loss_rows()), _columns(self._gradient_rows())
        return "\n\n".join((*tables, _columns(self._speed_rows()), _columns(self._hop_rows()), self._verdict()))

    def _heading(self) -> str:
        job, setting = self.job, self.setting
        count = sum(gradient.numel() for gradient in self.exact.gradients[0].values())
        return (
            f"{job.seqlen:,} bytes of {setting.document}; a decoder of {human(count)} parameters: {job.layers} "
            f"layer{'s' * (job.layers > 1)}, "
            f"{job.heads} heads ({job.kv_heads} of K/V) of dim {job.head_dim}, {job.dtype}\n"
            f"sharded: ring_attention, {job.layout}, {setting.world} {setting.ranks}, transport {self.ring.transport}\n"
            f"whole:   scaled_dot_product_attention, {setting.whole}, every step from the sharded run's weights\n"
            f"allowed: twice PyTorch's own error against float64, plus rounding ({job.dtype} eps times the largest)"
        )

    def _loss_rows(self) -> list[list[str]]:
        rows = [["step", "loss sharded", "loss whole", "difference", "allowed"]]
        for row, check in zip(self.steps(), self.losses, strict=True):
            losses = (f"{row[name]:.6f}" for name in ("loss_sharded", "loss_whole"))
            rows.append([f"{row['step']}", *losses, f"{check.difference:.1e}", f"{check.allowed:.1e}{_mark(check)}"])
        return rows

    def _gradient_rows(self) -> list[list[str]]:
        steps = " and ".join(str(step + 1) for step in self.job.compared)
        title = f"gradient at step {steps}" + ", the worse" * (len(self.job.compared) > 1)
        rows = [[title, "sharded - whole", "sharded - float64", "whole - float64", "allowed"]]
        for check in self.worst_gradients:
            numbers = check.difference, check.error, check.pytorch_error, check.allowed
            rows.append([check.name, *(f"{number:.1e}" for number in numbers)])
            rows[-1][-1] += _mark(check)
        return rows

    def _speed_rows(self) -> list[list[str]]:
        peaks = "all ranks together" if self.setting.shared_memory else "per rank"
        rows = [["", "tokens/s", "s per step", f"peak memory {peaks}, above what was in use at the start"]]
        for name, run in (("sharded", self.ring), ("whole", self.whole)):
            memory = (
                sorted({human(peak, "B") for peak in run.peaks}) if isinstance(run, RingRun) else [human(run.peak, "B")]
            )
            per_second = f"{self.job.seqlen / run.step_seconds:,.0f}"
            rows.append(
                [name, per_second, f"{run.step_seconds:.3f}", " to ".join(dict.fromkeys((memory[0], memory[-1])))]
            )
        return rows

    def _hop_rows(self) -> list[list[str]]:
        """A row per hop: the mean of the ranks and the largest, milliseconds of one step."""
        kinds = [(phase, kind) for phase in ("forward", "backward") for kind in ("compute", "wait")]
        rows = [["ms per step, mean (most) of ranks", *(" ".join(kind) for kind in kinds)]]
        for hop in range(self.setting.world):
            cells = [f"hop {hop}" + ", own shard" * (hop == 0)]
            for phase, kind in kinds:
                times = [1e3 * row[kind] for row in self.ring.hops if (row["hop"], row["phase"]) == (hop, phase)]
                cells.append(f"{sum(times) / len(times):.1f} ({max(times):.1f})")
            rows.append(cells)
        return rows

    def _verdict(self) -> str:
        wrong = self.disagreements
        if not wrong:
            nearest = max(map(_share, (*self.losses, *self.gradients)))
            return f"AGREE: every loss and every gradient; the largest error is {nearest:.0%} of what is allowed"
        told = [f"{check.name} at step {check.step + 1}: {check.measured:.1e} > {check.allowed:.1e}" for check in wrong]
        return f"DISAGREE in {len(wrong)}:\n" + "\n".join(told)


def _share(check: Check) -> float:
    return check.measured / check.allowed if check.allowed else 0.0


def _mark(check: Check) -> str:
    return "" if check.agrees else " !"


def _columns(rows: list[list[str]]) -> str:
    """Rows under each other, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("   ".join(line).rstrip() for line in lines)
