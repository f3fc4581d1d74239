"""yunchang's modules on ``ring_attention``: names, arguments, who holds which tokens, results.

The cases are those of its test folder, at smaller sizes, with what they leave out: gradients and a float64 oracle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout
from ringattn.comm import GroupLike, LocalGroup
from ringattn.integrations import yunchang as ours

from ..support.baselines import Results
from ..support.forked import results
from ..support.mask_cases import Case, compare, expected
from ..support.nightly import rest_nightly
from ..support.ring_cases import inputs, run_ranks

TOKENS = 64
MESHES = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]
"""Ring x Ulysses."""
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def of_rank(
    kind: str, whole: dict[str, Tensor], group: GroupLike, rank: int, rd: int, ud: int, **options: Any
) -> list[Tensor]:
    """Output and the gradients of q, k and v of one rank."""
    extract, size = ours.EXTRACT_FUNC_DICT[kind], (rank, rd * ud, rd, ud)
    q, k, v, dout = (extract(whole[name], *size, group=group).detach() for name in ("q", "k", "v", "dout"))
    if k.shape == q.shape:
        leaves = [torch.stack([q, k, v], 2).requires_grad_()]
        out = ours.LongContextAttentionQKVPacked(ring_impl_type=kind, group=group)(*leaves, **options)
    else:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ours.LongContextAttention(ring_impl_type=kind, group=group)(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), *(grads if len(grads) == 3 else grads[0].unbind(2))]


def check(kind: str, whole: dict[str, Tensor], rd: int, ud: int, parts: Any = None, **options: Any) -> None:
    """Of all ranks together, in the order of the mesh, against float64."""

    def virtual(group: LocalGroup) -> list[Tensor]:
        return of_rank(kind, whole, group.mesh(rd, ud), group.rank(), rd, ud, **options)

    order = torch.cat([held(kind, rank, rd, ud) for rank in range(rd * ud)]).argsort()
    columns = zip(*(parts or run_ranks(rd * ud, virtual)), strict=True)
    out, *grads = (torch.cat(x, 1).index_select(1, order) for x in columns)
    case = Case(Layout.contiguous(TOKENS, 1), whole, options, through_lse=False)
    compare(expected(case), Results(out, None, *grads))  # type: ignore[arg-type]


def held(kind: str, rank: int, rd: int, ud: int) -> Tensor:
    """Which tokens the rank at (rank // ud, rank % ud) holds, as they cut them."""
    whole, (place, part) = torch.arange(TOKENS), divmod(rank, ud)
    if kind == "strip":
        return whole.view(-1, rd).T.flatten().chunk(rd * ud)[rank]
    if kind == "zigzag":
        chunks = whole.chunk(2 * rd)
        return torch.cat([chunks[place], chunks[2 * rd - 1 - place]]).chunk(ud)[part]
    return whole.chunk(rd * ud)[rank]


def cut(kv_heads: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return inputs(TOKENS, (4, kv_heads))


@pytest.mark.parametrize(("rd", "ud"), rest_nightly(MESHES, (1, 2), (2, 1), (2, 2)))
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", ["basic", "zigzag", "strip"])
def test_their_cases(kind: str, kv_heads: int, rd: int, ud: int) -> None:
    """Whole heads packed, grouped ones apart."""
    check(kind, cut(kv_heads), rd, ud, causal=True)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False, "softmax_scale": 0.5},
        {"causal": True, "window_size": (9, 0), "alibi_slopes": SLOPES},
        {"causal": True, "softcap": 2.0},
    ],
    ids=["full", "window and ALiBi", "softcap"],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_theirs_refuses_or_gets_wrong(options: dict[str, Any], kv_heads: int) -> None:
    check("zigzag", cut(kv_heads), 2, 2, **options)


def in_process(rank: int) -> list[Any]:
    """By ``set_seq_parallel_pg``, the ring low in the second call; where the rank is in the mesh, and its part."""
    made: list[Any] = []
    for low in (True, False):
        ours.set_seq_parallel_pg(2, 2, rank, 4, use_ulysses_low=low)
        place = rank if low else rank % 2 * 2 + rank // 2
        made.append((place, of_rank("zigzag", cut(2), None, rank, 2, 2, causal=True)))
    return made


@pytest.mark.nightly
def test_processes() -> None:
    for ranks in zip(*results(4, in_process), strict=True):
        parts = [part for _, part in sorted(ranks, key=lambda one: one[0])]
        check("zigzag", cut(2), 2, 2, parts, causal=True)


