"""Moves bytes between ranks and says when a buffer may be touched; knows nothing of attention."""

from .groups import Group, GroupLike, group_rank_size, open_transport, open_transports, resolve_group, resolve_mesh
from .limits import Limits
from .slots import Slots, slot_nbytes
from .topology.topology import Topology
from .transport import DONE, Edge, Fence, Message, Transport, TransportError
from .transports.local import LocalGroup, LocalMesh, LocalTransport, LocalWorld, WorldAborted, single_rank
from .transports.nccl import NcclTransport
from .transports.process_group import ProcessGroupTransport

__all__ = [
    "DONE",
    "Edge",
    "Fence",
    "Group",
    "GroupLike",
    "Limits",
    "LocalGroup",
    "LocalMesh",
    "LocalTransport",
    "LocalWorld",
    "Message",
    "NcclTransport",
    "ProcessGroupTransport",
    "Slots",
    "Topology",
    "Transport",
    "TransportError",
    "WorldAborted",
    "group_rank_size",
    "open_transport",
    "open_transports",
    "resolve_group",
    "resolve_mesh",
    "single_rank",
    "slot_nbytes",
]
