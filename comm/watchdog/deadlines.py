"""When a transfer is late: a clock for each, from the moment when what it waits for, and the one before it, is over."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..transport import DONE, Fence

# Without a deadline of the user's, a transfer is late after this many times the median of the last ones ...
MEDIANS = 100
# ... but never before this many seconds: a rank may pause for a checkpoint, or the garbage collector, ...
LEAST_SECONDS = 60.0
# ... nor before this many times the longest that came: hops may be long where compute is slow, or work is uneven.
LONGESTS = 4
# The first transfers of a call wait for ranks that enter it late (data loading, a checkpoint), and those that this ring
# has never seen to their end for ranks that compile.
FIRST_SECONDS = 600.0
# as many of the last transfers make the median
RECENT = 128
# As many that are not over are looked at in one poll: those behind run after them, and a long ring posts a thousand.
LOOKS = 64

Sizes = Sequence[tuple[int, int]]  # (peer, bytes) per message


@dataclass(slots=True, eq=False)
class Post:
    """One group of transfers on its way."""

    label: object
    fence: Fence
    after: Sequence[Fence]
    sent: Sizes
    received: Sizes
    posted: float
    call: int
    ready: float | None = None  # when what it waits for was over
    problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its messages."""
        return sum(nbytes for _, nbytes in (*self.sent, *self.received))

    def edges(self, rank: int, names: Sequence[int]) -> str:
        """Its messages: `4096 bytes rank 0 -> rank 1, ...`; those of one edge in one. Ranks are called `names`."""
        sizes: dict[tuple[int, int], int] = {}
        for peer, nbytes in self.received:
            sizes[peer, rank] = sizes.get((peer, rank), 0) + nbytes
        for peer, nbytes in self.sent:
            sizes[rank, peer] = sizes.get((rank, peer), 0) + nbytes
        messages = [f"{nbytes} bytes rank {names[a]} -> rank {names[b]}" for (a, b), nbytes in sizes.items()]
        return ", ".join(messages) or "no bytes on this rank"


class Deadlines:
    """The transfers of one ring that are not over, oldest first.

    Args:
        seconds: how long each may take; None: many times the median of the last ones; inf: as long as it likes.
        ask_why: whether a fence that is over may be asked if it failed: on a host, where asking does nothing else.
    """

    def __init__(self, seconds: float | None, *, ask_why: bool) -> None:
        self._seconds = seconds
        self._ask_why = ask_why
        self._inbox: deque[tuple[Any, ...]] = deque()  # what makes a Post
        self._pending: list[Post] = []
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._longest: deque[float] = deque(maxlen=RECENT)  # without those that began their call
        self._known: set[object] = set()  # labels of transfers that were over once
        self._arrived_in = 0  # the last call of which some transfer is over
        self._moved = -NEVER  # when the last one was over: they run one after the other
        self.nbytes = 0
        self.last: object = None
        """Label of the newest transfer."""
        self.failed: Post | None = None
        """The first transfer that failed, with its `problem`."""

    def add(
        self, label: object, fence: Fence, after: Sequence[Fence], sent: Sizes, received: Sizes, now: float, call: int
    ) -> None:
        """Watch a transfer, from any thread; the hot path: a poll makes posts of all that came since the last one."""
        self._inbox.append((label, fence, after, sent, received, now, call))
        self.last = label

    @property
    def first(self) -> Post | None:
        """The oldest transfer that is not over, as of the last poll."""
        return self._pending[0] if self._pending else None

    @property
    def busy(self) -> bool:
        """Whether some transfer is not known to be over."""
        return bool(self._pending or self._inbox)

    def poll(self, now: float) -> Post | None:
        """Look at the transfers in the order of their posts; the oldest that is late, if any."""
        pending, looked = self._pending, 0
        left: list[Post] = []
        while self._inbox:
            pending.append(Post(*self._inbox.popleft()))
        moved = self._moved
        for post in pending:
            if len(left) == LOOKS:
                break
            looked += 1
            if not self._over(post, now, moved):
                left.append(post)
        self._pending = [*left, *pending[looked:]]  # in one step: another thread may ask for the first
        for post in left:
            if post.ready is not None and now - max(post.ready, self._moved) >= self.limit(post):
                return post
        return None

    def limit(self, post: Post) -> float:
        """Seconds that a transfer may take once what it waits for is over."""
        if self._seconds is not None:
            return self._seconds
        if post.call > self._arrived_in or post.label not in self._known:
            return FIRST_SECONDS
        usual = MEDIANS * statistics.median(self._durations)
        return max(LEAST_SECONDS, usual, LONGESTS * max(self._longest, default=0.0))

    def resume(self, now: float) -> None:
        """This process stood still until now, and so may have all others: no clock ran."""
        self._moved = now

    def clear(self) -> None:
        """Forget all transfers: they were aborted, or the ring is closed."""
        self._inbox.clear()
        self._pending = []

    def _over(self, post: Post, now: float, moved: float) -> bool:
        try:
            if not post.fence.done():
                if post.ready is None and all(fence.done() for fence in post.after):
                    # Exact where nothing had to be waited for; else late by one poll at most.
                    post.ready = post.posted if all(fence is DONE for fence in post.after) else now
                return False
            self.nbytes += post.nbytes
            if self._ask_why and self.failed is None:
                post.fence.wait()
        except RuntimeError as error:  # a TransportError, or the device has failed
            if self.failed is None:
                post.problem, self.failed = str(error), post
            return True
        self._moved = now
        duration = now - max(post.ready if post.ready is not None else post.posted, moved)
        self._durations.append(duration)
        if post.call <= self._arrived_in:
            self._longest.append(duration)
        self._arrived_in = max(self._arrived_in, post.call)
        self._known.add(post.label)
        return True


NEVER = math.inf
