"""Slices against their definition, and the masks of FlexAttention, Hugging Face, MagiAttention and FlashMask.

Of 29 masks 26 run, and 3 are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout, ring_attention
from ringattn.ring import Mask, bigbird, bounds, longformer, prefix_tree, slices, strided

from ..support.kernel_cases import dense_mask
from ..support.ring_cases import run_ranks

pytestmark = pytest.mark.usefixtures("one_core")

TOKENS, BLOCK, WORLD = 64, 8, 3
Rule = Callable[[int, int], bool]
DOCUMENTS = [0, 24, TOKENS]
IMAGES = [(4, 12), (30, 38)]
GRID, KERNEL = 8, 3
DRAFT = [-1, 0, 0, 1, 1, 2, 3, 3, 5, *[7] * 15]  # parents of single tokens after a context of 40


def is_in_slice(given: Any, q: int, k: int) -> bool:
    (start, end), (first, past), kind = given
    from_start, from_end = k - first >= q - start, past - k >= end - q  # a diagonal ends in a corner
    inside = start <= q < end and first <= k < past
    shown = {"full": True, "causal": from_end, "inverse causal": from_start, "both": from_start and from_end}
    return bool(inside and shown[kind])


@pytest.mark.parametrize("seed", range(300))
def test_slices_by_their_definition(seed: int) -> None:
    rng = Random(seed)
    queries, keys = rng.randint(0, 16), rng.randint(0, 16)
    ranges = [[sorted(rng.choices(range(most + 1), k=2)) for most in (queries, keys)] for _ in range(rng.randint(0, 4))]
    given: Any = [(*both, rng.choice(["full", "causal", "inverse causal", "both"])) for both in ranges]
    counts = [[sum(is_in_slice(each, q, k) for each in given) for k in range(keys)] for q in range(queries)]
    overlap = next(((q, k) for q, row in enumerate(counts) for k, count in enumerate(row) if count > 1), None)
    if overlap:
        with pytest.raises(ValueError, match=r"slices\[\d\] overlaps slices\[\d\]: both show key") as refused:
            slices(given, queries)
        second, first, key, query = map(int, re.findall(r"\d+", str(refused.value)))
        assert first < second and query == overlap[0]
        assert all(is_in_slice(given[number], query, key) for number in (first, second))
        return
    parts = Mask(intervals=slices(given, queries)).parts
    made = [dense_mask(bounds(part, torch.arange(queries), torch.arange(keys)), queries, keys) for part in parts]
    assert torch.stack(made).sum(0).tolist() == counts


def in_one(ranges: list[tuple[int, int]]) -> Rule:
    return lambda q, k: any(start <= min(q, k) and max(q, k) < end for start, end in ranges)


def is_neighbour(q: int, k: int) -> bool:
    """Neighbourhood attention: the 3 x 3 window around the query, moved inside the image."""
    centres = [min(max(side, KERNEL // 2), GRID - 1 - KERNEL // 2) for side in divmod(q, GRID)]
    return all(abs(side - centre) <= KERNEL // 2 for side, centre in zip(divmod(k, GRID), centres, strict=True))


def is_block_diffusion(q: int, k: int) -> bool:
    """BD3-LM: noisy tokens, then clean ones; noisy blocks see themselves and the clean blocks before them."""
    half = TOKENS // 2
    (noisy_q, block_q), (noisy_k, block_k) = ((at < half, at % half // BLOCK) for at in (q, k))
    if noisy_k:
        return noisy_q and block_q == block_k
    return block_k < block_q or (not noisy_q and block_k == block_q)


def path(node: int) -> set[int]:
    return {node} if node < 1 else {node, *path(DRAFT[node])}


def by_row(rule: Rule, tokens: int = TOKENS) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Yield every interval of every query as a slice."""
    for query in range(tokens):
        row = torch.tensor([0, *(rule(query, key) for key in range(tokens)), 0], dtype=torch.int8)
        edges = row.diff().nonzero().flatten().tolist()
        for edge in zip(edges[::2], edges[1::2], strict=True):
            yield (query, query + 1), edge, "full"


def from_rule(rule: Rule) -> tuple[dict[str, Any], Rule]:
    return {"intervals": slices(by_row(rule), TOKENS)}, rule


