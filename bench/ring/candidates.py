"""Who computes the same attention in ``bench ring``: ours, what people would do otherwise, what they can install."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...ring import Layout, Mask, Ring, ring_attention
from ...ring.schedule.schedule import schedule
from ..common.attention import DTYPES, AttentionConfig
from ..common.launching import cores
from ..common.timing import Stopwatch
from .collectives import Exchange, Gather
from .usual_ring import usual_ring_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = tuple[Tensor, ...]

OURS, WHOLE, ALL_CORES = "ringattn", "one device", "one process, all cores"
USUAL, ALL_GATHER, ULYSSES = "usual ring", "all-gather", "Ulysses"


class Refused(Exception):
    """A candidate does not compute this, or not here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """What candidates are made of, on one rank."""

    problem: AttentionConfig
    layouts: tuple[str, ...]
    device: torch.device
    ring: Callable[[], Ring]  # a new one, of the default group
    shared: bool = False  # ranks share a GPU

    def positions(self, layout: str) -> Tensor:
        """Of this rank."""
        return self.problem.named(layout).positions(dist.get_rank())

    def equal_shards(self, name: str, each: int = 1) -> None:
        """Refuse what needs shards of one length, made of so many pieces."""
        seqlen, world = self.problem.seqlen, self.problem.world
        if seqlen % (each * world):
            raise Refused(f"{seqlen} tokens are not {each * world} equal pieces, which {name} needs")

    def collectives(self, name: str) -> None:
        """Refuse what talks over NCCL where ranks share a GPU."""
        if self.shared:
            raise Refused(f"ranks share a GPU here, and {name} talks over NCCL, which takes one rank per GPU")


@dataclass(frozen=True)
class Candidate:
    """``attend`` on the tokens at ``positions``, all of which this rank holds; None where it stays idle."""

    name: str
    positions: Tensor | None
    attend: Attend
    threads: int = 1
    runs: int | None = None  # at most; None: as many as asked for
    kind: str = ""  # what it is, whatever its layout; its name where empty
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # each forward and backward
    sent: int | None = None  # bytes that a rank sends in one forward and backward; None: not known
    waits: Stopwatch | None = None  # what it spends in the network; None: not known
    ring: Ring | None = None  # ours, which records its waits itself
    trusted: bool = True  # a wrong result ends the command
    query_heads: tuple[int, ...] | None = None  # which of ours its query heads are; None: the same

    def shards(self, whole: Tensors, device: torch.device) -> Tensors:
        """This rank's part of q, k, v and dout, in memory of its own, with query heads in the candidate's order."""
        if self.positions is None:
            return ()
        q, k, v, dout = whole
        parts = self._queries(q), k[:, self.positions], v[:, self.positions], self._queries(dout)
        return tuple(x.contiguous().to(device) for x in parts)

    def _queries(self, whole: Tensor) -> Tensor:
        if self.query_heads is None:
            return whole[:, self.positions]
        assert self.positions is not None
        return whole[:, self.positions[:, None], list(self.query_heads)]

    def run(self, shards: Tensors) -> Tensors:
        """Forward and backward: out, dq, dk and dv of this rank's tokens; query heads in the candidate's order."""
        if self.positions is None:
            return ()
        torch.set_num_threads(self.threads)
        *inputs, dout = shards
        leaves = [x.detach().requires_grad_() for x in inputs]
        with self.around():
            out = self.attend(*leaves)
            return (out.detach(), *torch.autograd.grad(out, leaves, dout))


Maker = Callable[[Setting], Candidate]


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's attention on ``[B, S, H, D]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def whole(setting: Setting) -> Candidate:
    """PyTorch's SDPA on the whole sequence, by rank 0 with what one rank has, while the others block."""
    problem = setting.problem

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, causal=problem.causal)

    positions = torch.arange(problem.seqlen) if dist.get_rank() == 0 else None
    return Candidate(WHOLE, positions, attend, problem.threads, sent=0)


def all_cores(setting: Setting) -> Candidate:
    """The same with the threads of all ranks: what one process could do with this machine."""
    problem = setting.problem
    threads = min(cores(), problem.threads * problem.world)
    if setting.device.type != "cpu":
        raise Refused("a GPU has no threads to lend")
    if threads <= problem.threads:
        raise Refused(f"there is no more than what one device has: {problem.threads} threads")
    one = whole(setting)
    return Candidate(ALL_CORES, one.positions, one.attend, threads, sent=0)


