"""yunchang's modules on ``ring_attention``: names, arguments, token placement and results.

The cases are those of its test folder at smaller sizes, plus gradients and a float64 reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringattn import Layout
from ringattn.comm import GroupLike, LocalGroup
from ringattn.integrations import ring_flash_attn
from ringattn.integrations import yunchang as ours

from ..support.baselines import Results
from ..support.mask_cases import RingCase, compare_with_expected, expected_results
from ..support.nightly import rest_nightly
from ..support.rank_processes import group_results
from ..support.ring_cases import inputs, run_ranks

TOKENS = 64
MESHES = [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]
"""Ring degree and Ulysses degree."""
SLOPES, PACKED = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(1, 8, 3, 2, 16)


def of_rank(
    kind: str, whole: dict[str, Tensor], group: GroupLike, rank: int, rd: int, ud: int,
    make: Callable[[Any], torch.nn.Module] | None = None, **options: Any,
) -> list[Tensor]:  # fmt: skip
    """Return the output and the gradients of q, k and v of one rank. ``make`` builds the module from the mesh."""
    extract, size = ours.EXTRACT_FUNC_DICT[kind], (rank, rd * ud, rd, ud)
    q, k, v, dout = (extract(whole[name], *size, group=group).detach() for name in ("q", "k", "v", "dout"))
    if make is None and k.shape == q.shape:
        leaves = [torch.stack([q, k, v], 2).requires_grad_()]
        out = ours.LongContextAttentionQKVPacked(ring_impl_type=kind, group=group)(*leaves, **options)
    else:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        module = make(group) if make else ours.LongContextAttention(ring_impl_type=kind, group=group)
        out = module(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), *(grads if len(grads) == 3 else grads[0].unbind(2))]


def check(
    kind: str, whole: dict[str, Tensor], rd: int, ud: int, parts: Any = None,
    make: Callable[[Any], torch.nn.Module] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Compare all ranks, in the order of the mesh, with float64."""

    def virtual(group: LocalGroup) -> list[Tensor]:
        return of_rank(kind, whole, group.mesh(rd, ud), group.rank(), rd, ud, make, **options)

    order = torch.cat([held(kind, rank, rd, ud) for rank in range(rd * ud)]).argsort()
    columns = zip(*(parts or run_ranks(rd * ud, virtual)), strict=True)
    out, *grads = (torch.cat(x, 1).index_select(1, order) for x in columns)
    case = RingCase(Layout.contiguous(TOKENS, 1), whole, options, through_lse=False)
    compare_with_expected(expected_results(case), Results(out, None, *grads))  # type: ignore[arg-type]


def held(kind: str, rank: int, rd: int, ud: int) -> Tensor:
    """Return the tokens of the rank at (rank // ud, rank % ud), as yunchang cuts them."""
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
def test_cases_of_yunchang(kind: str, kv_heads: int, rd: int, ud: int) -> None:
    check(kind, cut(kv_heads), rd, ud, causal=True)


@pytest.mark.parametrize("kind", ["basic", "zigzag", "strip"])
def test_async_long_context_attention(kind: str) -> None:
    make = lambda mesh: ours.AsyncLongContextAttention(ring_impl_type=kind, group=mesh)  # noqa: E731
    check(kind, cut(2), 2, 2, make=make, causal=True)


@pytest.mark.parametrize("ud", [2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_ulysses_without_a_ring(kv_heads: int, ud: int) -> None:
    whole = cut(kv_heads)
    options: dict[str, Any] = {"window_size": (9, 3), "alibi_slopes": SLOPES}

    def in_a_group(group: LocalGroup) -> list[Tensor]:
        make = lambda _: ours.UlyssesAttention(group)  # noqa: E731
        return of_rank("basic", whole, group.mesh(1, ud), group.rank(), 1, ud, make, **options)

    check("basic", whole, 1, ud, make=ours.UlyssesAttention, **options)
    check("basic", whole, 1, ud, run_ranks(ud, in_a_group), **options)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "rd", "ud"), [("basic", 1, 2), ("basic", 2, 2), ("zigzag", 2, 1)])
def test_attention_in_a_compiled_graph(kind: str, rd: int, ud: int) -> None:
    """Compile the layouts that have a name. Zigzag and strip with several Ulysses ranks are built from tensors."""

    def make(mesh: Any) -> Any:
        module = ours.LongContextAttention(ring_impl_type=kind, group=mesh)
        module.compile(fullgraph=True, backend="aot_eager")
        return module

    check(kind, cut(2), rd, ud, make=make, causal=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ours.RING_IMPL_QKVPACKED_DICT)
