"""Objects cached per group and closed with it, and integer handles that stand for objects."""

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
    """An object that can be cached for a group."""

    def close(self) -> None:
        """Release all resources without raising."""


Kept = dict[object, Closes]
CONNECTION = "connection"
"""Key of a group's connection to its store."""

_KEPT: weakref.WeakKeyDictionary[dist.ProcessGroup, Kept] = weakref.WeakKeyDictionary()
_INHERITED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def kept_of(group: LocalGroup | dist.ProcessGroup) -> Kept:
    """Return the cache of a group, which the caller may add to."""
    if not isinstance(group, dist.ProcessGroup):
        return group.kept
    end_destroyed()
    return _KEPT.setdefault(group, {})


def end_destroyed() -> None:
    """Close the caches of groups that `destroy_process_group` has destroyed.

    `destroy_process_group` notifies nobody, and a weak reference does not help because a ring holds its group. Call
    this function now and then.
    """
    alive = dist.distributed_c10d._world.pg_map
    for group in [group for group in list(_KEPT) if group not in alive]:
        # Use a separate thread: closing may wait for transfers that never arrive, and the caller watches other rings.
        start(partial(end, _KEPT.pop(group, {})), HOST, "end")


def end(kept: Mapping[object, Closes]) -> None:
    """Close all cached objects, the connection first because the store may be gone."""
    for key, thing in sorted(kept.items(), key=lambda item: item[0] != CONNECTION):
        device = key[0] if isinstance(key, tuple) else key
        with on_device(device if isinstance(device, torch.device) else HOST):  # keys of rings begin with their device
            thing.close()


def check_process(group: dist.ProcessGroup) -> None:
    """Raise if this process inherited the group through a fork, because no peer answers here.

    Raises:
        RuntimeError: the group belongs to the parent process.
    """
    if group in _INHERITED:
        raise RuntimeError(
            f"group belongs to the process that process {os.getpid()} was forked from; its threads and connections do "
            "not work here. Create a new group in this process, or start the process with spawn"
        )


def _after_fork() -> None:
    _INHERITED.update(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_after_fork)


# Arguments of a torch.library op may be numbers but not arbitrary objects, so handles stand for objects.
_HANDLES = count(1)  # 0 stands for no object
_ALIVE: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def handle_of(thing: object) -> int:
    """Return a new handle for ``thing`` in this process. The handle does not keep ``thing`` alive."""
    handle = next(_HANDLES)
    _ALIVE[handle] = thing
    return handle


def of_handle(handle: int) -> object | None:
    """Return the object of ``handle``; None for handle 0 and for an object that no longer exists."""
    return _ALIVE.get(handle)
