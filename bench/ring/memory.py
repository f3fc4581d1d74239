"""What each candidate of ``bench ring`` takes of memory, counted before anything starts: what does not fit is refused.

Counted are the tensors that are there at the peak, a little above what is measured; B, H, D as in the problem, n tokens
of a rank, S of all, e bytes of an element. ``bench/README.md`` has the formulas as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...ring.schedule.schedule import DKV_SLOTS, KV_SLOTS, RAIL_SLOTS, ROOT_SLOTS
from ...ring.wire import Wire, grad_wire_of, wire_of
from ..common.exact import BLOCK_BYTES, chosen_heads
from ..common.memory_room import PROCESS_BYTES, Needs, too_large
from .candidates import ALL_CORES, ALL_GATHER, DTYPES, OURS, ULYSSES, USUAL, WHOLE, Problem
from .peers import BUCKET, LUCIDRAINS

FP32, FP64 = 4, 8
SCORES_AT_ONCE = 6  # tensors of one bucket's scores in ring-attention-pytorch


@dataclass(frozen=True)
class Rows:
    """Bytes per token: of one element per query head and dim, and per key head and dim."""

    queries: int
    keys: int
    item: int

    @property
    def inputs(self) -> int:
        """q, k, v and dout."""
        return 2 * (self.queries + self.keys) * self.item

    @property
    def in_and_out(self) -> int:
        """The same with out, dq, dk and dv."""
        return 2 * self.inputs


def rows_of(problem: Problem) -> Rows:
    per_head = problem.batch * problem.head_dim
    return Rows(per_head * problem.heads, per_head * problem.kv_heads, DTYPES[problem.dtype].itemsize)


def tokens_per_rank(problem: Problem) -> int:
    """Of the longest shard."""
    return -(-problem.seqlen // problem.world)


@dataclass(frozen=True)
class RingForm:
    """What one of our rings takes depends on, apart from its problem."""

    two_level: bool = False
    slots: int = KV_SLOTS
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None


def of_ours(problem: Problem, form: RingForm | None = None) -> int:
    """Beside the slots the running dQ in fp32, and one piece's K/V gradients."""
    return sum(parts_of_ours(problem, form or RingForm()).values())


def parts_of_ours(problem: Problem, form: RingForm) -> dict[str, int]:
    """The bytes of :func:`of_ours` by what they are for."""
    rows, n = rows_of(problem), tokens_per_rank(problem)
    return {
        "q, k, v and out": n * rows.inputs,
        "their gradients": n * rows.inputs,
        "dQ, fp32": n * rows.queries * FP32,
        "one piece's dK/dV": n * rows.keys * rows.item,
    } | slots_by_use(problem, form)


def slots_of(problem: Problem, form: RingForm | None = None) -> int:
    """What one of our rings keeps from call to call, whatever the world."""
    return sum(slots_by_use(problem, form or RingForm()).values())