def ours(layout: str, setting: Setting) -> Candidate:
    """``ring_attention``, one shard per rank."""
    problem, held, ring = setting.problem, setting.problem.named(layout), setting.ring()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ring_attention(q, k, v, layout=held, ring=ring, causal=problem.causal)
        assert isinstance(out, Tensor)
        return out

    sent = ring_bytes(problem, held, ring)
    return Candidate(
        f"{OURS} {layout}", setting.positions(layout), attend, problem.threads, kind=OURS, sent=sent, ring=ring
    )


def ring_bytes(problem: AttentionConfig, held: Layout, ring: Ring) -> int:
    """What the rank that sends most sends in a forward and a backward, by the schedule."""
    plan = schedule(held, Mask(causal=problem.causal), direction=ring.direction, topology=ring.topology)
    kv, sums = kv_bytes(problem)
    both = zip(plan.bytes(kv), plan.bytes(kv, sums), strict=True)
    return max(forward + backward for forward, backward in both)


def kv_bytes(problem: AttentionConfig) -> tuple[int, int]:
    """Of K and V of a token, and of the fp32 sums of dK and dV."""
    elements = 2 * problem.batch * problem.kv_heads * problem.head_dim
    return elements * DTYPES[problem.dtype].itemsize, elements * torch.float32.itemsize


def usual(setting: Setting) -> Candidate:
    """The baseline of :mod:`.usual_ring`, in the layout that it is made for."""
    problem = setting.problem
    if setting.device.type != "cpu":
        raise Refused("it is written on the CPU's operator; on a GPU ring-flash-attn is the usual ring")
    setting.equal_shards(USUAL, 2)
    layout, waits = "zigzag" if problem.causal else "contiguous", Stopwatch(setting.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return usual_ring_attention(q, k, v, causal=problem.causal, waits=waits)

    kv, sums = kv_bytes(problem)
    hops, shard = problem.world - 1, problem.seqlen // problem.world
    sent = shard * (2 * hops * kv + (problem.world if hops else 0) * sums)
    return Candidate(USUAL, setting.positions(layout), attend, problem.threads, sent=sent, waits=waits)


def all_gather(setting: Setting) -> Candidate:
    """K/V of all ranks on every rank, dK/dV reduced and scattered; balanced by a zigzag where the mask is causal."""
    problem = setting.problem
    setting.equal_shards(ALL_GATHER)
    setting.collectives(ALL_GATHER)
    layout = "zigzag" if problem.causal else "contiguous"
    net = Gather(problem.named(layout), problem.causal, setting.device)
    kv, sums = kv_bytes(problem)
    sent = (problem.world - 1) * problem.seqlen // problem.world * (kv + sums)
    return Candidate(ALL_GATHER, setting.positions(layout), net, problem.threads, sent=sent, waits=net.waits)


def ulysses(setting: Setting) -> Candidate:
    """Heads for tokens, all-to-all: every rank computes some heads of the whole sequence."""
    problem, world = setting.problem, setting.problem.world
    for name, count in (("heads", problem.heads), ("kv_heads", problem.kv_heads)):
        if count % world:
            raise Refused(f"{name} is {count}: {world} ranks need a multiple of {world}")
    setting.equal_shards(ULYSSES)
    setting.collectives(ULYSSES)
    net = Exchange(problem.named("contiguous"), problem.causal, setting.device)
    kv, _ = kv_bytes(problem)
    queries = problem.batch * problem.heads * problem.head_dim * DTYPES[problem.dtype].itemsize
    # q, k, v and out, then dout, dq, dk and dv; a rank keeps its own part of each
    sent = problem.seqlen // world * (world - 1) * (4 * queries + 2 * kv) // world
    return Candidate(ULYSSES, setting.positions("contiguous"), net, problem.threads, sent=sent, waits=net.waits)


def makers(layouts: Sequence[str]) -> dict[str, Maker]:
    """All that there are, by name; the first is what the others are compared with."""
    from .peers import PEERS  # which needs what is above

    rings = {f"{OURS} {layout}": _in_layout(layout) for layout in layouts}
    baselines = {USUAL: usual, ALL_GATHER: all_gather, ULYSSES: ulysses}
    return {WHOLE: whole, ALL_CORES: all_cores, **rings, **baselines, **PEERS}


def _in_layout(layout: str) -> Maker:
    return lambda setting: ours(layout, setting)


def candidates(setting: Setting, by: Sequence[str] = ()) -> tuple[dict[str, Candidate], dict[str, str]]:
    """All that can do this problem here, and why the others cannot; ``by``: those that start so, beside the first."""
    found: dict[str, Candidate] = {}
    absent: dict[str, str] = {}
    for name, make in makers(setting.layouts).items():
        if by and name != WHOLE and not any(name.startswith(one) for one in by):
            continue
        try:
            found[name] = make(setting)
        except Refused as reason:
            absent[name] = str(reason)
    return found, absent
