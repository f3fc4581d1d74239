"""Peak memory of a rank in a forward and backward, for the predictor and for checks whether a size fits.

The estimate counts the tensors alive at the peak and lies slightly above measured peaks. A row has bytes per element of
q (batch x heads x head dim per token) and of k. They count for this rank's tokens, or for the whole sequence. ``e`` is
the size of an element. dK/dV accumulators are fp32. ``bench/README.md`` explains the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ...ring.schedule.schedule import DKV_SLOTS, RAIL_SLOTS, ROOT_SLOTS
from ...ring.wire import Wire, resolve_grad_wire, resolve_wire
from .attention import DTYPES, AttentionConfig
from .errors import BLOCK_BYTES, judged_heads
from .flags import KV_SLOTS
from .timing import FLUSH_BYTES

FP32, FP64 = 4, 8
OURS, ONE_DEVICE, ALL_CORES = "ringattn", "one device", "one process on all cores"
BASELINE, ALL_GATHER, ULYSSES, LUCIDRAINS = "baseline ring", "all-gather", "Ulysses", "ring-attention-pytorch"
BUCKET, SCORES_AT_ONCE = 1024, 6  # of ring-attention-pytorch: tokens of a bucket, score tensors of a bucket
JUDGED_BLOCKS = 5  # tensors of a block's scores alive at once in the float64 backward
VOCABULARY_SIZE, LOGITS_AT_ONCE = 256, 4  # of the byte-level decoder that `demo` trains
DENSE_MASK = 5  # bytes per (query, key) pair while a mask tensor is built, next to its additive form


class BytesPerElement(NamedTuple):
    """Bytes per element of q and k, for this rank's tokens (q, k) and for all tokens (all_q, all_k)."""

    q: int
    k: int
    all_q: int = 0
    all_k: int = 0


def candidate_rows(e: int) -> dict[str, BytesPerElement]:
    """Return the bytes of a forward and backward by candidate, for elements of ``e`` bytes.

    4 e per element of q are q, dout, out and dq; 4 e per element of k are k, v, dk and dv.
    """
    return {
        OURS: BytesPerElement(4 * e + FP32, 5 * e),  # dQ in fp32, dK/dV of a chunk; slots are extra
        # two buffers of K/V; dK/dV accumulators sent and received; dK/dV of a block; dQ in fp32 and of a block
        BASELINE: BytesPerElement(5 * e + FP32, 10 * e + 4 * FP32),
        # K/V of all tokens; gradients of all tokens in fp32, one of them a second time in rank order
        ALL_GATHER: BytesPerElement(4 * e + FP32, 4 * e, 0, 2 * e + 3 * FP32),
        # a second copy of everything split by heads, gradients in fp32, and two tensors in transit
        ULYSSES: BytesPerElement(9 * e + FP32, 6 * e + 2 * FP32),
        # K/V in transit, fp32 results; scores are extra
        LUCIDRAINS: BytesPerElement(4 * e + 2 * FP32, 4 * e + 8 * FP32),
        ONE_DEVICE: BytesPerElement(0, 0, 4 * e, 4 * e),
        ALL_CORES: BytesPerElement(0, 0, 4 * e, 4 * e),
    }


def forward_rows(e: int) -> dict[str, BytesPerElement]:
    """Return the bytes of a forward without gradients by candidate; 2 e of them are q and out, or k and v."""
    return {
        OURS: BytesPerElement(2 * e + FP32, 2 * e),  # the running out in fp32; slots are extra
        # two buffers of K/V; the running out, two tensors of a merge, out of a block
        BASELINE: BytesPerElement(2 * e + 3 * FP32, 6 * e),
        # K/V of all tokens, one of them a second time in rank order
        ALL_GATHER: BytesPerElement(2 * e, 2 * e, 0, 3 * e),
        ULYSSES: BytesPerElement(6 * e, 4 * e),  # a second copy split by heads, two tensors in transit
    }


def mesh_name(degree: int, world: int) -> str:
    """Return the name of a mesh, such as ``Ulysses 8 x ring 2`` for 16 ranks of which 8 exchange heads."""
    return f"{ULYSSES} {degree} x ring {world // degree}"


def exchange_degree(name: str) -> int | None:
    """Return the degree in a name that :func:`mesh_name` made; None for other names."""
    return int(name.split()[1]) if name.startswith(f"{ULYSSES} ") else None


def candidate_kind(name: str) -> str:
    """Return ``ringattn`` for our ring in any layout, and other candidates' names unchanged."""
    return OURS if name.startswith(f"{OURS} ") else name


def elements_per_token(config: AttentionConfig) -> tuple[int, int]:
    """Return the elements of q and of k per token position, over all batch rows."""
    return config.batch * config.heads * config.head_dim, config.batch * config.kv_heads * config.head_dim


