"""USP, Ulysses x ring, by the names of yunchang (feifeibear's long-context-attention), on ``ringattn.ring_attention``.

``from ringattn.integrations.yunchang import LongContextAttention, set_seq_parallel_pg, EXTRACT_FUNC_DICT`` is the one
line to change: names, argument order and layouts are those of yunchang 0.6.4, which need not be installed.

``set_seq_parallel_pg`` makes a two-dimensional mesh of the ranks; heads are exchanged for tokens inside one dimension,
and the ring runs along the other. Of R x U ranks, the one at (r, u) holds the u-th of U equal parts of what ring rank r
holds by ``ring_impl_type``:

=====================================================  =================================================
``basic``, ``basic_pytorch``, ``basic_flashinfer``      run r of R equal ones
``zigzag``                                              runs r and 2R - 1 - r of 2R equal ones
``strip``                                               tokens r, r + R, r + 2R, ...
=====================================================  =================================================

``attn_type`` chooses between kernels of one result in theirs, and there is one here: it takes those that are exact, and
refuses those that quantise or leave blocks out (``sage_*``, ``sparse_sage``). Windows, ALiBi and dropout hold over the
whole sequence, zigzag and stripes without ``causal`` too, and ``deterministic`` may be either: the backward is.

``RING_IMPL_QKVPACKED_DICT`` has attention over a ring alone. Not offered: the other functions of ``yunchang.ring``.
Those of ``ringattn.integrations.ring_flash_attn`` are the same but for ``softcap``, which they take by keyword only,
and ``attn_type`` and ``attn_processor``, which they have not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import Layout, LayoutLike, ring_attention
from ..comm import Group, GroupLike, group_rank_size, resolve_group, resolve_mesh
from . import ring_flash_attn, unit_stride

RULES: dict[str, LayoutLike] = {
    "basic": "contiguous",
    "zigzag": "zigzag",
    "strip": "striped",
    "basic_pytorch": "contiguous",
    "basic_flashinfer": "contiguous",
    "basic_npu": "contiguous",
}
"""The layout of the ring for each ``ring_impl_type``: a constructor of ``Layout``."""
EXACT = ("aiter", "fa", "fa3", "flashinfer", "torch_math", "torch_flash", "torch_efficient", "torch_cudnn", "npu")
"""Values of ``AttnType`` whose results are the same but for rounding."""


class _Kept:
    """What ``set_seq_parallel_pg`` made last."""

    mesh: DeviceMesh | None = None


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Make the mesh that modules and extraction use from now on; every rank calls it.

    Consecutive ranks share a sequence, ``sp_ulysses_degree * sp_ring_degree`` of them. With ``use_ulysses_low`` the
    ranks of Ulysses are neighbours among them, else those of the ring.

    Raises:
        ValueError: the degrees do not divide ``world_size``, or rank and world are not those of ``torch.distributed``.
    """
    degrees = sp_ulysses_degree, sp_ring_degree
    if not all(isinstance(degree, Integral) for degree in degrees):
        raise ValueError(f"sp_ulysses_degree and sp_ring_degree are {degrees}: they must be whole numbers")
    degree = sp_ulysses_degree * sp_ring_degree
    if min(sp_ulysses_degree, sp_ring_degree) < 1 or world_size % degree:
        raise ValueError(
            f"sp_ulysses_degree is {sp_ulysses_degree}, sp_ring_degree is {sp_ring_degree}: their product must divide "
            f"world_size, {world_size}"
        )
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank is {rank}, world_size is {world_size}: the default group has {dist.get_world_size()} ranks"
        )
    ranks = torch.arange(world_size)
    if use_ulysses_low:
        ranks = ranks.view(-1, sp_ring_degree, sp_ulysses_degree)
    else:
        ranks = ranks.view(-1, sp_ulysses_degree, sp_ring_degree).transpose(1, 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _Kept.mesh = DeviceMesh(device, ranks, mesh_dim_names=("data", "ring", "ulysses"))["ring", "ulysses"]


@lru_cache
def layout_of(ring_impl_type: str, seqlen: int, rd: int, ud: int) -> Layout:
    """Who holds which tokens over all ranks of a mesh of ``rd`` x ``ud``.

    Raises:
        ValueError: an unknown ``ring_impl_type``, or a length that the ranks do not divide.
    """
    if ring_impl_type not in RULES:
        raise ValueError(f"ring_impl_type is {ring_impl_type!r}: it must be one of {', '.join(RULES)}")
    if min(rd, ud) < 1:
        raise ValueError(f"rd is {rd}, ud is {ud}: there is at least one rank of each")
    if seqlen % (rd * ud):
        raise ValueError(f"{seqlen} tokens are not divisible by the {rd * ud} ranks that share them")
    whole: Layout = getattr(Layout, str(RULES[ring_impl_type]))(seqlen, rd)
    return Layout.from_positions(part for place in range(rd) for part in whole.positions(place).chunk(ud))


def _extract(
    ring_impl_type: str,
    value: Tensor,
    rank: int,
    world_size: int,
    rd: int | None = None,
    ud: int | None = None,
    *,
    group: GroupLike = None,
) -> Tensor:
    """This rank's tokens of ``value`` ``[B, S, ...]``, of which every rank has the same; a copy.

    ``rd`` and ``ud`` are by default those of the mesh; yunchang's ``basic`` does without them, too.
    ``group`` is a mesh of ring x ulysses in place of that of ``set_seq_parallel_pg``. Where that has the ring low, the
    tokens are those that the ring needs, which yunchang's ``basic`` and ``strip`` do not look at.

    Raises:
        ValueError: the degrees, ``rank`` or ``world_size`` are not those of the mesh, or as :func:`layout_of`.
    """
    mesh, degrees = _mesh_of(group)
    rd, ud = degrees[0] if rd is None else rd, degrees[1] if ud is None else ud
    if value.ndim < 2:
        raise ValueError(f"value is {list(value.shape)}: it must be [B, S, ...]")
    mine, size = group_rank_size(mesh)
    # its number in torch.distributed is another one where the ring is low
    process = mesh.get_rank() % size if isinstance(mesh, DeviceMesh) else mine
    if (world_size, rd, ud) != (size, *degrees) or rank % world_size not in (mine, process):
        raise ValueError(
            f"rank is {rank}, world_size is {world_size}, rd is {rd}, ud is {ud}: this is rank {process} of {size}, "
            f"{degrees[0]} x {degrees[1]} ranks"
        )
    return layout_of(ring_impl_type, value.shape[1], rd, ud).shard(value, mine)


EXTRACT_FUNC_DICT: dict[str, Callable[..., Tensor]] = {name: partial(_extract, name) for name in RULES}
"""By ``ring_impl_type``: ``extract(value, rank, world_size, rd, ud)``."""
basic_extract_local = EXTRACT_FUNC_DICT["basic"]
zigzag_extract_local = EXTRACT_FUNC_DICT["zigzag"]
stripe_extract_local = EXTRACT_FUNC_DICT["strip"]


def _mesh_of(group: GroupLike) -> tuple[GroupLike, tuple[int, int]]:
    """Return the mesh, and the number of ranks along its ring and its Ulysses dimension."""
    mesh = _Kept.mesh if group is None else group
    dims = resolve_mesh(mesh)
    if dims is None:
        resolve_group(mesh)
        raise ValueError("there is no mesh of ring x ulysses: call set_seq_parallel_pg first, or pass one as group=")
    return mesh, (dims[0].size(), dims[1].size())


def _check_attn_type(attn_type: object) -> None:
    """Raise NotImplementedError for kernels that are not exact."""
    if getattr(attn_type, "value", attn_type) not in EXACT:
        raise NotImplementedError(
            f"attn_type is {attn_type}: attention is exact here; it must be one of {', '.join(EXACT)}"
        )


def _ring_qkvpacked(
    function: Callable[..., ring_flash_attn.Attention],
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: GroupLike = None,
    attn_type: object = "fa",
) -> ring_flash_attn.Attention:
    """Compute attention of ``qkv`` ``[B, S, 3, H, D]`` over the ranks of a ring, by the arguments of yunchang.ring."""
    _check_attn_type(attn_type)
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return function(qkv, *options, softcap=softcap)


RING_IMPL_QKVPACKED_DICT: dict[str, Callable[..., ring_flash_attn.Attention]] = {
    "basic": partial(_ring_qkvpacked, ring_flash_attn.ring_flash_attn_qkvpacked_func),
    "zigzag": partial(_ring_qkvpacked, ring_flash_attn.zigzag_ring_flash_attn_qkvpacked_func),
    "strip": partial(_ring_qkvpacked, ring_flash_attn.stripe_flash_attn_qkvpacked_func),
    "basic_flashinfer": partial(_ring_qkvpacked, ring_flash_attn.ring_flash_attn_qkvpacked_func),
}
"""By ``ring_impl_type`` the attention over one ring, without Ulysses: ``attend(qkv, ..., group=, attn_type=)``."""


class LongContextAttention(torch.nn.Module):
    """Attention of this rank's tokens over those of all ranks, as a module without parameters.

    Args:
        ring_impl_type: who holds which tokens, a key of ``EXTRACT_FUNC_DICT``.
        use_pack_qkv: either: q, k and v travel in one exchange.
        attn_type: a member of yunchang's ``AttnType`` or its value, one of those that are exact.
        group: a DeviceMesh ``("ring", "ulysses")`` in place of that of ``set_seq_parallel_pg``.

    Raises:
        ValueError: ``scatter_idx`` or ``gather_idx`` other than heads and tokens, an unknown ``ring_impl_type``, or no
            mesh.
        NotImplementedError: ``use_sync``, ``attn_processor``, or an ``attn_type`` that is not exact.
    """

    heads_dim = 2

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: object = "fa",
        attn_processor: torch.nn.Module | None = None,
        *,
        group: GroupLike = None,
    ) -> None:
        super().__init__()
        indices, dims = (scatter_idx, gather_idx), (self.heads_dim, 1)
        if indices != dims:
            raise ValueError(f"scatter_idx and gather_idx are {indices}: heads and tokens are dimensions {dims}")
        if use_sync:
            raise NotImplementedError("use_sync is True: the exchange waits by events, in stream order; leave it False")
        _check_attn_type(attn_type)
        if attn_processor is not None:
            raise NotImplementedError(
                "attn_processor is given: attention is exact here; for sparse patterns see block_mask of ring_attention"
            )
        layout_of(ring_impl_type, 0, 1, 1)
        self.ring_impl_type = ring_impl_type
        self.mesh, self.degrees = _mesh_of(group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """``[B, S, H, D]`` of this rank's tokens, from those and from keys ``[B, S, Hkv, D]``.

        ``alibi_slopes`` are those of all heads. As in theirs the output alone comes back, whatever
        ``return_attn_probs``.

        Raises:
            ValueError: as :func:`ringattn.ring_attention`; heads that Ulysses' degree does not divide are named.
        """
        rd, ud = self.degrees
        layout = RULES[self.ring_impl_type]
        if ud > 1 and layout != "contiguous":  # else a name says it, which torch.compile can trace
            layout = layout_of(self.ring_impl_type, query.shape[1] * rd * ud, rd, ud)
        return ring_attention(
            unit_stride(query),
            unit_stride(key),
            unit_stride(value),
            layout=layout,
            group=self.mesh,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )


class LongContextAttentionQKVPacked(LongContextAttention):
    """The same of ``qkv`` ``[B, S, 3, H, D]``; its heads are dimension 3."""

    heads_dim = 3

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: object = "fa",
        *,
        group: GroupLike = None,
    ) -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type, False, use_sync, attn_type, group=group)

    def forward(  # type: ignore[override]
        self,
        qkv: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        """As :meth:`LongContextAttention.forward`."""
        if qkv.ndim != 5 or qkv.shape[2] != 3:
            raise ValueError(f"qkv is {list(qkv.shape)}: it must be [B, S, 3, H, D]")
        q, k, v = qkv.unbind(2)
        return super().forward(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)


class AsyncLongContextAttention(LongContextAttention):
    """The same by this name, of grouped heads too, and with gradients, of which theirs has none."""

    def __init__(
        self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic", *, group: GroupLike = None
    ) -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type, group=group)


