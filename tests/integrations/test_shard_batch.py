"""``shard_batch``: comparison of batches between ranks, and documents of padding-free batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout
from ringattn.integrations import transformers as integration
from ringattn.integrations.transformers import checksum, shard_batch, sharded
from ringattn.ring import prefix_tree

from ..support.hf_models import DOCUMENTS, TOKENS, build_model, token_ids
from ..support.ring_cases import run_ranks

Batch = dict[str, Any]
LAYOUT = Layout.zigzag(TOKENS, 3)


def changed(x: Tensor, place: tuple[int, ...] = (1, 5)) -> Tensor:
    """Return a copy in which one element differs."""
    x = x.clone()
    x[place] = x[place] + 1
    return x


def embedded() -> Batch:
    values = torch.randn(2, TOKENS, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    return {"inputs_embeds": values, "labels": token_ids()}


def text() -> Batch:
    return {"input_ids": token_ids(), "labels": token_ids()}


def padding_free(documents: list[int] = DOCUMENTS) -> Batch:
    """Return a batch as TRL's collator makes it."""
    lengths = [end - start for start, end in pairwise(documents)]
    boundaries = torch.tensor(documents, dtype=torch.int32)
    return {
        "input_ids": token_ids()[:1],
        "labels": token_ids()[:1],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths) + 1,  # more than needed is allowed
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)).roll(1), torch.tensor(lengths))[None].int(),
    }


def errors(calls: Callable[[int], list[Callable[[Any], object]]], world: int = 3) -> list[list[str]]:
    """Return each rank's error texts of its calls in turn, "" for a call without an error."""

    def one_rank(group: Any) -> list[str]:
        texts = []
        for call in calls(group.rank()):
            try:
                call(group)
                texts.append("")
            except ValueError as error:
                texts.append(str(error))
        return texts

    return run_ranks(world, one_rank)


def cut(batch: Batch, layout: Any = LAYOUT, **options: Any) -> Callable[[Any], object]:
    return lambda group: shard_batch(batch, layout, group, **options)


DIFFERENT: dict[str, tuple[str, Batch, Batch]] = {
    "one label": ("labels", text(), {**text(), "labels": changed(token_ids())}),
    "the first label": ("labels", text(), {**text(), "labels": changed(token_ids(), (0, 0))}),
    "two tokens swapped": ("input_ids", text(), {**text(), "input_ids": token_ids()[:, [1, 0, *range(2, TOKENS)]]}),
    "rows swapped": ("input_ids", text(), {**text(), "input_ids": token_ids().flip(0)}),
    "an embedding": (
        "inputs_embeds", embedded(), {**embedded(), "inputs_embeds": changed(embedded()["inputs_embeds"], (1, 5, 3))}
    ),
    "shifted labels": (
        "shift_labels", {**text(), "shift_labels": token_ids()}, {**text(), "shift_labels": -token_ids()},
    ),
    "no labels": ("labels", text(), {"input_ids": token_ids()}),
    "items": ("num_items_in_batch", {**text(), "num_items_in_batch": 80}, {**text(), "num_items_in_batch": 81}),
    "dtype": ("labels", text(), {**text(), "labels": token_ids().int()}),
    "rows": ("input_ids", text(), {"input_ids": token_ids()[:1], "labels": token_ids()[:1]}),
    "documents": ("cu_seqlens", padding_free(), padding_free([0, 19, 23, TOKENS])),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_different_batch_is_refused_on_every_rank(name: str) -> None:
    entry, batch, other = DIFFERENT[name]
    for error, later in errors(lambda rank: [cut(other if rank == 1 else batch), cut(text())]):
        assert entry in error and not later, (error, later)
        values = dict(part.split(": ", 1) for part in error.split("(", 1)[1].split(", rank "))
        assert [*values] == ["rank 0", "1", "2"]


@pytest.mark.parametrize("batch", [[1], {**text(), "labels": [1]}])
def test_a_wrong_type_on_one_rank_is_an_error_on_all(batch: Any) -> None:
    for error, later in errors(lambda rank: [cut(batch if rank == 1 else text()), cut(text())]):
        assert " is [1]: it must be" in error or "batch is list" in error
        assert not later


def test_contents_of_known_shapes_are_compared_in_every_100th_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "CHECK_EVERY", 4)
    other = {**text(), "labels": changed(token_ids())}

    def calls(rank: int) -> list[Callable[[Any], object]]:
        differs = other if rank == 2 else text()
        return [cut(batch) for batch in (text(), differs, differs, differs, differs)] + [cut(differs, check=True)]

    for found in errors(calls):
        assert ["labels" in text for text in found] == [False, False, False, True, False, True]


