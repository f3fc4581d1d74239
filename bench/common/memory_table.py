"""How many bytes a rank takes at the peak of a forward and backward: one table, for the predictor and for refusals.

Counted are the tensors that are there at the peak, a little above what is measured. A row says bytes per element of q
(batch x heads x head dim per token) and of k, of this rank's tokens and of the whole sequence; ``e`` is the size of an
element of the dtype, dK/dV accumulators are fp32. ``bench/README.md`` explains the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ...ring.schedule.schedule import DKV_SLOTS, RAIL_SLOTS, ROOT_SLOTS
from ...ring.wire import Wire, grad_wire_of, wire_of
from .attention import DTYPES, AttentionConfig
from .errors import BLOCK_BYTES, chosen_heads
from .flags import KV_SLOTS
from .timing import FLUSH_BYTES

FP32, FP64 = 4, 8
OURS, WHOLE, ALL_CORES = "ringattn", "one device", "one process on all cores"
BASELINE, ALL_GATHER, ULYSSES, LUCIDRAINS = "baseline ring", "all-gather", "Ulysses", "ring-attention-pytorch"
BUCKET, SCORES_AT_ONCE = 1024, 6  # of ring-attention-pytorch: tokens, and tensors of one bucket's scores
JUDGED_BLOCKS = 5  # tensors of a block's scores that float64 has at once, in its backward
LETTERS, LOGITS_AT_ONCE = 256, 4  # of the decoder that `demo` trains, which reads bytes
DENSE_MASK = 5  # bytes per query and key: a mask as a tensor while it is made, beside its additive form


class ElementBytes(NamedTuple):
    """Bytes per element: of q and k of this rank's tokens, of q and k of all tokens."""

    q: int
    k: int
    all_q: int = 0
    all_k: int = 0


def candidate_rows(e: int) -> dict[str, ElementBytes]:
    """Per candidate of ``bench ring``; in 4e are inputs and results: q, k, v, dout, out, dq, dk, dv."""
    return {
        OURS: ElementBytes(4 * e + FP32, 5 * e),  # dQ in fp32, dK/dV of a chunk; beside them its slots
        # two buffers of K/V; dK/dV accumulators that are sent and received, dK/dV of a block; dQ in fp32 and of a block
        BASELINE: ElementBytes(5 * e + FP32, 10 * e + 4 * FP32),
        # K/V of all tokens, gradients of all tokens in fp32 and one of them once more in the order of ranks
        ALL_GATHER: ElementBytes(4 * e + FP32, 4 * e, 0, 2 * e + 3 * FP32),
        # everything once more by heads, gradients in fp32, and two tensors on their way
        ULYSSES: ElementBytes(9 * e + FP32, 6 * e + 2 * FP32),
        LUCIDRAINS: ElementBytes(4 * e + 2 * FP32, 4 * e + 8 * FP32),  # K/V that travel, fp32 results; and its scores
        WHOLE: ElementBytes(0, 0, 4 * e, 4 * e),
        ALL_CORES: ElementBytes(0, 0, 4 * e, 4 * e),
    }


def forward_rows(e: int) -> dict[str, ElementBytes]:
    """Return the same of a forward alone, without gradients; in 2e are q, out, k and v."""
    return {
        OURS: ElementBytes(2 * e + FP32, 2 * e),  # the carried out in fp32; beside them its slots
        # two buffers of K/V; the carried out, and two tensors of a merge; out of a block
        BASELINE: ElementBytes(2 * e + 3 * FP32, 6 * e),
        ALL_GATHER: ElementBytes(2 * e, 2 * e, 0, 3 * e),  # K/V of all tokens, one of them in the order of ranks too
        ULYSSES: ElementBytes(6 * e, 4 * e),  # everything once more by heads, and two tensors on their way
    }


def exchanged_name(degree: int, world: int) -> str:
    """Of Ulysses by so many ranks, and a ring of such groups for the rest: the mesh that ``group=`` takes."""
    return f"{ULYSSES} {degree} x ring {world // degree}"


def degree_of(name: str) -> int | None:
    """How many ranks exchange heads, of an ``exchanged_name``; None of any other."""
    return int(name.split()[1]) if name.startswith(f"{ULYSSES} ") else None


def kind_of(name: str) -> str:
    """What a candidate is, whatever its layout."""
    return OURS if name.startswith(f"{OURS} ") else name


