"""Modules and functions of yunchang (feifeibear's long-context-attention) on top of ``ringattn.ring_attention``.

Only the import changes:
``from ringattn.integrations.yunchang import LongContextAttention, set_seq_parallel_pg, EXTRACT_FUNC_DICT``.
Names, argument order and layouts are those of yunchang 0.6.4, which need not be installed.

``set_seq_parallel_pg`` creates a mesh of R x U ranks for USP. The ring runs along the first dimension, and Ulysses
exchanges heads for tokens along the second. Each ring rank r has a shard that depends on ``ring_impl_type``, and the
rank at (r, u) holds the u-th of U equal parts of that shard:

=====================================================  =================================================
``basic``, ``basic_pytorch``, ``basic_flashinfer``      run r of R equal runs
``zigzag``                                              runs r and 2R - 1 - r of 2R equal runs
``strip``                                               tokens r, r + R, r + 2R, ...
=====================================================  =================================================

``attn_type`` selects a kernel in yunchang and has no effect here. Every exact kernel is accepted. ``sage_*`` and
``sparse_sage``, which quantise or skip blocks, raise. Windows, ALiBi and dropout apply to the whole sequence, and
zigzag and stripes work without ``causal``, too. The backward is deterministic, whatever ``deterministic`` says.

``RING_IMPL_QKVPACKED_DICT`` has the functions over one ring. The other functions of ``yunchang.ring`` are not offered.
``ringattn.integrations.ring_flash_attn`` has them under other names, with ``softcap`` by keyword only and without
``attn_type`` and ``attn_processor``.
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

RING_LAYOUTS: dict[str, LayoutLike] = {
    "basic": "contiguous", "zigzag": "zigzag", "strip": "striped", "basic_pytorch": "contiguous",
    "basic_flashinfer": "contiguous", "basic_npu": "contiguous",
}  # fmt: skip
"""Layout of the ring for each ``ring_impl_type``, as the name of a constructor of ``Layout``."""
EXACT_KERNELS = (
    "aiter", "fa", "fa3", "flashinfer", "torch_math", "torch_flash", "torch_efficient", "torch_cudnn", "npu",
)  # fmt: skip
"""Values of ``AttnType`` whose results are exact up to rounding."""


class _MeshCache:
    """Holder of the mesh that the last ``set_seq_parallel_pg`` created."""

    mesh: DeviceMesh | None = None


def set_seq_parallel_pg(
    sp_ulysses_degree: int, sp_ring_degree: int, rank: int, world_size: int, use_ulysses_low: bool = True
) -> None:
    """Create the mesh that modules and extract functions use from now on; every rank must call it.

    ``sp_ulysses_degree * sp_ring_degree`` consecutive ranks share a sequence. With ``use_ulysses_low`` the Ulysses
    ranks are neighbours, otherwise the ring ranks are.

    Raises:
        ValueError: The degrees do not divide ``world_size``, or ``rank`` and ``world_size`` differ from
            ``torch.distributed``.
    """
    degrees = sp_ulysses_degree, sp_ring_degree
    if not all(isinstance(degree, Integral) for degree in degrees):
        raise ValueError(f"sp_ulysses_degree and sp_ring_degree are {degrees}: they must be integers")
    degree = sp_ulysses_degree * sp_ring_degree
    if min(sp_ulysses_degree, sp_ring_degree) < 1 or world_size % degree:
        raise ValueError(
            f"sp_ulysses_degree is {sp_ulysses_degree} and sp_ring_degree is {sp_ring_degree}. Their product must "
            f"divide world_size, {world_size}."
        )
    if (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank is {rank} and world_size is {world_size}, but torch.distributed has rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in this process"
        )
    ranks = torch.arange(world_size)
    if use_ulysses_low:
        ranks = ranks.view(-1, sp_ring_degree, sp_ulysses_degree)
    else:
        ranks = ranks.view(-1, sp_ulysses_degree, sp_ring_degree).transpose(1, 2)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _MeshCache.mesh = DeviceMesh(device, ranks, mesh_dim_names=("data", "ring", "ulysses"))["ring", "ulysses"]


@lru_cache
def usp_layout(ring_impl_type: str, seqlen: int, rd: int, ud: int) -> Layout:
    """Return the layout of ``seqlen`` tokens over a mesh of ``rd`` ring ranks x ``ud`` Ulysses ranks.

    Raises:
        ValueError: ``ring_impl_type`` is unknown, a degree is below 1, or the ranks do not divide ``seqlen``.
    """
    if ring_impl_type not in RING_LAYOUTS:
        raise ValueError(f"ring_impl_type is {ring_impl_type!r}: it must be one of {', '.join(RING_LAYOUTS)}")
    if min(rd, ud) < 1:
        raise ValueError(f"rd is {rd} and ud is {ud}: both must be at least 1")
    if seqlen % (rd * ud):
        raise ValueError(f"the sequence has {seqlen} tokens: use a multiple of {rd * ud}, the number of ranks")
    ring: Layout = getattr(Layout, str(RING_LAYOUTS[ring_impl_type]))(seqlen, rd)
    return Layout.from_positions(part for ring_rank in range(rd) for part in ring.positions(ring_rank).chunk(ud))


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
    """Return a copy of this rank's tokens of ``value [B, S, ...]``, which is equal on all ranks.

    ``rd`` and ``ud`` default to the mesh's. ``group`` is a mesh of ring x Ulysses that replaces the one of
    ``set_seq_parallel_pg``. With ``use_ulysses_low=False`` the tokens are those that the ring needs. yunchang's
    ``basic`` and ``strip`` ignore that order of the ranks.

    Raises:
        ValueError: The degrees, ``rank`` or ``world_size`` differ from the mesh, or :func:`usp_layout` raises.
    """
    mesh, degrees = _usp_mesh(group)
    rd, ud = degrees[0] if rd is None else rd, degrees[1] if ud is None else ud
    if value.ndim < 2:
        raise ValueError(f"value has shape {list(value.shape)}: it must be [B, S, ...]")
    mine, size = group_rank_size(mesh)
    # the rank in torch.distributed differs from the rank in the mesh if use_ulysses_low is False
    process = mesh.get_rank() % size if isinstance(mesh, DeviceMesh) else mine
    if (world_size, rd, ud) != (size, *degrees) or rank % world_size not in (mine, process):
        raise ValueError(
            f"rank is {rank}, world_size is {world_size}, rd is {rd}, ud is {ud}. They must match the mesh: rank "
            f"{process}, world_size {size}, rd {degrees[0]}, ud {degrees[1]}."
        )
    return usp_layout(ring_impl_type, value.shape[1], rd, ud).shard(value, mine)


EXTRACT_FUNC_DICT: dict[str, Callable[..., Tensor]] = {name: partial(_extract, name) for name in RING_LAYOUTS}
"""Maps ``ring_impl_type`` to ``extract(value, rank, world_size, rd, ud)``."""
basic_extract_local = EXTRACT_FUNC_DICT["basic"]
zigzag_extract_local = EXTRACT_FUNC_DICT["zigzag"]
stripe_extract_local = EXTRACT_FUNC_DICT["strip"]


def _usp_mesh(group: GroupLike) -> tuple[GroupLike, tuple[int, int]]:
    """Return the mesh, and its numbers of ring ranks and of Ulysses ranks; None means :class:`_MeshCache`'s mesh."""
    mesh = _MeshCache.mesh if group is None else group
    dims = resolve_mesh(mesh)
    if dims is None:
        resolve_group(mesh)
        raise ValueError("there is no ring x Ulysses mesh. Call set_seq_parallel_pg first, or pass a mesh as group=.")
    return mesh, (dims[0].size(), dims[1].size())


