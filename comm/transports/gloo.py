"""What gloo needs that torch.distributed does not offer: the end of transfers in flight, and news of a dead peer."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

# Nobody ever sends with this tag: a receive of it always times out.
INTERRUPT_TAG = 20000
# zero would mean the group's own timeout
AT_ONCE = timedelta(milliseconds=1)


def interrupt(group: dist.ProcessGroup) -> None:
    """End every transfer of the group in flight, in both directions; from any thread. The group is of no use then.

    A receive that times out closes every connection of its gloo context, and whoever waits for one, in any thread, is
    told (`Work` has no abort; `ProcessGroup.abort` leaves gloo's waits alone, tried with torch 2.13). A wait with a
    timeout on the pending work itself could take the news of its end from the thread that waits for it.

    Other host backends have no such thing: nothing happens there.
    """
    if "gloo" not in dist.get_backend_config(group):
        return
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            _receive_nothing(group, peer).wait(AT_ONCE)
        except RuntimeError as error:
            # Where the connection to this peer is broken already, the receive ends before its time: try the next.
            if "Timed out" in str(error):
                return


def connection_closed(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether the connection to a peer is closed: it has ended, or broken off all transfers. False for other backends.

    A receive of a tag that nobody sends is refused once gloo has seen the end of the connection. One that is not
    refused is let go of at once: gloo knows it weakly, so that no thread waits and nothing is left to end. It costs
    some bytes in both processes until the group ends: ask seldom.
    """
    if "gloo" not in dist.get_backend_config(group):
        return False
    try:
        _receive_nothing(group, peer)
    except RuntimeError:
        return True
    return False


def _receive_nothing(group: dist.ProcessGroup, peer: int) -> dist.Work:
    scratch = torch.empty(1, dtype=torch.uint8, device="cpu")  # whatever the default device is
    work = dist.irecv(scratch, group=group, group_src=peer, tag=INTERRUPT_TAG)
    assert work is not None
    return work
