"""ring_flash_attn's functions on ``ring_attention``: names, arguments, layouts and results.

The cases are those of its test folder, at smaller sizes and with assertions instead of printed differences.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from importlib.metadata import files, version
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Layout
from ringattn.comm import GroupLike
from ringattn.integrations import ring_flash_attn as ours

from ..support.baselines import Results
from ..support.mask_cases import RingCase, combine_ranks, compare_with_expected, expected_results
from ..support.nightly import rest_nightly
from ..support.ring_cases import inputs, run_ranks

PACKINGS = ("", "kvpacked_", "qkvpacked_")
FAMILIES = ("ring", "zigzag_ring", "stripe", "ring_varlen", "zigzag_ring_varlen", "llama3_varlen")
NAMES = {
    f"{family.removesuffix('_varlen')}_flash_attn_{'varlen_' * family.endswith('_varlen')}{packing}func": family
    for family in FAMILIES
    for packing in PACKINGS
}
DOCUMENTS = {"": [0, 48], "varlen": [0, 16, 40, 96], "llama3": [0, 12, 13, 60, 96]}


def documents_of(family: str) -> list[int]:
    return DOCUMENTS["llama3" if "llama3" in family else "varlen" if "varlen" in family else ""]


def held(family: str, rank: int, world: int, documents: list[int]) -> Tensor:
    """Return the tokens of a rank, as their tests cut them."""
    whole = torch.arange(documents[-1])
    if family == "stripe":
        return whole[rank::world]
    parts = whole.split([stop - start for start, stop in pairwise(documents)]) if "ring_varlen" in family else [whole]
    if "zigzag" in family:
        return torch.cat([part.chunk(2 * world)[at] for part in parts for at in (rank, 2 * world - 1 - rank)])
    return torch.cat([part.chunk(world)[rank] for part in parts])


def documents_arguments(family: str, rank: int, world: int, causal: bool) -> tuple[Any, ...]:
    """Return the arguments that follow the tensors."""
    documents = torch.tensor(documents_of(family), dtype=torch.int32)
    if family == "llama3_varlen":
        prepared = ours.llama3_flash_attn_prepare_cu_seqlens(documents, causal, rank, world)
        return *prepared[:4], 1, prepared[4]
    longest = int((documents[1:] - documents[:-1]).max())
    return (documents // world, longest // world) if "varlen" in family else ()


def of_rank(
    name: str, family: str, whole: dict[str, Tensor], group: GroupLike, rank: int, world: int, options: dict[str, Any]
) -> list[Tensor]:
    """Return out, lse and the gradients of q, k and v of one rank, as ``[B, S, H, D]``."""
    positions = held(family, rank, world, documents_of(family))
    packed = "varlen" in family
    q, k, v, dout = (whole[x][0, positions] if packed else whole[x][:, positions] for x in ("q", "k", "v", "dout"))
    pieces = {"kvpacked": [q, torch.stack([k, v], -3)], "qkvpacked": [torch.stack([q, k, v], -3)]}
    leaves = [x.clone().requires_grad_() for x in pieces.get(name.split("_")[-2], [q, k, v])]
    arguments = documents_arguments(family, rank, world, options["causal"])
    out, lse, probabilities = getattr(ours, name)(*leaves, *arguments, return_attn_probs=True, group=group, **options)
    assert probabilities is None
    dlse = whole["dlse"][0][:, positions] if packed else whole["dlse"][:, :, positions]
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    separate = [x for grad in grads for x in (grad.unbind(-3) if grad.dim() > q.dim() else [grad])]
    results_of_rank = [out.detach(), lse.detach(), *separate]
    return [x[None] for x in results_of_rank] if packed else results_of_rank


def check(name: str, family: str, world: int, **options: Any) -> None:
    """Compare all ranks together with float64, with the tolerance of PyTorch's error."""
    documents = documents_of(family)
    whole = inputs(documents[-1], (4, 4), batch=1 if "varlen" in family else 2)
    parts = run_ranks(world, lambda group: of_rank(name, family, whole, group, group.rank(), world, options))
    order = torch.cat([held(family, rank, world, documents) for rank in range(world)]).argsort()
    columns = enumerate(zip(*parts, strict=True))
    mine = [torch.cat(x, 2 if i == 1 else 1).index_select(2 if i == 1 else 1, order) for i, x in columns]
    call = options | {"cu_seqlens": documents}
    compare_with_expected(expected_results(RingCase(Layout.contiguous(documents[-1], 1), whole, call)), Results(*mine))


@pytest.mark.parametrize("world", rest_nightly([1, 2, 4], 2))
@pytest.mark.parametrize(("name", "family"), [*NAMES.items()])
def test_cases_of_ring_flash_attn(name: str, family: str, world: int) -> None:
    check(name, family, world, causal=True)


