"""The watchdog: one thread per process that watches all rings for late transfers, failed ranks and differing calls."""

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

from ..control import Control, open_control
from ..cuda_threads import CPU_DEVICE, join_at_exit, on_device, run_with_timeout
from ..group_cache import close_destroyed_groups
from ..groups import Group
from ..transport import Fence, Transport, TransportError
from ..world import LocalGroup
from .deadlines import FIRST_DEADLINE_SECONDS, NEVER, Deadlines, MessageSizes, Post
from .preflight import Preflight
from .telemetry import TICK_RANKS, TICK_SECONDS, Gauges, Report, Telemetry, tick_period

logger = logging.getLogger(__name__)


# Timeout of one exchange, so that a silent store does not delay the deadlines.
STORE_SECONDS = 1.0
# After a timeout the store is left alone for the first time, then twice as long each time, up to the second. The host
# that serves the store may only have stalled for a moment.
SILENT_STORE_SECONDS, MAX_SILENT_SECONDS = 2.0, 16.0
# Aborting a communicator whose peers died may never return.
ABORT_SECONDS = 2.0
# Two ticks this far apart mean that the process was stopped, for example by a signal, a debugger or swapping.
STOPPED_SECONDS = 5.0
# After a call a rank exchanges news for this long, so that its last report spreads.
GRACE_SECONDS = 0.5
# Then it only answers waiting ranks, and reads their questions this often (less often in larger worlds).
IDLE_SECONDS = 1.0
# Number of ranks whose report is read directly after a failure. The ends of the failed edge come first.
MAX_ASKED_RANKS = 16


class RingFailure(NamedTuple):
    """Failure of a ring, as published in the store."""

    rank: int  # rank that found the failure
    kind: str  # "ValueError" if the ranks' calls differ, else "TransportError"
    text: str


