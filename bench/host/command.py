"""``ringattn bench host`` measures the host's time to post one hop with its launches, next to its compute time."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ..common import flags
from ..common.output import prints
from ..common.result import Result, Row, finish

UNITS = {"phase": "", "host": "us", "of it Triton": "us", "Python calls": "", "compute": "us"}
LOWER_BOUND = "device calls are stubs: the times are lower bounds"
AHEAD = "requirement: the host posts a hop faster than the device computes it"
BY_CLOCK = "with --timer clock, compute includes the host's time, so the two are not compared"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def host(
    tokens: flags.TokensPerRank = "4k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 128,
    dtype: flags.Dtype = "bf16",
    chunks: flags.Chunks = 1,
    device: flags.DeviceFlag = "",
    timer: flags.TimerOfRings = "",
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Measure the host's time to post one hop with its launches.

    On a GPU, exit with code 1 if posting takes longer than the hop computes.
    """
    device = flags.device_name(device)
    timer = flags.timer_of_rings(device, timer)
    kv_heads = flags.kv_heads_of(heads, kv_heads)
    flags.check_chunks([chunks], kv_heads)
    if not prints():
        return  # one rank measures
    import torch

    from ...comm.cuda_threads import indexed
    from ..common.attention import AttentionConfig
    from ..common.memory import Needs, needs_of_ranks, refuse_too_large
    from ..common.memory_table import OURS, candidate_bytes
    from ..common.provenance import provenance
    from ..common.timing import Clock
    from .hop import HOPS, REPEATS, ring_of_one, rows_of, shard_of

    where = indexed(torch.device(device))

    def problem(tokens: int) -> AttentionConfig:
        return AttentionConfig(
            HOPS * tokens, HOPS, batch, heads, kv_heads, head_dim, dtype, causal=False, layout="contiguous"
        )

    def needed(tokens: int) -> Needs:
        return needs_of_ranks(candidate_bytes(OURS, problem(tokens)), where, 1)

    refuse_too_large("--tokens", tokens, needed, where, unit="tokens per rank")
    with ring_of_one(where, chunks) as ring:
        rows = rows_of(shard_of(problem(tokens), ring, where), Clock(where, timer=timer))
    notes = [
        problem(tokens).title,
        f"{flags.counted(chunks, 'chunk')}; per hop of one rank, median of {REPEATS} passes by {timer}",
    ]
    message, failed = verdict(rows, device, timer)
    finish(Result("bench host", UNITS, rows, failed, [*notes, message], provenance(where)), json, csv)


def verdict(rows: Sequence[Row], device: str, timer: str) -> tuple[str, list[str]]:
    """Return the summary note, and the phases in which the host is slower than the device."""
    if device == "cpu":
        return LOWER_BOUND, []
    if timer == "clock":
        return BY_CLOCK, []
    failed = [
        f"the host is slower than the device in the {row['phase']}" for row in rows if not row["host"] < row["compute"]
    ]
    return AHEAD, failed