def test_extraction_without_degrees_and_a_last_stride_that_is_not_1() -> None:
    """``basic`` of theirs takes no degrees, and the exchange any strides."""
    x = torch.randn(1, 8, 2, 16)
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)

    def of_rank(group: Any) -> None:
        mesh = group.mesh(2, 1)
        part = ours.EXTRACT_FUNC_DICT["basic"](turned, group.rank(), 2, group=mesh)
        assert torch.equal(part, x.chunk(2, 1)[group.rank()])
        attend = ours.LongContextAttention(group=mesh)
        q, right = turned.chunk(2, 1)[group.rank()], x.chunk(2, 1)[group.rank()]
        torch.testing.assert_close(attend(q, q, q), attend(right, right, right))

    run_ranks(2, of_rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: ours.LongContextAttention(), "call set_seq_parallel_pg first"),
        (lambda mesh: ours.LongContextAttention(3, 1, group=mesh), r"are \(3, 1\)"),
        (lambda mesh: ours.LongContextAttention(use_sync=True, group=mesh), "use_sync is True"),
        (lambda mesh: ours.LongContextAttention(attn_type="sage_fp8", group=mesh), "attn_type is sage_fp8"),
        (lambda mesh: ours.LongContextAttention(attn_processor=torch.nn.Identity(), group=mesh), "attn_processor is"),
        (lambda mesh: ours.LongContextAttention(ring_impl_type="ring", group=mesh), "ring_impl_type is 'ring'"),
        (lambda mesh: ours.LongContextAttentionQKVPacked(group=mesh)(torch.randn(1, 8, 2, 16)), "qkv is"),
        (lambda mesh: ours.EXTRACT_FUNC_DICT["basic"](torch.zeros(1, 8), 0, 2, 2, 1, group=mesh), "this is rank 0"),
        (lambda mesh: ours.EXTRACT_FUNC_DICT["basic"](torch.zeros(8), 0, 1, group=mesh), r"value is \[8\]: it must be"),
        (lambda mesh: ours.layout_of("basic", 8, 0, 1), "rd is 0, ud is 1"),
        (lambda mesh: ours.set_seq_parallel_pg(2, None, 0, 1), r"are \(2, None\): they must be whole numbers"),  # type: ignore[arg-type]
        (lambda mesh: ours.set_seq_parallel_pg(2, 2, 0, 1), "their product must divide world_size, 1"),
        (lambda mesh: ours.set_seq_parallel_pg(1, 1, 0, 2), "process group has not been initialized"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[GroupLike], object], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        run_ranks(1, lambda group: call(group.mesh(1, 1)))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_names_and_arguments_are_theirs() -> None:
    import yunchang
    from yunchang.kernels import AttnType

    assert yunchang.__version__ == "0.6.4"
    assert {*yunchang.EXTRACT_FUNC_DICT} == {*ours.EXTRACT_FUNC_DICT}
    values = [one.value for one in AttnType]
    assert {*values} - {*ours.EXACT} == {one for one in values if "sage" in one}
    for name in ("set_seq_parallel_pg", "LongContextAttention", "LongContextAttentionQKVPacked"):
        mine, theirs = getattr(ours, name), getattr(yunchang, name)
        pairs = [(mine, theirs)] if "set" in name else [(mine, theirs), (mine.forward, theirs.forward)]
        for one, other in pairs:
            positional = [x for x in inspect.signature(one).parameters.values() if x.kind is not x.KEYWORD_ONLY]
            named = [x for x in inspect.signature(other).parameters.values() if x.kind is not x.VAR_POSITIONAL]
            assert [x.name for x in positional] == [x.name for x in named]
            assert [getattr(x.default, "value", x.default) for x in named] == [x.default for x in positional]


def their_tokens(rank: int) -> list[Tensor]:
    import yunchang

    made = []
    for ud, rd in ((1, 4), (2, 2), (4, 1)):
        yunchang.set_seq_parallel_pg(ud, rd, rank, 4)
        whole = torch.arange(TOKENS)[None, :, None]
        made += [yunchang.EXTRACT_FUNC_DICT[kind](whole, rank, 4, rd=rd, ud=ud).flatten() for kind in ours.RULES]
    dist.barrier()
    return made


@pytest.mark.nightly
def test_layouts_are_theirs() -> None:
    """Of the package itself, in four processes."""
    for rank, theirs in enumerate(results(4, their_tokens)):
        cases = [(kind, rd, ud) for ud, rd in ((1, 4), (2, 2), (4, 1)) for kind in ours.RULES]
        for (kind, rd, ud), tokens in zip(cases, theirs, strict=True):
            assert ours.layout_of(kind, TOKENS, rd, ud).positions(rank).equal(tokens)
            assert held(kind, rank, rd, ud).equal(tokens)
