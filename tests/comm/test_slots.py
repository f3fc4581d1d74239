"""Receive slots: alignment of the views, and waits for every use before memory is reused."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import Slots, slot_nbytes, slot_windows
from ringattn.comm.slots import ALIGNMENT, MAX_CACHED_FORMS, TensorSpec
from ringattn.comm.transports.copy_streams import CudaCopyStream

from ..support.cuda.graph import Graph
from ..support.cuda.operators import acting
from ..support.cuda.recorder import GPU, install

CPU = torch.device("cpu")
SPECS: list[TensorSpec] = [
    ((2, 3, 5), torch.bfloat16),
    ((7,), torch.float32),
    ((0, 4), torch.float32),
    ((), torch.int32),
]


def span(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_views_are_aligned_disjoint_and_typed() -> None:
    slots = Slots(3, CPU)
    slots.reserve(slot_nbytes(SPECS))
    taken: set[int] = set()
    for slot in range(3):
        tensors = slots.tensors(slot, SPECS)
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == SPECS
        assert slots.tensors(slot, SPECS[:1])[0].data_ptr() == tensors[0].data_ptr()
        for tensor in tensors:
            assert tensor.is_contiguous()
            assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0
            assert taken.isdisjoint(span(tensor))
            taken.update(span(tensor))


def test_cached_views_are_dropped_when_slots_grow() -> None:
    slots = Slots(2, CPU)
    slots.reserve(100)
    slots.form_cache("a")[0] = slots.tensors(0, [((4,), torch.float32)])
    slots.reserve(50)
    assert not slots.form_cache("b") and list(slots.form_cache("a")) == [0]
    slots.reserve(1000)
    assert not slots.form_cache("a")
    for form in range(3 * MAX_CACHED_FORMS):
        assert slots.form_cache(form) is slots.form_cache(form) and len(slots._form_caches) <= MAX_CACHED_FORMS


def test_growing_on_another_stream_does_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the last use before freeing, because the memory returns to the stream that allocated it."""
    recorder, _ = install(monkeypatch)
    with acting(recorder, 0):
        slots, lane = Slots(1, GPU), CudaCopyStream(GPU)
        slots.reserve(100)
        recorder.begin()
        lane.wait_for_fences([lane.mark()])
        with torch.cuda.stream(lane.stream):
            slots.tensors(0, [((10,), torch.float32)])[0].fill_(1)
        slots.add_use(0, lane.record_point())
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            slots.reserve(10_000)
        recorder.end()
    assert Graph(recorder.log).races() == []


def test_transfers_run_after_the_zeros_of_new_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _ = install(monkeypatch)
    with acting(recorder, 0):
        slots, lane = Slots(1, GPU), CudaCopyStream(GPU)
        recorder.begin()
        slots.reserve(100)
        with torch.cuda.stream(lane.stream):  # the first transfer into a slot waits for no compute
            slots.tensors(0, [((10,), torch.float32)])[0].fill_(1)
        recorder.end()
    assert Graph(recorder.log).races() == []


def test_windows_of_slots_are_shared_by_all_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks = Mock(), Mock()
    memory = first.zeros.return_value = torch.zeros(2 * ALIGNMENT, dtype=torch.uint8)
    slots = Slots(2, CPU, slot_windows(ranks))
    synchronized = Mock()
    monkeypatch.setattr(slots, "_synchronize_zeros", synchronized)
    before = list[tuple[bool, bool]]()
    first.release = Mock(side_effect=lambda _: before.append((synchronized.called, second.release.called)))
    slots.reserve(100)
    first.zeros.assert_called_once_with(2 * ALIGNMENT)
    second.register.assert_called_once_with(memory)
    synchronized.reset_mock()
    for _ in range(2):
        slots.release()
    assert before == [(True, True)], "the owner frees the memory last"
    for transport in ranks:
        transport.release.assert_called_once_with(memory)
    assert slot_windows([first, object()]) is None  # type: ignore[list-item]


def test_slots_keep_their_high_water_mark() -> None:
    slots, fences = Slots(3, CPU), [Mock() for _ in range(4)]
    slots.reserve(2000)
    (before,) = slots.tensors(0, [((4,), torch.float32)])
    for slot, fence in zip((0, 1, 2, 2), fences, strict=True):
        slots.add_use(slot, fence)
    for smaller in (2000, 100, 0, 2048):
        slots.reserve(smaller)
    assert slots.tensors(0, [((4,), torch.float32)])[0].data_ptr() == before.data_ptr()
    assert (slots.nbytes, [fence.wait.call_count for fence in fences]) == (2048, [0] * 4)
    slots.reserve(100_000)
    assert [fence.wait.call_count for fence in fences] == [1] * 4
    assert [slots.pop_uses(slot) for slot in range(3)] == [(), (), ()]
    for slot in range(3):
        (everything,) = slots.tensors(slot, [((100_000,), torch.uint8)])
        assert not everything.any()


@pytest.mark.parametrize("slot", [-1, 2])
def test_slots_refuse_wrong_counts_indices_and_sizes(slot: int) -> None:
    with pytest.raises(ValueError, match="count is 0; it must be at least 1"):
        Slots(0, CPU)
    slots = Slots(2, CPU)
    slots.reserve(ALIGNMENT)
    for call in (lambda: slots.tensors(slot, []), lambda: slots.add_use(slot, Mock()), lambda: slots.pop_uses(slot)):
        with pytest.raises(IndexError, match=f"slot is {slot}; it must be between 0 and 1"):
            call()
    slots.tensors(0, [((ALIGNMENT,), torch.uint8)])
    with pytest.raises(ValueError, match=r"specs need 512 bytes, but a slot has 256; call reserve\(512\) first"):
        slots.tensors(0, [((ALIGNMENT + 1,), torch.uint8)])
