"""What ``ringattn doctor`` runs: bytes over every edge by every transport, and a ring against the reference."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ...bench.common.attention import DTYPES, forward_backward
from ...bench.common.errors import Inputs, judge_of
from ...bench.common.flags import binary, human
from ...bench.kernels.accuracy import shards_of, unsharded
from ...bench.links.runs import ONE_WAY, Ends, Way
from ...comm import Transport, open_transports, transport_names
from ...comm.registry import AUTO
from ...comm.topology.topology import Edge as EdgeInfo
from ...comm.topology.topology import Topology, discover
from ...reference.masks import Masks
from ...ring import Layout, Ring, ring_attention
from .findings import FAIL, OK, Failed, Finding, Ranks, Skipped, checked, error_text
from .machine import facts, machine

REPEATS = 3  # timed transfers of one way, one behind the other, after one that is not
MOST_ALL_PAIRS = 16  # ranks up to which every pair is warmed up, since any rank may send dK/dV to its owner
FRACTION = 0.25  # of what an edge should carry: less is no matter of tuning, the bytes take another way
PRINTED = 8  # edges of a line
GIGA = 1e9
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64  # of the ring that is compared: the reference is dense, float64
LOOK_AT_LINKS = (
    "look at what joins the ranks that the line names, and take a GPU, cable or NIC that corrupts bytes out of use: "
    "run again with NCCL_DEBUG=INFO, which prints the path of every pair; `nvidia-smi nvlink -s` shows links that are "
    "down, `ibstat` the NICs, and the lines above every NCCL_* that is set"
)
TRY_AGAIN = (
    "a rank stopped answering: look at its own output, above; run again with fewer ranks to find which host it is"
)
REPORT_RING = (
    "bytes arrive, the result is wrong: `ringattn bench suite` says which kernel; please report it with --json"
)


def examine(ranks: Ranks, seqlen: int, dtype: str, nbytes: int) -> Iterator[Finding]:
    """Every check, in order; each rank gets the findings of all."""
    try:
        ring = ranks.ring = discover(ranks.control, ranks.device)
        on_gpu = ranks.device.type == "cuda"
        results = ranks.together(
            "versions and settings", facts, lambda all_facts: machine(all_facts, ring, on_gpu=on_gpu)
        )
        yield from (Finding(*one) for one in results)
        yield from transports(ranks, ring, nbytes)
        yield checked(
            f"ring of {binary(seqlen)} tokens", REPORT_RING, partial(_against_reference, ranks, seqlen, dtype)
        )
    except Exception as error:  # no answer from a rank: nothing that follows could be agreed on
        yield Finding("all ranks answer", FAIL, error_text(error), TRY_AGAIN)
    if not ranks.alone:
        # the launcher ends the others when one exits: not before rank 0 has come to its end too
        ranks.together("the end of the examination", lambda: None)


def transports(ranks: Ranks, ring: Topology, nbytes: int) -> Iterator[Finding]:
    """For every transport: does it open, do the bytes arrive, how fast; then which one ``auto`` takes, and why."""
    for name in [*transport_names(), AUTO]:
        opened: list[Transport] = []
        try:
            finding = checked(f"transport {name}", LOOK_AT_LINKS, partial(_opens, ranks, ring, name, opened))
            yield finding
            if finding.status == OK and name != AUTO and ring.world > 1:
                yield checked(f"GB/s {name}", LOOK_AT_LINKS, partial(_speeds, ranks, ring, opened, nbytes))
        finally:
            for transport in opened:
                transport.close()


def _opens(ranks: Ranks, ring: Topology, name: str, opened: list[Transport]) -> str:
    """Open a transport and send a pattern over every edge; what opened is left in ``opened``."""

    def open_all() -> None:
        try:
            opened.extend(open_transports(ranks.group, transport=name, device=ranks.device, topology=ring))
        except ValueError as error:
            raise Skipped(f"not possible here: {error}") from None

    ranks.together(f"whether {name} opens", open_all)
    edges = [warmed(ring, level if len(opened) > 1 else None) for level in range(len(opened))]

    def warm_up() -> str:
        for transport, wanted in zip(opened, edges, strict=True):
            transport.warm_up(wanted)
        return "; ".join(dict.fromkeys(transport.reason for transport in opened))

    reason = ranks.together(f"whether bytes arrive by {name}", warm_up, lambda reasons: reasons[0])
    count = sum(map(len, edges))
    return str(reason) if name == AUTO else f"patterned bytes over {count} edge{'s' * (count > 1)}"


def warmed(ring: Topology, level: int | None) -> list[tuple[int, int]]:
    """The (source, destination) pairs of a level, or of the whole ring: all pairs where the ranks are few."""
    if ring.world == 1:
        return [(0, 0)]
    edges = [edge[:2] for edge in ring.edges if level in (None, edge.level)]
    if level is None and ring.world <= MOST_ALL_PAIRS:
        edges = [(a, b) for a in range(ring.world) for b in range(ring.world) if a != b]
    return list(dict.fromkeys([*edges, *((b, a) for a, b in edges)]))


def _speeds(ranks: Ranks, ring: Topology, opened: Sequence[Transport], nbytes: int) -> str:
    """GB/s of every edge, one way; rank 0 alone keeps them, and knows what to expect."""
    rates: dict[EdgeInfo, float] = {}
    for turn in rounds(ring):
        mine = next((edge for edge in turn if ranks.rank in edge[:2]), None)
        ends: list[Ends] = []

        def prepare(mine: EdgeInfo | None = mine, ends: list[Ends] = ends) -> None:
            if mine is not None:
                way = Way(ONE_WAY, (mine[:2],))
                ends.append(Ends(opened[min(mine.level, len(opened) - 1)], way, nbytes, ranks.device))
                if wrong := ends[0].wrong(0):
                    raise Failed(f"{way.edge}: {wrong} wrong bytes of {nbytes}")

        def go(ends: list[Ends] = ends) -> float:
            begun = time.perf_counter()
            for one in ends:
                one.run(REPEATS)
            return (time.perf_counter() - begun) / REPEATS

        def slower_end(seconds: list[float], turn: list[EdgeInfo] = turn) -> None:
            rates.update({edge: nbytes / max(seconds[rank] for rank in edge[:2]) / GIGA for edge in turn})

        ranks.together("a checked transfer", prepare)
        ranks.together("a timed transfer", go, slower_end)

    def judge(_: object) -> str:
        shown = {edge: f"{edge.source}->{edge.destination} {rate:.3g}" for edge, rate in rates.items()}
        expected = {edge: edge.link.gigabytes_per_second or 0.0 for edge in rates}
        slow = [
            f"{shown[one]} of {expected[one]:.3g} expected" for one in rates if rates[one] < FRACTION * expected[one]
        ]
        if slow:
            raise Failed(", ".join(slow[:PRINTED]))
        slowest = shown[min(rates, key=lambda edge: rates[edge])]
        edges = ", ".join([*shown.values()][:PRINTED]) + ", …" * (len(shown) > PRINTED)
        return f"{edges}; slowest {slowest} ({human(nbytes, 'B')}, at the slower end)"

    return str(ranks.together("how fast the edges are", lambda: None, judge))


def rounds(ring: Topology) -> Iterator[list[EdgeInfo]]:
    """Every edge; what is timed at the same time shares no node."""
    node = {rank: number for number, ranks in enumerate(ring.nodes) for rank in ranks}
    left = [*ring.edges]
    while left:
        busy, now, later = set[int](), list[EdgeInfo](), list[EdgeInfo]()
        for edge in left:
            nodes = {node[rank] for rank in edge[:2]}
            (later if nodes & busy else now).append(edge)
            busy |= set() if nodes & busy else nodes
        yield now
        left = later


def _against_reference(ranks: Ranks, seqlen: int, dtype: str) -> str:
    """A causal ring over all ranks, forward and backward, against float64; rank 0 judges."""
    layout = Layout.zigzag(seqlen, ranks.control.size)
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    q, k, v, dout = (
        torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator).to(ranks.device, DTYPES[dtype])
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    given = Inputs(q, k, v, dout, torch.randn(1, HEADS, seqlen, generator=generator).to(ranks.device))

    def compute() -> tuple[str, str]:
        q, k, v, *gradients = (x.contiguous() for x in shards_of(given, layout, ranks.rank))
        with Ring(ranks.group) as ring:
            attend = partial(ring_attention, layout=layout, ring=ring, causal=True, return_lse=True)
            file = io.BytesIO()
            torch.save([x.cpu() for x in forward_backward(attend, (q, k, v), *gradients)], file)
            # through the store: what is being judged does not carry the evidence
            return ring.transport, file.getvalue().hex()

    def judge(answers: list[tuple[str, str]]) -> str:
        parts = [torch.load(io.BytesIO(bytes.fromhex(one)), weights_only=True) for _, one in answers]
        judged = judge_of(given, Masks(causal=True))
        errors = judged.differences(unsharded(layout, parts))
        wrong = judged.wrong(errors)
        text = ", ".join(f"{name} {error:.2g} (allowed {judged.limits[name]:.2g})" for name, error in errors.items())
        text = f"causal, zigzag, {dtype}, transport {answers[0][0]}: {text}"
        if wrong:
            raise Failed(f"wrong in {', '.join(wrong)}; {text}")
        return text

    return str(ranks.together("a small ring", compute, judge))
