"""Moves bytes between ranks and says when a buffer may be touched; knows nothing of attention."""

from .groups import Group, group_rank_size, open_transport, resolve_group
from .local import LocalGroup, LocalTransport, LocalWorld
from .mailboxes import WorldAborted
from .nccl import NcclTransport
from .process_group import ProcessGroupTransport
from .slots import Slots, slot_nbytes
from .transport import DONE, Fence, Message, Transport, TransportError

__all__ = [
    "DONE",
    "Fence",
    "Group",
    "LocalGroup",
    "LocalTransport",
    "LocalWorld",
    "Message",
    "NcclTransport",
    "ProcessGroupTransport",
    "Slots",
    "Transport",
    "TransportError",
    "WorldAborted",
    "group_rank_size",
    "open_transport",
    "resolve_group",
    "slot_nbytes",
]