def element_bytes(config: AttentionConfig) -> int:
    return DTYPES[config.dtype].itemsize


def shard_tokens(config: AttentionConfig) -> int:
    """Return the number of tokens of the longest shard."""
    return -(-config.seqlen // config.world)


def input_bytes(config: AttentionConfig) -> int:
    """Return the bytes of q, k, v and dout together per token position."""
    return 2 * sum(elements_per_token(config)) * element_bytes(config)


@dataclass(frozen=True)
class RingForm:
    """Settings of a ``Ring`` that change its memory."""

    two_level: bool = False
    slots: int = KV_SLOTS
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None


PLAIN_RING = RingForm()


def ring_parts(config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> dict[str, int]:
    """Return the bytes of a rank of our ring by purpose, at the peak of a forward with or without a backward."""
    (q, k), e, n = elements_per_token(config), element_bytes(config), shard_tokens(config)
    if not backward:
        own = {"q, k, v and out": n * input_bytes(config), "carried out, fp32": n * q * FP32}
        return own | slot_parts(config, form, backward=False)
    own = {
        "q, k, v and out": n * input_bytes(config),
        "their gradients": n * input_bytes(config),
        "dQ, fp32": n * q * FP32,
        "dK/dV of a chunk": n * k * e,
    }
    return own | slot_parts(config, form)


def slot_parts(config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> dict[str, int]:
    """Return the bytes that a ring keeps from call to call: slots of K/V and of fp32 dK/dV accumulators.

    A two-level ring has extra slots for the rail, and accumulators for its own dK/dV. With a wire dtype, the owner
    encodes into one more slot, and receivers decode into separate memory.
    """
    if config.world == 1:
        return {}
    dtype, elements_of_kv = DTYPES[config.dtype], 2 * shard_tokens(config) * elements_per_token(config)[1]
    wire, grad_wire = resolve_wire(form.wire_dtype, dtype), resolve_grad_wire(form.grad_wire_dtype)
    kv, dkv = elements_of_kv * dtype.itemsize, elements_of_kv * FP32
    parts = {"K/V slots": (form.slots + ROOT_SLOTS * form.two_level + (wire is not None)) * _on_wire(config, wire, kv)}
    if backward:
        parts |= {
            "dK/dV slots": (DKV_SLOTS + RAIL_SLOTS * form.two_level) * _on_wire(config, grad_wire, dkv),
            "own dK/dV accumulators, fp32": dkv * form.two_level,
        }
    parts["decoded"] = kv * (wire is not None) + dkv * (backward and grad_wire is not None)
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _on_wire(config: AttentionConfig, wire: Wire | None, plain: int) -> int:
    """Return the bytes of one rank's K/V pair, or dK/dV pair, as they are sent."""
    if wire is None:
        return plain
    shape = (config.batch, shard_tokens(config), config.kv_heads, config.head_dim)
    return 2 * sum(prod(size) * dtype.itemsize for size, dtype in wire.specs(shape))


def ring_slots(config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> int:
    return sum(slot_parts(config, form, backward=backward).values())


def candidate_bytes(kind: str, config: AttentionConfig, form: RingForm = PLAIN_RING, *, backward: bool = True) -> int:
    """Return the peak bytes of one rank of a candidate of this kind, with inputs and results.

    An unknown ``kind`` counts as the baseline ring. ``backward=False`` counts a forward alone.
    """
    if (degree := exchange_degree(kind)) is not None:
        return mesh_bytes(config, degree, form, backward=backward)
    rows = (candidate_rows if backward else forward_rows)(element_bytes(config))
    row, (q, k), n = rows.get(kind, rows[BASELINE]), elements_per_token(config), shard_tokens(config)
    nbytes = n * (row.q * q + row.k * k) + config.seqlen * (row.all_q * q + row.all_k * k)
    if backward and row is rows[BASELINE]:  # with few key heads in 16 bits, merging takes more than the backward
        nbytes = max(nbytes, candidate_bytes(BASELINE, config, backward=False))
    if kind == OURS:
        nbytes += ring_slots(config, form, backward=backward)
    if kind == LUCIDRAINS:
        nbytes += SCORES_AT_ONCE * config.batch * config.heads * min(BUCKET, n) ** 2 * FP32
    if kind in (ONE_DEVICE, ALL_CORES):  # lse; on a GPU, FlashAttention's backward accumulates dQ in fp32
        nbytes += config.seqlen * (config.batch * config.heads + (q if config.device != "cpu" else 0)) * FP32
    return nbytes


def mesh_bytes(config: AttentionConfig, degree: int, form: RingForm = PLAIN_RING, *, backward: bool = True) -> int:
    """Return the bytes of a rank of a mesh where ``degree`` ranks exchange heads; scarce key heads are repeated."""
    e, kv_heads = element_bytes(config), max(1, config.kv_heads // degree)
    group = replace(config, world=config.world // degree, heads=config.heads // degree, kv_heads=kv_heads)
    repeated = kv_heads * degree - config.kv_heads
    # The row of Ulysses counts only this rank's own heads.
    by_heads = config.batch * repeated * config.head_dim * (2 * e + 2 * FP32 * backward)
    carried = FP32 * elements_per_token(config)[0] * (group.world > 1 and not backward)  # the backward's 9e covers it
    own = candidate_bytes(ULYSSES, config, backward=backward) + shard_tokens(config) * (by_heads + carried)
    return own + ring_slots(group, form, backward=backward)


def settings_bytes(config: AttentionConfig, slots: Sequence[int]) -> int:
    """Return the bytes of a rank of ``bench overlap``; ``slots`` has the number of slots of every setting.

    Every setting keeps its own inputs, out, lse and slots. In addition one step runs at a time. It needs a backward's
    fp32 dQ, the chunks before they are joined, dK and dV, or the inputs drawn in fp32.
    """
    (q, k), e = elements_per_token(config), element_bytes(config)
    per_setting = input_bytes(config) + q * e + config.batch * config.heads * FP32
    rings = [0 if config.world == 1 else 2 * k * (count * e + DKV_SLOTS * FP32) for count in slots]
    running = max(q * (FP32 + 2 * e) + 3 * k * e, 2 * (q + k) * FP32)
    kept = sum(per_setting + slot_bytes for slot_bytes in rings)
    return shard_tokens(config) * (kept + running) + flush_bytes(config.device)


def tuned_bytes(config: AttentionConfig, rings: int) -> int:
    """Return the bytes of a rank of ``tune --ring``, which keeps the slots of ``rings`` rings and joins chunks."""
    joined = 2 * shard_tokens(config) * elements_per_token(config)[0] * element_bytes(config)
    return candidate_bytes(OURS, config) + joined + (rings - 1) * ring_slots(config)


def judged_bytes(config: AttentionConfig, seqlen: int | None = None) -> int:
    """Return the bytes to judge results: float64 results and a block's scores, or PyTorch's results if larger."""
    n = config.seqlen if seqlen is None else seqlen
    chosen = len(judged_heads(config.batch, config.heads, config.kv_heads, n, n))
    heads, dims = chosen * config.heads // config.kv_heads, config.head_dim + config.value_dim
    elements_once = config.batch * n * (heads + chosen) * dims
    row = config.batch * heads * n
    block = max(min(BLOCK_BYTES, row * n * FP64), row * FP64)
    plain = 2 * elements_once * element_bytes(config)
    if not config.is_plain:
        masks = 1 if config.mask.used is None else config.batch
        e = element_bytes(config)
        plain += masks * n**2 * (e + DENSE_MASK) + config.batch * n * heads * dims * e
    return elements_once * FP64 + max(elements_once * FP64 + JUDGED_BLOCKS * block, plain)


def kernels_bytes(config: AttentionConfig, seqlen: int, ours: int, theirs: int, product_side: int) -> int:
    """Return the bytes of ``bench kernels`` for ``ours`` contenders of ours and ``theirs`` others.

    They are inputs, tensors that contenders keep, one running contender, float64 results, and a matrix product of
    ``product_side`` squared.
    """
    e, tokens, dims = element_bytes(config), config.batch * seqlen, config.head_dim + config.value_dim
    # q, k, v and dout; out, dq, dk and dv have the same size
    input_bytes = tokens * (config.heads + config.kv_heads) * dims * e
    out, row = tokens * config.heads * config.value_dim, tokens * config.heads * FP32
    kept_bytes = ours * (out * (e + FP32) + 3 * row) + theirs * (input_bytes + out * e + row)
    running = input_bytes + tokens * config.heads * config.head_dim * FP32
    if config.mask.global_tokens and ours:  # dK and dV passed between the mask's parts, in and out
        running += 2 * tokens * config.kv_heads * dims * FP32
    product = 3 * product_side**2 * FP32
    return input_bytes + kept_bytes + running + judged_bytes(config, seqlen) + product + flush_bytes(config.device)


def trained_bytes(tokens: int, layers: int, q: int, k: int, e: int) -> int:
    """Return the bytes that training adds to a rank's parameters in the decoder of ``ringattn demo``.

    Per token and layer, queries have ``q`` elements, keys and values ``k`` each, all of ``e`` bytes.
    """
    return tokens * e * (layers * (15 * q + 4 * k) + 6 * q + LOGITS_AT_ONCE * VOCABULARY_SIZE)


def flush_bytes(device: str) -> int:
    """Return the bytes of the buffer that evicts the L2 cache of a GPU before every timed run; 0 on the CPU."""
    return FLUSH_BYTES if device != "cpu" else 0
