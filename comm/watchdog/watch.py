"""One thread that watches all rings of a process: late transfers, failed ranks, calls that differ, who is slow."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..control import Control, control_of
from ..cuda_threads import HOST, join_at_exit, on_device, within
from ..groups import Group
from ..kept import end_destroyed
from ..transport import Fence, Transport, TransportError
from ..world import LocalGroup
from .deadlines import FIRST_SECONDS, NEVER, Deadlines, Post, Sizes
from .preflight import Preflight
from .telemetry import TICK_RANKS, TICK_SECONDS, Gauges, Report, Telemetry, period

logger = logging.getLogger(__name__)


# A store that does not answer must not hold up the deadlines.
STORE_SECONDS = 1.0
# Then it is left alone for this long, the next time for twice as long, up to the second: the machine that serves it may
# only have stood still for a moment.
SILENT_STORE_SECONDS, MOST_SILENT_SECONDS = 2.0, 16.0
# A communicator whose peers died may not come back from its abort.
ABORT_SECONDS = 2.0
# Two ticks that are so far apart mean that the process was stopped: a signal, a debugger, a machine that swaps.
STOPPED_SECONDS = 5.0
# After a call a rank goes on talking for a while, so that its last news get around.
GRACE_SECONDS = 0.5
# Then it only answers ranks that wait for it, and looks for their questions this often (in larger worlds less).
IDLE_SECONDS = 1.0
# Where a last report is asked for directly when something failed; in larger worlds, the edge's ends among them.
ASKED_RANKS = 16


class Failure(NamedTuple):
    """Why a ring cannot go on, as it stands in the store."""

    rank: int  # that found it
    kind: str  # "ValueError" where the ranks disagree, else "TransportError"
    text: str


class FailTogether:
    """The watches of this process that fail together, such as those of the two rings of a mesh, and their one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # what one thread finds wrong, another must not find at the same time
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """What the watchdog does for one ring; see `watchdog.open_watch`.

    Args:
        control: keys of this ring's own.
        deadline: seconds that a transfer may take; None: many times the median; inf: no limit.
        device: where the ring computes.
        transports: the transports that are open now; must not hold the ring.
        fatal: called with the words of a failure after the transports are aborted: a process whose streams wait for
            bytes that never come has to end. None: aborted transports raise in whoever waits.
        together: the ranks end together, whatever ends one of them: virtual ranks of one process.
        rings: the watches that fail with this one; None: it fails alone.
        gauges: reads clocks and throttle reasons.
    """

    def __init__(
        self,
        control: Control,
        *,
        deadline: float | None,
        device: torch.device,
        transports: Callable[[], Sequence[Transport]],
        fatal: Callable[[str], None] | None = None,
        together: bool = False,
        rings: FailTogether | None = None,
        gauges: Gauges | None = None,
    ) -> None:
        self.rank, self.size = control.rank, control.size
        self.device = device
        self._control = control
        self._transports = transports
        self._fatal = fatal
        self._together = together
        self._preflight = Preflight(control)
        self._posts = Deadlines(deadline, ask_why=fatal is None and device.type == "cpu")
        self._telemetry = Telemetry(control.rank, control.size, device, gauges)
        self._names = control.names
        self._rings = rings or FailTogether()
        self._lock = self._rings.lock
        self._failure: Failure | None = None
        self._calls = 0
        self._phase: str | None = None
        self._waiting = False  # in the preflight
        self._number: int | None = 0  # of the call that is agreed on; 0: not yet; None: the ranks could not agree
        self._active = -NEVER  # when this ring was last in use
        self._ticked = NEVER
        self._answered = -NEVER
        self._store_problem: str | None = None
        self._ask_again = -NEVER
        self._silence = SILENT_STORE_SECONDS
        self.closed = False
        with self._lock:
            self._rings.watches.add(self)

    # -- the thread that computes ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Mark the start of a call; `leave` marks its end."""
        self._number = 0

    def leave(self) -> None:
        """Mark the end of a call, after `left` where an error ended it."""
        self._number = 0

    def agree(
        self,
        fields: Mapping[str, object],
        values: Mapping[str, object] | None = None,
        *,
        of: int | None = None,
        always: bool = False,
    ) -> int:
        """Compare what this rank is about to compute with every other rank's, before anything moves.

        Args:
            fields: compared by `repr`; a call that was to be expected, going by those before, costs no traffic.
            values: compared likewise; what changes from batch to batch.
            of: the number of the forward whose backward this is.
            always: compare an expected call, too: where nothing moves, nothing else would tell.

        Returns:
            The number of the call, the same on every rank.

        Raises:
            ValueError: on every rank, naming the first field that differs and who has what, or who refused the call.
            TransportError: a rank did not answer, or the ring has failed before.
        """
        if self.size == 1:
            return 0
        if self._failure is not None:
            raise self._as_error(self._failure)
        self._number = self._preflight.number + 1
        self._waiting, self._active = True, time.monotonic()
        try:
            verdict = self._preflight.agree(fields, values, of=of, always=always, stop=self.stopped)
        except TransportError as error:
            raise self.failed(error) from error
        finally:
            self._waiting = False
        if verdict is not None:
            if verdict.in_flight:
                self._fail(Failure(self.rank, "ValueError", verdict.text))
            self._number = None
            raise ValueError(verdict.text)
        self._telemetry.expect("agreed on a call")
        return self._number

    def left(self, error: BaseException) -> None:
        """Tell the other ranks that an error ended a call, unless they know. Raises nothing.

        An error before the ranks agreed on the call is a refusal: they raise it, too, and may go on with other calls.
        A `TransportError` is none, because the ring that it came from is lost, nor is anything that ends a call on
        which a ring of the same mesh has agreed.
        """
        if self.size == 1 or self._failure is not None or self._number is None:
            return
        if isinstance(error, TransportError) or any(watch._number for watch in self._rings.watches):
            self.failed(error)
        else:
            self._preflight.refuse(error)

    def call_off(self) -> None:
        """No rank makes the call that was agreed on: another ring of theirs has refused it."""
        self._number = None

    def begin(self, phase: str) -> None:
        """The loop of a call begins."""
        self._calls += 1
        self._phase = phase

    def end(self) -> None:
        """The loop of a call is over."""
        self._phase = None
        self._active = time.monotonic()

    def posted(self, label: object, fence: Fence, after: Sequence[Fence], sent: Sizes, received: Sizes) -> None:
        """A group of transfers was posted: `label` is what errors call it; (peer, bytes) per message. O(1), no lock."""
        if self.size > 1:
            self._posts.add(label, fence, after, sent, received, time.monotonic(), self._calls)

    def span(self, kind: str, hop: object = None) -> AbstractContextManager[None]:
        """Around "compute" or "wait", for the telemetry, which asks for no hop."""
        return self._telemetry.stopwatch.measure(kind) if self.size > 1 else contextlib.nullcontext()

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others that `error` ended this rank's part of a call; what to raise in its place.

        For a `TransportError`: one that names hop, edge, bytes and the last step each rank reported, or what another
        rank found. Anything else stays as it is.
        """
        if self.size == 1:
            return error
        known = isinstance(error, TransportError)
        with self._lock:
            if self._failure is None and self._together:
                return error  # whoever runs the ranks tells the others, and who was first
            if self._failure is None:
                self._posts.poll(time.monotonic())
                problem = str(error) if known else f"{type(error).__name__}: {error}"
                if self._fatal is not None:  # the process ends in here: nobody else will show where this came from
                    logger.error("rank %d failed", self.rank, exc_info=error)
                self._find(self._posts.failed or self._posts.first, f"failed: {problem}", look_first=known)
            assert self._failure is not None
            return self._as_error(self._failure) if known else error

    def telemetry(self) -> tuple[Report, ...]:
        """What this rank knows of every rank, in rank order, with its age."""
        self._telemetry.report(self._step(), self._calls, self._posts.nbytes)
        return self._telemetry.table.reports(time.time())

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self.closed = True
        self._posts.clear()

    # -- the watchdog's thread ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at every transfer, at what other ranks say, and spread the news."""
        if self.closed or self._failure is not None:
            return
        now = time.monotonic()
        with self._lock:
            if now - self._ticked > STOPPED_SECONDS:
                self._posts.resume(now)
            self._ticked = now
            late = self._posts.poll(now)
            if self._posts.failed is not None:
                return self._find(self._posts.failed, f"failed: {self._posts.failed.problem}")
            noticed = next(filter(None, (transport.check() for transport in self._transports())), None)
            if noticed is not None:
                return self._find(self._posts.first, f"failed: {noticed}")
            if late is not None:
                return self._find(
                    late, f"not over {self._posts.limit(late):g} s after what it waits for (its deadline)"
                )
        if self._phase is not None or self._waiting or self._posts.busy:
            self._active = now
        if now - self._active < GRACE_SECONDS + period(self.size):
            self._talk(now)
        elif now - self._answered > IDLE_SECONDS * max(1.0, self.size / TICK_RANKS):
            self._answer(self._exchange(look=self._preflight.wanted()), {})

    def _talk(self, now: float) -> None:
        """One round with the store: failures of others, questions of others, and the gossip."""
        self._telemetry.report(self._step(), self._calls, self._posts.nbytes)
        peer = self._telemetry.next_peer()
        table = [] if peer is None else [f"table/{peer}"]
        published = self._exchange(look=["failure", *self._preflight.wanted(), *table])
        if published is None:
            return
        if "failure" in published:
            return self._find(self._posts.first, "given up", Failure(*published["failure"]))
        if peer is not None:
            self._telemetry.table.merge_packed(published.get(f"table/{peer}"))
        self._answer(published, {} if peer is None else {f"table/{self.rank}": self._telemetry.table.packed()})
        self._telemetry.warn(now)

    def _answer(self, published: Mapping[str, object] | None, table: Mapping[str, object]) -> None:
        """Say what other ranks have asked for, and the news; also in a rank that computes something else for long."""
        self._answered = time.monotonic()
        if published is None:
            return
        publish, verdict = self._preflight.hear(published)
        if verdict is not None:
            return self._fail(Failure(self.rank, "ValueError", verdict.text))
        if publish or table:
            self._exchange({**publish, **table})

    def _exchange(
        self, publish: Mapping[str, object] | None = None, look: Sequence[str] = (), *, at_once: bool = False
    ) -> dict[str, Any] | None:
        """None where the store does not answer; it is then left alone for a while, unless it is asked `at_once`."""
        if time.monotonic() < self._ask_again and not at_once:
            return None
        try:
            published = self._control.exchange(publish, look, STORE_SECONDS)
            self._silence = SILENT_STORE_SECONDS
            return published
        except TransportError as error:
            if self._store_problem is None:
                logger.info("rank %d: %s", self.rank, error)
            self._store_problem, self._ask_again = str(error), time.monotonic() + self._silence
            self._silence = min(2 * self._silence, MOST_SILENT_SECONDS)
            return None

    # -- what went wrong ---------------------------------------------------------------------------------------------

    def _find(self, post: Post | None, what: str, theirs: Failure | None = None, *, look_first: bool = True) -> None:
        """This rank found something wrong: say what, unless another rank's find (`theirs`, if known) explains it."""
        where = f"{post.label} ({post.edges(self.rank, self._names)})" if post is not None else self._step()
        if theirs is None and look_first:
            theirs = self._explained()
        if theirs is not None and theirs.kind == "ValueError":
            return self._fail(theirs, tell=theirs.rank == self.rank)
        text = f"rank {self._names[self.rank]}: {where} {what}"
        if theirs is not None:
            text = f"{text}. Rank {self._names[theirs.rank]} found: {theirs.text}"
            return self._fail(Failure(self.rank, theirs.kind, text), tell=False)
        self._fail(Failure(self.rank, "TransportError", f"{text}. {self._last_steps(post)}"))

    def _explained(self) -> Failure | None:
        """What another rank has found or said that explains what this one sees."""
        for _ in range(2):  # the first round may bring a question, the second what others said to it
            published = self._exchange(look=["failure", *self._preflight.wanted()])
            if published is None:
                return None
            if "failure" in published:
                return Failure(*published["failure"])
            publish, verdict = self._preflight.hear(published)
            if verdict is not None:
                return Failure(self.rank, "ValueError", verdict.text)
            self._exchange(publish)
        return None

    def _fail(self, failure: Failure, *, tell: bool = True) -> None:
        """End this ring, and the rings that fail with it.

        The ranks of all of them are told first: what they see when the transports break must have its reason in the
        store. The ranks of the other rings hear it from this rank, which `tell` does not concern.
        """
        with self._lock:
            if self._failure is not None:
                return
            if tell:
                self._tell(failure)
            self._failure = failure
            others = [w for w in self._rings.watches if w.size > 1 and not w.closed and w._failure is None]
            for watch in others:
                watch._failure = failure._replace(rank=watch.rank)
                watch._tell(watch._failure)
        logger.error("%s", failure.text)
        for watch in (self, *others):
            within(ABORT_SECONDS, partial(watch._abort, failure.text), self.device, "abort")
        if self._fatal is not None:
            self._fatal(failure.text)

    def _tell(self, failure: Failure) -> None:
        # with a look, for a TCPStore confirms only what it is asked
        self._exchange({"failure": tuple(failure)}, look=["failure"], at_once=True)

    def _abort(self, reason: str) -> None:
        for transport in self._transports():
            transport.abort(reason)

    def _last_steps(self, post: Post | None) -> str:
        """What each rank reported last, asked for once more."""
        near = [peer for peer, _ in (*post.sent, *post.received)] if post is not None else []
        others = [rank for rank in dict.fromkeys((*near, *range(self.size))) if rank != self.rank][:ASKED_RANKS]
        for table in (self._exchange(look=[f"table/{rank}" for rank in others]) or {}).values():
            self._telemetry.table.merge_packed(table)
        known = {report.rank: report for report in self._telemetry.table.reports(time.time())}
        silent = [str(self._names[rank]) for rank in others if rank not in known]
        reports = [known[rank] for rank in sorted(others) if rank in known]
        steps = "; ".join(f"rank {self._names[rank]}: {row.step} ({age:.1f} s ago)" for rank, age, row in reports)
        text = f"Last reported: {steps or 'nothing'}"
        text += f"; nothing from rank {', '.join(silent)}" if silent else ""
        return text + (f". {self._store_problem}" if self._store_problem else "")

    def _step(self) -> str:
        first, last = self._posts.first, self._posts.last
        if first is not None:
            return f"in {first.label}"
        after = f" after {last}" if last is not None else ""
        if self._phase is not None:
            return f"in a {self._phase}{after}"
        return f"comparing what the ranks pass{after}" if self._waiting else f"between calls{after}"

    def stopped(self) -> str | None:
        """Why nothing comes any more, for whoever waits; None while it may."""
        return self._failure.text if self._failure is not None else None

    @staticmethod
    def _as_error(failure: Failure) -> Exception:
        return ValueError(failure.text) if failure.kind == "ValueError" else TransportError(failure.text)


