"""Transports between ranks, receive buffers, deadlines and checks; this package knows nothing of attention."""

from .control import Control
from .groups import Group, GroupLike, group_rank_size, resolve_group, resolve_mesh
from .limits import Limits
from .registry import TransportFactory, register_transport, transport_names, unregister_transport
from .slots import Slots, Windows, slot_nbytes, slot_windows
from .topology.topology import Topology
from .transport import DONE, Edge, Fence, Message, Placed, Transport, TransportBase, TransportError, check_messages
from .transports.local import LocalTransport
from .transports.nccl import NcclTransport
from .transports.nccl_one_sided import NcclOneSidedTransport
from .transports.process_group import ProcessGroupTransport
from .transports.selection import open_transport, open_transports
from .world import LocalGroup, LocalMesh, LocalWorld, WorldAborted, single_rank

__all__ = [
    "DONE",
    "Control",
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
    "NcclOneSidedTransport",
    "NcclTransport",
    "Placed",
    "ProcessGroupTransport",
    "Slots",
    "Topology",
    "Transport",
    "TransportBase",
    "TransportError",
    "TransportFactory",
    "Windows",
    "WorldAborted",
    "check_messages",
    "group_rank_size",
    "open_transport",
    "open_transports",
    "register_transport",
    "resolve_group",
    "resolve_mesh",
    "single_rank",
    "slot_nbytes",
    "slot_windows",
    "transport_names",
    "unregister_transport",
]