class FailureGroup:
    """Watches of this process that fail together, such as those of a mesh's two rings, with their shared lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # only one thread at a time may report a problem
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """The watchdog's state for one ring. Create it with `open_watch`.

        entering a call   begin_call -> agree_on_call
        the ring loop     begin_loop -> add_post, span -> end_loop
        the watchdog      tick: check transfers, exchange news with other ranks, fail the ring if necessary

    Args:
        control: exchanges small values between the ranks of this ring.
        deadline: longest time of a transfer in seconds. None: a multiple of the median; inf: no limit.
        device: device of the ring.
        transports: returns the open transports; must not hold a reference to the ring.
        on_fatal: called with the failure's text after the transports are aborted, because a process whose streams wait
            for ever has to end. None: aborted transports raise in their waiters.
        ends_all_ranks: True for virtual ranks of one process, which all end if one of them does.
        failure_group: watches that fail together with this watch; None: this watch fails alone.
        gauges: reads clocks and throttle reasons of the GPU; None: they are not reported.
    """

    def __init__(
        self,
        control: Control,
        *,
        deadline: float | None,
        device: torch.device,
        transports: Callable[[], Sequence[Transport]],
        on_fatal: Callable[[str], None] | None = None,
        ends_all_ranks: bool = False,
        failure_group: FailureGroup | None = None,
        gauges: Gauges | None = None,
    ) -> None:
        self.rank, self.size = control.rank, control.size
        self.device = device
        self._control = control
        self._transports = transports
        self._fatal = on_fatal
        self._ends_all_ranks = ends_all_ranks
        self._preflight = Preflight(control)
        self._posts = Deadlines(deadline, ask_why=on_fatal is None and device.type == "cpu")
        self._names = control.names
        self._telemetry = Telemetry(control.rank, control.size, device, gauges, self._names)
        self._failure_group = failure_group or FailureGroup()
        self._lock = self._failure_group.lock
        self._failure: RingFailure | None = None
        self._calls = 0
        self._phase: str | None = None
        self._is_in_preflight = False  # True in the preflight
        self._agreed_call: int | None = 0  # number of the agreed call; 0: not agreed yet; None: the ranks did not agree
        self._active_at = -NEVER  # when this ring was last in use
        self._ticked_at = NEVER
        self._answered_at = -NEVER
        self._store_problem: str | None = None
        self._retry_store_at = -NEVER
        self._silence = SILENT_STORE_SECONDS
        self.is_closed = False
        with self._lock:
            self._failure_group.watches.add(self)

    # -- the thread that computes ------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Mark the start of a call; `end_call` marks its end."""
        self._agreed_call = 0

    def end_call(self) -> None:
        """Mark the end of a call. If an error ended the call, call `report_call_error` before this."""
        self._agreed_call = 0

    def agree_on_call(
        self,
        fields: Mapping[str, object],
        values: Mapping[str, object] | None = None,
        *,
        forward_number: int | None = None,
        is_forced: bool = False,
    ) -> int:
        """Compare this rank's call with those of all other ranks before anything is sent.

        Args:
            fields: compared by `repr`. A call that the previous calls predict costs no traffic.
            values: compared likewise, but expected to change from batch to batch.
            forward_number: for a backward, the number of its forward call.
            is_forced: compare a predicted call as well, because no transfer would reveal a difference.

        Returns:
            The number of the call, equal on every rank.

        Raises:
            ValueError: on every rank, with the first field that differs and its values by rank, or the rank that
                refused.
            TransportError: a rank did not answer, or the ring has failed before.
        """
        if self.size == 1:
            return 0
        if self._failure is not None:
            raise self._as_error(self._failure)
        self._agreed_call = self._preflight.call_count + 1
        self._is_in_preflight, self._active_at = True, time.monotonic()
        try:
            verdict = self._preflight.agree_on_call(
                fields, values, forward_number=forward_number, is_forced=is_forced, stop=self.failure_reason
            )
        except TransportError as error:
            raise self.report_failure(error) from error
        finally:
            self._is_in_preflight = False
        if verdict is not None:
            if verdict.is_in_flight:
                self._fail(RingFailure(self.rank, "ValueError", verdict.text))
            self._agreed_call = None
            raise ValueError(verdict.text)
        self._telemetry.set_initial_step("agreed on a call")
        return self._agreed_call

    def report_call_error(self, error: BaseException) -> None:
        """Tell the other ranks that an error ended a call, unless they know already. Never raises.

        An error before the ranks have agreed on the call refuses the call: all ranks raise that error, and later calls
        may succeed. A `TransportError` fails the ring instead. So does any error in a call on which a ring of the same
        mesh has agreed.
        """
        if self.size == 1 or self._failure is not None or self._agreed_call is None:
            return
        if isinstance(error, TransportError) or any(watch._agreed_call for watch in self._failure_group.watches):
            self.report_failure(error)
        else:
            self._preflight.refuse_call(error)

    def cancel_call(self) -> None:
        """Cancel the agreed call because another ring of these ranks refused it."""
        self._agreed_call = None

    def begin_loop(self, phase: str) -> None:
        """Mark the start of a call's ring loop; `phase` is "forward" or "backward"."""
        self._calls += 1
        self._phase = phase

    def end_loop(self) -> None:
        """Mark the end of a call's ring loop."""
        self._phase = None
        self._active_at = time.monotonic()

    def add_post(
        self, label: object, fence: Fence, after: Sequence[Fence], sent: MessageSizes, received: MessageSizes
    ) -> None:
        """Record a posted group of transfers, in O(1) and without a lock.

        Args:
            label: name of the transfers in errors.
            fence: fence of the post.
            after: fences that the post waits for.
            sent: (peer, bytes) of each sent message.
            received: (peer, bytes) of each received message.
        """
        if self.size > 1:
            self._posts.add(label, fence, after, sent, received, time.monotonic(), self._calls)

    def span(self, kind: str, hop: object = None) -> AbstractContextManager[None]:
        """Measure the time of a block; `kind` is "compute" or "wait". `hop` is ignored."""
        return self._telemetry.stopwatch.measure(kind) if self.size > 1 else contextlib.nullcontext()

    def report_failure(self, error: BaseException) -> BaseException:
        """Tell the other ranks that `error` ended this rank's part of a call, and return the error to raise.

        For a `TransportError` the result names hop, edge, bytes and the last step of each rank, or the failure that
        another rank found. Any other error is returned unchanged.
        """
        if self.size == 1:
            return error
        known = isinstance(error, TransportError)
        with self._lock:
            if self._failure is None and self._ends_all_ranks:
                return error  # LocalWorld tells the other ranks and raises the first error
            if self._failure is None:
                self._posts.poll(time.monotonic())
                problem = str(error) if known else f"{type(error).__name__}: {error}"
                if self._fatal is not None:  # the process ends here, so log the traceback now
                    logger.error("rank %d failed", self._names[self.rank], exc_info=error)
                self._report_problem(
                    self._posts.failed_post or self._posts.oldest, f"failed: {problem}", look_first=known
                )
            assert self._failure is not None
            return self._as_error(self._failure) if known else error

    def telemetry(self) -> tuple[Report, ...]:
        """Return the latest report of every known rank, in rank order, with its age."""
        self._telemetry.report(self._step(), self._calls, self._posts.nbytes)
        return self._telemetry.table.reports(time.time())

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self.is_closed = True
        self._posts.clear()

    # -- the watchdog's thread ---------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check every transfer, read other ranks' failures and questions, and spread reports."""
        if self.is_closed or self._failure is not None:
            return
        now = time.monotonic()
        with self._lock:
            if now - self._ticked_at > STOPPED_SECONDS:
                self._posts.resume(now)
            self._ticked_at = now
            late = self._posts.poll(now)
            if self._posts.failed_post is not None:
                return self._report_problem(self._posts.failed_post, f"failed: {self._posts.failed_post.problem}")
            noticed = next(filter(None, (transport.check() for transport in self._transports())), None)
            if noticed is not None:
                return self._report_problem(self._posts.oldest, f"failed: {noticed}")
            if late is not None:
                return self._report_problem(
                    late, f"not finished {self._posts.limit(late):g} s after it could start, which is its deadline"
                )
        if self._phase is not None or self._is_in_preflight or self._posts.is_busy:
            self._active_at = now
        if now - self._active_at < GRACE_SECONDS + tick_period(self.size):
            self._exchange_news(now)
        elif now - self._answered_at > IDLE_SECONDS * max(1.0, self.size / TICK_RANKS):
            self._answer(self._exchange(look=self._preflight.keys_to_read()), {})

    def _exchange_news(self, now: float) -> None:
        """Exchange failures, questions and reports with the store once."""
        self._telemetry.report(self._step(), self._calls, self._posts.nbytes)
        peer = self._telemetry.next_peer()
        table = [] if peer is None else [f"table/{peer}"]
        published = self._exchange(look=["failure", *self._preflight.keys_to_read(), *table])
        if published is None:
            return
        if "failure" in published:
            return self._report_problem(self._posts.oldest, "given up", RingFailure(*published["failure"]))
        if peer is not None:
            self._telemetry.table.merge_from_peer(published.get(f"table/{peer}"))
        self._answer(published, {} if peer is None else {f"table/{self.rank}": self._telemetry.table.pack()})
        self._telemetry.warn_straggler(now)

    def _answer(self, published: Mapping[str, object] | None, table: Mapping[str, object]) -> None:
        """Answer other ranks' questions in `published`, and publish the answers and `table`.

        This also happens in a rank that is busy outside the ring. `published` is None if the store did not answer.
        """
        self._answered_at = time.monotonic()
        if published is None:
            return
        publish, verdict = self._preflight.process_published(published)
        if verdict is not None:
            return self._fail(RingFailure(self.rank, "ValueError", verdict.text))
        if publish or table:
            self._exchange({**publish, **table})

    def _exchange(
        self, publish: Mapping[str, object] | None = None, look: Sequence[str] = (), *, at_once: bool = False
    ) -> dict[str, Any] | None:
        """Publish values, then read the keys in `look` and return their values; None if the store does not answer.

        A silent store is then left alone for a while, unless `at_once` is set.
        """
        if time.monotonic() < self._retry_store_at and not at_once:
            return None
        try:
            published = self._control.exchange(publish, look, STORE_SECONDS)
            self._silence = SILENT_STORE_SECONDS
            return published
        except TransportError as error:
            if self._store_problem is None:
                logger.info("rank %d: %s", self._names[self.rank], error)
            self._store_problem, self._retry_store_at = str(error), time.monotonic() + self._silence
            self._silence = min(2 * self._silence, MAX_SILENT_SECONDS)
            return None

    # -- what went wrong ---------------------------------------------------------------------------------------------

    def _report_problem(
        self, post: Post | None, what: str, other_failure: RingFailure | None = None, *, look_first: bool = True
    ) -> None:
        """Fail the ring because of a problem of this rank, or with another rank's failure that explains the problem.

        Args:
            post: the transfers with the problem, if known.
            what: the problem, which follows the description of the transfers in the error.
            other_failure: failure of another rank that explains the problem, if known.
            look_first: look for such a failure in the store if none is known.
        """
        where = f"{post.label} ({post.edges(self.rank, self._names)})" if post is not None else self._step()
        if other_failure is None and look_first:
            other_failure = self._find_explanation()
        if other_failure is not None and other_failure.kind == "ValueError":
            return self._fail(other_failure, tell=other_failure.rank == self.rank)
        text = f"rank {self._names[self.rank]}: {where} {what}"
        if other_failure is not None:
            text = f"{text}. Rank {self._names[other_failure.rank]} reported: {other_failure.text}"
            return self._fail(RingFailure(self.rank, other_failure.kind, text), tell=False)
        self._fail(RingFailure(self.rank, "TransportError", f"{text}. {self._describe_last_steps(post)}"))

    def _find_explanation(self) -> RingFailure | None:
        """Return a failure of another rank that explains this rank's problem, or None."""
        for _ in range(2):  # the first round may bring a question, and the second the answers to it
            published = self._exchange(look=["failure", *self._preflight.keys_to_read()])
            if published is None:
                return None
            if "failure" in published:
                return RingFailure(*published["failure"])
            publish, verdict = self._preflight.process_published(published)
            if verdict is not None:
                return RingFailure(self.rank, "ValueError", verdict.text)
            self._exchange(publish)
        return None

    def _fail(self, failure: RingFailure, *, tell: bool = True) -> None:
        """End this ring and the rings that fail with it.

        The failure is published first, so that the store has the reason when other ranks see broken transports. `tell`
        applies only to this ring: the other rings always publish the failure.
        """
        with self._lock:
            if self._failure is not None:
                return
            if tell:
                self._publish_failure(failure)
            self._failure = failure
            others = [w for w in self._failure_group.watches if w.size > 1 and not w.is_closed and w._failure is None]
            for watch in others:
                watch._failure = failure._replace(rank=watch.rank)
                watch._publish_failure(watch._failure)
        logger.error("%s", failure.text)
        for watch in (self, *others):
            run_with_timeout(ABORT_SECONDS, partial(watch._abort, failure.text), self.device, "abort")
        if self._fatal is not None:
            self._fatal(failure.text)

    def _publish_failure(self, failure: RingFailure) -> None:
        """Publish a failure of this ring, even if the store is left alone at the moment."""
        # Read the key as well, because a TCPStore confirms only reads.
        self._exchange({"failure": tuple(failure)}, look=["failure"], at_once=True)

    def _abort(self, reason: str) -> None:
        for transport in self._transports():
            transport.abort(reason)

    def _describe_last_steps(self, post: Post | None) -> str:
        """Return text with the last reported step of each rank, after asking for newer reports."""
        peers = [peer for peer, _ in (*post.sent, *post.received)] if post is not None else []
        others = [rank for rank in dict.fromkeys((*peers, *range(self.size))) if rank != self.rank][:MAX_ASKED_RANKS]
        for table in (self._exchange(look=[f"table/{rank}" for rank in others]) or {}).values():
            self._telemetry.table.merge_from_peer(table)
        known = {report.rank: report for report in self._telemetry.table.reports(time.time())}
        silent = [str(self._names[rank]) for rank in others if rank not in known]
        reports = [known[rank] for rank in sorted(others) if rank in known]
        steps = "; ".join(f"rank {self._names[rank]}: {row.step} ({age:.1f} s ago)" for rank, age, row in reports)
        text = f"Last reported: {steps or 'nothing'}"
        text += f"; nothing from rank {', '.join(silent)}" if silent else ""
        return text + (f". {self._store_problem}" if self._store_problem else "")

    def _step(self) -> str:
        """Return text with what this rank is doing, such as `in a forward after hop 2`."""
        first, last = self._posts.oldest, self._posts.last_label
        if first is not None:
            return f"in {first.label}"
        after = f" after {last}" if last is not None else ""
        if self._phase is not None:
            return f"in a {self._phase}{after}"
        return f"comparing the ranks' calls{after}" if self._is_in_preflight else f"between calls{after}"

    def failure_reason(self) -> str | None:
        """Return the text of this ring's failure, which ends waits, or None."""
        return self._failure.text if self._failure is not None else None

    @staticmethod
    def _as_error(failure: RingFailure) -> Exception:
        """Return the exception that this rank raises for a failure."""
        return ValueError(failure.text) if failure.kind == "ValueError" else TransportError(failure.text)


