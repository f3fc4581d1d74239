"""Waits that the proof finds redundant, with the reason why each one stays.

The tables map each transport to its waits, named by the transport's and the ring's functions. `ALWAYS`: the wait is
redundant in all cases of the proof. `SOMETIMES`: the wait is redundant in some cases, and needed in others.
"""

from __future__ import annotations

ALWAYS, SOMETIMES = True, False

SETTLED = (
    "a call returns with nothing under way: who frees, aborts or times it afterwards need not know what moved last"
)
HIDDEN = "where sums posted after these K/V are waited for first, or K/V are waited for again for a second kernel"
TOLD = "a later chunk, or a slot that is free since longer: the same line is what counts for the first"

COMMON = {
    "RingCall.settle waits for post of KeyValues.advance": (
        SOMETIMES,
        "the caller may write k and v when a forward returns; before a backward it may not, and nobody notices",
    ),
    "RingCall.settle waits for post of DkvAccumulators.post": (
        ALWAYS,
        SETTLED + "; the slots' own notes protect the sums",
    ),
    "RingCall.settle waits for post of DkvAccumulators.send_return": (
        ALWAYS,
        SETTLED + "; the slots' own notes protect the sums",
    ),
    "KeyValues.arrived waits for post of KeyValues.advance": (SOMETIMES, HIDDEN),
    "DkvAccumulators.out waits for post of DkvAccumulators.post": (
        ALWAYS,
        "the slot's last send: this rank has since waited for K/V or dK/dV that were posted behind it",
    ),
    "_settle of RingBuffer.__init__ waits for the device": (
        SOMETIMES,
        "zeros of a new arena: needed where a rank receives before it has marked anything, once in the life of a ring",
    ),
    "post of KeyValues.advance waits for mark of KeyValues._held": (SOMETIMES, TOLD),
    "post of KeyValues.advance waits for mark of forward": (
        SOMETIMES,
        "the last call's compute on the slot: implied where this call's first post waits for the newer k and v",
    ),
    "post of KeyValues.advance waits for mark of query_gradient": (
        SOMETIMES,
        "the compute on the slot: implied where the sums of the same hop were posted behind it",
    ),
    "post of KeyValues.advance waits for post of KeyValues.advance": (
        SOMETIMES,
        "from one level to the other: a shard that is passed on before this rank computes with it has no other wait",
    ),
}

OWN = "post of KeyValues.advance waits for mark of KeyValues._held"  # every chunk has its own slot
ONE_SIDED = {
    **{wait: why for wait, why in COMMON.items() if wait != OWN},
    **{
        f"_make_room of {post} waits for _make_room of {post}": (
            SOMETIMES,
            "every message waits for its room, whatever else orders it: the host of its sender cannot know",
        )
        for post in ("KeyValues.advance", "DkvAccumulators.post", "DkvAccumulators.send_return")
    },
    **{
        f"_put of {post} waits for _put of {post}": (
            SOMETIMES,
            "every message is waited for, also if the same ranks are ordered by a later one",
        )
        for post in ("KeyValues.advance", "DkvAccumulators.post")
    },
    "_make_room waits for _make_room": (SOMETIMES, "the first box of an unshard, which is free"),
}

BOTH = "one fence stands for a post, what came and what went: who waits may need only one of the two"

LOCAL = COMMON | {
    "RingCall.settle waits for post of KeyValues.advance": (ALWAYS, SETTLED),
    "RingCall.settle waits for _receive of KeyValues.advance": (SOMETIMES, SETTLED),
    "RingCall.settle waits for _receive of DkvAccumulators.post": (ALWAYS, SETTLED),
    "RingCall.settle waits for _receive of DkvAccumulators.send_return": (ALWAYS, SETTLED),
    "KeyValues.arrived waits for _receive of KeyValues.advance": (SOMETIMES, BOTH),
    "DkvAccumulators.out waits for post of DkvAccumulators.post": (ALWAYS, BOTH),
    "DkvAccumulators._read waits for _receive of DkvAccumulators.post": (SOMETIMES, BOTH),
    "DkvAccumulators._read waits for _receive of DkvAccumulators.send_return": (SOMETIMES, BOTH),
    "DkvAccumulators.out waits for _receive of DkvAccumulators.post": (ALWAYS, BOTH),
    "post of DkvAccumulators.post waits for _receive of DkvAccumulators.post": (SOMETIMES, BOTH),
    "post of DkvAccumulators.send_return waits for _receive of DkvAccumulators.send_return": (ALWAYS, BOTH),
    "post of KeyValues.advance waits for _receive of KeyValues.advance": (SOMETIMES, BOTH),
    "_receive of DkvAccumulators.post waits for post of DkvAccumulators.post": (
        SOMETIMES,
        "dK and dV of one post have one point where they are final",
    ),
    "_receive of KeyValues.advance waits for post of KeyValues.advance": (
        SOMETIMES,
        "K and V of one post have one point where they are final, and what passes on has waited for it before",
    ),
}

LATER = "the same stream waits for something that was cached behind it"
CACHES = {
    f"_admit of {place} waits for __init__ of {place}": (SOMETIMES, LATER)
    for place in ("prepare", "RingCall.mask_args", "TritonBackward.dkdv")
}

NCCL = COMMON | CACHES | {"_admit waits for __init__": (ALWAYS, "the order of an unshard: its slots are waited for")}

LOCAL |= CACHES | {
    "_admit waits for __init__": (SOMETIMES, "the order of an unshard: its slots are waited for in the second call"),
    "_receive waits for post": (SOMETIMES, BOTH),
    "exchange_all waits for _receive": (SOMETIMES, BOTH),
    "exchange_all of ring_attention waits for _receive of ring_attention": (SOMETIMES, BOTH),
}

IMPLIED = {"nccl": NCCL, "nccl_one_sided": ONE_SIDED, "local": LOCAL}
