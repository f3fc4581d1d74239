"""Waits that the proof finds redundant, with the reason why each one stays.

The tables map each transport to its waits, named by the transport's and the ring's functions. `ALWAYS`: the wait is
redundant in all cases of the proof. `SOMETIMES`: the wait is redundant in some cases, and needed in others.
"""

from __future__ import annotations

ALWAYS, SOMETIMES = True, False

SETTLED = "a call returns with no transfer in flight, so that its caller can free, abort or time it"
SUMS = SETTLED + "; the slots' own marks protect the sums"
BOTH = "one fence stands for the sends and the receives of a post, and a waiter may need only one of them"
FINAL = "the tensors of one post become final at one point"
MESSAGE = "every message waits, even if a later message orders the same ranks"
CACHES = "the same stream waits for a value that was cached later"

COMMON = {
    "RingCall.wait_all waits for post of KeyValues.post_kv": (
        SOMETIMES, "needed after a forward, when the caller may overwrite k and v; redundant before a backward",
    ),
    "RingCall.wait_all waits for post of DkvAccumulators.post": (ALWAYS, SUMS),
    "RingCall.wait_all waits for post of DkvAccumulators.send_return": (ALWAYS, SUMS),
    "KeyValues.wait_chunk waits for post of KeyValues.post_kv": (
        SOMETIMES, "redundant after a wait for sums that were posted after these K/V, or for K/V of a second kernel",
    ),
    "DkvAccumulators.out waits for post of DkvAccumulators.post": (
        ALWAYS, "protects the slot's last send, but the rank has already waited for K/V or dK/dV posted later",
    ),
    "_synchronize_zeros of RingBuffer.__init__ waits for the device": (
        SOMETIMES, "protects the zeros of a new arena; needed once per ring, if a rank receives before its first mark",
    ),
    "post of KeyValues.post_kv waits for mark of KeyValues._outgoing": (
        SOMETIMES, "redundant for later chunks and for slots that have been free for longer; needed for the first",
    ),
    "post of KeyValues.post_kv waits for mark of forward": (
        SOMETIMES, "protects the slot of the last call's compute; redundant if the first post waits for newer k and v",
    ),
    "post of KeyValues.post_kv waits for mark of compute_dq": (
        SOMETIMES, "protects the slot of the compute; redundant if the sums of the hop were posted after the compute",
    ),
    "post of KeyValues.post_kv waits for post of KeyValues.post_kv": (
        SOMETIMES, "between levels: the only wait of a shard that is passed on before this rank computes with it",
    ),
}  # fmt: skip

OWN = "post of KeyValues.post_kv waits for mark of KeyValues._outgoing"  # every chunk has its own slot
PUT_BY = ("KeyValues.post_kv", "DkvAccumulators.post")
ROOM_BY = (*PUT_BY, "DkvAccumulators.send_return")
ONE_SIDED = {
    **{wait: why for wait, why in COMMON.items() if wait != OWN},
    **{f"_make_room of {post} waits for _make_room of {post}": (SOMETIMES, MESSAGE) for post in ROOM_BY},
    **{f"_put of {post} waits for _put of {post}": (SOMETIMES, MESSAGE) for post in PUT_BY},
    "_make_room waits for _make_room": (SOMETIMES, "the first box of an unshard is free"),
}

CACHED = {
    f"_add_reader of {place} waits for __init__ of {place}": (SOMETIMES, CACHES)
    for place in ("prepare_call", "RingCall.mask_args", "TritonBackward.dkdv")
}
EXCHANGE = "orders an exchange, whose transfers are waited for"
IN_ORDER = {
    "DkvAccumulators.out waits for mark of DkvAccumulators.mark_added": (
        ALWAYS,
        "protects the slot's last compute in an earlier call with runs of tokens, which newer waits already follow",
    ),
}
NCCL = COMMON | CACHED | IN_ORDER | {"_add_reader waits for __init__": (SOMETIMES, EXCHANGE)}

LOCAL = COMMON | CACHED | IN_ORDER | {
    "RingCall.wait_all waits for post of KeyValues.post_kv": (ALWAYS, SETTLED),
    "RingCall.wait_all waits for _receive of KeyValues.post_kv": (SOMETIMES, SETTLED),
    "RingCall.wait_all waits for _receive of DkvAccumulators.post": (ALWAYS, SETTLED),
    "RingCall.wait_all waits for _receive of DkvAccumulators.send_return": (ALWAYS, SETTLED),
    "KeyValues.wait_chunk waits for _receive of KeyValues.post_kv": (SOMETIMES, BOTH),
    "DkvAccumulators.out waits for post of DkvAccumulators.post": (ALWAYS, BOTH),
    "DkvAccumulators._read waits for _receive of DkvAccumulators.post": (SOMETIMES, BOTH),
    "DkvAccumulators._read waits for _receive of DkvAccumulators.send_return": (SOMETIMES, BOTH),
    "DkvAccumulators.out waits for _receive of DkvAccumulators.post": (ALWAYS, BOTH),
    "post of DkvAccumulators.post waits for _receive of DkvAccumulators.post": (SOMETIMES, BOTH),
    "post of DkvAccumulators.send_return waits for _receive of DkvAccumulators.send_return": (ALWAYS, BOTH),
    "post of KeyValues.post_kv waits for _receive of KeyValues.post_kv": (SOMETIMES, BOTH),
    "_receive of DkvAccumulators.post waits for post of DkvAccumulators.post": (SOMETIMES, FINAL),
    "_receive of KeyValues.post_kv waits for post of KeyValues.post_kv": (SOMETIMES, FINAL),
    "_add_reader waits for __init__": (SOMETIMES, EXCHANGE + " in the second call"),
    "_receive waits for post": (SOMETIMES, BOTH),
    "transfer waits for _receive": (SOMETIMES, BOTH),
    "transfer of ring_attention waits for _receive of ring_attention": (SOMETIMES, BOTH),
}  # fmt: skip

IMPLIED = {"nccl": NCCL, "nccl_one_sided": ONE_SIDED, "local": LOCAL}
