"""Tests that every flag of a bench reaches the measurement."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ringattn import Layout
from ringattn.bench import cli
from ringattn.bench.common import flags, launching, memory, memory_table
from ringattn.bench.common.attention import AttentionConfig, random_boundaries
from ringattn.bench.common.flags import PatternFlag
from ringattn.bench.common.memory_table import RingForm
from ringattn.bench.common.result import Result
from ringattn.bench.host import hop_posting
from ringattn.bench.kernels import contenders, speed
from ringattn.bench.links.measure import LinksConfig
from ringattn.bench.overlap.measure import OverlapConfig
from ringattn.bench.predict import command as predict
from ringattn.bench.predict.links import PRESETS
from ringattn.bench.predict.predicted_call import PredictedCall
from ringattn.bench.predict.speed import Perturbation
from ringattn.bench.ring.measure import RingConfig
from ringattn.comm import Topology
from ringattn.examples.train import Job
from ringattn.ring import Mask
from ringattn.ring.schedule.layout import Documents

pytestmark = pytest.mark.usefixtures("alone")

SHAPE = "--batch 3 --heads 6 --kv-heads 2 --head-dim 24"
SIZES: dict[str, Any] = {"batch": 3, "heads": 6, "kv_heads": 2, "head_dim": 24}
ON_2: dict[str, Any] = SIZES | {"world": 2, "threads": 8, "seed": 9}
STRIPED = AttentionConfig(96, layout="striped", causal=False, dtype="bfloat16", transport="process_group", **ON_2)
DRAWN = tuple(random_boundaries(96, 16, 3))
PACKED = AttentionConfig(96, layout="packed", cu_seqlens=DRAWN, **ON_2)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)  # unusable ones make no ranks


def invoke(words: str) -> Any:
    return CliRunner().invoke(cli.app, shlex.split(words), env={"COLUMNS": "300"})


DEFAULT = AttentionConfig(16384, 2, threads=8)
ON_GPUS = replace(DEFAULT, seqlen=8192, world=4, threads=4, device="cuda", dtype="bfloat16")


@pytest.mark.parametrize(("words", "world", "expected"), [
    ("bench ring", 2, (RingConfig((DEFAULT,), ("zigzag",), 5, (), "clock"),)),
    ("bench overlap --world 4", 4, (OverlapConfig(
        replace(DEFAULT, seqlen=8192, world=4, threads=4, transport="process_group"),
        tuple((*pair, n) for n in (1, 2) for pair in ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2))), 5, 0.8, "clock"),)),
    ("bench timeline", 2, (replace(DEFAULT, seqlen=8192), 5)),
    ("bench links --transport process_group", 2, (LinksConfig(
        ("process_group",), "cpu", (32 << 20,), 20, 5, 1, "clock", (None, 1, 2, 4, 8, 16, 32), beside="matmul",
        must_open=True),)),
    ("bench memory", 8, ([AttentionConfig(8192 * n, n) for n in (2, 4, 8)], RingForm(), 1, 1)),
    ("demo", 2, (Job(seqlen=8192, steps=10),)),
    (f"bench ring --world 2 --seqlen 96 {SHAPE} --dtype bf16 --full --layout striped,zigzag --by ringattn,one --seed 9 "
     "--transport process_group --bytes-per-second 1m --repeats 4 --timer clock",
     2, (RingConfig((STRIPED,), ("striped", "zigzag"), 4, ("ringattn", "one"), "clock", 1 << 20),)),
    (f"bench ring --seqlen 96 {SHAPE} --documents 16 --documents-seed 3 --seed 9",
     2, (RingConfig((PACKED,), ("packed", "per-document"), timer="clock"),)),
    (f"bench ring --seqlen 96 {SHAPE} --cu-seqlens 0,7,96 --layout per-document --seed 9", 2,
     (RingConfig((replace(PACKED, layout="per-document", cu_seqlens=(0, 7, 96)),), ("per-document",), timer="clock"),)),
    (f"bench overlap --tokens 48 {SHAPE} --dtype bf16 --full --layout striped --slots 2,3 --prefetch 1,2 "
     "--chunks 2,1 --link-share 0.5 --transport process_group --repeats 4 --seed 9",
     2, (OverlapConfig(STRIPED, ((2, 1, 2), (3, 1, 2), (3, 2, 2), (2, 1, 1), (3, 1, 1), (3, 2, 1)), 4, 0.5, "clock"),)),
    (f"bench timeline --world 2 --seqlen 96 {SHAPE} --dtype bf16 --full --layout striped --repeats 4 --seed 9",
     2, (replace(STRIPED, transport="auto"), 4)),
    ("bench links --world 3 --transport process_group,local -b 1k -e 8k -f 4 -n 7 -w 3 -c 2 --beside none",
     3, (LinksConfig(("process_group",), "cpu", (1024, 4096), 7, 3, 2, "clock", (None, 1, 2, 4, 8, 16, 32),
                     must_open=True),)),
    (f"bench memory --world 8,4 --tokens 12 {SHAPE} --dtype bf16 --full --layout striped --nodes 2 --slots 4 "
     "--chunks 2 --wire-dtype float8_e4m3fn --grad-wire-dtype bf16",
     8, ([AttentionConfig(12 * n, n, dtype="bfloat16", causal=False, layout="striped", **SIZES) for n in (8, 4)],
         RingForm(True, 4, "float8_e4m3fn", "bfloat16"), 2, 2)),
    ("demo --world 4 --data 2 --steps 3 --batch 2 --seqlen 96 --layout striped --heads 6 --kv-heads 3 --head-dim 24 "
     "--layers 1 --dtype bf16 --lr 0.5 --seed 9 --block 7",
     4, (Job(seqlen=96, batch=2, steps=3, layers=1, heads=6, kv_heads=3, head_dim=24, layout="striped", data=2,
             block=7, dtype="bfloat16", lr=0.5, seed=9),)),
    # On four GPUs all lengths share processes, the link is not slowed, and there is a rank per GPU.
    ("bench ring --world 4 --seqlen 2k,1k --device cuda",
     4, (RingConfig(tuple(replace(ON_GPUS, seqlen=n) for n in (1024, 2048)), ("zigzag",), timer="events"),)),
    ("bench overlap --slots 2 --prefetch 1 --chunks 1 --transport nccl --device cuda",
     4, (OverlapConfig(replace(ON_GPUS, transport="nccl"), ((2, 1, 1),), 5, None, "events"),)),
    ("bench overlap --slots 2 --prefetch 1 --chunks 1 --timer clock --device cuda",
     4, (OverlapConfig(ON_GPUS, ((2, 1, 1),), 5, None, "clock"),)),
])  # fmt: skip
def test_flags_reach_the_ranks(words: str, world: int, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind := words.partition("--device ")[2]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    started: list[Any] = []

    def launch(world: int, entry: object, kind: str, measure: object, arguments: tuple[Any, ...]) -> None:
        started.append((world, kind, arguments[: len(expected)]))
        raise typer.Exit(3)

    monkeypatch.setattr(launching, "launch_processes", launch)
    monkeypatch.setattr(flags, "cores", lambda: 16)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 40)
    ran = invoke(words)
    assert ran.exit_code == 3, ran.output
    assert started == [(world, kind or "cpu", expected)]


SHAPES = AttentionConfig(96, 1, 2, 6, 2, layout="contiguous", seed=9, head_dim_v=40)


@pytest.mark.parametrize(("words", "masks"), [
    ("--full --window 4,8 --seqused-k 90,80", {"causal": False, "window": (4, 8), "seqused_k": (90, 80)}),
    ("--documents 16 --documents-seed 3 --prefix-length 5", {"cu_seqlens": DRAWN, "prefix_length": 5}),
    ("--cu-seqlens 0,7,96", {"cu_seqlens": (0, 7, 96)}),
    ("--block-mask strided,block=32,stride=64",
     {"block_mask": PatternFlag("strided", {"block": 32, "stride": 64})}),
    ("", None),
])  # fmt: skip
def test_flags_reach_the_kernels(words: str, masks: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []

    def measure(config: AttentionConfig, clock: Any, *, seconds: float, prefixes: list[str]) -> Result:
        configs.append((config, clock.timer, seconds, prefixes))
        return Result("bench kernels", {})

    monkeypatch.setattr(speed, "measure_kernels", measure)
    monkeypatch.setattr(contenders, "other_backends", lambda device: [])  # other tests register some
    counts: Any = []
    monkeypatch.setattr(memory_table, "kernels_bytes", lambda config, n, *given: counts.append(given) or n)
    if masks is None:
        one = AttentionConfig(1024, heads=4, kv_heads=4, layout="contiguous")
        problems = [replace(one, head_dim=dim, head_dim_v=dim, seqlen=n) for dim in (64, 128) for n in (1024, 2048)]
        expected: list[Any] = [(config, "clock", 3.0, ["ringattn", "ATen operator", "math"]) for config in problems]
    else:
        words += " --seqlen 96 --batch 2 --heads 6 --kv-heads 2 --head-dim 24,32 --value-dim 40 --seed 9"
        words += " --dtype bf16,fp32 --seconds 0.5 --by 'math, ringattn'"
        kinds = [(kind, dim) for kind in ("bfloat16", "float32") for dim in (24, 32)]
        problems = [replace(SHAPES, dtype=kind, head_dim=dim, **masks) for kind, dim in kinds]
        expected = [(config, "clock", 0.5, ["math", "ringattn"]) for config in problems]
    ran = invoke(f"bench kernels {words}")
    assert ran.exit_code == 0, ran.output
    assert configs == expected and {*counts} == {(1, len(expected[0][-1]) - 1, 1024)}  # ours, and the others


@pytest.mark.parametrize(("words", "chunks", "tokens", "shape"), [
    (f"--tokens 12 {SHAPE} --dtype fp32 --chunks 2", 2, 12, SIZES),
    ("", 1, 4096, {"heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "bfloat16"}),
])  # fmt: skip
def test_flags_reach_the_hops(
    words: str, chunks: int, tokens: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def passes(problem: AttentionConfig, ring: object, device: torch.device) -> None:
        made.append((problem, ring, device))
        raise typer.Exit(3)

    needs: Any = []
    monkeypatch.setattr(memory, "check_size_fits", lambda *given, **_: needs.append((given[:2], given[2](tokens))))
    monkeypatch.setattr(hop_posting, "ring_of_one", lambda device, chunks: nullcontext((device, chunks)))
    monkeypatch.setattr(hop_posting, "rank_passes", passes)
    ran = invoke(f"bench host {words}")
    assert ran.exit_code == 3, ran.output
    cpu, problem = torch.device("cpu"), AttentionConfig(8 * tokens, 8, causal=False, layout="contiguous", **shape)
    assert made == [(problem, (cpu, chunks), cpu)]
    one_rank = memory.PROCESS_BYTES + memory_table.candidate_bytes(memory_table.OURS, problem)
    assert needs == [(("--tokens", tokens), memory.MemoryNeeds(one_rank))]


CALL = PredictedCall(96, 4, "striped", Mask(), 6, 2, 24, 3, "float16", 2, slots=4, chunks=2,
                     wire_dtype="bfloat16", grad_wire_dtype="float32")  # fmt: skip
NODES, ENDS = "--world 4 --nodes 2", random_boundaries(384, 30, 2)


@pytest.mark.parametrize(("words", "call"), [
    (f"--tokens 96 {NODES} --layout striped {SHAPE} --full --dtype fp16 --chunks 2 --slots 4 --wire-dtype bf16 "
     "--grad-wire-dtype fp32", CALL),
    (f"--seqlen 384 {NODES} --layout striped {SHAPE} --window 8,0 --prefix-length 5 --dtype fp16", replace(
        CALL, mask=Mask(True, (8, 0), prefix=5), chunks=1, slots=3, wire_dtype=None, grad_wire_dtype=None)),
    (f"--seqlen 384 --gpus 4 {SHAPE} --documents 100 --documents-seed 3",
     PredictedCall(96, 4, "zigzag", Mask(True, documents=Documents(random_boundaries(384, 100, 3))), **SIZES)),
    (f"--seqlen 384 {NODES} {SHAPE} --documents 30 --documents-seed 2 --packed", PredictedCall(
        96, 4, Layout.packed(ENDS, 4, masks=[(Mask(True), 1)], topology=Topology.grid(2, 2),
                             heads_per_kv_head=3), Mask(True, documents=Documents(ENDS)), **SIZES, nodes=2)),
    ("", PredictedCall(8192, 8, heads=32, kv_heads=32)),
    ("--layout {folder}/own.json", PredictedCall(8, 2, Layout([[(0, 4), (12, 4)], [(4, 8)]]), heads=32, kv_heads=32)),
])  # fmt: skip
def test_flags_reach_the_prediction(
    words: str, call: PredictedCall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.json").write_text('{"spans_per_rank": [[[0, 4], [12, 4]], [[4, 8]]]}')
    made: list[Any] = []

    def predicted(*given: object) -> None:
        made.append(given)
        raise typer.Exit(3)

    monkeypatch.setattr(predict, "_one_call", predicted)
    hardware = "--gpu a800 --pass forward --slow 1=1.5 --slow 0=2 --jitter 0.25 --memory 12"
    between = "--link 150,7us --link-between ib200 --nics 2" if call.nodes > 1 else "--link 150,7us"
    ran = invoke(f"predict {words.format(folder=tmp_path)} {hardware} {between} --trace {tmp_path}/t.json")
    assert ran.exit_code == 3, ran.output
    ((predicted_call, inputs, capacity, trace),) = made
    assert predicted_call == call and (capacity, trace) == (12e9, tmp_path / "t.json")
    assert (inputs.speed.name, [*inputs.phases]) == ("A800", ["forward"])
    assert inputs.perturbation == Perturbation({1: 1.5, 0: 2.0}, 0.25)
    assert [inputs.links.inside.rate, inputs.links.inside.latency] == pytest.approx([150e9, 7e-6])
    if call.nodes > 1:
        assert (inputs.links.between, inputs.links.nics) == (PRESETS["ib200"], 2)
    else:
        assert inputs.links.between.rate == PRESETS["ib400"].rate and inputs.links.nics is None


@pytest.mark.parametrize(("text", "words"), [
    ('{"spans_per_rank": [[[0, 4]], [[5, 4]]]}', "8 tokens up to position 8"),
    ('{"spans_per_rank": [[], []]}', "it has no token"),
    ('{"spans_per_rank": [[[0, 4]], [[4, 6]]]}', "its shards have 4 to 6 tokens, but must be equal"),
    ('{"spans_per_rank": [[[0, 4]], [[4, 4]]], "world": 2}', "it has spans_per_rank, world"),
    ("{}", "it has no field"),
])  # fmt: skip
def test_layouts_with_gaps_or_other_fields_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(text)
    ran = invoke(f"predict --layout {tmp_path}/own.json")
    assert ran.exit_code == 2 and words in " ".join(ran.output.split()) and "--layout is" in ran.output, ran.output