# EX_TEMPFAIL of sysexits.h, after which torchrun and schedulers restart.
EXIT_CODE = 75
# Timeout for flushing, so that a pipe that nobody reads does not keep the process alive.
FLUSH_SECONDS = 1.0


class Watchdog:
    """The thread that ticks all watches of this process. It runs while there is a ring to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def add(self, watch: Watch) -> None:
        """Watch a ring until it is closed or garbage-collected."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ringattn-watchdog", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread at exit. Returning from C++ after the interpreter's shutdown would crash the process."""
        self._end.set()
        thread = self._thread
        if thread is not None:
            join_at_exit(thread)

    def _run(self) -> None:
        while not self._end.wait(TICK_SECONDS):
            with self._lock:
                watches = [watch for watch in self._watches if not watch.is_closed]
                if not watches:
                    self._thread = None
                    return
            while watches:
                _tick(watches)
            close_destroyed_groups()


def _tick(watches: list[Watch]) -> None:
    """Tick the last watch and drop the reference to it, so that a watch that nobody else holds is freed here."""
    rank, device, left = watches[-1].rank, watches[-1].device, len(watches) - 1
    try:
        with on_device(device):
            watches.pop().tick()
    except Exception:  # an error here must not end the watchdog of the other rings
        logger.exception("the watchdog of rank %d failed", rank)
    finally:
        del watches[left:]