def elements(config: AttentionConfig) -> tuple[int, int]:
    """Of q and of k per token."""
    return config.batch * config.heads * config.head_dim, config.batch * config.kv_heads * config.head_dim


def item(config: AttentionConfig) -> int:
    return DTYPES[config.dtype].itemsize


def shard(config: AttentionConfig) -> int:
    """Tokens of the longest shard."""
    return -(-config.seqlen // config.world)


def inputs(config: AttentionConfig) -> int:
    """Of q, k, v and dout per token."""
    return 2 * sum(elements(config)) * item(config)


@dataclass(frozen=True)
class RingForm:
    """What one of our rings takes depends on, apart from its attention."""

    two_level: bool = False
    slots: int = KV_SLOTS
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None


PLAIN_RING = RingForm()


def ring_parts(config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> dict[str, int]:
    """Bytes of a rank of our ring by what they are for; without ``backward`` at the peak of a forward alone."""
    (q, k), e, n = elements(config), item(config), shard(config)
    if not backward:
        own = {"q, k, v and out": n * inputs(config), "carried out, fp32": n * q * FP32}
        return own | slot_parts(config, form, backward=False)
    own = {
        "q, k, v and out": n * inputs(config),
        "their gradients": n * inputs(config),
        "dQ, fp32": n * q * FP32,
        "dK/dV of a chunk": n * k * e,
    }
    return own | slot_parts(config, form)


def slot_parts(config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> dict[str, int]:
    """What a ring keeps from call to call, whatever the world: slots of K/V and of dK/dV accumulators in fp32.

    Of two levels some more for the rail, and the total of the dK/dV that it brought to their owner. What travels in
    another dtype is encoded in one more slot by its owner, and decoded into memory of its own.
    """
    if config.world == 1:
        return {}
    dtype, elements_of_kv = DTYPES[config.dtype], 2 * shard(config) * elements(config)[1]
    wire, grad_wire = wire_of(form.wire_dtype, dtype), grad_wire_of(form.grad_wire_dtype)
    kv, dkv = elements_of_kv * dtype.itemsize, elements_of_kv * FP32
    found = {"K/V slots": (form.slots + ROOT_SLOTS * form.two_level + (wire is not None)) * _on_wire(config, wire, kv)}
    if backward:
        found |= {
            "dK/dV slots": (DKV_SLOTS + RAIL_SLOTS * form.two_level) * _on_wire(config, grad_wire, dkv),
            "own dK/dV accumulators, fp32": dkv * form.two_level,
        }
    found["decoded"] = kv * (wire is not None) + dkv * (backward and grad_wire is not None)
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _on_wire(config: AttentionConfig, wire: Wire | None, plain: int) -> int:
    """A pair of a rank's K/V, or of their dK/dV, in the form in which they travel."""
    if wire is None:
        return plain
    shape = (config.batch, shard(config), config.kv_heads, config.head_dim)
    return 2 * sum(prod(size) * dtype.itemsize for size, dtype in wire.specs(shape))


def ring_slots(config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> int:
    return sum(slot_parts(config, form, backward=backward).values())


def candidate_bytes(kind: str, config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> int:
    """Return the bytes of one rank with inputs and results, by the kind of a candidate.

    Unknown ones count as the baseline ring; without ``backward`` the peak is that of a forward alone, of the kinds of
    :func:`forward_rows`.
    """
    if (degree := degree_of(kind)) is not None:
        return mesh_bytes(config, degree, form, backward=backward)
    rows = (candidate_rows if backward else forward_rows)(item(config))
    row, (q, k), n = rows.get(kind, rows[BASELINE]), elements(config), shard(config)
    found = n * (row.q * q + row.k * k) + config.seqlen * (row.all_q * q + row.all_k * k)
    if kind == OURS:
        found += ring_slots(config, form, backward=backward)
    if kind == LUCIDRAINS:
        found += SCORES_AT_ONCE * config.batch * config.heads * min(BUCKET, n) ** 2 * FP32
    if kind in (WHOLE, ALL_CORES):  # lse; on a GPU FlashAttention's backward adds dQ up in fp32
        found += config.seqlen * (config.batch * config.heads + (q if config.device != "cpu" else 0)) * FP32
    return found


def mesh_bytes(config: AttentionConfig, degree: int, form: RingForm = PLAIN_RING, *, backward: bool = True) -> int:
    """Of one rank of a mesh: Ulysses among ``degree`` ranks, with repeated key heads, and the slots of its ring."""
    e, few = item(config), max(1, config.kv_heads // degree)
    group = replace(config, world=config.world // degree, heads=config.heads // degree, kv_heads=few)
    repeated = few * degree - config.kv_heads
    # of Ulysses' row what is not a rank's own
    by_heads = config.batch * repeated * config.head_dim * (2 * e + 2 * FP32 * backward)
    carried = FP32 * elements(config)[0] * (group.world > 1 and not backward)  # in 9e of a backward there is room
    own = candidate_bytes(ULYSSES, config, backward=backward) + shard(config) * (by_heads + carried)
    return own + ring_slots(group, form, backward=backward)


def settings_bytes(config: AttentionConfig, slots: Sequence[int]) -> int:
    """A rank of ``bench overlap``: inputs, out, lse and slots for every setting, each of so many slots; and one step.

    A step is a backward's dQ in fp32 and its chunks before they are joined, dK and dV; or the inputs, drawn in fp32.
    """
    (q, k), e = elements(config), item(config)
    kept = inputs(config) + q * e + config.batch * config.heads * FP32
    rings = [0 if config.world == 1 else 2 * k * (count * e + DKV_SLOTS * FP32) for count in slots]
    running = max(q * (FP32 + 2 * e) + 3 * k * e, 2 * (q + k) * FP32)
    return shard(config) * (sum(kept + each for each in rings) + running) + flush_bytes(config.device)


def tuned_bytes(config: AttentionConfig, rings: int) -> int:
    """A rank of ``tune --ring``: results of chunks are there twice while they are joined, slots of all rings stay."""
    joined = 2 * shard(config) * elements(config)[0] * item(config)
    return candidate_bytes(OURS, config) + joined + (rings - 1) * ring_slots(config)


def judged_bytes(config: AttentionConfig, seqlen: int | None = None) -> int:
    """float64 of the heads that are looked at, and the scores of a block of their queries, or PyTorch in its dtype."""
    n = config.seqlen if seqlen is None else seqlen
    chosen = len(chosen_heads(config.batch, config.heads, config.kv_heads, n, n))
    heads, dims = chosen * config.heads // config.kv_heads, config.head_dim + config.value_dim
    once = config.batch * n * (heads + chosen) * dims
    row = config.batch * heads * n
    block = max(min(BLOCK_BYTES, row * n * FP64), row * FP64)
    plain = 2 * once * item(config)
    if not config.is_plain:
        masks = 1 if config.mask.used is None else config.batch
        plain += masks * n**2 * (item(config) + DENSE_MASK) + config.batch * n * heads * dims * item(config)
    return once * FP64 + max(once * FP64 + JUDGED_BLOCKS * block, plain)


def kernels_bytes(config: AttentionConfig, seqlen: int, ours: int, theirs: int, product_side: int) -> int:
    """``bench kernels`` with so many tokens: inputs, what each contender keeps, one that runs, float64 beside them."""
    e, tokens, dims = item(config), config.batch * seqlen, config.head_dim + config.value_dim
    given = tokens * (config.heads + config.kv_heads) * dims * e  # q, k, v, dout; as much are out, dq, dk, dv
    out, row = tokens * config.heads * config.value_dim, tokens * config.heads * FP32
    kept = ours * (out * (e + FP32) + 3 * row) + theirs * (given + out * e + row)
    running = given + tokens * config.heads * config.head_dim * FP32
    if config.mask.global_tokens and ours:  # dK and dV between the parts: what came and what goes on
        running += 2 * tokens * config.kv_heads * dims * FP32
    product = 3 * product_side**2 * FP32
    return given + kept + running + judged_bytes(config, seqlen) + product + flush_bytes(config.device)


def trained_bytes(tokens: int, layers: int, q: int, k: int, e: int) -> int:
    """The decoder of ``demo`` on the whole sequence, forward and backward: what its layers keep, then both ends."""
    return tokens * e * (layers * (15 * q + 4 * k) + 6 * q + LOGITS_AT_ONCE * LETTERS)


def flush_bytes(device: str) -> int:
    """What is written before every timed run on a GPU."""
    return FLUSH_BYTES if device != "cpu" else 0
