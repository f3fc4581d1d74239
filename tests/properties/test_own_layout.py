"""A user's own layout and mask, through every path that accepts a layout by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from ringattn import Documents, Layout, ring_attention, shard
from ringattn.bench import cli
from ringattn.bench.predict.links import ClusterLinks, parse_link
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.ring_time import predict_passes
from ringattn.bench.predict.speed import gpu_speed
from ringattn.comm import GroupLike, LocalGroup
from ringattn.ring import BlockMask, Mask, schedule
from ringattn.tools.call_summary import CallSummary
from ringattn.tools.show import call_text

from ..support.mask_cases import RingCase, check_case
from ..support.nightly import rest_nightly
from ..support.ring_cases import inputs, run_ranks

pytestmark = pytest.mark.usefixtures("one_core")
TOKENS, BLOCK = 64, 4
LAYOUT = Layout([[(0, 8), (48, 16)], [(8, 16)], [(32, 16)], [(24, 8)]])
MASK: Any = {"causal": True, "cu_seqlens": [0, 25, TOKENS], "block_mask": BlockMask(torch.rand(16, 16) > 0.3, BLOCK)}


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_own_layouts_are_exact(mesh: tuple[int, int] | None) -> None:
    check_case(RingCase(LAYOUT, inputs(TOKENS), MASK | {"backend": "aten"}, mesh=mesh))


def attend(q: Tensor, k: Tensor, v: Tensor, group: GroupLike) -> Tensor:
    out = ring_attention(q, k, v, layout=LAYOUT, group=group, **MASK)
    assert isinstance(out, Tensor)
    return out


def compiled(*given: Any) -> Any:
    return torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)


def checkpointed(*given: Any) -> Any:
    return checkpoint(attend, *given, use_reentrant=False)


ROUTES = [(False, compiled), (True, checkpointed), (True, compiled), (False, checkpointed)]


@pytest.mark.parametrize(("mesh", "function"), rest_nightly(ROUTES, *ROUTES[:2]))
def test_own_layouts_compile_and_checkpoint(function: Callable[..., Tensor], mesh: bool) -> None:
    whole = inputs(TOKENS)

    def on_rank(group: LocalGroup) -> None:
        members = group.mesh(2, 2) if mesh else group
        results = []
        for each in (attend, function):
            q, k, v = (shard(whole[name], layout=LAYOUT, group=members).requires_grad_() for name in "qkv")
            out = each(q, k, v, members)
            dout = shard(whole["dout"], layout=LAYOUT, group=members)
            results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
        assert all(map(torch.equal, *results))

    run_ranks(LAYOUT.world, on_rank)


def test_show_prints_own_layouts() -> None:
    mask = Mask(causal=True, documents=Documents(MASK["cu_seqlens"]), blocks=MASK["block_mask"])
    call = CallSummary(LAYOUT, "own", mask, 1, 1, 4, 2, 16, "bfloat16")
    assert str(schedule(LAYOUT, mask)) in call_text(call, ["own"])


def command(name: str, spans: object, tmp_path: Path, *flags: str) -> str:
    """Return the output of a command for a layout file, without starting ranks."""
    file = tmp_path / "own.json"
    file.write_text(spans if isinstance(spans, str) else json.dumps({"spans_per_rank": spans}))
    return CliRunner().invoke(cli.app, [name, "--layout", str(file), *flags], env={"COLUMNS": "1000"}).output


def test_show_reads_a_layout_file(tmp_path: Path) -> None:
    shown = command("show", LAYOUT.spans_per_rank, tmp_path, "--cu-seqlens", "0,25,64")
    assert str(schedule(LAYOUT, Mask(causal=True, documents=Documents(MASK["cu_seqlens"])))) in shown
    assert shown.startswith("own.json, causal, 2 documents, 64 tokens over 4 ranks")


def test_predict_reads_a_layout_file(tmp_path: Path) -> None:
    """The zigzag layout is simulated like any other one, so its prediction equals that by name."""
    rows = []
    for layout in (Layout.zigzag(1 << 16, 4), Layout.contiguous(1 << 16, 4)):
        call = PredictedCall(1 << 14, 4, layout, heads=32, kv_heads=32)
        table = json.loads(command("predict", layout.spans_per_rank, tmp_path, "--json", "-"))
        passes = predict_passes(
            call, gpu_speed("h100"), ClusterLinks(parse_link("nvlink4", "link"), parse_link("ib400", "link"))
        )
        assert table["provenance"]["call"]["layout"] == str(layout)
        assert [row["way"] for row in table["rows"]] == ["flat ring"]
        rows.append((table["rows"][0], 1e3 * sum(float(pass_.seconds) for pass_ in passes)))
    for row, milliseconds in rows:
        assert row["fwd"] + row["bwd"] == pytest.approx(milliseconds)
    assert rows[0][1] < rows[1][1]


@pytest.mark.parametrize("name", ["show", "predict"])
@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[[0, 8], [4, 8]]], "spans_per_rank[0][1] starts at 4, but the span before it ends at 7"),
        ([[[0, 8]], [[4, 8]]], "spans_per_rank holds position 4 on rank 0 and on rank 1"),
        ([[[0, 2.5]]], "spans_per_rank[0][0] is [0, 2.5]: it must be a Span"),
        ([[[0, 8]], [[16, 8]]], "it has 16 tokens up to position 23, but must have every position"),
        ([[]], "it has no token, but must have"),
        (None, "spans_per_rank is None: it must be a list"),
        ("{}", "it has no field, but must have only spans_per_rank"),
        ('{"spans_per_rank": [[[0, 8]]], "rank": 1}', "it has spans_per_rank, rank, but must have"),
        ("[]", "it is []: it must be a JSON object"),
    ],
)
def test_bad_layout_files_are_refused(name: str, spans: object, message: str, tmp_path: Path) -> None:
    printed = command(name, spans, tmp_path)
    assert f"--layout is {tmp_path / 'own.json'}: {message}" in printed and len(printed.splitlines()) == 1


def test_predict_needs_equal_shards(tmp_path: Path) -> None:
    assert "shards have 8 to 24 tokens" in command("predict", LAYOUT.spans_per_rank, tmp_path)
