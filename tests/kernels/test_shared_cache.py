"""The shared cache of device tensors: every reading stream waits for the fill, and memory outlives its readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.kernels import BlockSparseIndex, Bounds, Tile
from ringattn.kernels.shared_cache import SharedCache, SharedValue
from ringattn.kernels.single_pass import dq_add_order

from ..support.cuda.graph import Graph
from ..support.cuda.operators import acting
from ..support.cuda.recorder import GPU, Recorder, install


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made, _ = install(monkeypatch)
    with acting(made, 0), torch.cuda.device(GPU):
        yield made


def get(cache: SharedCache[torch.Tensor], key: str = "x") -> torch.Tensor:
    return cache.get(key, lambda: torch.ones(4, device=GPU), lambda x: (x,))


def kinds(recorder: Recorder, since: int = 0) -> list[str]:
    return [op.kind for op in recorder.log[since:]]


def test_each_stream_waits_once(recorder: Recorder) -> None:
    cache, streams = SharedCache[torch.Tensor](), [torch.cuda.Stream(GPU) for _ in range(2)]
    made = get(cache)
    first = len(recorder.log)
    assert get(cache) is made and kinds(recorder, first) == []
    for stream in (*streams, *streams):
        with torch.cuda.stream(stream):
            assert get(cache) is made
    assert kinds(recorder, first) == ["wait", "wait"]
    assert [op.stream for op in recorder.log[first:]] == streams


def test_another_stream_reads_after_the_fill_and_before_reuse(recorder: Recorder) -> None:
    cache = SharedCache[torch.Tensor]()
    get(cache)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        copied = get(cache) + 1
    del cache
    recorder.end()
    assert [op.kind for op in recorder.log].count("free") == 1
    assert Graph(recorder.log).problems() == []
    del copied


def test_values_made_during_a_capture_are_not_cached(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SharedCache[torch.Tensor]()
    before = get(cache, "before")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = get(cache)
    first = len(recorder.log)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        assert get(cache, "before") is before  # the device was synchronized before the capture
    assert kinds(recorder, first) == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert get(cache) is not captured and get(cache) is get(cache)


def test_a_value_without_device_tensors_has_no_event(recorder: Recorder) -> None:
    assert SharedValue("x", (None, torch.ones(2))).read() == "x"
    assert recorder.log == []


def test_caches_know_every_tensor_that_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream waits only for tensors that the cache knows."""
    filled: list[list[torch.Tensor]] = []
    known: list[list[torch.Tensor]] = []

    def get(cache: object, key: object, make: Callable[[], Any], tensors: Callable[[Any], Any]) -> Any:
        value = make()
        fields = (
            vars(value).values()
            if isinstance(value, Bounds)
            else (value,)
            if isinstance(value, torch.Tensor)
            else value
        )
        filled.append([x for x in fields if isinstance(x, torch.Tensor)])
        known.append([*tensors(value)])
        return value

    monkeypatch.setattr(SharedCache, "get", get)
    rows = torch.arange(4, dtype=torch.int32)
    index = BlockSparseIndex(torch.ones(1, 1, dtype=torch.bool), 16)
    assert len(index.ranges) == 3
    made = Bounds(rows, rows + 1)
    dq_add_order(made, 1, 4, 5, Tile(16, 16, 4, 1), rows.device)  # transposes the bounds, too
    assert [len(x) for x in filled] == [3, 2, 1]
    assert all(x is y for a, b in zip(filled, known, strict=True) for x, y in zip(a, b, strict=True))


def test_a_copy_of_bounds_has_its_own_caches() -> None:
    lo, hi = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    original = Bounds(lo, hi)
    copied = replace(original, lo=torch.zeros_like(lo))
    by_key = original.transposed(2).hi
    assert by_key is not None and by_key.tolist() == [1, 2]
    by_key = copied.transposed(2).hi
    assert by_key is not None and by_key.tolist() == [2, 2]