_WATCHDOG = Watchdog()
atexit.register(lambda: _WATCHDOG.stop())


def _after_fork() -> None:
    """Make a watchdog without a thread in a forked process."""
    global _WATCHDOG
    _WATCHDOG = Watchdog()  # a forked process does not inherit threads


os.register_at_fork(after_in_child=_after_fork)


def open_watch(
    group: Group,
    device: torch.device,
    *,
    control: Control,
    deadline: float | None,
    transports: Callable[[], Sequence[Transport]],
    failure_group: FailureGroup | None = None,
    gauges: Gauges | None = None,
) -> Watch:
    """Watch a ring of this group until it is closed. Every rank opens its rings in the same order.

    The arguments are those of `Watch`. `control` comes from `ring_control`, and its patience limits the preflight. In a
    `LocalWorld`, which has its own timeout, a `deadline` of None means no limit.
    """
    local = isinstance(group, LocalGroup)
    watch = Watch(
        control,
        deadline=NEVER if local and deadline is None else deadline,
        device=device,
        transports=transports,
        on_fatal=None if local or device.type == "cpu" else end_process,
        ends_all_ranks=local,
        failure_group=failure_group,
        gauges=gauges,
    )
    if watch.size > 1:
        _WATCHDOG.add(watch)
    return watch


def ring_control(group: Group, deadline: float | None) -> Control:
    """Return the control of a new ring, whose waits do not exceed the ring's deadline.

    Raises:
        TransportError: the store did not accept a connection in time.
    """
    # A LocalWorld has its own timeout. Elsewhere the first wait may be for ranks that are still compiling.
    first = None if isinstance(group, LocalGroup) else FIRST_DEADLINE_SECONDS
    return open_control(group, deadline or first).new_scope("ring")


def end_process(reason: str) -> None:
    """End the process with a non-zero exit code, so that torchrun restarts it. Its streams would wait for ever."""
    logger.critical("ending this process: %s", reason)
    run_with_timeout(FLUSH_SECONDS, sys.stdout.flush, CPU_DEVICE, "flush")  # os._exit does not flush
    os._exit(EXIT_CODE)
