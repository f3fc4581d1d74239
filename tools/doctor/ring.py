"""Checks of ``ringattn doctor`` that communicate: every edge of every transport, and a ring against the reference."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ...bench.common.attention import DTYPES, forward_backward
from ...bench.common.errors import AttentionInputs, build_judge
from ...bench.common.flags import human_count, size_text
from ...bench.kernels.accuracy import shard_inputs, unshard_results
from ...bench.links.measure import ONE_WAY, RankTransfers, TransferPattern
from ...comm import Transport, open_transports, transport_names
from ...comm.registry import AUTO
from ...comm.topology.topology import RingEdge as EdgeInfo
from ...comm.topology.topology import Topology, discover_topology
from ...reference.masks import MaskOptions
from ...ring import Layout, Ring, ring_attention
from .adoption import REFUSED_HINT, check_adopted
from .findings import FAIL, OK, CheckFailedError, CheckSkippedError, DoctorRanks, Finding, error_text, run_check
from .machine import check_machine, collect_facts

REPEATS = 3  # timed transfers of an edge in a row, after one warm-up
MOST_ALL_PAIRS = 16  # up to this world size warm up all pairs, because any rank may send dK/dV to any owner
FRACTION = 0.25  # an edge with less of its nominal rate fails, because tuning alone cannot explain that
PRINTED = 8  # edges per line
GIGA = 1e9
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64  # small, because the reference is dense and float64
LINKS_HINT = (
    "check the link between the ranks that the line names, and replace a GPU, cable or NIC that corrupts bytes. "
    "NCCL_DEBUG=INFO prints the path of every pair, `nvidia-smi nvlink -s` shows NVLinks that are down, `ibstat` shows "
    "the NICs, and the lines above list every NCCL_* that is set"
)
RETRY_HINT = "a rank stopped answering: read its output above, or run with fewer ranks to find its host"
REPORT_HINT = (
    "the bytes arrive but the result is wrong: run `ringattn bench suite` to find the kernel, and please report the "
    "problem with the file that --json writes"
)


def check_job(ranks: DoctorRanks, seqlen: int, dtype: str, nbytes: int) -> Iterator[Finding]:
    """Run all checks in order, and yield the same findings on every rank."""
    try:
        ring = ranks.ring = discover_topology(ranks.control, ranks.device)
        on_gpu = ranks.device.type == "cuda"
        results = ranks.merge_on_rank_0(
            "versions and settings", collect_facts, lambda all_facts: check_machine(all_facts, ring, on_gpu=on_gpu)
        )
        yield from (Finding(*fields) for fields in results)
        yield run_check("adopted kernels", REFUSED_HINT, partial(check_adopted, ranks))
        yield from check_transports(ranks, ring, nbytes)
        yield run_check(
            f"ring of {size_text(seqlen)} tokens", REPORT_HINT, partial(_check_against_reference, ranks, seqlen, dtype)
        )
    except Exception as error:  # a rank does not answer, so the ranks cannot agree on further findings
        yield Finding("all ranks answer", FAIL, error_text(error), RETRY_HINT)
    if not ranks.alone:
        # wait for rank 0, because the launcher kills all ranks when one exits
        ranks.merge_on_rank_0("the end of the checks", lambda: None)


def check_transports(ranks: DoctorRanks, ring: Topology, nbytes: int) -> Iterator[Finding]:
    """Check that every transport opens and sends correctly, and time it; then check the choice of ``auto``."""
    for name in [*transport_names(), AUTO]:
        opened: list[Transport] = []
        try:
            finding = run_check(
                f"transport {name}", LINKS_HINT, partial(_check_transport_opens, ranks, ring, name, opened)
            )
            yield finding
            if finding.status == OK and name != AUTO and ring.world > 1:
                yield run_check(f"GB/s {name}", LINKS_HINT, partial(_edge_speeds, ranks, ring, opened, nbytes))
        finally:
            for transport in opened:
                transport.close()


def _check_transport_opens(ranks: DoctorRanks, ring: Topology, name: str, opened_transports: list[Transport]) -> str:
    """Open a transport, send a pattern over every edge, and return the text of the finding.

    The open transports are appended to ``opened_transports``.
    """

    def open_all() -> None:
        try:
            opened_transports.extend(open_transports(ranks.group, transport=name, device=ranks.device, topology=ring))
        except ValueError as error:
            raise CheckSkippedError(f"not possible here: {error}") from None

    ranks.merge_on_rank_0(f"opening the transport {name}", open_all)
    edges = [
        warm_up_edges(ring, level if len(opened_transports) > 1 else None) for level in range(len(opened_transports))
    ]

    def warm_up() -> str:
        for transport, its_edges in zip(opened_transports, edges, strict=True):
            transport.warm_up(its_edges)
        return "; ".join(dict.fromkeys(transport.reason for transport in opened_transports))

    reason = ranks.merge_on_rank_0(f"warming up the transport {name}", warm_up, lambda reasons: reasons[0])
    count = sum(map(len, edges))
    return str(reason) if name == AUTO else f"patterned bytes over {count} edge{'s' * (count > 1)}"


def warm_up_edges(ring: Topology, level: int | None) -> list[tuple[int, int]]:
    """Return the (source, destination) pairs that a transport warms up, in both directions.

    ``level`` is 0 for the edges inside nodes, 1 for those between nodes, and None for the whole ring. Up to
    MOST_ALL_PAIRS ranks, None gives all pairs of ranks.
    """
    if ring.world == 1:
        return [(0, 0)]
    edges = [edge[:2] for edge in ring.edges if level in (None, edge.level)]
    if level is None and ring.world <= MOST_ALL_PAIRS:
        edges = [(a, b) for a in range(ring.world) for b in range(ring.world) if a != b]
    return list(dict.fromkeys([*edges, *((b, a) for a, b in edges)]))


def _edge_speeds(ranks: DoctorRanks, ring: Topology, opened_transports: Sequence[Transport], nbytes: int) -> str:
    """Time every edge in one direction, and return a line with the GB/s of each.

    Raises:
        CheckFailedError: Bytes are wrong, or an edge is below ``FRACTION`` of its expected speed.
    """
    rates: dict[EdgeInfo, float] = {}
    for turn in timing_rounds(ring):
        own_edge = next((edge for edge in turn if ranks.rank in edge[:2]), None)
        ends: list[RankTransfers] = []

        def prepare(own_edge: EdgeInfo | None = own_edge, ends: list[RankTransfers] = ends) -> None:
            if own_edge is not None:
                way = TransferPattern(ONE_WAY, (own_edge[:2],))
                ends.append(
                    RankTransfers(
                        opened_transports[min(own_edge.level, len(opened_transports) - 1)], way, nbytes, ranks.device
                    )
                )
                if wrong := ends[0].count_wrong_bytes(0):
                    raise CheckFailedError(f"{way.edge}: {wrong} wrong bytes of {nbytes}")

        def run(ends: list[RankTransfers] = ends) -> float:
            start = time.perf_counter()
            for end in ends:
                end.run(REPEATS)
            return (time.perf_counter() - start) / REPEATS

        def record_slower_end(seconds: list[float], turn: list[EdgeInfo] = turn) -> None:
            rates.update({edge: nbytes / max(seconds[rank] for rank in edge[:2]) / GIGA for edge in turn})

        ranks.merge_on_rank_0("a checked transfer", prepare)
        ranks.merge_on_rank_0("a timed transfer", run, record_slower_end)

    def judge(_: object) -> str:
        texts = {edge: f"{edge.source}->{edge.destination} {rate:.3g}" for edge, rate in rates.items()}
        expected = {edge: edge.link.gigabytes_per_second or 0.0 for edge in rates}
        slow = [
            f"{texts[edge]} of {expected[edge]:.3g} expected"
            for edge in rates
            if rates[edge] < FRACTION * expected[edge]
        ]
        if slow:
            raise CheckFailedError(", ".join(slow[:PRINTED]))
        slowest = texts[min(rates, key=lambda edge: rates[edge])]
        edges = ", ".join([*texts.values()][:PRINTED]) + ", …" * (len(texts) > PRINTED)
        return f"{edges}; slowest {slowest} ({human_count(nbytes, 'B')}, at the slower end)"

    return str(ranks.merge_on_rank_0("the speed of the edges", lambda: None, judge))


def timing_rounds(ring: Topology) -> Iterator[list[EdgeInfo]]:
    """Yield all edges in rounds, such that the edges of a round share no node and can be timed together."""
    node = {rank: number for number, ranks in enumerate(ring.nodes) for rank in ranks}
    remaining = [*ring.edges]
    while remaining:
        busy, current, later = set[int](), list[EdgeInfo](), list[EdgeInfo]()
        for edge in remaining:
            nodes = {node[rank] for rank in edge[:2]}
            (later if nodes & busy else current).append(edge)
            busy |= set() if nodes & busy else nodes
        yield current
        remaining = later


def _check_against_reference(ranks: DoctorRanks, seqlen: int, dtype: str) -> str:
    """Compare forward and backward of a causal ring over all ranks with float64, on rank 0."""
    layout = Layout.zigzag(seqlen, ranks.control.size)
    generator = torch.Generator().manual_seed(0)  # equal on all ranks
    q, k, v, dout = (
        torch.randn(1, seqlen, heads, HEAD_DIM, generator=generator).to(ranks.device, DTYPES[dtype])
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    inputs = AttentionInputs(q, k, v, dout, torch.randn(1, HEADS, seqlen, generator=generator).to(ranks.device))

    def compute() -> tuple[str, str]:
        q, k, v, *gradients = (x.contiguous() for x in shard_inputs(inputs, layout, ranks.rank))
        with Ring(ranks.group) as ring:
            attend = partial(ring_attention, layout=layout, ring=ring, causal=True, return_lse=True)
            file = io.BytesIO()
            torch.save([x.cpu() for x in forward_backward(attend, (q, k, v), *gradients)], file)
            # send results through the store, because the transport is under test
            return ring.transport, file.getvalue().hex()

    def judge(answers: list[tuple[str, str]]) -> str:
        shards = [torch.load(io.BytesIO(bytes.fromhex(data)), weights_only=True) for _, data in answers]
        reference = build_judge(inputs, MaskOptions(causal=True))
        errors = reference.head_errors(unshard_results(layout, shards))
        wrong = reference.failing_results(errors)
        text = ", ".join(f"{name} {error:.2g} (limit {reference.limits[name]:.2g})" for name, error in errors.items())
        text = f"causal, zigzag, {dtype}, transport {answers[0][0]}: {text}"
        if wrong:
            raise CheckFailedError(f"wrong in {', '.join(wrong)}; {text}")
        return text

    return str(ranks.merge_on_rank_0("a small ring", compute, judge))
