"""NCCL over several nodes by two communicators: one for the edges inside this rank's node, one for those that leave it.

NCCL gives all peers of a communicator as many channels as the worst of them can use: one peer over a NIC would throttle
every NVLink edge. And it asks that the operations of several communicators of a GPU run one after the other, in one
order on all ranks (user guide, "Using multiple NCCL communicators concurrently"). So both work on one stream, and of
every post the part inside the node goes first: a transfer waits for none but those before it in that order, at either
end, and the first that is not over can always run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..transport import Edge, Fence, Message, TransportError, check_messages
from .nccl import NcclTransport
from .warm_up import DEFAULT_TIMEOUT, WarmUp


class ByNodeTransport:
    """One transport over all ranks of ``nodes``; the other arguments are those of `NcclTransport`."""

    name = "nccl"

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        nodes: Sequence[Sequence[int]],
        timeout: float = DEFAULT_TIMEOUT,
        **more: Any,
    ) -> None:
        self.rank, self.size, self.reason = rank, size, ""
        self._device, self._warm_up = device, WarmUp(device, timeout)
        self._node = {peer: number for number, node in enumerate(nodes) for peer in node}
        common = {"rank": rank, "size": size, "device": device, "timeout": timeout, **more}
        self._inside = NcclTransport(members=nodes[self._node[rank]], **common)
        try:
            self._between = NcclTransport(members=[*self._node], lane=self._inside.lane, **common)
        except BaseException:
            self._inside.abort("there is none between the nodes")
            raise

    def mark(self) -> Fence:
        """See `Transport.mark`."""
        return self._between.mark()

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        """See `Transport.post`."""
        check_messages(self, self._device, sends, receives)  # before either part is on its way
        parts = [([one for one in sends if self._near(one)], [one for one in receives if self._near(one)])]
        parts.append(([one for one in sends if not self._near(one)], [one for one in receives if not self._near(one)]))
        if not any(parts[0]):
            return self._between.post(sends=sends, receives=receives, after=after)
        fence = self._inside.post(sends=parts[0][0], receives=parts[0][1], after=after)
        if not any(parts[1]):
            return fence
        last = self._between.post(sends=parts[1][0], receives=parts[1][1])  # on the same stream: behind `after` too
        last.take_over(fence)
        return last

    def warm_up(self, edges: Sequence[Edge]) -> None:
        """See `Transport.warm_up`."""
        try:
            self._warm_up(self, edges)
        except TransportError:
            self.abort("its warm-up failed")
            raise

    def gather(self, value: object) -> list[object]:
        """See `Transport.gather`."""
        return self._between.gather(value)

    def check(self) -> str | None:
        """See `NcclTransport.check`."""
        return self._inside.check() or self._between.check()

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        self._between.abort(reason)
        self._inside.abort(reason)

    def close(self) -> None:
        """See `Transport.close`."""
        self._between.close()
        self._inside.close()

    def _near(self, message: Message) -> bool:
        return self._node[message.peer] == self._node[self.rank]