def slots_by_use(problem: Problem, form: RingForm) -> dict[str, int]:
    """Slots of K/V and of fp32 sums.

    Of two levels some more for the rail, and the total of what came home over it. What travels in another dtype is
    encoded in one more slot by its owner, and decoded into memory of its own.
    """
    if problem.world == 1:
        return {}
    rows, n, dtype = rows_of(problem), tokens_per_rank(problem), DTYPES[problem.dtype]
    wire, grad_wire = wire_of(form.wire_dtype, dtype), grad_wire_of(form.grad_wire_dtype)
    kv, sums = 2 * n * rows.keys * rows.item, 2 * n * rows.keys * FP32
    kv_slots = form.slots + ROOT_SLOTS * form.two_level + (wire is not None)
    dkv_slots = DKV_SLOTS + RAIL_SLOTS * form.two_level
    found = {
        "K/V slots": kv_slots * (kv if wire is None else _travelling(problem, wire)),
        "slots of sums": dkv_slots * (sums if grad_wire is None else _travelling(problem, grad_wire)),
        "sums that are home, fp32": sums * form.two_level,
        "decoded": kv * (wire is not None) + sums * (grad_wire is not None),
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def _travelling(problem: Problem, wire: Wire) -> int:
    """Bytes of a pair of a rank's K/V, or of their sums, in the form in which they travel."""
    shape = (problem.batch, tokens_per_rank(problem), problem.kv_heads, problem.head_dim)
    return 2 * sum(prod(size) * dtype.itemsize for size, dtype in wire.specs(shape))


def of_usual_ring(problem: Problem) -> int:
    """Two buffers of K/V, of sums what leaves, what came and one block's, and dQ in fp32 beside a block's."""
    rows, n = rows_of(problem), tokens_per_rank(problem)
    buffers = 2 * rows.keys * (2 * rows.item + 2 * FP32 + rows.item)
    return n * (rows.in_and_out + buffers + rows.queries * (FP32 + rows.item))


def of_all_gather(problem: Problem) -> int:
    """K/V of all tokens, gradients of all tokens in fp32 and one of them once more in the order of ranks."""
    rows, n = rows_of(problem), tokens_per_rank(problem)
    everywhere = 2 * rows.keys * rows.item + 3 * rows.keys * FP32
    return n * (rows.in_and_out + rows.queries * FP32) + problem.seqlen * everywhere


def of_ulysses(problem: Problem) -> int:
    """Everything once more by heads, gradients in fp32, and two tensors on their way."""
    rows, n = rows_of(problem), tokens_per_rank(problem)
    by_head = (3 * rows.queries + 2 * rows.keys) * rows.item + (rows.queries + 2 * rows.keys) * FP32
    return n * (rows.in_and_out + by_head + 2 * rows.queries * rows.item)


def of_whole(problem: Problem) -> int:
    """Inputs and results of all tokens, and lse; on a GPU FlashAttention's backward adds dQ up in fp32 beside them."""
    rows = rows_of(problem)
    sums = rows.queries * FP32 if problem.device != "cpu" else 0
    return problem.seqlen * (rows.in_and_out + problem.batch * problem.heads * FP32 + sums)


def of_lucidrains(problem: Problem) -> int:
    """K/V that travel, fp32 results, and the scores of a bucket several times."""
    rows, n = rows_of(problem), tokens_per_rank(problem)
    scores = SCORES_AT_ONCE * problem.batch * problem.heads * min(BUCKET, n) ** 2 * FP32
    return n * (rows.in_and_out + 2 * (rows.queries + 4 * rows.keys) * FP32) + scores


FORMULAS: dict[str, Callable[[Problem], int]] = {
    WHOLE: of_whole,
    ALL_CORES: of_whole,
    OURS: of_ours,
    USUAL: of_usual_ring,
    ALL_GATHER: of_all_gather,
    ULYSSES: of_ulysses,
    LUCIDRAINS: of_lucidrains,
}
"""Bytes of one rank at the peak of a forward and backward, inputs and results with them, by the kind of a candidate."""


def peak(kind: str, problem: Problem) -> int:
    """The formula of a candidate; other people's rings are counted as a usual one."""
    return FORMULAS.get(kind, of_usual_ring)(problem)


def needs(problem: Problem, layouts: Sequence[str], kinds: Sequence[str], ranks_here: int, ranks_per_gpu: int) -> Needs:
    """What all ranks of one machine take: the whole inputs, shards by every order, the judge, and the largest peak.

    Beside them the slots of every layout's ring of ours, which stay open while all are timed.
    """
    rows = rows_of(problem)
    inputs = problem.seqlen * rows.inputs
    drawn = inputs + problem.seqlen * rows.queries * FP32  # one of them in fp32, before it is rounded
    shards = (len(layouts) + 2) * tokens_per_rank(problem) * rows.inputs
    kept = shards + (len(layouts) * slots_of(problem) if OURS in kinds else 0)
    ranks = {kind: peak(kind, problem) - (slots_of(problem) if kind == OURS else 0) for kind in kinds}
    alone = max((size for kind, size in ranks.items() if kind in (WHOLE, ALL_CORES)), default=0)
    shared = max((size for kind, size in ranks.items() if kind not in (WHOLE, ALL_CORES)), default=0)
    host = ranks_here * (drawn + PROCESS_BYTES)
    if problem.device != "cpu":
        return Needs(host, ranks_per_gpu * (kept + shared) + max(alone + inputs, judged(problem)))
    return Needs(host + ranks_here * kept + max(ranks_here * shared, alone + inputs, judged(problem)))


def judged(problem: Problem) -> int:
    """What float64 takes on rank 0: the heads that are looked at, and the scores of a block of their queries."""
    count = len(chosen_heads(problem.batch, problem.heads, problem.kv_heads, problem.seqlen, problem.seqlen))
    heads = count * (problem.heads // problem.kv_heads + 1)
    return 4 * problem.batch * problem.seqlen * problem.head_dim * heads * FP64 + 5 * BLOCK_BYTES


def refusal(problem: Problem, free: Needs, needed: Callable[[Problem], Needs]) -> str | None:
    """Why a problem does not fit, with the longest sequence that does; None where it fits."""
    unit = f"tokens over {problem.world} ranks"
    return too_large(problem.seqlen, lambda tokens: needed(replace(problem, seqlen=tokens)), free, unit=unit)
