"""Places where copies of a transport run: at once on the host, or on a separate high-priority CUDA stream."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

import torch

from ..cuda_threads import HIGH_PRIORITY, new_stream, on_device
from ..transport import DONE, Fence

# Numbers all recorded events of the process. On one stream a larger number is a later point, because recording and
# numbering happen under one lock.
_point_numbers = itertools.count()
_record_lock = threading.Lock()

POLL_SECONDS = 0.001

# (waiting stream, recorded stream) -> number of the latest point waited for. The entries assume that streams live as
# long as the process, as torch's do. A foreign stream whose handle is reused during a transfer would be confused.
WaitedPoints = dict[tuple[torch.cuda.Stream, torch.cuda.Stream], int]


class StreamOrderedFence:
    """A fence that any CUDA stream can wait for, not only the current one. No ABC, because isinstance must be fast."""

    def order(self, stream: torch.cuda.Stream) -> None:
        """Order later work on `stream` after this point."""
        raise NotImplementedError


class StreamFence(StreamOrderedFence):
    """A recorded CUDA event, with the tensors that must stay allocated until the compute stream has waited for it.

    Args:
        stream: stream on which the event is recorded.
        device: device of the stream.
        passed: points that streams have waited for already, shared by the fences of one transport.
        keep: tensors to hold until `wait`.
    """

    def __init__(
        self, stream: torch.cuda.Stream, device: torch.device, passed: WaitedPoints, keep: Sequence[torch.Tensor] = ()
    ) -> None:
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with _record_lock:
            self._event.record(stream)
            self._number = next(_point_numbers)
        self._stream = stream
        self._waited_points = passed
        self._device = device
        self._keep = tuple(keep)

    def wait(self) -> None:
        """Order the current stream after this point."""
        self.order(torch.cuda.current_stream(self._device))
        # Memory freed from here on is reused in the order of the current stream, which now runs after this point.
        self._keep = ()

    def adopt_tensors(self, earlier: StreamFence) -> None:
        """Hold the tensors of an earlier point of the same stream, so that the earlier fence can go."""
        self._keep, earlier._keep = (*self._keep, *earlier._keep), ()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Order `stream` after this point. The tensors stay held, because the stream that owns them has not waited.

        Skips the wait if the stream's own order or an earlier wait already implies it.
        """
        waits = (stream, self._stream)
        if stream != self._stream and self._waited_points.get(waits, -1) < self._number:
            stream.wait_event(self._event)
            self._waited_points[waits] = self._number

    def done(self) -> bool:
        """Return True if the device has passed this point.

        Raises:
            RuntimeError: the device has failed.
        """
        with on_device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]


def wait_until_passed(fence: StreamFence | None, seconds: float) -> bool:
    """Poll a fence for at most `seconds`, and return True if the device has passed it.

    Without a fence the result is True. If the device has failed, the result is False.
    """
    deadline = time.monotonic() + seconds
    try:
        while fence is not None and not fence.done():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
    except RuntimeError:
        return False
    return True


class HostCopyStream:
    """Copies of CPU tensors, which are over when their call returns, as compute on the CPU is."""

    def mark(self) -> Fence:
        return DONE

    def wait_for_fences(self, fences: Sequence[Fence]) -> None:
        """Block until every fence is over."""
        for fence in fences:
            fence.wait()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def record_point(self, keep: Sequence[torch.Tensor] = ()) -> Fence:
        return DONE


class CudaCopyStream:
    """One high-priority CUDA stream that runs transfers in program order beside compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = new_stream(device, HIGH_PRIORITY)
        self._waited_points: WaitedPoints = {}

    def mark(self) -> StreamFence:
        """Return a fence for the compute enqueued so far on the current stream."""
        return StreamFence(torch.cuda.current_stream(self._device), self._device, self._waited_points)

    def wait_for_fences(self, fences: Sequence[Fence]) -> None:
        """Order later transfers after every fence: on the copy stream if possible, else by blocking this thread."""
        for fence in fences:
            if isinstance(fence, StreamOrderedFence):
                fence.order(self.stream)
            else:
                fence.wait()  # a host fence is over once this returns

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            destination.copy_(source, non_blocking=True)

    def record_point(self, keep: Sequence[torch.Tensor] = ()) -> StreamFence:
        """Return a fence for the transfers enqueued so far."""
        return StreamFence(self.stream, self._device, self._waited_points, keep)


CopyStream = HostCopyStream | CudaCopyStream