def test_a_ring_of_packed_tensors(kind: str) -> None:
    whole, rule = cut(4), ours.RING_LAYOUTS[kind]
    options: dict[str, Any] = {
        "softmax_scale": 0.5, "causal": True, "window_size": (9, 0), "softcap": 2.0, "alibi_slopes": SLOPES,
    }  # fmt: skip

    def part(group: LocalGroup) -> list[Tensor]:
        layout = getattr(Layout, str(rule))(TOKENS, 2)
        q, k, v, dout = (layout.shard(whole[name], group.rank()).detach() for name in ("q", "k", "v", "dout"))
        qkv = torch.stack([q, k, v], 2).requires_grad_()
        by_position = 0.0, *options.values(), False, True, group, "fa"
        out, _, probabilities = ours.RING_IMPL_QKVPACKED_DICT[kind](qkv, *by_position)
        assert probabilities is None
        return [out.detach(), *torch.autograd.grad(out, qkv, dout)[0].unbind(2)]

    check(kind, whole, 2, 1, run_ranks(2, part), **options)


def ulysses_in_process(rank: int) -> list[Any]:
    """Return results in the default group and in pairs, each beside yunchang's in float64."""
    import yunchang

    def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    def theirs(group: Any) -> Any:
        module = yunchang.UlyssesAttention(group, attn_type=yunchang.kernels.AttnType.TORCH_MATH)
        module.attn_fn = plain
        return module

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    made: list[Any] = []
    for size, group in ((4, None), (2, pairs[rank // 2])):
        ours.set_seq_parallel_pg(size, 1, rank, 4)
        exact = {name: x.double() for name, x in cut(4).items()}
        for make, whole in ((ours.UlyssesAttention, cut(4)), (theirs, exact)):
            made.append(of_rank("basic", whole, None, rank % size, 1, size, lambda _: make(group), causal=True))  # noqa: B023
    return made


@pytest.mark.nightly
def test_ulysses_in_processes() -> None:
    ranks = group_results(4, ulysses_in_process)
    for size, at in ((4, 0), (2, 2)):
        check("basic", cut(4), 1, size, [rank[at] for rank in ranks[-size:]], causal=True)
    for rank in ranks:
        torch.testing.assert_close(rank[0::2], [[x.float() for x in made] for made in rank[1::2]])


def in_process(rank: int) -> list[Any]:
    """Return the rank's place in the mesh and its results, with Ulysses low and with the ring low."""
    made: list[Any] = []
    for low in (True, False):
        ours.set_seq_parallel_pg(2, 2, rank, 4, use_ulysses_low=low)
        place = rank if low else rank % 2 * 2 + rank // 2
        made.append((place, of_rank("zigzag", cut(2), None, rank, 2, 2, causal=True)))
    return made


@pytest.mark.parametrize(("low", "right"), [(True, [[0, 1], [2, 3], [4, 5]]), (False, [[0, 3], [1, 4], [2, 5]])])
def test_use_ulysses_low_decides_the_inner_dimension_of_the_mesh(
    low: bool, right: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expect ring places as rows and Ulysses places as columns. Ranks 6 to 11 share another sequence."""
    mesh = Mock(return_value={("ring", "ulysses"): None})
    monkeypatch.setattr(ours, "DeviceMesh", mesh)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 12)
    ours.set_seq_parallel_pg(2, 3, 0, 12, use_ulysses_low=low)
    device, ranks = mesh.call_args.args
    assert device == "cpu" and mesh.call_args.kwargs == {"mesh_dim_names": ("data", "ring", "ulysses")}
    assert ranks.tolist() == [right, (torch.tensor(right) + 6).tolist()]
    for rank, world in ((1, 12), (0, 6)):
        with pytest.raises(ValueError, match=f"rank is {rank} and world_size is {world}, .* rank 0 of 12"):
            ours.set_seq_parallel_pg(2, 3, rank, world)


def test_all_rings_and_exact_kernels_are_accepted() -> None:
    kernels = "aiter fa fa3 flashinfer torch_math torch_flash torch_efficient torch_cudnn npu"

    def of_rank(group: LocalGroup) -> None:
        for kind in ["basic", "zigzag", "strip", "basic_pytorch", "basic_flashinfer", "basic_npu"]:
            ours.LongContextAttention(2, 1, kind, group=group.mesh(1, 1))
        for kernel in kernels.split():
            ours.LongContextAttention(attn_type=SimpleNamespace(value=kernel), group=group.mesh(1, 1))

    run_ranks(1, of_rank)


@pytest.mark.parametrize(("rank", "accepted"), [(1, True), (5, True), (2, True), (3, False)])
def test_tokens_are_those_of_the_place_in_the_mesh(rank: int, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 5 has place 2 in the second of two meshes of 2 x 2 ranks, in which the ring is low."""
    mesh = Mock(spec=DeviceMesh, get_rank=lambda: 5)
    monkeypatch.setattr(ours, "_usp_mesh", lambda group: (mesh, (2, 2)))
    monkeypatch.setattr(ours, "group_rank_size", lambda group: (2, 4))
    x = torch.arange(16)[None]
    with nullcontext() if accepted else pytest.raises(ValueError, match="rank is 3, world_size is 4"):
        assert ours.EXTRACT_FUNC_DICT["zigzag"](x, rank, 4).equal(x[:, 4:8])


def test_a_group_without_a_ring_becomes_one_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    group, made = Mock(spec=dist.ProcessGroup), Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, use_local_synchronization: ranks)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1, 3])
    monkeypatch.setattr(ours, "DeviceMesh", made)
    monkeypatch.setattr(ours, "resolve_mesh", lambda group: None)
    monkeypatch.setattr(ours, "resolve_group", lambda group: group)
    assert ours._without_ring(group) is ours._without_ring(group) is made.from_group.return_value
    made.from_group.assert_called_once_with([[3], group], "cpu", [[1, 3]], mesh_dim_names=("ring", "ulysses"))


@pytest.mark.nightly
def test_attention_over_processes() -> None:
    for ranks in zip(*group_results(4, in_process), strict=True):
        parts = [part for _, part in sorted(ranks, key=lambda one: one[0])]
        check("zigzag", cut(2), 2, 2, parts, causal=True)


def test_basic_extraction_without_degrees() -> None:
    x = torch.randn(1, 8, 2, 16)

    def of_rank(group: Any) -> Tensor:
        return ours.EXTRACT_FUNC_DICT["basic"](x, group.rank(), 2, group=group.mesh(2, 1))

    assert torch.cat(run_ranks(2, of_rank), 1).equal(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: ours.LongContextAttention(), "Call set_seq_parallel_pg first"),
        (lambda mesh: ours.LongContextAttention(3, 1, group=mesh), r"are \(3, 1\)"),
        (lambda mesh: ours.LongContextAttention(use_sync=True, group=mesh), "use_sync is True"),
        (lambda mesh: ours.LongContextAttention(attn_type="sage_fp8", group=mesh), "attn_type is sage_fp8"),
        (lambda mesh: ours.LongContextAttention(attn_processor=torch.nn.Identity(), group=mesh), "attn_processor is"),
        (lambda mesh: ours.LongContextAttention(ring_impl_type="ring", group=mesh), "ring_impl_type is 'ring'"),
        (lambda mesh: ours.RING_IMPL_QKVPACKED_DICT["basic"](PACKED, attn_type="sage_fp8"), "attn_type is sage_fp8"),
        (lambda mesh: ours.LongContextAttentionQKVPacked(group=mesh)(torch.randn(1, 8, 2, 16)), "qkv has shape"),
        (lambda mesh: ours.LongContextAttentionQKVPacked(group=mesh)(PACKED[:, :, :2]), r"qkv has shape \[1, 8, 2, 2,"),
        (lambda mesh: ours.EXTRACT_FUNC_DICT["basic"](torch.zeros(1, 8), 0, 2, 2, 1, group=mesh), "the mesh: rank 0"),
        (lambda mesh: ours.UlyssesAttention(mesh, use_sync=True), "use_sync is True"),
        (lambda mesh: ours.LongContextAttentionQKVPacked(use_sync=True, group=mesh), "use_sync is True"),
        (lambda mesh: ours.LongContextAttentionQKVPacked(2, 1, group=mesh), r"are \(2, 1\): they must be \(3, 1\)"),
        (lambda mesh: ours.AsyncLongContextAttention(1, 2, group=mesh), r"are \(1, 2\): they must be \(2, 1\)"),
        (lambda mesh: ours.UlyssesAttention(mesh, attn_type="sage_fp8"), "attn_type is sage_fp8"),
        (lambda mesh: ours.LongContextAttentionQKVPacked(attn_type="sage_fp8", group=mesh), "attn_type is sage_fp8"),
        (lambda mesh: ours.UlyssesAttention(mesh, 1, 2), r"are \(1, 2\)"),
        (lambda mesh: ours.EXTRACT_FUNC_DICT["basic"](torch.zeros(8), 0, 1, group=mesh), r"value has shape \[8\]"),
        (lambda mesh: ours.usp_layout("basic", 8, 0, 1), "rd is 0 and ud is 1"),
        (lambda mesh: ours.usp_layout("zigzag", 12, 4, 2), "12 tokens: use a multiple of 8"),
        (lambda mesh: ours.set_seq_parallel_pg(-1, -1, 0, 1), "sp_ulysses_degree is -1 and sp_ring_degree is -1"),
        (lambda mesh: ours.set_seq_parallel_pg(2, None, 0, 1), r"are \(2, None\)"),  # type: ignore[arg-type]
        (lambda mesh: ours.set_seq_parallel_pg(2, 2, 0, 1), "product must divide world_size, 1"),
        (lambda mesh: ours.set_seq_parallel_pg(1, 1, 0, 2), "process group has not been initialized"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[GroupLike], object], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        run_ranks(1, lambda group: call(group.mesh(1, 1)))


@pytest.mark.parametrize(("call", "message"), [
    (lambda mesh, rank: ours.EXTRACT_FUNC_DICT["basic"](torch.zeros(1, 8, 2), 1 - rank, 2, group=mesh),
     r"rank is \d, world_size is 2, .*match the mesh: rank"),
    (lambda mesh, _: ours.UlyssesAttention(mesh), "a mesh of 2 x 1 ranks"),
])  # fmt: skip
def test_refusals_on_a_ring_of_two_ranks(call: Callable[[GroupLike, int], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(2, lambda group: call(group.mesh(2, 1), group.rank()))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_names_and_arguments_match_the_package() -> None:
    """Compare all public names. Functions of ``yunchang.ring`` are ring_flash_attn's plus three arguments."""
    import yunchang
    from yunchang.kernels import AttnType

    assert yunchang.__version__ == "0.6.4"
    assert {*yunchang.EXTRACT_FUNC_DICT} == {*ours.EXTRACT_FUNC_DICT}
    values = [member.value for member in AttnType]
    assert {*values} - {*ours.EXACT_KERNELS} == {member for member in values if "sage" in member}
    homes = yunchang, yunchang.hybrid, yunchang.ulysses, yunchang.ring
    public = {name for home in homes for name, x in vars(home).items() if name[0] != "_" and not inspect.ismodule(x)}
    functions = {name for name in public if name.endswith("_func")}
    assert public - {*dir(ours)} == functions
    assert yunchang.hybrid.RING_IMPL_QKVPACKED_DICT.keys() == ours.RING_IMPL_QKVPACKED_DICT.keys()
    for name, theirs in yunchang.hybrid.RING_IMPL_QKVPACKED_DICT.items():
        named = by_position(theirs)
        assert [*by_position(ours.RING_IMPL_QKVPACKED_DICT[name])] == [*named]
        assert named["attn_type"] in ours.EXACT_KERNELS
    of_a_kernel = {name for name in functions if "pytorch" in name or "flashinfer" in name or "npu" in name}
    for name in functions - of_a_kernel:
        kept, named = by_position(getattr(ring_flash_attn, name)), by_position(getattr(yunchang, name))
        assert [x for x in named if x not in ("softcap", "attn_type", "attn_processor")] == [*kept]
    for name in sorted(public - functions - {"RING_IMPL_QKVPACKED_DICT", "EXTRACT_FUNC_DICT"}):
        mine, theirs = getattr(ours, name), getattr(yunchang, name)
        pairs = [(mine, theirs), (mine.forward, theirs.forward)] if "Attention" in name else [(mine, theirs)]
        for member, other in pairs:
            kept, named = by_position(member), by_position(other)
            if name.endswith("_extract_local"):  # theirs take *args, and one of them ``dim``
                assert [*kept][: len(named)] == [*named][: len(kept)]
            else:
                assert [*kept.items()] == [*named.items()]


def by_position(function: Callable[..., object]) -> dict[str, object]:
    """Return names and defaults of positional arguments, with the values of enumerations."""
    every = inspect.signature(function).parameters.values()
    return {x.name: getattr(x.default, "value", x.default) for x in every if x.kind is x.POSITIONAL_OR_KEYWORD}


def their_tokens(rank: int) -> list[Tensor]:
    import yunchang

    made = []
    for ud, rd in ((1, 4), (2, 2), (4, 1)):
        yunchang.set_seq_parallel_pg(ud, rd, rank, 4)
        whole = torch.arange(TOKENS)[None, :, None]
        made += [yunchang.EXTRACT_FUNC_DICT[kind](whole, rank, 4, rd=rd, ud=ud).flatten() for kind in ours.RING_LAYOUTS]
    dist.barrier()
    return made


@pytest.mark.nightly
def test_layouts_match_the_package() -> None:
    for rank, theirs in enumerate(group_results(4, their_tokens)):
        cases = [(kind, rd, ud) for ud, rd in ((1, 4), (2, 2), (4, 1)) for kind in ours.RING_LAYOUTS]
        for (kind, rd, ud), tokens in zip(cases, theirs, strict=True):
            assert ours.usp_layout(kind, TOKENS, rd, ud).positions(rank).equal(tokens)
            assert held(kind, rank, rd, ud).equal(tokens)
