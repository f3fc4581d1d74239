"""What gloo needs that torch.distributed does not offer: the end of transfers that are in flight."""

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
    scratch = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            work = dist.irecv(scratch, group=group, group_src=peer, tag=INTERRUPT_TAG)
            assert work is not None
            work.wait(AT_ONCE)
        except RuntimeError as error:
            # Where the connection to this peer is broken already, the receive ends before its time: try the next.
            if "Timed out" in str(error):
                return