class UlyssesAttention(LongContextAttention):
    """The same without a ring: rank u of ``sequence_process_group`` holds run u of as many equal ones.

    ``sequence_process_group`` is the default group where it is None, and may be a mesh whose ring has one rank.
    """

    def __init__(
        self,
        sequence_process_group: GroupLike = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: object = "fa",
    ) -> None:
        mesh = _without_ring(sequence_process_group)
        super().__init__(scatter_idx, gather_idx, "basic", False, use_sync, attn_type, group=mesh)
        if self.degrees[0] > 1:
            raise ValueError(
                f"sequence_process_group is a mesh of {self.degrees[0]} x {self.degrees[1]} ranks: here the ring has "
                "one rank; LongContextAttention takes more"
            )


def _without_ring(group: GroupLike) -> GroupLike:
    """A mesh of one ring rank; a mesh as it is."""
    if resolve_mesh(group) is not None:
        return group
    members: Group = resolve_group(group)
    return _one_row(members) if isinstance(members, dist.ProcessGroup) else members.mesh(1, members.size())


@lru_cache
def _one_row(group: dist.ProcessGroup) -> DeviceMesh:
    """Made once for a group."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    device, row = "cuda" if torch.cuda.is_available() else "cpu", [dist.get_process_group_ranks(group)]
    return DeviceMesh.from_group([alone, group], device, row, mesh_dim_names=("ring", "ulysses"))
