"""Deadlines of transfers. The clock of a transfer starts when its `after` fences and the previous transfer are over."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..transport import DONE, Fence

# Without a user-defined deadline, a transfer is late after this many times the median of the recent transfers ...
MEDIAN_FACTOR = 100
# ... but not before this many seconds, because a rank may pause for a checkpoint or the garbage collector, ...
MIN_DEADLINE_SECONDS = 60.0
# ... and not before this many times the longest recent transfer, because slow or uneven compute makes hops long.
LONGEST_FACTOR = 4
# The first transfers of a call may wait for ranks that enter late (data loading, a checkpoint). Transfers that this
# ring has never finished may wait for ranks that compile.
FIRST_DEADLINE_SECONDS = 600.0
# Number of recent transfers that the median covers.
RECENT_TRANSFERS = 128
# Number of unfinished transfers that one poll checks. Later transfers run after them, and a long ring posts a thousand.
MAX_POLLED_POSTS = 64

MessageSizes = Sequence[tuple[int, int]]  # (peer, bytes) per message


@dataclass(slots=True, eq=False)
class Post:
    """One group of transfers in flight."""

    label: object  # name of the transfers in errors
    fence: Fence
    after: Sequence[Fence]
    sent: MessageSizes
    received: MessageSizes
    posted_at: float
    call: int  # number of the forward or backward that posted
    ready_at: float | None = None  # time when its `after` fences were over
    problem: str | None = None  # error of a failed transfer

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(nbytes for _, nbytes in (*self.sent, *self.received))

    def edges(self, rank: int, names: Sequence[int]) -> str:
        """Describe the messages, summed by edge, as `4096 bytes rank 0 -> rank 1, ...`.

        Args:
            rank: this rank.
            names: rank numbers to print.
        """
        sizes: dict[tuple[int, int], int] = {}
        for peer, nbytes in self.received:
            sizes[peer, rank] = sizes.get((peer, rank), 0) + nbytes
        for peer, nbytes in self.sent:
            sizes[rank, peer] = sizes.get((rank, peer), 0) + nbytes
        messages = [f"{nbytes} bytes rank {names[a]} -> rank {names[b]}" for (a, b), nbytes in sizes.items()]
        return ", ".join(messages) or "no bytes on this rank"


class Deadlines:
    """Unfinished transfers of one ring, oldest first.

    Args:
        seconds: longest time of a transfer. None: a multiple of the median of recent transfers; inf: no limit.
        ask_why: True if waiting for a finished fence is free of side effects and raises its error, as on the host.
    """

    def __init__(self, seconds: float | None, *, ask_why: bool) -> None:
        self._seconds = seconds
        self._ask_why = ask_why
        self._inbox: deque[tuple[Any, ...]] = deque()  # arguments of Post
        self._pending: list[Post] = []
        self._durations: deque[float] = deque(maxlen=RECENT_TRANSFERS)
        self._longest: deque[float] = deque(maxlen=RECENT_TRANSFERS)  # without the first transfers of calls
        self._finished_labels: set[object] = set()  # labels of transfers that have finished at least once
        self._last_arrived_call = 0  # last call with a finished transfer
        self._last_finished_at = -NEVER  # time when the last transfer finished; transfers run one after the other
        self.nbytes = 0
        self.last_label: object = None
        """Label of the newest transfer."""
        self.failed_post: Post | None = None
        """First failed transfer, with its `problem`."""

    def add(
        self,
        label: object,
        fence: Fence,
        after: Sequence[Fence],
        sent: MessageSizes,
        received: MessageSizes,
        now: float,
        call: int,
    ) -> None:
        """Watch a group of transfers that was posted at `now`. The other arguments are the fields of `Post`.

        Any thread may call it. `poll` creates the `Post` later, because this is the hot path.
        """
        self._inbox.append((label, fence, after, sent, received, now, call))
        self.last_label = label

    @property
    def oldest(self) -> Post | None:
        """Oldest transfer that was not over at the last poll."""
        return self._pending[0] if self._pending else None

    @property
    def is_busy(self) -> bool:
        """True if some transfer is not known to be over."""
        return bool(self._pending or self._inbox)

    def poll(self, now: float) -> Post | None:
        """Check the transfers in the order of their posts, and return the oldest late transfer or None."""
        pending, polled = self._pending, 0
        left: list[Post] = []
        while self._inbox:
            pending.append(Post(*self._inbox.popleft()))
        previous_end = self._last_finished_at
        for post in pending:
            if len(left) == MAX_POLLED_POSTS:
                break
            polled += 1
            if not self._is_over(post, now, previous_end):
                left.append(post)
        self._pending = [*left, *pending[polled:]]  # assign once, because another thread may read `oldest`
        for post in left:
            if post.ready_at is not None and now - max(post.ready_at, self._last_finished_at) >= self.limit(post):
                return post
        return None

    def limit(self, post: Post) -> float:
        """Return the seconds that a transfer may take once it can start."""
        if self._seconds is not None:
            return self._seconds
        if post.call > self._last_arrived_call or post.label not in self._finished_labels:
            return FIRST_DEADLINE_SECONDS
        usual = MEDIAN_FACTOR * statistics.median(self._durations)
        return max(MIN_DEADLINE_SECONDS, usual, LONGEST_FACTOR * max(self._longest, default=0.0))

    def resume(self, now: float) -> None:
        """Restart all clocks, because this process, and perhaps all others, stood still until now."""
        self._last_finished_at = now

    def clear(self) -> None:
        """Forget all transfers, because they were aborted or the ring is closed."""
        self._inbox.clear()
        self._pending = []

    def _is_over(self, post: Post, now: float, previous_end: float) -> bool:
        """Return True if a post has finished or failed, and record its duration or its error.

        `previous_end` is the time when the last transfer had finished before this poll.
        """
        try:
            if not post.fence.done():
                if post.ready_at is None and all(fence.done() for fence in post.after):
                    # Exact if there was nothing to wait for, and otherwise late by at most one poll.
                    post.ready_at = post.posted_at if all(fence is DONE for fence in post.after) else now
                return False
            self.nbytes += post.nbytes
            if self._ask_why and self.failed_post is None:
                post.fence.wait()
        except RuntimeError as error:  # a TransportError, or the device has failed
            if self.failed_post is None:
                post.problem, self.failed_post = str(error), post
            return True
        self._last_finished_at = now
        duration = now - max(post.ready_at if post.ready_at is not None else post.posted_at, previous_end)
        self._durations.append(duration)
        if post.call <= self._last_arrived_call:
            self._longest.append(duration)
        self._last_arrived_call = max(self._last_arrived_call, post.call)
        self._finished_labels.add(post.label)
        return True


NEVER = math.inf
