"""``ringattn bench host`` measures the host's time to post one hop with its launches, next to its compute time."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ..common import flags
from ..common.output import is_printing_rank
from ..common.result import Result, Row, finish_command

UNITS = {"phase": "", "host": "us", "Triton's part": "us", "Python calls": "", "compute": "us"}
LOWER_BOUND = "lower bounds, because device calls are replaced by stubs"
AHEAD = "requirement: the host posts a hop faster than the device computes it"
BY_CLOCK = "host and compute are not compared, because with --timer clock compute includes the host's time"

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
    timer: flags.RingTimer = "",
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Measure the host's time to post one hop with its launches.

    On a GPU, exit with code 1 if posting takes longer than the hop computes.
    """
    device = flags.parse_device_kind(device)
    timer = flags.resolve_timer(device, timer, flags.RING_TIMERS)
    kv_heads = flags.resolve_kv_heads(heads, kv_heads)
    if not is_printing_rank():
        return  # one rank measures
    import torch

    from ...comm.cuda_threads import with_device_index
    from ..common.attention import AttentionConfig
    from ..common.memory import MemoryNeeds, check_size_fits, rank_needs
    from ..common.memory_table import OURS, candidate_bytes
    from ..common.provenance import provenance
    from ..common.timing import StepTimer
    from .hop_posting import HOPS, REPEATS, host_rows, rank_passes, ring_of_one

    where = with_device_index(torch.device(device))

    def problem(tokens: int) -> AttentionConfig:
        total = HOPS * tokens
        return AttentionConfig(total, HOPS, batch, heads, kv_heads, head_dim, dtype, False, layout="contiguous")

    def needed(tokens: int) -> MemoryNeeds:
        return rank_needs(candidate_bytes(OURS, problem(tokens)), where, 1)

    check_size_fits("--tokens", tokens, needed, where, unit="tokens per rank")
    with ring_of_one(where, chunks) as ring:
        rows = host_rows(rank_passes(problem(tokens), ring, where), StepTimer(where, timer=timer))
    notes = [
        problem(tokens).title,
        f"{flags.count_noun(chunks, 'chunk')}; per hop of one rank, median of {REPEATS} passes, timed by {timer}",
    ]
    message, failed = host_verdict(rows, device, timer)
    finish_command(Result("bench host", UNITS, rows, failed, [*notes, message], provenance(where)), json, csv)


def host_verdict(rows: Sequence[Row], device: str, timer: str) -> tuple[str, list[str]]:
    """Return the summary note, and a failure for each phase in which the host is slower than the device."""
    if device == "cpu":
        return LOWER_BOUND, []
    if timer == "clock":
        return BY_CLOCK, []
    slow = [row["phase"] for row in rows if not row["host"] < row["compute"]]
    return AHEAD, [f"the host is slower than the device in the {phase}" for phase in slow]