def test_contents_are_compared_again_when_too_many_shapes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "MAX_SHAPES", 2)
    known = [{name: x[:, :tokens] for name, x in text().items()} for tokens in (12, 24, 36)]
    other = {**known[0], "labels": changed(known[0]["labels"])}

    def calls(rank: int) -> list[Callable[[Any], object]]:
        differs = other if rank == 2 else known[0]
        return [cut(batch, "contiguous") for batch in (*known[:2], differs, known[2], differs)]

    for found in errors(calls):
        assert ["labels" in text for text in found] == [False] * 4 + [True]


def test_different_trees_are_refused() -> None:
    trees = [prefix_tree([30, 5, 8], parents) for parents in ([-1, 0, 0], [-1, 0, 1])]
    for (found,) in errors(lambda rank: [cut({"input_ids": token_ids()}, tree=trees[rank // 2])]):
        assert "tree differs between ranks" in found


def test_a_shape_that_is_new_to_one_rank_is_refused_on_all() -> None:
    """Compare contents on that rank only, because the others know the shape."""
    short = {name: x[:, :40] for name, x in text().items()}

    def calls(rank: int) -> list[Callable[[Any], object]]:
        return [cut(text()), cut(short if rank == 0 else text(), Layout.zigzag(40 if rank == 0 else TOKENS, 3))]

    for first, second in errors(calls):
        assert not first and "layout" in second


def test_without_a_check_no_rank_waits() -> None:
    def calls(rank: int) -> list[Callable[[Any], object]]:
        return [cut({**text(), "labels": changed(token_ids())}, check=False)] if rank == 1 else []

    assert errors(calls) == [[], [""], []]


def test_a_check_in_a_data_loader_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse, because a worker shares the connections of its parent process."""
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "worker 0")
    shard_batch(text(), "contiguous")
    for refused, cut_alone in errors(lambda _: [cut(text()), cut(text(), check=False)]):
        assert "check is None" in refused and "must be False" in refused and not cut_alone


def test_a_check_on_some_ranks_is_refused() -> None:
    def call(group: Any) -> None:
        shard_batch(text(), LAYOUT, group, check=None if group.rank() else False)
        shard_batch({"input_ids": token_ids()}, LAYOUT, group)

    with pytest.raises(ValueError, match="labels"):
        run_ranks(3, call)


def test_a_check_on_one_rank_only_is_refused_by_name() -> None:
    for found in errors(lambda rank: [cut(text()), cut(text(), check=True if rank == 0 else None)]):
        assert not found[0] and "check differs between ranks (rank 0: True, rank 1: False" in found[1]


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("cu_seq_lens_q .* 18, but position_ids", {"cu_seq_lens_q": torch.tensor([0, 18, 22, TOKENS])}),
        ("position_ids .* 22, but cu_seq_lens_k", {"cu_seq_lens_k": torch.tensor([0, 19, TOKENS])}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 19, 22, 40])}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0.0, 19.0, 22.0, 43.0])}),
        ("seq_idx", {"seq_idx": torch.zeros(1, TOKENS, dtype=torch.int32)}),
        ("seq_idx", {"seq_idx": torch.zeros(TOKENS, dtype=torch.int32)}),
        ("seq_idx has shape .2, 43", {"seq_idx": padding_free()["seq_idx"].repeat(2, 1)}),
        ("position_ids has shape .1, 42", {"position_ids": padding_free()["position_ids"][:, :-1]}),
        ("max_length_q", {"max_length_q": 20}),
        ("max_length_k", {"max_length_k": torch.tensor(20)}),
        ("position_ids", {"position_ids": torch.arange(TOKENS)[None] + 1}),
        ("position_ids", {"position_ids": 2 * torch.arange(TOKENS)[None]}),
        ("position_ids", {"position_ids": torch.arange(TOKENS).expand(3, 1, -1)}),
        ("position_ids", {"position_ids": torch.arange(TOKENS)[None]}),
    ],
)
def test_a_contradictory_padding_free_batch_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, entry: str, wrong: Batch
) -> None:
    """Refuse the batch of one rank on all ranks, and compare the contents of the next batch."""
    monkeypatch.setattr(integration, "CHECK_EVERY", 3)
    bad = {**padding_free(), **wrong}
    errors_by_rank = errors(
        lambda rank: [cut(padding_free()), cut(bad if rank == 1 else padding_free()), cut(padding_free())]
    )
    for before, refused, after in errors_by_rank:
        assert re.search(entry, refused) and not before and not after, (before, refused, after)


def test_a_batch_refused_in_an_expected_call_is_refused_on_all_ranks() -> None:
    bad = {**text(), "attention_mask": torch.zeros(2, TOKENS)}
    for texts in errors(lambda rank: [*[cut(text())] * 6, cut(bad if rank == 1 else text()), cut(text())]):
        assert ["attention_mask" in error for error in texts] == [False] * 6 + [True, False], texts


def test_rows_with_different_documents_are_refused() -> None:
    rows = torch.stack([torch.arange(TOKENS), torch.arange(TOKENS) % 20])
    with pytest.raises(ValueError, match=r"position_ids\[1, 20\] is 0"):
        shard_batch({**text(), "position_ids": rows}, "contiguous")


def test_cu_seqlens_of_the_call_must_agree_with_the_batch() -> None:
    with pytest.raises(ValueError, match="cu_seqlens"):
        shard_batch(padding_free(), "contiguous", cu_seqlens=[0, 20, TOKENS])


@pytest.mark.parametrize("entries", [("position_ids",), ("cu_seq_lens_q",), ("seq_idx",), integration.PACKING_KEYS])
def test_a_padding_free_batch_is_sharded_by_its_documents(entries: tuple[str, ...]) -> None:
    whole = padding_free()
    batch = {name: whole[name] for name in ("input_ids", "labels", *entries)}
    plain = {name: whole[name] for name in ("input_ids", "labels")}

    def one_rank(group: Any) -> None:
        ours, right = shard_batch(batch, LAYOUT, group), shard_batch(plain, LAYOUT, group, cu_seqlens=DOCUMENTS)
        assert ours.cu_seqlens == right.cu_seqlens == tuple(DOCUMENTS)
        assert ours.keys() == right.keys() and all(torch.equal(x, right[name]) for name, x in ours.items())

    run_ranks(3, one_rank)


def test_one_document_needs_no_boundaries() -> None:
    batch = shard_batch({**text(), "position_ids": torch.arange(TOKENS)[None]}, "contiguous")
    assert batch.cu_seqlens is None and batch["position_ids"].equal(torch.arange(TOKENS)[None])


def test_a_model_on_a_padding_free_batch() -> None:
    model, batch = build_model("llama").eval(), padding_free()

    def one_rank(group: Any) -> Tensor:
        mine = shard_batch(batch, LAYOUT, group)
        with sharded(model, LAYOUT, group, cu_seqlens=mine.cu_seqlens):
            logits: Tensor = model(**mine).logits.detach()
            return logits

    alone = [model(batch["input_ids"][:, start:end]).logits for start, end in pairwise(DOCUMENTS)]
    torch.testing.assert_close(LAYOUT.unshard(run_ranks(3, one_rank)), torch.cat(alone, 1))


def test_the_checksum_is_the_sum_of_mixed_elements() -> None:
    """Compute SplitMix64 with Python's integers."""
    total = 0
    for index, element in enumerate([3, -7, 2**40]):
        x = (element + index * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        total += x ^ x >> 31
    assert int(checksum(torch.tensor([3, -7, 2**40]))) % 2**64 == total % 2**64


def test_the_checksum_depends_on_every_element_and_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randint(-100, 50000, (3, 11))
    in_one_chunk = int(checksum(x))
    monkeypatch.setattr(integration, "CHECKSUM_CHUNK", 7)
    others = [changed(x, (row, column)) for row in range(3) for column in range(11)]
    others += [~x, x.flip(1), x.flip(0), x[:, :10], x.new_zeros(3, 11), x.new_zeros(3, 12)]
    sums = [int(checksum(tensor)) for tensor in (x, *others)]
    assert len({*sums}) == len(sums) and int(checksum(x.T.contiguous().T)) == sums[0] == in_one_chunk
    for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.int8):
        values = torch.arange(6).remainder(2).to(dtype)
        assert int(checksum(values)) == int(checksum(values.clone())) != int(checksum(values.flip(0)))


@pytest.mark.parametrize(
    ("batch", "options", "entry"),
    [
        (text(), {"check": 1}, "check is 1"),
        (None, {}, "batch is NoneType"),
        ({**text(), "input_ids": [[1]]}, {}, "input_ids is"),
        ({**text(), "position_ids": 3}, {}, "position_ids is 3"),
        ({**text(), "num_items_in_batch": "a"}, {}, "num_items_in_batch is 'a'"),
        ({**text(), "max_length_q": "q"}, {}, "max_length_q is 'q'"),
        ({"input_ids": token_ids()[0]}, {}, "input_ids is"),
        ({**text(), "labels": token_ids()[:, :9]}, {}, "^labels has shape"),
        ({**text(), "shift_labels": token_ids()[:1]}, {}, "shift_labels has shape"),
    ],
)
def test_wrong_arguments_are_refused(batch: Batch, options: Mapping[str, Any], entry: str) -> None:
    with pytest.raises(ValueError, match=entry):
        shard_batch(batch, "contiguous", **options)
