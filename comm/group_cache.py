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

from .cuda_threads import CPU_DEVICE, on_device, start_thread

if TYPE_CHECKING:
    from .world import LocalGroup


class Closeable(Protocol):
    """An object that can be cached for a group."""

    def close(self) -> None:
        """Release all resources without raising."""


GroupCache = dict[object, Closeable]
CONNECTION_KEY = "connection"
"""Key of a group's connection to its store."""

_GROUP_CACHES: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupCache] = weakref.WeakKeyDictionary()
_INHERITED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def get_group_cache(group: LocalGroup | dist.ProcessGroup) -> GroupCache:
    """Return the dict of objects that are closed together with `group`. The caller may add objects."""
    if not isinstance(group, dist.ProcessGroup):
        return group.cache
    close_destroyed_groups()
    return _GROUP_CACHES.setdefault(group, {})


def close_destroyed_groups() -> None:
    """Close the caches of groups that `destroy_process_group` has destroyed.

    `destroy_process_group` notifies nobody, and a weak reference does not help because a ring holds its group. Call
    this function now and then.
    """
    alive = dist.distributed_c10d._world.pg_map
    for group in [group for group in list(_GROUP_CACHES) if group not in alive]:
        # Use a separate thread: closing may wait for transfers that never arrive, and the caller watches other rings.
        start_thread(partial(close_group_cache, _GROUP_CACHES.pop(group, {})), CPU_DEVICE, "end")


def close_group_cache(cache: Mapping[object, Closeable]) -> None:
    """Close all cached objects. The connection is first, so that the others do not wait for a store that is gone."""
    for key, thing in sorted(cache.items(), key=lambda item: item[0] != CONNECTION_KEY):
        device = key[0] if isinstance(key, tuple) else key  # keys of rings begin with their device
        with on_device(device if isinstance(device, torch.device) else CPU_DEVICE):
            thing.close()


def check_not_forked(group: dist.ProcessGroup) -> None:
    """Raise if this process inherited the group through a fork, because the group's connections do not work here.

    Raises:
        RuntimeError: the group belongs to the parent process.
    """
    if group in _INHERITED:
        raise RuntimeError(
            f"group was created before process {os.getpid()} was forked, and its threads and connections do not work "
            "here. Create a new group in this process, or start the process with spawn"
        )


def _after_fork() -> None:
    """Remember the groups that the new process has inherited from its parent."""
    _INHERITED.update(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_after_fork)


# Arguments of a torch.library op may be numbers but not arbitrary objects, so handles stand for objects.
_HANDLES = count(1)  # 0 stands for no object
_ALIVE: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()


def create_handle(value: object) -> int:
    """Return a new handle for ``value`` in this process. The handle does not keep ``value`` alive."""
    handle = next(_HANDLES)
    _ALIVE[handle] = value
    return handle


def resolve_handle(handle: int) -> object | None:
    """Return the object of ``handle``; None for handle 0 and for an object that no longer exists."""
    return _ALIVE.get(handle)
