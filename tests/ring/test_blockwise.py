"""The blockwise code of the CPU backend with tiles of any size, and Philox4x32-10 against published answers."""

from __future__ import annotations

import math

import pytest
import torch

from ringattn import ring_attention
from ringattn.kernels import Bounds
from ringattn.reference.philox import counter_words as philox_words
from ringattn.reference.philox import philox
from ringattn.ring.cpu import blockwise
from ringattn.ring.cpu.aten import ATEN
from ringattn.ring.cpu.blockwise import philox_word
from ringattn.ring.local import regions as cutting

from ..support.mask_cases import check_case
from .test_ring_masks import MASKS, PATTERNS, SCORES, case_of


@pytest.mark.parametrize("seed", [0, 2**63 + 5, 2**64 - 1])
def test_philox_equals_the_reference(seed: int) -> None:
    """The reference gives the published answers of Random123."""
    rows, keys = torch.tensor([0, 7, 2**31 - 1, 2**32 - 1]), torch.tensor([0, 1, 2, 0x85A308D3, 2**32 - 1])
    for head, item in ((0, 0), (3, 1), (2**32 - 1, 2**32 - 1)):
        words = philox_word(seed, (rows[:, None], keys, torch.tensor(head), torch.tensor(item)))
        assert words.equal(philox(philox_words(rows[:, None], keys, head, item), (seed % 2**32, seed >> 32))[0])


SMALL = {"MIN_ROWS": 6, "FOLDED_ROWS": 16, "MIN_BLOCK_ROWS": 4, "TILE_KEYS": 8, "TILE_SCORES": 64}
SQUARES = {"MIN_ROWS": 6, "BAND_ROWS": 8, "NARROW_KEYS": 7}
FEATURES = MASKS | SCORES | {name: make(4) for name, make in PATTERNS.items()} | {
    "many at once": {
        "cu_seqlens": [0, 25, 60],
        "seqused_k": [50, 29],
        "softcap": 1.5,
        "alibi_slopes": SCORES["alibi by batch row"]["alibi_slopes"],
        "dropout_p": 0.7,
        "dropout_seed": 2**63 + 11,
    }
}  # fmt: skip


def cut(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, float]) -> None:
    """Set tile sizes so small that short shards are split like long ones."""
    for name, value in sizes.items():
        monkeypatch.setattr(cutting if hasattr(cutting, name) else blockwise, name, value)


@pytest.mark.usefixtures("poison", "one_core")
@pytest.mark.parametrize(
    ("name", "tiles"), [*((name, SMALL) for name in FEATURES), *((name, SQUARES) for name in MASKS)]
)
def test_features_in_small_tiles(name: str, tiles: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, tiles)
    check_case(
        case_of(2, "zigzag", FEATURES[name] | {"backend": "aten"}, dims=(16, 24) if name in SCORES else (16, 16))
    )


@pytest.mark.parametrize(("name", "small"), [("causal window", True), ("causal window", False), ("window", False)])
def test_windows_with_and_without_the_small_score_path(name: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, SMALL | ({} if small else {"MAX_SAFE_SCORE": -1.0}))
    check_case(case_of(3, "striped", MASKS[name] | {"backend": "aten"}))


@pytest.mark.parametrize(("score", "value"), [(59.0, 1.0), (61.0, 1.0), (80.0, 1e13), (59.0, 9e18), (200.0, 1e30)])
def test_windows_of_large_scores_and_values(score: float, value: float) -> None:
    """Small scores skip the maximum. ``score`` is in units of the base-2 logarithm."""
    q, k, v = torch.zeros(1, 180, 1, 8), torch.zeros(1, 180, 1, 8), torch.full((1, 180, 1, 8), value / 8)
    q[..., 0], k[..., 0], v[..., 0] = score / math.log2(math.e), 1.0, value
    hi = torch.arange(1, 181, dtype=torch.int32)
    work = ATEN.forward(q, softmax_scale=1.0)
    work.fold(k, v, Bounds(hi.sub(90).clamp(min=0), hi), final=True)
    out, lse = work.result()
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse[0, 0], score / math.log2(math.e) + hi.clamp(max=90).log())


def test_a_sink_beyond_the_range_of_small_scores() -> None:
    """The scores are 36. Without a maximum, the sink alone would overflow the sum."""
    q = torch.full((1, 8, 1, 16), 3.0)
    out = ring_attention(q, q, q, window_size=(2, 2), learnable_sink=torch.tensor([200.0]))
    assert torch.equal(out, torch.zeros_like(q))


def test_slopes_of_a_batch_row_serve_that_row_beside_padding() -> None:
    q, k, v = torch.randn(3, 3, 20, 4, 16)
    slopes, used = torch.rand(3, 4), [5, 20, 11]
    whole = ring_attention(q, k, v, alibi_slopes=slopes, seqused_k=used, backend="aten")
    for row, keys in enumerate(used):
        near = slice(row, row + 1)
        alone = ring_attention(q[near], k[near], v[near], alibi_slopes=slopes[row], seqused_k=[keys], backend="aten")
        torch.testing.assert_close(whole[near], alone)
