"""Tests of arguments that the benches refuse before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import launching

WIDE = {"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
ON_CPU = "cannot be used on the CPU."
REFUSED = {
    "host --tokens 1g": "--tokens: 1,073,741,824 tokens per rank need",
    "host --heads 8 --kv-heads 3": "--heads is 8: it must be a multiple of --kv-heads, 3",
    "kernels --timer graph": "--timer is 'graph': on cpu it must be clock",
    "kernels --by magic": "--by has 'magic'",
    "kernels --heads 4 --kv-heads 3": "--heads is 4: it must be a multiple of --kv-heads, 3",
    "kernels --documents-seed 3": "--documents-seed has no effect without --documents",
    "kernels --documents 3 --cu-seqlens 0,10": "--cu-seqlens and --documents cannot be used together",
    "kernels --block-mask longformer,window=5,global=2": "window is 5: it must be even",
    "kernels --seqused-k 10,20": "seqused_k has 2 lengths: it must have 1, one per batch row",
    "kernels --seqlen 1k,1g": "--seqlen: 1,073,741,824 tokens need",
    "links --channels 4": f"--channels {ON_CPU}",
    "links --ctas auto --transport process_group": f"--ctas {ON_CPU}",
    "links -b 2k -e 1k": "-b is 2048: it must be between 1 and -e, 1024",
    "links --transport tcp": "comma-separated list of local, nccl, process_group, nccl_one_sided",
    "links --channels 4,x": "is not a list of counts such as auto,8",
    "links --transport local,pigeon": "it must be all, or a comma-separated list of",
    "links --channels 3": "power of two",
    "links --channels 4,0": "power of two",
    "links --transport local,nccl": "--transport is nccl: it works on cuda, not on cpu",
    "links --device cuda": "finds no CUDA device",
    "links --beside forward": "--beside is forward: this kernel needs a GPU",
    "links --beside sleep": "forward, matmul or none",
    "links -b 1024g -e 1024g": "-e: 1,099,511,627,776 bytes need",
    "memory --tokens 1g": "--tokens: 1,073,741,824 tokens on each of 8 ranks need",
    "memory --nodes 2 --world 4,6,2": "--nodes is 2: it must divide 2 processes",
    "memory --heads 4 --kv-heads 3": "--heads is 4: it must be a multiple of --kv-heads, 3",
    "memory --json {folder}": "it is a folder",
    "memory --csv {folder}/none/x.csv": "there is no folder",
    "overlap --heads 4 --chunks 1,0": "--chunks is 1,0: each number must be at least 1",
    "overlap --slots 1,2 --prefetch 2,3": "prefetch is 2: with 1 slots it must be between 0 and 0; prefetch is 3",
    "overlap --transport local": "--transport is local: it works only within one process. Use auto for 2 ranks.",
    "overlap --timer graph": "timer is 'graph': on cpu it must be clock",
    "overlap --tokens 1g": "--tokens: 1,073,741,824 tokens on each of 2 ranks need",
    "ring --heads 4 --kv-heads 3": "--heads is 4: it must be a multiple of --kv-heads, 3",
    "ring --seqlen 1 --world 2": "--seqlen is 1: it must be at least 2",
    "ring --seqlen 3,64 --world 2,4": "--seqlen is 3: it must be at least 4",
    "ring --world 0": "--world is 0: it must be at least 1",
    "ring --layout spiral": "'spiral' is not a layout",
    "ring --layout packed": "--layout packed needs --documents or --cu-seqlens",
    "ring --seqlen 64,128 --cu-seqlens 0,64": "cu_seqlens ends at 64: it must end at 128",
    "ring --by magic": "--by has 'magic': it must begin one of one device",
    "ring --by device": "--by has 'device': it must begin one of one device",
    "ring --transport nccl_one_sided --world 1": "is nccl_one_sided: it works on cuda, not on cpu",
    "ring --timer events": "timer is 'events': on cpu it must be clock",
    "ring --seqlen 1g,64": "fits",
    "ring --transport local --world 1,2": "works only within one process. Use auto for 2 ranks.",
    "ring --device cpu --seqlen 16 --bytes-per-second 1m --world 1,2": "--world is 1",
    "timeline --seqlen 1": "--seqlen is 1: it must be at least 2",
    "timeline --trace /nowhere/at/all.json": "there is no folder /nowhere/at",
    "timeline --out a.gif": "a.gif is not a valid figure",
    "timeline --out /nowhere/at/all.png": "there is no folder /nowhere/at",
    "timeline --kv-heads 3": "it must be a multiple of --kv-heads, 3",
    "timeline --seqlen 16g": "--seqlen: 17,179,869,184 tokens over 2 ranks need",
}
REFUSED_ON_A_GPU = {
    "links --ctas 4 --transport process_group": "--ctas cannot be used unless --transport includes nccl",
    "links --timer sundial": "on cuda it must be events or clock",
    "overlap --link-share 0.5": "--link-share cannot be used on a GPU",
    "ring --bytes-per-second 1m": "--bytes-per-second slows down only transfers on the CPU. Set --device cpu.",
}


@pytest.mark.parametrize(
    ("command", "message", "gpu"),
    [*((*case, False) for case in REFUSED.items()), *((*case, True) for case in REFUSED_ON_A_GPU.items())],
)
def test_refusals_are_one_line(
    command: str, message: str, gpu: bool, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(launching, "launch_processes", lambda *args: pytest.fail("it started"))
    ran = CliRunner().invoke(cli.app, ["bench", *command.format(folder=tmp_path).split()], env=WIDE)
    assert ran.exit_code == 2 and message in ran.output and len(ran.output.splitlines()) == 1, ran.output
