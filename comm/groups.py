"""The ranks that `group=` names."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..kinds import shown
from .kept import check_process
from .world import LocalGroup, LocalMesh, single_rank

Group = LocalGroup | dist.ProcessGroup
GroupLike = Group | DeviceMesh | LocalMesh | None
"""What `group=` takes."""
MESH_DIMS = ("ring", "ulysses")
"""Names of the dimensions of a two-dimensional mesh, where it has names."""


def resolve_group(group: GroupLike = None) -> Group:
    """The ranks that `group` names.

    Args:
        group: a torch.distributed ProcessGroup, a one-dimensional DeviceMesh or a `LocalWorld` member; None is the
            default group where torch.distributed is initialised, else one device alone.

    Raises:
        ValueError: anything else, a mesh of more dimensions, or a process group that this rank is not in.
        RuntimeError: this process was forked from the one that is in the process group.
    """
    members: object = group
    if group is None:
        members = dist.group.WORLD if dist.is_initialized() else single_rank()
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions, a ring runs along one: pass {_example(group)}"
            )
        members = group.get_group()
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if members is outside:
        raise ValueError("group: this rank is not a member of that process group")
    if isinstance(members, LocalGroup):
        return members
    if isinstance(members, dist.ProcessGroup):
        check_process(members)
        return members
    raise ValueError(
        f"group is {shown(group)}: it takes a torch.distributed ProcessGroup, a one-dimensional DeviceMesh, "
        "a LocalWorld member or None"
    )


def resolve_mesh(group: GroupLike) -> tuple[Group, Group] | None:
    """This rank's two groups in a two-dimensional mesh: along the ring, and along Ulysses; None for any other group.

    Raises:
        ValueError: the dimensions have other names, so that neither is known to be a ring.
    """
    dims = dims_of(group)
    return None if dims is None else (resolve_group(dims[0]), resolve_group(dims[1]))


def dims_of(group: GroupLike) -> tuple[Group, Group] | None:
    """Both dimensions as the mesh has them, which torch.compile can trace; raises the same."""
    if isinstance(group, LocalMesh):
        return group.ring, group.ulysses
    if not isinstance(group, DeviceMesh) or group.ndim != len(MESH_DIMS):
        return None
    if group.mesh_dim_names not in (None, MESH_DIMS):
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}: two are taken where they are "
            f"{MESH_DIMS} or have no names; of a mesh that has more, pass those of the sequence, as {_example(group)}"
        )
    return group.get_group(0), group.get_group(1)


def group_rank_size(group: GroupLike = None) -> tuple[int, int]:
    """(rank inside the group, number of ranks); of a two-dimensional mesh over all of it."""
    mesh = resolve_mesh(group)
    if mesh is not None:
        ring, ulysses = mesh
        return ring.rank() * ulysses.size() + ulysses.rank(), ring.size() * ulysses.size()
    members = resolve_group(group)
    return members.rank(), members.size()


def _example(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names
    if not names:
        return 'mesh["ring"], with mesh_dim_names given'
    return f"mesh[{(MESH_DIMS[0] if MESH_DIMS[0] in names else names[-1])!r}]"
