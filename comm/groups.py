"""Conversion of the argument `group` into ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..validators import short_repr
from .group_cache import check_not_forked
from .world import LocalGroup, LocalMesh, single_rank

Group = LocalGroup | dist.ProcessGroup
GroupLike = Group | DeviceMesh | LocalMesh | None
"""Types that the argument `group` takes."""
MESH_DIMS = ("ring", "ulysses")
"""Names of the dimensions of a two-dimensional mesh; a mesh without names is accepted, too."""


def resolve_group(group: GroupLike = None) -> Group:
    """Return the ProcessGroup or LocalGroup that the argument `group` stands for.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a `LocalWorld` member. None is the
            default group if torch.distributed is initialised, and otherwise this device alone.

    Raises:
        ValueError: `group` is anything else, a mesh of more dimensions, or a process group without this rank.
        RuntimeError: the process group belongs to the process that this one was forked from.
    """
    members: object = group
    if group is None:
        members = dist.group.WORLD if dist.is_initialized() else single_rank()
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group is a {group.ndim}D DeviceMesh. It must be 1D; pass {_submesh_example(group)}")
        members = group.get_group()
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if members is outside:
        raise ValueError("group is a process group without this rank. Call this only on the ranks of the group")
    if isinstance(members, LocalGroup):
        return members
    if isinstance(members, dist.ProcessGroup):
        check_not_forked(members)
        return members
    raise ValueError(
        f"group is {short_repr(group)}; it must be a torch.distributed ProcessGroup, a one-dimensional DeviceMesh, "
        "a LocalWorld member or None"
    )


def resolve_mesh(group: GroupLike) -> tuple[Group, Group] | None:
    """Return this rank's ring group and Ulysses group in a two-dimensional mesh, or None for any other group.

    Raises:
        ValueError: the mesh has dimensions with other names, so the ring is unknown.
    """
    dims = mesh_groups(group)
    return None if dims is None else (resolve_group(dims[0]), resolve_group(dims[1]))


def mesh_groups(group: GroupLike) -> tuple[Group, Group] | None:
    """Return (ring group, Ulysses group) of a two-dimensional mesh, or None for any other group.

    Unlike `resolve_mesh`, the groups are not checked, so that torch.compile can trace the function.

    Raises:
        ValueError: the mesh has dimensions with other names.
    """
    if isinstance(group, LocalMesh):
        return group.ring, group.ulysses
    if not isinstance(group, DeviceMesh) or group.ndim != len(MESH_DIMS):
        return None
    if group.mesh_dim_names not in (None, MESH_DIMS):
        raise ValueError(
            f"group is a DeviceMesh with the dimensions {group.mesh_dim_names}. Their names must be {MESH_DIMS}, "
            "or the dimensions must have no names. If some of them do not shard the sequence, pass a "
            f"submesh without them, such as {_submesh_example(group)}"
        )
    return group.get_group(0), group.get_group(1)


def group_rank_size(group: GroupLike = None) -> tuple[int, int]:
    """Return (rank, number of ranks) in the group, or in the whole of a two-dimensional mesh."""
    mesh = resolve_mesh(group)
    if mesh is not None:
        ring, ulysses = mesh
        return ring.rank() * ulysses.size() + ulysses.rank(), ring.size() * ulysses.size()
    members = resolve_group(group)
    return members.rank(), members.size()


def _submesh_example(mesh: DeviceMesh) -> str:
    """Return the expression of a one-dimensional part of a mesh, such as `mesh["ring"]`, for an error message."""
    names = mesh.mesh_dim_names
    if not names:
        return 'mesh["ring"] of a mesh with mesh_dim_names'
    return f"mesh[{(MESH_DIMS[0] if MESH_DIMS[0] in names else names[-1])!r}]"