# sysexits' EX_TEMPFAIL: what torchrun and schedulers restart
EXIT_CODE = 75
# A pipe that nobody reads must not keep the process.
FLUSH_SECONDS = 1.0


class Watchdog:
    """The thread. It runs while there is a ring to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def add(self, watch: Watch) -> None:
        """Watch one more ring, until it is closed or nobody holds it any more."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ringattn-watchdog", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End with the process: a thread that returns from C++ into an interpreter that is gone brings it down."""
        self._end.set()
        thread = self._thread
        if thread is not None:
            join_at_exit(thread)

    def _run(self) -> None:
        while not self._end.wait(TICK_SECONDS):
            with self._lock:
                watches = [watch for watch in self._watches if not watch.closed]
                if not watches:
                    self._thread = None
                    return
            while watches:
                _tick(watches)
            end_destroyed()


def _tick(watches: list[Watch]) -> None:
    """Look at the last one, and let go of it: nobody else may hold it any more, and what it holds is freed here."""
    rank, device, left = watches[-1].rank, watches[-1].device, len(watches) - 1
    try:
        with on_device(device):
            watches.pop().tick()
    except Exception:  # a fault in here must not end the watch over the other rings
        logger.exception("the watchdog of rank %d failed", rank)
    finally:
        del watches[left:]


_WATCHDOG = Watchdog()
atexit.register(lambda: _WATCHDOG.stop())


def _after_fork() -> None:
    global _WATCHDOG
    _WATCHDOG = Watchdog()  # threads stay behind


os.register_at_fork(after_in_child=_after_fork)


def open_watch(
    group: Group,
    device: torch.device,
    *,
    control: Control,
    deadline: float | None,
    transports: Callable[[], Sequence[Transport]],
    rings: FailTogether | None = None,
    gauges: Gauges | None = None,
) -> Watch:
    """Watch over a ring of this group until it is closed; every rank opens its rings in the same order.

    The arguments are those of `Watch`. `control` comes from `ring_control`, and the preflight waits no longer than its
    patience. In a `LocalWorld`, which has a limit of its own, no `deadline` means no limit.
    """
    local = isinstance(group, LocalGroup)
    watch = Watch(
        control,
        deadline=NEVER if local and deadline is None else deadline,
        device=device,
        transports=transports,
        fatal=None if local or device.type == "cpu" else end_process,
        together=local,
        rings=rings,
        gauges=gauges,
    )
    if watch.size > 1:
        _WATCHDOG.add(watch)
    return watch


def ring_control(group: Group, deadline: float | None) -> Control:
    """What the ranks of a ring tell each other, where nothing waits longer than the ring's deadline allows.

    Raises:
        TransportError: no connection to the store of the group, in that time.
    """
    # A LocalWorld has a patience of its own; elsewhere the first wait is for ranks that compile.
    first = None if isinstance(group, LocalGroup) else FIRST_SECONDS
    return control_of(group, deadline or first).fresh_scope("ring")


def end_process(reason: str) -> None:
    """Leave at once, non-zero, so that torchrun restarts: the streams of this process wait for bytes for ever."""
    logger.critical("this process ends: %s", reason)
    within(FLUSH_SECONDS, sys.stdout.flush, HOST, "flush")  # os._exit does not
    os._exit(EXIT_CODE)
