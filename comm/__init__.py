"""Moves bytes between ranks and says when a buffer may be touched; knows nothing of attention."""

from .groups import Group, GroupLike, group_rank_size, open_transport, open_transports, resolve_group
from .limits import Limits
from .local import LocalGroup, LocalTransport
from .local_world import LocalWorld
from .mailboxes import WorldAborted
from .nccl import NcclTransport
from .process_group import ProcessGroupTransport
from .slots import Slots, slot_nbytes
from .topology import Topology
from .transport import DONE, Edge, Fence, Message, Transport, TransportError

__all__ = [
    "DONE",
    "Edge",
    "Fence",
    "Group",
    "GroupLike",
    "Limits",
    "LocalGroup",
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
    "slot_nbytes",
]
