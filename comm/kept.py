"""What is kept for a group from call to call, and ends with it; and handles that stand for objects."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from .cuda_threads import HOST, on_device, start

if TYPE_CHECKING:
    from .world import LocalGroup


class Closes(Protocol):
    """What can be kept."""

    def close(self) -> None:
        """Give everything back. Raises nothing."""


Kept = dict[object, Closes]
CONNECTION = "connection"
"""The key of a group's way to its store."""

_KEPT: weakref.WeakKeyDictionary[dist.ProcessGroup, Kept] = weakref.WeakKeyDictionary()
_INHERITED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def kept_of(group: LocalGroup | dist.ProcessGroup) -> Kept:
    """What is kept for a group, for the caller to add to."""
    if not isinstance(group, dist.ProcessGroup):
        return group.kept
    end_destroyed()
    return _KEPT.setdefault(group, {})


def end_destroyed() -> None:
    """End what is kept for groups that destroy_process_group has ended, which tells nobody.

    To be called now and then: a ring holds its group, so that no weak reference would ever notice.
    """
    alive = dist.distributed_c10d._world.pg_map
    for group in [group for group in list(_KEPT) if group not in alive]:
        # in a thread of its own: what waits for transfers that never come must not hold up who watches other rings
        start(partial(end, _KEPT.pop(group, {})), HOST, "end")


def end(kept: Mapping[object, Closes]) -> None:
    """Close everything; the connection first, for a store that may be gone has nothing to be told any more."""
    for key, thing in sorted(kept.items(), key=lambda item: item[0] != CONNECTION):
        device = key[0] if isinstance(key, tuple) else key
        with on_device(device if isinstance(device, torch.device) else HOST):  # rings are kept by device, and deadline
            thing.close()


def check_process(group: dist.ProcessGroup) -> None:
    """Raise in a process that was forked while it had this group: nobody answers there.

    Raises:
        RuntimeError: the group is its parent's.
    """
    if group in _INHERITED:
        raise RuntimeError(
            f"group belongs to the process that process {os.getpid()} was forked from, which has none of its threads "
            "and must not use its connections: make a group of its own, or start the process by spawn"
        )


def _after_fork() -> None:
    _INHERITED.update(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_after_fork)


# Handles stand for objects where numbers may pass and objects may not: the arguments of a torch.library op.
_HANDLES = count(1)  # 0 stands for nothing
_ALIVE: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def handle_of(thing: object) -> int:
    """A handle of ``thing`` in this process, which does not keep it alive."""
    handle = next(_HANDLES)
    _ALIVE[handle] = thing
    return handle


def of_handle(handle: int) -> object | None:
    """What ``handle`` was given to; None for 0, and once it is gone."""
    return _ALIVE.get(handle)
