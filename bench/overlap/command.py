"""``ringattn bench overlap`` times compute alone, communication alone and both, by slots and prefetch depth."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common import flags
from ..common.launching import run_process_group
from ..common.result import finish_command

if TYPE_CHECKING:
    from .measure import BufferSetting

LINK_SHARE = 0.8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def overlap(
    context: typer.Context,
    world: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: the launcher's, else one per GPU, at least 2.")
    ] = None,
    tokens: flags.TokensPerRank = "2k",
    batch: flags.Batch = 1,
    heads: flags.Heads = 8,
    kv_heads: flags.KvHeads = None,
    head_dim: flags.HeadDim = 64,
    dtype: flags.DeviceDtype = None,
    causal: flags.Causal = True,
    layout: flags.LayoutFlag = flags.LayoutName.zigzag,
    slots: Annotated[Any, typer.Option(parser=flags.sizes, metavar="N,…", help="Receive buffers for K/V.")] = "1,2,3",
    prefetch: Annotated[
        Any, typer.Option(parser=flags.sizes, metavar="N,…", help="Hops by which K/V are requested ahead; 0: blocking.")
    ] = "0,1,2",
    chunks: Annotated[
        Any,
        typer.Option(parser=flags.sizes, metavar="N,…", help=flags.CHUNKS_HELP),
    ] = "1,2",
    link_share: Annotated[
        float,
        typer.Option(min=0.01, help="CPU only: throttle the link to this ratio of communication to compute time."),
    ] = LINK_SHARE,
    transport: Annotated[
        str, typer.Option(help="As in Ring(transport=); default: auto, on the CPU process_group.")
    ] = "",
    device: flags.DeviceFlag = "",
    timer: flags.RingTimer = "",
    repeats: flags.Repeats = 5,
    seed: flags.Seed = 0,
    json: flags.Json = None,
    csv: flags.Csv = None,
) -> None:
    """Measure how much communication a ring hides, by number of buffers and prefetch depth."""
    import torch

    from ..common.attention import AttentionConfig
    from ..common.memory import check_ranks_fit
    from ..common.memory_table import settings_bytes
    from ..common.provenance import provenance
    from .measure import OverlapConfig, measure_overlap

    device = flags.parse_device_kind(device)
    on_gpu = device == "cuda"
    if on_gpu:
        mode = "on a GPU, because only CPU links are throttled"
        flags.check_mode(context, mode, context.params.keys() - {"link_share"})
    world = flags.resolve_world(world, max(2, torch.cuda.device_count() if on_gpu else 0))
    kv_heads = flags.resolve_kv_heads(heads, kv_heads)
    if min(chunks) < 1:
        raise typer.BadParameter(f"--chunks is {','.join(map(str, chunks))}: each number must be at least 1")
    transport = transport or ("auto" if on_gpu else "process_group")
    flags.check_transport_flag(transport, device, world)
    settings, reasons = ring_settings_grid(slots, prefetch, chunks, world)
    timer = flags.resolve_timer(device, timer, flags.RING_TIMERS)

    problem = AttentionConfig(
        world * tokens, world, batch, heads, kv_heads, head_dim, dtype or ("bfloat16" if on_gpu else "float32"),
        causal, layout.value, flags.rank_threads(world), seed, device, transport,
    )  # fmt: skip
    needed_for = partial(settings_bytes, slots=[slots for slots, _, _ in settings])
    check_ranks_fit("--tokens", problem, needed_for, per_rank=True)
    config = OverlapConfig(problem, settings, repeats, None if on_gpu else link_share, timer)
    result = run_process_group(world, measure_overlap, config, device=device)
    result.notes = [*(f"skipped: {reason}" for reason in reasons), *result.notes]
    result.provenance = provenance(torch.device(device))
    finish_command(result, json, csv)


def ring_settings_grid(
    slots: list[int], prefetch: list[int], chunks: list[int], world: int
) -> tuple[tuple[BufferSetting, ...], list[str]]:
    """Return all valid (slots, prefetch, chunks), and the reasons against the rest; BadParameter if none is valid."""
    from ...ring.ring import check_slots

    pairs, reasons = [], []
    for pair in product(slots, prefetch):
        try:
            check_slots(*pair, world)
            pairs.append(pair)
        except ValueError as error:
            reasons.append(str(error))
    if not pairs:
        why = "; ".join(dict.fromkeys(reasons))
        raise typer.BadParameter(f"no combination of --slots and --prefetch is valid: {why}")
    return tuple((*pair, count) for count in chunks for pair in pairs), reasons
