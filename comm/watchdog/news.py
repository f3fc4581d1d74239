"""What a rank says of itself and knows of the others, and whether the store still answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from .deadlines import NEVER
from .gossip import Row, Stragglers, Table, peer_at, period, unpack
from .spans import Spans

logger = logging.getLogger(__name__)

# A store that did not answer is left alone for this long.
SILENT_STORE_SECONDS = 10.0
# Compute and wait in a row are those of this many last seconds.
WINDOW_SECONDS = 10.0
# A reading of a GPU's clocks takes milliseconds in the driver.
GAUGE_SECONDS = 2.0

Gauges = Callable[[], Mapping[str, object]]


class News:
    """What a rank says of itself and knows of the others; and whether the store still answers."""

    def __init__(self, rank: int, size: int, device: torch.device, gauges: Gauges | None) -> None:
        self.table = Table()
        self.spans = Spans(device)
        self.store_problem: str | None = None
        self._rank, self._size = rank, size
        self._gauges = gauges
        self._read: Mapping[str, object] | None = None
        self._read_at = -NEVER
        self._seconds = {"compute": 0.0, "wait": 0.0}
        self._window: deque[tuple[float, float, float]] = deque()  # (when, compute, wait) so far, at past ticks
        self._tick = -1
        self._ask_again = -NEVER
        self._stragglers = Stragglers()
        self._looked = -NEVER
        self._saying = threading.Lock()  # the watchdog, and whoever asks for telemetry

    def spent(self, kind: str, seconds: float) -> None:
        """Count seconds of one kind; others than compute and wait are nobody's news."""
        if kind in self._seconds:
            self._seconds[kind] += seconds

    def say(self, step: str, calls: int, nbytes: int) -> None:
        """Write this rank's row, if anything in it has changed."""
        with self._saying:
            for what, seconds in self.spans.finished():
                self.spent(str(what[0]), seconds)
            now = time.monotonic()
            compute, wait = self._seconds["compute"], self._seconds["wait"]
            while self._window and now - self._window[0][0] > WINDOW_SECONDS:
                self._window.popleft()
            self._window.append((now, compute, wait))
            since, compute_then, wait_then = self._window[0]
            old = self.table.rows.get(self._rank)
            said = (step, calls, nbytes, compute - compute_then, wait - wait_then, now - since)
            self.table.put(
                self._rank, Row(old.version + 1 if old is not None else 1, time.time(), *said, self._gauge(now))
            )

    def expect(self, size: int, step: str) -> None:
        """Note the first thing that is known of every rank, until it says something itself."""
        if len(self.table.rows) < size:
            self.table.merge({rank: Row(0, time.time(), step) for rank in range(size)})

    def next_peer(self) -> int | None:
        """Whose table to pull now; None between two ticks of the gossip."""
        tick = int(time.time() / period(self._size))
        if tick == self._tick or self._size == 1:
            return None
        self._tick = tick
        return peer_at(self._rank, self._size, tick)

    def pull(self, packed: object) -> None:
        """Merge a peer's table."""
        self.table.merge(unpack(packed))

    def warn(self, now: float) -> None:
        """Name a straggler, once per episode; rank 0 speaks for all."""
        if self._rank != 0 or now - self._looked < WINDOW_SECONDS:
            return
        self._looked = now  # once per window: what one long pause did is in one look only
        fresh = {report.rank: report.row for report in self.table.reports(time.time()) if report.age < WINDOW_SECONDS}
        straggler = self._stragglers.look(fresh, time.time())
        if straggler is not None:
            since = time.strftime("%H:%M:%S", time.localtime(straggler.since))
            logger.warning("%s, since %s", straggler, since)

    def store_answers(self) -> bool:
        """Whether it makes sense to ask the store."""
        return time.monotonic() >= self._ask_again

    def store_failed(self, problem: str) -> None:
        """The store did not answer, or never will: it is left alone for a while."""
        if self.store_problem is None:
            logger.info("rank %d: %s", self._rank, problem)
        self.store_problem = problem
        self._ask_again = time.monotonic() + SILENT_STORE_SECONDS

    def _gauge(self, now: float) -> Mapping[str, object] | None:
        if self._gauges is not None and now - self._read_at >= GAUGE_SECONDS:
            self._read, self._read_at = self._gauges() or None, now
        return self._read