@pytest.mark.parametrize("world", [2, 4])
def test_documents_that_do_not_divide(world: int) -> None:
    """Pass ``layout=``, so that the boundaries are those of the whole sequence."""
    documents = [0, 7, 8, 30, 61]
    layout, whole = Layout.zigzag(61, world, documents), inputs(61, (4, 2), batch=1)

    def one_rank(group: Any) -> list[Any]:
        q, k, v, dout = (layout.shard(whole[x], group.rank())[0].detach() for x in ("q", "k", "v", "dout"))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse, _ = ours.zigzag_ring_flash_attn_varlen_func(
            *leaves, torch.tensor(documents), 31, causal=True, return_attn_probs=True, group=group, layout=layout
        )
        grads = torch.autograd.grad((out, lse), leaves, (dout, layout.shard(whole["dlse"], group.rank(), 2)[0]))
        return [*(x[None] for x in (out.detach(), lse.detach(), *grads)), None]

    case = RingCase(layout, whole, {"causal": True, "cu_seqlens": documents})
    compare_with_expected(expected_results(case), *combine_ranks(case, run_ranks(world, one_rank)))


@pytest.mark.parametrize("family", ["zigzag_ring", "llama3"])
def test_a_layout_replaces_the_function_s_own(family: str) -> None:
    """Give the ranks odd numbers of tokens."""
    layout, q = Layout.uneven([3, 5]), torch.randn(1, 8, 2, 16)
    if packed := family == "llama3":
        expected = ours.ring_flash_attn_varlen_func(q[0], q[0], q[0], torch.tensor([0, 3, 8]), 5, causal=True)
    else:
        expected = ours.ring_flash_attn_func(q, q, q, causal=True)

    def one_rank(group: Any) -> Any:
        x, options = layout.shard(q, group.rank()), {"causal": True, "group": group, "layout": layout}
        if packed:
            return ours.llama3_flash_attn_varlen_func(*[x[0]] * 3, *llama3_arguments(group.rank()), **options)
        return ours.zigzag_ring_flash_attn_func(x, x, x, **options)

    torch.testing.assert_close(torch.cat(run_ranks(2, one_rank), 0 if packed else 1), expected)


def test_only_the_output_is_returned_without_return_attn_probs() -> None:
    q = torch.randn(1, 8, 2, 16)
    out = ours.ring_flash_attn_func(q, q, q)
    assert isinstance(out, Tensor) and out.shape == q.shape


def test_a_last_stride_that_is_not_1() -> None:
    q, qkv = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 3, 2, 16)
    turned, packed = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, qkv))
    torch.testing.assert_close(
        ours.zigzag_ring_flash_attn_func(turned, turned, turned), ours.zigzag_ring_flash_attn_func(q, q, q)
    )
    torch.testing.assert_close(
        ours.ring_flash_attn_qkvpacked_func(packed), ours.ring_flash_attn_qkvpacked_func(qkv.clone())
    )


def test_zigzag_lengths_that_do_not_divide_are_refused() -> None:
    q = torch.randn(7, 2, 16)
    with pytest.raises(ValueError, match=r"q has 7 tokens.*layout="):
        run_ranks(2, lambda group: ours.zigzag_ring_flash_attn_func(q[None], q[None], q[None], group=group))
    documents = torch.tensor([0, 3, 6])
    with pytest.raises(ValueError, match="a document of cu_seqlens, 0 to 3, has 3 tokens"):
        run_ranks(2, lambda group: ours.zigzag_ring_flash_attn_varlen_func(*[q[:6]] * 3, documents, 3, group=group))
    assert isinstance(ours.zigzag_ring_flash_attn_func(q[None], q[None], q[None]), Tensor)


Q = torch.randn(8, 2, 16)
PREPARED = ours.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 0, 1)
LLAMA = (*PREPARED[:4], 1, PREPARED[4])


def llama3_arguments(rank: int) -> tuple[Any, ...]:
    *first, keys = ours.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, rank, 2)
    return *first, 1, keys


