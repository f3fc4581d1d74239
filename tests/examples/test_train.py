"""``train.py``: its losses are those of one process, a resumed run is the same run, and memory is shared out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ringattn.bench.common.memory import freed_at_once
from ringattn.examples import demo
from ringattn.examples.compare import Kept, alone, pytorch_attention, spent
from ringattn.examples.demo import Job
from ringattn.examples.model import Decoder
from ringattn.examples.train import Run, as_virtual_ranks, check_checkpoint, on_mesh

from ..support.forked import results
from ..support.tolerance import assert_as_exact_as_pytorch

CPU = torch.device("cpu")
TINY = Job(seqlen=203, steps=4, layers=2, heads=4, kv_heads=2, head_dim=8, batch=2, block=32, lr=1e-3)


def process(rank: int, job: Job, kept: Kept | None = None) -> Run:
    return on_mesh(job, demo.text(), CPU, kept)


# -- the parts


@pytest.mark.parametrize("block", [1, 7, 300])
def test_blockwise_is_the_same_function(block: int) -> None:
    """Losses and gradients, beside the plain ones."""
    tokens, labels = torch.randint(256, (2, 2, 30), generator=torch.Generator().manual_seed(0))

    def backward(block: int | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        model = Decoder(layers=2, heads=4, kv_heads=2, head_dim=8, block=block)
        model.initialize(0)
        model.to(dtype)
        losses = model(tokens, torch.arange(30), pytorch_attention, labels)
        return [losses, *torch.autograd.grad(losses.sum(), [*model.parameters()])]

    names = ("losses", *(name for name, _ in Decoder(layers=2, heads=4, kv_heads=2, head_dim=8).named_parameters()))
    for given in zip(names, backward(block), backward(None), backward(None, torch.float64), strict=True):
        assert_as_exact_as_pytorch(*given)


def test_the_forward_ring_runs_once(forward_rings: list[object]) -> None:
    as_virtual_ranks(replace(TINY, steps=1), demo.text(), 2)
    assert len(forward_rings) == 2 * TINY.layers


# -- one process and many


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mesh_trains_as_one_process(dtype: str, tmp_path: Path) -> None:
    """Left to themselves, 2 rows of a batch on 2 rings of 2, weights in parts on all 4: every loss, and the gradients
    of the first step. (Adam takes no notice of a factor on all gradients: losses alone would not show one.)"""
    job, text, kept = replace(TINY, data=2, dtype=dtype), demo.text(), Kept(str(tmp_path))
    runs = results(4, partial(process, job=job, kept=kept))
    assert all(run.losses == runs[0].losses for run in runs)
    single, exact = alone(job, text, CPU), alone(replace(job, dtype="float32"), text, CPU)
    exact.model.double()
    three = runs[0], single.fit(kept), exact.fit(kept)
    size = max(single.run.logits.values())  # a token's loss is a difference of numbers of this size
    losses = (torch.tensor([*run.losses.values()], dtype=torch.float64) for run in three)
    rounded = (x.to(torch.float32) if run is not exact.run else x for x, run in zip(losses, three, strict=True))
    assert_as_exact_as_pytorch("losses", *rounded, magnitude=size)
    for name in runs[0].gradients[0]:
        assert_as_exact_as_pytorch(name, *(run.gradients[0][name] for run in three))
    assert runs[0].losses[3] < runs[0].losses[0]


# -- checkpoints


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    """Bit for bit, losses of earlier steps included; on another number of ranks within rounding."""
    job = replace(TINY, checkpoint=str(tmp_path), every=2)
    whole = as_virtual_ranks(replace(TINY, steps=6), demo.text(), 2)
    as_virtual_ranks(replace(job, steps=3), demo.text(), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]
    resumed = as_virtual_ranks(replace(job, steps=6), demo.text(), 2)
    assert resumed.losses == whole.losses and len(resumed.seconds) == 3
    again = as_virtual_ranks(replace(job, steps=6), demo.text(), 1)  # nothing is left to do
    assert again.losses == whole.losses and again.seconds == []
    assert spent("sharded", job, again).startswith("sharded: no step was left to do")
    other = r"is of another job: layers 2, here 1: name another folder"
    with pytest.raises(ValueError, match=other):
        as_virtual_ranks(replace(job, layers=1), demo.text(), 1)
    with pytest.raises(ValueError, match=other):  # the command's refusal, before any rank starts
        check_checkpoint(replace(job, layers=1))
    check_checkpoint(replace(job, steps=9, data=2, block=0))


def test_a_folder_that_was_not_finished_is_left_alone(tmp_path: Path) -> None:
    job = replace(TINY, checkpoint=str(tmp_path), steps=2)
    first = as_virtual_ranks(job, demo.text(), 1)
    (tmp_path / "00000009").mkdir()
    assert as_virtual_ranks(job, demo.text(), 1).losses == first.losses


@pytest.mark.nightly
def test_a_mesh_resumes_bit_for_bit_and_as_another_mesh(tmp_path: Path) -> None:
    job = replace(TINY, checkpoint=str(tmp_path), data=2)
    (whole, *_) = results(4, partial(process, job=replace(TINY, steps=4, data=2)))
    results(4, partial(process, job=replace(job, steps=2)))
    assert results(2, partial(process, job=replace(job, data=1, block=0)))[0].losses == pytest.approx(
        whole.losses, rel=1e-6
    )
    (tmp_path / "00000004" / ".metadata").unlink()
    assert results(4, partial(process, job=job))[0].losses == whole.losses


# -- memory

LONG = Job(seqlen=16384, steps=1, layers=8, heads=8, kv_heads=2, head_dim=32)


def warm(rank: int, job: Job) -> Run:
    """What PyTorch imports and keeps at its first step is no part of a step's memory. Nor is the heap: tensors that
    are cut from blocks which the warm-up has freed stay resident once they are freed themselves."""
    with freed_at_once(CPU):
        on_mesh(replace(job, seqlen=64, steps=1), demo.text(), CPU)
        return on_mesh(job, demo.text(), CPU)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_memory_is_shared_out() -> None:
    """Each of 4 ranks peaks, weights and slots of the ring with it, at 0.30 of one process (bench/results/LOG.md)."""
    (single,) = results(1, partial(warm, job=LONG), patience=1200)
    ranks = results(4, partial(warm, job=LONG), patience=1200)
    assert max(ranks[0].peaks) <= 0.30 * single.peaks[0], (ranks[0].peaks, single.peaks)
