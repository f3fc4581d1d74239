"""Chunks of heads."""

from __future__ import annotations

import pytest

from ringattn.ring.buffers import chunks_of


@pytest.mark.parametrize("kv_heads", range(1, 9))
@pytest.mark.parametrize("group", [1, 3])
def test_chunks_are_runs_of_heads(kv_heads: int, group: int) -> None:
    for count in range(1, kv_heads + 1):
        chunks = chunks_of(count, group * kv_heads, kv_heads)
        assert [heads.number for heads in chunks] == list(range(count))
        assert [head for heads in chunks for head in range(kv_heads)[heads.kv]] == list(range(kv_heads))
        assert all(heads.q == slice(heads.kv.start * group, heads.kv.stop * group) for heads in chunks)
        lengths = [heads.kv.stop - heads.kv.start for heads in chunks]
        assert lengths[0] == max(lengths)  # a slot is cut for the first
        assert max(lengths) - min(lengths) <= 1