AT = torch.arange(TOKENS)
LONGFORMER, BIGBIRD = longformer(16, [(0, 4)]), bigbird(TOKENS, BLOCK, window=3, global_=1, random=1)
ZOO: dict[str, tuple[dict[str, Any], Rule]] = {
    "causal": ({"causal": True}, lambda q, k: k <= q),
    "causal window": ({"causal": True, "window_size": (7, 0)}, lambda q, k: 0 <= q - k < 8),
    "window on both sides (ModernBERT)": ({"window_size": (8, 8)}, lambda q, k: abs(q - k) <= 8),
    "prefix LM": ({"causal": True, "prefix_length": 20}, lambda q, k: k <= q or k < 20),
    "documents": ({"cu_seqlens": DOCUMENTS}, in_one([(0, 24), (24, TOKENS)])),
    "causal documents": (
        {"causal": True, "cu_seqlens": DOCUMENTS}, lambda q, k: k <= q and in_one([(0, 24), (24, TOKENS)])(q, k),
    ),
    "prefix LM of each document": (
        {"causal": True, "cu_seqlens": DOCUMENTS, "islands": [(0, 8), (24, 34)]},
        lambda q, k: in_one([(0, 24), (24, TOKENS)])(q, k) and (k <= q or k < 8 or (q >= 24 and k < 34)),
    ),
    "padding": ({"causal": True, "seqused_k": [50]}, lambda q, k: k <= q and k < 50),
    "padding on the left": ({"causal": True, "leftpad_k": [9]}, lambda q, k: 9 <= k <= q),
    "chunks (Llama 4)": (
        {"causal": True, "cu_seqlens": [*range(0, TOKENS + 1, 16)]}, lambda q, k: k <= q and q // 16 == k // 16,
    ),
    "image islands (Gemma 3, Transfusion)": (
        {"causal": True, "islands": IMAGES}, lambda q, k: k <= q or in_one(IMAGES)(q, k),
    ),
    "image islands in a window (Gemma 3)": (
        {"causal": True, "islands": IMAGES, "window_size": (4, -1)},
        lambda q, k: k >= q - 4 and (k <= q or in_one(IMAGES)(q, k)),
    ),
    "image and prompt as prefix (PaliGemma)": (
        {"causal": True, "islands": [(0, 20)]}, lambda q, k: k <= q or max(q, k) < 20,
    ),
    "sink tokens and a window (StreamingLLM)": (
        {"intervals": slices([
            ((0, 12), (0, 12), "causal"), ((12, TOKENS), (0, 4), "full"), ((12, TOKENS), (5, TOKENS), "both"),
        ], TOKENS)},
        lambda q, k: k <= q and (k < 4 or q - k < 8),
    ),
    "global tokens and a window (Longformer)": (
        {"block_mask": LONGFORMER}, lambda q, k: abs(q - k) <= 8 or min(q, k) < 4,
    ),
    "BigBird": ({"block_mask": BIGBIRD}, lambda q, k: bool(BIGBIRD.visible[q // BLOCK, k // BLOCK])),
    "strided (Sparse Transformer)": (
        {"causal": True, "block_mask": strided(TOKENS, BLOCK, stride=16)},
        lambda q, k: k <= q and (q // BLOCK - k // BLOCK) in (0, 1, 2, 4, 6),
    ),
    "dilated window": (
        {"intervals": slices([((2 * i, TOKENS), (0, TOKENS - 2 * i), "both") for i in range(8)], TOKENS)},
        lambda q, k: q - k in range(0, 16, 2),
    ),
    "neighbourhood attention (NATTEN)": from_rule(is_neighbour),
    "the last image before the text (Flamingo)": (
        {"kv_layout": Layout.contiguous(TOKENS, WORLD), "intervals": [(AT // 16 * 16, AT // 16 * 16 + 16)]},
        lambda q, k: k // 16 == q // 16,
    ),
    "answers that share a question": (
        {"intervals": prefix_tree([16, 24, 24], [-1, 0, 0]).intervals},
        lambda q, k: k <= q and (k < 16 or q < 40 or k >= 40),
    ),
    "draft tree (Medusa)": from_rule(lambda q, k: k <= q and (k < 40 or k - 40 in path(q - 40))),
    "block diffusion (BD3-LM)": from_rule(is_block_diffusion),
    "block causal (MAGI-1)": (
        {"intervals": slices([((end - 16, end), (0, end), "full") for end in range(16, TOKENS + 1, 16)], TOKENS)},
        lambda q, k: k // 16 <= q // 16,
    ),
    "examples and a question (FlashMask, causal blockwise)": (
        {"intervals": slices(
            [*(((start, start + 16), (start, start + 16), 1) for start in (0, 16, 32)), ((48, 64), (0, 64), 1)], TOKENS
        )},
        lambda q, k: k <= q and (q >= 48 or k // 16 == q // 16),
    ),
    "without some queries and keys (QK-sparse)": from_rule(
        lambda q, k: k <= q and not 16 <= k < 24 and not 40 <= q < 48
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_masks_that_run(name: str) -> None:
    """Use equal scores and one-hot values, so that a non-zero output marks a visible key."""
    call, rule = ZOO[name]
    layout = Layout.uneven([2 * BLOCK, 5 * BLOCK, BLOCK])

    def rows(group: Any) -> Tensor:
        zeros, values = torch.zeros(1, TOKENS, 1, 8), torch.eye(TOKENS)[None, :, None]
        kv_layout = call.get("kv_layout", layout)
        q, k, v = layout.shard(zeros, group.rank()), *(kv_layout.shard(x, group.rank()) for x in (zeros, values))
        return ring_attention(q, k, v, layout=layout, group=group, **call)  # type: ignore[call-overload,no-any-return]

    expected = torch.tensor([[rule(query, key) for key in range(TOKENS)] for query in range(TOKENS)])
    assert (layout.unshard(run_ranks(WORLD, rows))[0, :, 0] > 0).equal(expected)


LONGER = 400
KEPT, BUCKETS = ([Random(seed + key).randrange(most) for key in range(LONGER)] for seed, most in ((0, LONGER), (9, 3)))
REFUSED: dict[str, Rule] = {
    "every other key (periodic)": lambda q, k: k <= q and (q - k) % 2 == 0,
    "random eviction (FlashMask)": lambda q, k: k <= q <= k + KEPT[k],
    "hash buckets (FlashMask)": lambda q, k: k <= q and BUCKETS[q] == BUCKETS[k],
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"slices need more than 64 intervals at query \d+.* Use block_mask"):
        slices(by_row(REFUSED[name], LONGER), LONGER)


def test_the_zoo_has_29_masks_with_few_intervals() -> None:
    assert (len(ZOO), len(REFUSED)) == (26, 3)
    lists = {name: call["intervals"] for name, (call, _) in ZOO.items() if "intervals" in call}
    counts = sorted(1 if isinstance(made, list) else len(made.table) for made in lists.values())
    assert counts == [1, 1, 2, 2, 2, 3, 3, 4, 4, 8]
    assert len(slices([((0, 8), (0, 3), "full"), ((0, 8), (3, 8), "full")], 8).table) == 1
