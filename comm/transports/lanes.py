"""Where a transport's copies are enqueued: at once on the host, or on a high-priority CUDA stream of their own."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import torch

from ..cuda_threads import HIGH_PRIORITY, new_stream, on_device
from ..transport import DONE, Fence

# Of every record in this process: on one stream, a larger number is a later point, as both are taken under the lock.
_numbers = itertools.count()
_recording = threading.Lock()

POLL_SECONDS = 0.001

# (who waits, for whom) -> the number of the latest point that was waited for. torch's own streams live as long as the
# process; a foreign one that is destroyed under a running transfer, and its handle given to another, would be mistaken.
Passed = dict[tuple[torch.cuda.Stream, torch.cuda.Stream], int]


class StreamOrdered:
    """A fence that can hold back any stream, without touching the current one. No ABC: every post asks who is one."""

    def order(self, stream: torch.cuda.Stream) -> None:
        """Let what is enqueued on `stream` from now on run after this point."""
        raise NotImplementedError


class StreamFence(StreamOrdered):
    """A recorded CUDA event, and the tensors that must stay allocated until the compute stream has waited for it."""

    def __init__(
        self, stream: torch.cuda.Stream, device: torch.device, passed: Passed, keep: Sequence[torch.Tensor] = ()
    ) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with _recording:
            self._event.record(stream)
            self._number = next(_numbers)
        self._stream = stream
        self._passed = passed
        self._device = device
        self._keep = tuple(keep)

    def wait(self) -> None:
        """Order the current stream behind this point."""
        self.order(torch.cuda.current_stream(self._device))
        # Memory that is freed from here on is reused in the order of the stream that has just been held back.
        self._keep = ()

    def take_over(self, earlier: StreamFence) -> None:
        """Hold what an earlier point of the same stream holds, in its place."""
        self._keep, earlier._keep = (*self._keep, *earlier._keep), ()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Order `stream` behind this point; the tensors stay held, for the stream that owns them has not waited.

        What its own order implies, or an earlier wait of it for the same stream, is not waited for again.
        """
        waits = (stream, self._stream)
        if stream != self._stream and self._passed.get(waits, -1) < self._number:
            stream.wait_event(self._event)
            self._passed[waits] = self._number

    def done(self) -> bool:
        """Whether the device has passed this point; RuntimeError where the device has failed."""
        with on_device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]


def passed(fence: StreamFence | None, seconds: float) -> bool:
    """Whether the device has passed a point, after at most so many seconds; one that has failed never does."""
    deadline = time.monotonic() + seconds
    try:
        while fence is not None and not fence.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
    except RuntimeError:
        return False
    return True


class HostLane:
    """CPU tensors: compute and copies are over when their call returns, so every point is past when it is made."""

    def mark(self) -> Fence:
        """The point that compute has reached."""
        return DONE

    def follow(self, fences: Sequence[Fence]) -> None:
        """Block until every fence is over."""
        for fence in fences:
            fence.wait()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        destination.copy_(source)

    def point(self, keep: Sequence[torch.Tensor] = ()) -> Fence:
        """The point that this lane has reached."""
        return DONE


class StreamLane:
    """One high-priority CUDA stream: transfers run there in program order, beside compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = new_stream(device, HIGH_PRIORITY)
        self._passed: Passed = {}

    def mark(self) -> StreamFence:
        """The point that compute has reached on the current stream."""
        return StreamFence(torch.cuda.current_stream(self._device), self._device, self._passed)

    def follow(self, fences: Sequence[Fence]) -> None:
        """Let transfers enqueued from now on run after every fence; the compute stream goes on."""
        for fence in fences:
            if isinstance(fence, StreamOrdered):
                fence.order(self.stream)
            else:
                fence.wait()  # a point of the host: over once this returns

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the transfer stream."""
        with torch.cuda.stream(self.stream):
            destination.copy_(source, non_blocking=True)

    def point(self, keep: Sequence[torch.Tensor] = ()) -> StreamFence:
        """The point that the transfers enqueued so far will reach."""
        return StreamFence(self.stream, self._device, self._passed, keep)


Lane = HostLane | StreamLane