def changed(at: int, value: Any) -> tuple[Any, ...]:
    return (Q, Q, Q, *LLAMA[:at], value, *LLAMA[at + 1 :])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.ring_flash_attn_qkvpacked_func(Q), r"qkv has shape \[8, 2, 16\]: it must be \[..., 3, heads"),
        (lambda: ours.ring_flash_attn_qkvpacked_func(Q[:3]), r"qkv has shape \[3, 2, 16\]: it must be"),
        (lambda: ours.ring_flash_attn_varlen_func(Q, Q, Q, torch.tensor([0, 3, 9]), 6), "ends at 9 and q has 8 tokens"),
        (lambda: ours.ring_flash_attn_varlen_func(Q, Q, Q, torch.tensor([0, 3, 7]), 4), "ends at 7 and q has 8 tokens"),
        (lambda: ours.ring_flash_attn_varlen_func(Q, Q, Q, torch.tensor([0, 3, 8]), 4), "max_seqlen is 4"),
        (lambda: ours.ring_flash_attn_varlen_func(Q, Q, Q, torch.tensor([0, 9, 8]), 9), "must not decrease"),
        (lambda: ours.ring_flash_attn_varlen_func(Q, Q, Q, torch.tensor([0, 8]), None), "max_seqlen is None"),
        (lambda: ours.ring_flash_attn_kvpacked_func(Q[None], torch.stack([Q[None]] * 3, -3)), "kv has shape"),
        (lambda: run_ranks(2, lambda group: ours.llama3_flash_attn_varlen_func(
            *[Q[:4]] * 3, *llama3_arguments(1 - group.rank()), causal=True, group=group)), "rank is"),
        (lambda: run_ranks(2, lambda group: ours.zigzag_ring_flash_attn_func(
            *[torch.zeros(8, 3, 16)] * 3, group=group)), r"q has shape \[8, 3, 16\]"),
        (lambda: ours.ring_flash_attn_qkvpacked_func([Q, Q, Q]), "qkv is a list: it must be a torch.Tensor"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(0, PREPARED[0].clone())), "cu_seqlens_q is not prepared"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(1, PREPARED[0])), "cu_seqlens_k is"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(2, 4), causal=True), "max_seqlen_q is 4"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(4, 4), causal=True), "heads_k_stride is 4"),
        (lambda: ours.llama3_flash_attn_varlen_func(
            Q, *[Q[:, :1]] * 2, *changed(4, 2)[3:], causal=True), "heads_k_stride is 2: it must divide 1"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(4, None), causal=True), "heads_k_stride is None"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(4, 0), causal=True), "heads_k_stride is 0"),
        (lambda: ours.llama3_flash_attn_prepare_cu_seqlens([0, 8], True, 0, 1), r"cu_seqlens is \[0, 8\]: it must"),  # type: ignore[arg-type]
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(5, slice(0, 4)), causal=True), "local_k_slice is"),
        (lambda: ours.llama3_flash_attn_varlen_func(*changed(4, 1)), "causal is False"),
        (lambda: ours.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 2]), True, 2, 4), "rank 2 of 4 has no"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def published() -> dict[str, ast.FunctionDef]:
    """Return their functions as syntax trees, because importing them needs flash_attn."""
    assert version("ring-flash-attn") == "0.1.8"
    sources = [path for path in files("ring-flash-attn") or [] if path.suffix == ".py"]
    trees = [ast.parse(path.read_text()) for path in sources]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.nightly
def test_names_and_arguments_match_the_package() -> None:
    theirs = published()
    offered = [name for name in theirs if name.endswith("_func") or "prepare" in name]
    assert sorted(offered) == sorted([*NAMES, "llama3_flash_attn_prepare_cu_seqlens"])
    for name in offered:
        parameters = [*inspect.signature(getattr(ours, name)).parameters.values()]
        positional = [argument for argument in parameters if argument.kind is not inspect.Parameter.VAR_KEYWORD]
        arguments, empty = theirs[name].args, inspect.Parameter.empty
        assert [argument.name for argument in positional] == [argument.arg for argument in arguments.args]
        defaults = [ast.literal_eval(argument) for argument in arguments.defaults]
        assert [argument.default for argument in positional if argument.default is not empty] == defaults
        assert getattr(ours, name).__name__ == name


@pytest.mark.parametrize(
    ("rank", "causal", "q", "k", "keys"),
    [
        (0, True, [0, 4, 8], [0, 4, 8], slice(0, 8)),
        (0, False, [0, 4, 8], [0, 4, 12], slice(0, 12)),
        (1, True, [0, 4, 8], [0, 8, 12], slice(4, 16)),
    ],
)
def test_llama3_arguments(rank: int, causal: bool, q: list[int], k: list[int], keys: slice) -> None:
    """Give a query the keys of its whole document, or with ``causal`` those up to the end of the rank's run."""
    documents, before = torch.tensor([0, 4, 12, 16], dtype=torch.int32), len(ours._PREPARED)
    prepared = ours.llama3_flash_attn_prepare_cu_seqlens(documents, causal, rank, 2)
    assert prepared[0].dtype == prepared[1].dtype == torch.int32
    longest = [max(stop - start for start, stop in pairwise(edges)) for edges in (q, k)]
    assert [prepared[0].tolist(), prepared[1].tolist(), *prepared[2:]] == [q, k, *longest, keys]
    del prepared
    assert len(ours._PREPARED) == before  # nothing is kept longer than the tensor


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("documents", "world"), [([0, 7, 14, 16], 8), ([0, 120, 1248, 4232], 4), ([0, 4, 4, 8], 2)])
def test_llama3_arguments_match_the_package(documents: list[int], world: int, causal: bool) -> None:
    source = published()["llama3_flash_attn_prepare_cu_seqlens"]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([source], []), "theirs", "exec"), scope)
    whole = torch.tensor(documents, dtype=torch.int32)
    for rank in range(world):
        mine, theirs = (
            prepare(whole, causal=causal, rank=rank, world_size=world)
            for prepare in (ours.llama3_flash_attn_prepare_cu_seqlens, scope["llama3_flash_attn_prepare_cu_seqlens"])
        )
        assert [x.equal(y) and x.dtype == y.dtype for x, y in zip(mine[:2], theirs[:2], strict=True)] == [True, True]
        assert mine[2:] == theirs[2:]
