"""Who is told apart, and the smaller ring that stands for thousands of ranks with a window."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench.cli import app
from ringattn.bench.predict import apart
from ringattn.bench.predict.call import Call
from ringattn.bench.predict.launch import area_of
from ringattn.bench.predict.links import PRESETS, Links
from ringattn.bench.predict.program import FOLD
from ringattn.bench.predict.ring import ideal_seconds, predicted
from ringattn.bench.predict.speed import H100
from ringattn.bench.predict.trouble import Trouble
from ringattn.ring import Mask
from ringattn.ring.schedule.mask import bounds

from ..support.nightly import rest_nightly

LINKS = Links(PRESETS["nvlink4"], PRESETS["ib400"])
runner = CliRunner()


@pytest.mark.parametrize(
    ("layout", "window", "per_node"),
    rest_nightly(
        [
            ("contiguous", (700, 0), 0),
            ("zigzag", (700, 0), 0),
            ("zigzag", (300, 500), 0),
            ("zigzag", (700, 0), 8),
            ("contiguous", (600, 300), 8),
        ],
        ("contiguous", (600, 300), 8),
    ),
)
def test_a_smaller_ring_stands_for_a_window(layout: str, window: tuple[int, int], per_node: int) -> None:
    """Told apart, rings of 64, 128 and 256 take as long; and one of 128 answers for all above."""
    mask = Mask(causal=not window[1], window=window)

    def ring(world: int) -> Call:
        return Call(256, world, layout, mask, nodes=world // per_node if per_node else 1)

    def told(call: Call) -> list[float]:
        return [one.seconds for one in predicted(call, H100, LINKS)]

    few, some = told(ring(64)), told(ring(128))
    assert apart.told_apart(ring(256), Trouble({200: 1.0})) == ring(256)  # who may have trouble is told apart
    many = [one.seconds for one in predicted(ring(256), H100, LINKS, Trouble({200: 1.0}))]
    assert few == pytest.approx(some, rel=1e-12) and many == pytest.approx(some, rel=1e-12)
    assert apart.told_apart(ring(16384)) == ring(128) and told(ring(16384)) == some


@pytest.mark.parametrize("two_level", [True, False])
def test_a_smaller_ring_has_the_slow_link_too(two_level: bool) -> None:
    """128 ranks hold one node of 72, which has none."""
    mask = Mask(causal=True, window=(4096, 0))
    call = Call(512, 144, "contiguous", mask, nodes=2, two_level=two_level)
    assert apart.told_apart(call) == call
    asked, inside = (predicted(one, H100, LINKS) for one in (call, replace(call, nodes=1)))
    assert all(one.seconds > 1.5 * other.seconds for one, other in zip(asked, inside, strict=True))


@pytest.mark.parametrize("window", [(700, 0), (300, 500), (4095, 0), (100, 0), (0, 0)])
@pytest.mark.parametrize("seqlen", [512, 5000, 8192, 33333])
def test_an_ideal_window_is_the_area_of_all_positions(window: tuple[int, int], seqlen: int) -> None:
    at, mask = torch.arange(seqlen), Mask(causal=not window[1], window=window)
    form, area = replace(Call(seqlen, 1).form, tokens=seqlen), area_of(bounds(mask, at, at), seqlen, seqlen)
    wanted = H100.seconds(FOLD, area, form, hop=0)
    assert ideal_seconds(Call(seqlen, 1, mask=mask), H100, "forward") == pytest.approx(wanted, rel=1e-12)


def test_windows_of_thousands_of_gpus(tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    arguments = ["--gpus", "16k", "--nodes", "2048", "--window", "4k,0", "--json", str(target)]
    found = runner.invoke(app, ["predict", *arguments])
    assert found.exit_code == 0, found.output
    told = json.loads(target.read_text())
    assert told["call"]["world"] == 16384 and "a ring of 128 GPUs on 16 nodes takes as long" in told["stands_in"]
    assert "a ring of 128 GPUs" in found.output and 0 < told["step"]["percent_of_ideal"] < 101