def _check_attn_type(attn_type: object) -> None:
    """Raise NotImplementedError if ``attn_type`` is not an exact kernel."""
    if getattr(attn_type, "value", attn_type) not in EXACT_KERNELS:
        raise NotImplementedError(
            f"attn_type is {attn_type}: it must be an exact kernel, one of {', '.join(EXACT_KERNELS)}"
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
    """Compute attention of ``qkv [B, S, 3, H, D]`` over the ranks of a ring, with the arguments of yunchang.ring."""
    _check_attn_type(attn_type)
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs, group
    return function(qkv, *options, softcap=softcap)


RING_IMPL_QKVPACKED_DICT: dict[str, Callable[..., ring_flash_attn.Attention]] = {
    "basic": partial(_ring_qkvpacked, ring_flash_attn.ring_flash_attn_qkvpacked_func),
    "zigzag": partial(_ring_qkvpacked, ring_flash_attn.zigzag_ring_flash_attn_qkvpacked_func),
    "strip": partial(_ring_qkvpacked, ring_flash_attn.stripe_flash_attn_qkvpacked_func),
    "basic_flashinfer": partial(_ring_qkvpacked, ring_flash_attn.ring_flash_attn_qkvpacked_func),
}
"""Maps ``ring_impl_type`` to attention over one ring, without Ulysses: ``attend(qkv, ..., group=, attn_type=)``."""


class LongContextAttention(torch.nn.Module):
    """Module without parameters that computes attention of this rank's tokens over the tokens of all ranks.

    ``scatter_idx`` and ``gather_idx`` must be the dimensions of heads and tokens. ``ring_impl_type`` is a key of
    ``EXTRACT_FUNC_DICT``. ``use_pack_qkv`` has no effect, because q, k and v always share one exchange. ``attn_type``
    is a member of yunchang's ``AttnType`` or its value. ``group`` is a DeviceMesh ``("ring", "ulysses")`` that replaces
    the one of ``set_seq_parallel_pg``.

    Raises:
        ValueError: ``scatter_idx``, ``gather_idx`` or ``ring_impl_type`` has a wrong value, or there is no mesh.
        NotImplementedError: ``use_sync`` or ``attn_processor`` is given, or ``attn_type`` is not exact.
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
            raise ValueError(
                f"scatter_idx and gather_idx are {indices}: they must be {dims}, the dimensions of heads and tokens"
            )
        if use_sync:
            raise NotImplementedError("use_sync is True: it must be False, because the exchange is ordered by events")
        _check_attn_type(attn_type)
        if attn_processor is not None:
            raise NotImplementedError(
                "attn_processor is given: it must be None. For sparse patterns use block_mask of ring_attention."
            )
        usp_layout(ring_impl_type, 0, 1, 1)
        self.ring_impl_type = ring_impl_type
        self.mesh, self.degrees = _usp_mesh(group)

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
        """Return ``[B, S, H, D]`` for this rank's queries ``[B, S, H, D]`` and keys ``[B, S, Hkv, D]``.

        ``alibi_slopes`` has the slopes of all heads. As in yunchang, ``return_attn_probs`` has no effect.

        Raises:
            ValueError: :func:`ringattn.ring_attention` raises, for example if the Ulysses degree does not divide the
                heads.
        """
        rd, ud = self.degrees
        layout = RING_LAYOUTS[self.ring_impl_type]
        if ud > 1 and layout != "contiguous":  # otherwise a name suffices, which torch.compile can trace
            layout = usp_layout(self.ring_impl_type, query.shape[1] * rd * ud, rd, ud)
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
    """Variant of :class:`LongContextAttention` for packed ``qkv [B, S, 3, H, D]``, with the heads in dimension 3."""

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
        """Return ``[B, S, H, D]``; see :meth:`LongContextAttention.forward`."""
        if qkv.ndim != 5 or qkv.shape[2] != 3:
            raise ValueError(f"qkv has shape {list(qkv.shape)}: it must be [B, S, 3, H, D]")
        q, k, v = qkv.unbind(2)
        return super().forward(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)


class AsyncLongContextAttention(LongContextAttention):
    """Variant of :class:`LongContextAttention` with GQA and with gradients, both of which the original lacks."""

    def __init__(
        self, scatter_idx: int = 2, gather_idx: int = 1, ring_impl_type: str = "basic", *, group: GroupLike = None
    ) -> None:
        super().__init__(scatter_idx, gather_idx, ring_impl_type, group=group)


class UlyssesAttention(LongContextAttention):
    """Variant of :class:`LongContextAttention` without a ring: rank u holds the u-th of equal contiguous runs.

    ``sequence_process_group`` is a group, or a mesh with one ring rank. None is the default group.
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
                f"sequence_process_group is a mesh of {self.degrees[0]} x {self.degrees[1]} ranks: its ring dimension "
                "must have one rank. For more ring ranks use LongContextAttention."
            )


def _without_ring(group: GroupLike) -> GroupLike:
    """Return a mesh of 1 ring rank x all ranks of ``group``, or ``group`` itself if it is a mesh."""
    if resolve_mesh(group) is not None:
        return group
    members: Group = resolve_group(group)
    return _one_row(members) if isinstance(members, dist.ProcessGroup) else members.mesh(1, members.size())


@lru_cache
def _one_row(group: dist.ProcessGroup) -> DeviceMesh:
    """Return the mesh of 1 ring rank x all ranks of ``group``, created once per group."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    device, row = "cuda" if torch.cuda.is_available() else "cpu", [dist.get_process_group_ranks(group)]
    return DeviceMesh.from_group([alone, group], device, row, mesh_dim_names=("ring", "ulysses"))
