"""Runs the cases of a suite in processes of their own: what fails, hangs or dies there costs that case alone."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import torch

from .cases import Case, CutShort, NotHere, Number

OVERTIME = (
    2.0  # a case is stopped between two numbers when it has taken its time, and killed after this many times that
)
LEAST_SHARE = 0.5  # of its time: with less left a case is not started
POLL_SECONDS = 0.2
ENDING_SECONDS = 5.0


@dataclass
class Outcome:
    """How a case ended."""

    case: Case
    state: str = "not run"  # done, failed, cut short, not here, not run
    reason: str = ""
    seconds: float = 0.0
    numbers: list[Number] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing is wrong: whatever ran is done, or cut short, and no number failed."""
        return self.state != "failed" and not any(number.fails for number in self.numbers)


def serve(connection: Connection, device_name: str) -> None:
    """A worker: runs one case after the other until told to stop, or until the device can no longer be trusted."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    while (request := connection.recv()) is not None:
        case, seconds = request
        connection.send(("end", *run_case(case, device, seconds, connection)))
        if not healthy(device):
            return


def run_case(case: Case, device: torch.device, seconds: float, connection: Connection) -> tuple[str, str]:
    """Send the numbers of a case as they come; how it ended, and why."""
    deadline = time.monotonic() + seconds
    try:
        for number in case.run(device, **case.arguments):
            connection.send(("number", number))
            if time.monotonic() > deadline:
                return "cut short", f"it had {seconds:.0f} s"
    except NotHere as missing:
        return "not here", str(missing)
    except CutShort as cut:
        return "cut short", str(cut)
    except Exception:
        return "failed", traceback.format_exc()
    return "done", ""


def healthy(device: torch.device) -> bool:
    """False after an error that stays, such as an illegal address: every later call of this process would fail too."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.empty_cache()  # what one case held is not the next one's
        return int(torch.ones(1, device=device).sum()) == 1
    except RuntimeError:
        return False


class Worker:
    """One process that runs cases."""

    def __init__(self, device: torch.device) -> None:
        # not forked: CUDA does not survive that
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, str(device)))
        self._process.start()
        theirs.close()
        self.outcome: Outcome | None = None
        self._begun = 0.0
        self._killed_at = 0.0

    def start(self, outcome: Outcome, seconds: float, killed_at: float) -> None:
        """Run a case that may take so many seconds; at ``killed_at`` its time is up."""
        self.outcome, self._begun, self._killed_at = outcome, time.monotonic(), killed_at
        self.connection.send((outcome.case, seconds))

    def receive(self) -> bool:
        """Take in what it has to say; False once the process is gone."""
        try:
            while self.connection.poll():
                kind, *content = self.connection.recv()
                if self.outcome is None:
                    continue
                if kind == "number":
                    self.outcome.numbers.append(content[0])
                else:
                    self._end(*content)
        except (EOFError, ConnectionError):
            self._process.join(ENDING_SECONDS)
            self._end("failed", f"its process died with exit code {self._process.exitcode}")
            return False
        return True

    def late(self) -> bool:
        """Whether its time is up."""
        return self.outcome is not None and time.monotonic() > self._killed_at

    def stop(self, reason: str = "", state: str = "failed") -> None:
        """End the process: at once where it still runs a case, which then is in that state."""
        running = self.outcome is not None
        self._end(state, reason)
        if running:
            self._process.terminate()
        else:
            self._say_goodbye()
        self._process.join(ENDING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()

    def _say_goodbye(self) -> None:
        try:
            self.connection.send(None)
        except (OSError, ValueError):
            return  # it is gone already

    def _end(self, state: str, reason: str) -> None:
        if self.outcome is not None:
            self.outcome.state, self.outcome.reason = state, reason
            self.outcome.seconds = time.monotonic() - self._begun
            self.outcome = None


@dataclass
class Pool:
    """Runs cases in order: those that time the device alone, others up to ``width`` at a time."""

    device: torch.device
    ends: float  # on time.monotonic(): nothing runs on after it
    width: int
    changed: Callable[[Outcome], None]  # called when a case starts or ends
    workers: list[Worker] = field(default_factory=list)

    def run(self, cases: Iterable[Case]) -> list[Outcome]:
        """The outcome of every case, in their order."""
        outcomes = [Outcome(case) for case in cases]
        pending = deque(outcomes)
        try:
            while pending or self._busy():
                while pending and self._may_start(pending[0].case):
                    self._start(pending.popleft())
                self._listen()
        finally:
            for worker in self.workers:
                worker.stop("the suite ended")
        return outcomes

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.outcome is not None]

    def _may_start(self, case: Case) -> bool:
        busy = self._busy()
        if case.alone or any(worker.outcome and worker.outcome.case.alone for worker in busy):
            return not busy
        return len(busy) < self.width

    def _start(self, outcome: Outcome) -> None:
        case = outcome.case
        left = self.ends - time.monotonic()
        if left < LEAST_SHARE * case.seconds:
            outcome.reason = f"it takes up to {case.seconds:.0f} s, {max(left, 0):.0f} s were left"
            self.changed(outcome)
            return
        idle = [worker for worker in self.workers if worker.outcome is None]
        if case.alone:
            for worker in idle[1:]:  # their contexts take memory and nothing else, but a case that times wants it all
                self._forget(worker)
        worker = idle[0] if idle else self._new_worker()
        killed_at = min(time.monotonic() + OVERTIME * case.seconds, self.ends)
        worker.start(outcome, min(case.seconds, left - ENDING_SECONDS), killed_at)
        self.changed(outcome)

    def _new_worker(self) -> Worker:
        self.workers.append(Worker(self.device))
        return self.workers[-1]

    def _listen(self) -> None:
        ready = wait([worker.connection for worker in self.workers], POLL_SECONDS) if self.workers else []
        for worker in list(self.workers):
            outcome = worker.outcome
            if worker.connection in ready and not worker.receive():
                self._forget(worker)
            elif worker.late():
                self._forget(worker, *self._too_late(outcome))
            if outcome is not None and worker.outcome is None:
                self.changed(outcome)

    def _too_late(self, outcome: Outcome | None) -> tuple[str, str]:
        """Why a case is killed, and its state: not its fault where the suite's time was up before its own."""
        if outcome is not None and time.monotonic() >= self.ends:
            return f"it takes up to {outcome.case.seconds:.0f} s, and the suite's time was up before", "cut short"
        return "it did not end in time, and was killed", "failed"

    def _forget(self, worker: Worker, reason: str = "", state: str = "failed") -> None:
        worker.stop(reason, state)
        self.workers.remove(worker)
