"""The host entries: validation, allocation and grid. What a vendor calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .bounds import FULL, Bounds
from .checks import check_backward, check_inputs, check_like, check_qkv, check_rank, result_like
from .choice import Bound, LaunchPlan, backward_config, check_config, check_tiles, launch_traits
from .config import KernelConfig, Tile, is_single_pass
from .device.backward import delta_kernel, dkdv_kernel, dq_kernel, reduce_kernel
from .device.forward import forward_kernel
from .device.tiles import Shape
from .hopper_launch import launch_hopper, takes
from .launch import (
    TAKES,
    Pair,
    check_describable,
    check_described,
    descriptor,
    empty_parts,
    head_dims,
    interval,
    is_described,
    launch,
    modifiers,
    options,
    programs,
    shape_of,
    strided,
)
from .order import split_shape, splits_of, tile_schedule
from .scores import PLAIN, Scores
from .single_pass import attention_gradients

REDUCE_BLOCK = 16  # of another: the parts of few rows are many bytes already, and this divides every tile
REDUCE_WARPS = 8  # with four, ptxas keeps two addresses in local memory on sm_100
DELTA_BLOCK = 64  # rows of a memory-bound pass: enough loads in flight, few idle rows at a shard's end


class Forward(Bound):
    """:func:`attention_forward` of one tensor of queries, one shard after the other; the state rides in the kernel."""

    def __init__(
        self, q: torch.Tensor, softmax_scale: float, config: KernelConfig | None, state: Pair | None = None
    ) -> None:
        super().__init__(q, softmax_scale, config)
        self._state = state

    def fold(self, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Continue the state with the keys of one shard."""
        q, plan = self._q, self._plan("forward", k, v, bounds, scores)
        dtype, out = q.dtype if final else torch.float32, None
        if self._state is None:
            lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device, dtype=torch.float32)
        else:
            out, lse = self._state
        in_place = out is not None and out.dtype == dtype
        result = out if out is not None and in_place else q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
        self._state = result, lse
        if plan.hopper and self._takes(
            id(plan), k, v, lambda: takes(q, k, v, bounds, scores, plan.tile, requested=self._config is not None)
        ):
            launch_hopper(q, k, v, out, result, lse, bounds, self._scale, plan.tile, self._described)
            return
        before = self._continued(result if out is None else out)
        launch(
            forward_kernel, plan.grid, q.device,
            self._queries, strided(k), strided(v), before, self._continued(result), lse,
            interval(bounds), plan.shape, self._scale, modifiers(scores),
            HAS_STATE=out is not None, IN_PLACE=in_place, **plan.options,
        )  # fmt: skip

    def result(self) -> Pair:
        """Return ``(out, lse)``, after the final shard."""
        assert self._state is not None
        return self._state


class Backward(Bound):
    """:func:`attention_dq` and :func:`attention_dkdv` of one tensor of queries, one shard after the other."""

    def __init__(
        self, dout: torch.Tensor, q: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, softmax_scale: float,
        config: KernelConfig | None,
    ) -> None:  # fmt: skip
        super().__init__(q, softmax_scale, config)
        self._dout, self._lse, self._delta = dout, lse, delta
        self._given = strided(dout), self._queries

    def dq(
        self, k: torch.Tensor, v: torch.Tensor, *, bounds: Bounds, scores: Scores, accum: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """``out`` = ``accum``, which it may be, plus one shard's part."""
        q, plan = self._q, self._plan("dq", k, v, bounds, scores)
        before = self._continued(out if accum is None else accum)
        launch(
            dq_kernel, plan.grid, q.device,
            *self._given, strided(k), strided(v), self._lse, self._delta, before, self._continued(out),
            interval(bounds), plan.shape, self._scale, modifiers(scores),
            **plan.options, HAS_SUM=accum is not None, IN_PLACE=out is accum,
        )  # fmt: skip

    def dkdv(
        self, k: torch.Tensor, v: torch.Tensor, *, bounds: Bounds, scores: Scores, accum: Pair | None, out: Pair
    ) -> None:
        """``out`` = ``accum``, which it may be, plus what one shard gets."""
        q, plan, (dk, dv) = self._q, self._plan("dkdv", k, v, bounds, scores), out
        before = out if accum is None else accum
        in_place = dk is before[0] and dv is before[1]
        parts = out if plan.splits == 1 else (empty_parts(k, plan.splits), empty_parts(v, plan.splits))
        describe = self._output_arg(plan, v, out, before)
        written = describe(parts[0]), describe(parts[1])
        read = written if in_place or plan.splits > 1 else (describe(before[0]), describe(before[1]))
        seen = interval(bounds.transposed(k.shape[1]))
        launch(
            dkdv_kernel, plan.grid, q.device,
            *self._given, strided(k), strided(v), self._lse, self._delta, *read, *written, seen, plan.shape,
            self._scale, modifiers(scores, rows_are_keys=True),
            **plan.options, HAS_SUM=accum is not None and plan.splits == 1, IN_PLACE=accum is not None and in_place,
        )  # fmt: skip
        if plan.splits > 1:
            launch(
                reduce_kernel, programs(k.shape[1], REDUCE_BLOCK, k), q.device,
                *map(strided, parts), *map(strided, before), strided(dk), strided(dv), seen,
                shape_of(k, q)._replace(splits=plan.splits), **head_dims(q, v), BLOCK_Q=plan.tile.block_q,
                BLOCK_K=plan.tile.block_k, BLOCK_ROWS=REDUCE_BLOCK, HAS_SUM=accum is not None,
                IN_PLACE=accum is not None and in_place, num_warps=REDUCE_WARPS,
            )  # fmt: skip

    def _output_arg(self, plan: LaunchPlan, v: torch.Tensor, out: Pair, accum: Pair) -> Callable[[torch.Tensor], Any]:
        """How dK/dV's kernel is told of what it leaves: as a tensor, or a TMA descriptor of its tiles."""
        if not is_described(plan.config):
            return strided
        try:
            check_described(self._q, v)
            named = {"out[0]": out[0], "out[1]": out[1], "accum[0]": accum[0], "accum[1]": accum[1]}
            check_describable(TAKES, **named)
        except ValueError:
            if self._config is not None:
                raise
            return strided  # a tuned table chose so, and not the caller
        return partial(descriptor, rows=plan.tile.block_k) if v.numel() else strided

    def _planned(
        self, tile: Tile, config: KernelConfig | None, kernel: str, k: torch.Tensor, v: torch.Tensor
    ) -> LaunchPlan:
        if kernel == "dq":
            return super()._planned(tile, config, kernel, k, v)
        splits = splits_of(config, self._q, k, tile.block_k)
        shape = split_shape(shape_of(k, self._q), splits)
        grid, shape = tile_schedule(config, shape, tile, (self._q, self._dout), rows_are_keys=True)
        return LaunchPlan(tile, config, grid, shape, {**head_dims(self._q, v), **options(tile)}, splits)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    state: Pair | None = None,
    final: bool = True,
    config: KernelConfig | None = None,
) -> Pair:
    """``out = softmax(scale * q k^T) v`` over the keys of one shard, continuing ``state``.

    Online softmax of FlashAttention (Dao et al., arXiv:2205.14135, algorithm 1), restarted from the carried
    ``(out, lse)``. Fold shard after shard: the first call without ``state``, all but the last with ``final=False``.

    Args:
        q: queries ``[B, Sq, H, D]``; float16, bfloat16 or float32; any strides with a unit last one.
        k: keys ``[B, Sk, Hkv, D]``; ``H`` is a multiple of ``Hkv``.
        v: values ``[B, Sk, Hkv, Dv]``.
        bounds: the keys that each query row sees.
        scores: what becomes of ``scale * q k^T``: softcap, ALiBi, dropout.
        softmax_scale: factor of ``q k^T`` before the exponential, 1e-30 to 1e30; default ``1 / sqrt(D)``.
        state: ``(out, lse)`` of the shards before, out fp32 ``[B, Sq, H, Dv]``, lse fp32 ``[B, H, Sq]``; both are
            continued in place (with ``final`` and 16-bit queries only lse is).
        final: return ``out`` in q's dtype; otherwise in fp32, to be passed on as ``state``.
        config: tiles, and which kernel; default by GPU and shape, and the portable kernel.

    Returns:
        ``out [B, Sq, H, Dv]`` and ``lse [B, H, Sq]``, the natural logarithm of the sum of exponentials, fp32. A row
        that has seen no key has ``out = 0`` and ``lse = -inf``.

    A NaN or inf reaches the rows that see it, except that a NaN or inf in ``v`` may also reach rows whose tiles hold
    it under the mask (0 * NaN).

    Raises:
        ValueError: an argument does not fit; the message names it, what it got and what it takes.
    """
    scale = check_inputs(q, k, v, bounds, scores, softmax_scale)
    out, lse = state if state is not None else (None, None)
    if (out is None) != (lse is None):
        raise ValueError("state has only one of out and lse: pass both, or no state")
    if out is None or lse is None:
        state = None
    else:
        check_like("state[0]", out, (*q.shape[:3], v.shape[3]), torch.float32, q.device, written=True)
        check_like("state[1]", lse, (q.shape[0], q.shape[2], q.shape[1]), torch.float32, q.device, contiguous=True)
    made = Forward(q, scale, config, state)
    made.fold(k, v, bounds, scores=scores, final=final)
    return made.result()


def attention_delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor | None = None) -> torch.Tensor:
    """``delta = rowsum(dout * out) - dlse``, fp32 ``[B, H, S]`` (arXiv:2307.08691, algorithm 2, line 4).

    Args:
        dout, out: ``[B, S, H, Dv]``, a unit last stride.
        dlse: gradient of ``lse``, fp32 ``[B, H, S]``, or None.

    Raises:
        ValueError: shapes or strides do not fit.
    """
    check_rank("out", out)
    check_like("out", out, tuple(out.shape), None, out.device)
    check_like("dout", dout, tuple(out.shape), None, out.device)
    batch, rows, heads, _ = out.shape
    if dlse is not None:
        check_like("dlse", dlse, (batch, heads, rows), torch.float32, out.device, contiguous=True)
    delta = torch.empty(batch, heads, rows, device=out.device, dtype=torch.float32)
    launch(
        delta_kernel, programs(rows, DELTA_BLOCK, out), out.device,
        strided(dout), strided(out), dlse, delta, Shape(rows, rows, heads, 1),
        HEAD_DIM_V=out.shape[3], BLOCK_Q=DELTA_BLOCK, num_warps=4,
    )  # fmt: skip
    return delta


def attention_dq(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    accum: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """``dQ = scale * dS K`` over the keys of one shard, plus ``accum``.

    Args:
        dout, q, k, v, lse, bounds, scores, softmax_scale, config: as in :func:`attention_backward`.
        delta: of :func:`attention_delta`.
        accum: fp32 ``[B, Sq, H, D]``, dQ of the shards before.
        out: where the result goes, ``[B, Sq, H, D]``; may be ``accum``. Default: a new tensor in q's dtype.

    Raises:
        ValueError: an argument does not fit.
    """
    scale = check_backward(dout, q, k, v, lse, delta, bounds, scores, softmax_scale)
    target = result_like("out", out, "accum", accum, q)
    Backward(dout, q, lse, delta, scale, config).dq(k, v, bounds=bounds, scores=scores, accum=accum, out=target)
    return target


def attention_dkdv(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    *,
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    accum: Pair | None = None,
    out: Pair | None = None,
    config: KernelConfig | None = None,
) -> Pair:
    """``dK = scale * dS^T Q`` and ``dV = P^T dO`` of one key shard, plus ``accum``.

    Query heads that share a key head are summed in their order, or in parts whose sums are added in theirs
    (``KernelConfig.dkdv_splits``): deterministic either way.

    Args:
        dout, q, k, v, lse, bounds, scores, softmax_scale, config: as in :func:`attention_backward`.
        delta: of :func:`attention_delta`.
        accum: fp32 ``(dk [B, Sk, Hkv, D], dv [B, Sk, Hkv, Dv])`` from the query shards before.
        out: where the result goes; may be ``accum``. Default: new tensors in the dtype of k and v.

    Raises:
        ValueError: an argument does not fit.
    """
    scale = check_backward(dout, q, k, v, lse, delta, bounds, scores, softmax_scale)
    dk_accum, dv_accum = accum or (None, None)
    dk_out, dv_out = out or (None, None)
    dk = result_like("out[0]", dk_out, "accum[0]", dk_accum, k)
    dv = result_like("out[1]", dv_out, "accum[1]", dv_accum, v)
    made = Backward(dout, q, lse, delta, scale, config)
    made.dkdv(k, v, bounds=bounds, scores=scores, accum=accum, out=(dk, dv))
    return dk, dv


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    bounds: Bounds = FULL,
    scores: Scores = PLAIN,
    softmax_scale: float | None = None,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of :func:`attention_forward` for one query shard and one key shard: delta, then dQ, then dK/dV.

    With the global ``out`` and ``lse`` of the whole sequence, the parts of all shards add up to the exact gradient
    (Dao, arXiv:2307.08691, algorithm 2). Deterministic: no atomics; unless ``config.backward`` is ``"single_pass"``,
    which computes all three at once and adds to dQ in no fixed order (see :func:`attention_gradients`). Without a
    config a tuned table that measured ``"single_pass_deterministic"`` as faster makes it that one.

    Args:
        dout: gradient of ``out``, ``[B, Sq, H, Dv]``.
        q, k, v, bounds, scores, softmax_scale, config: as in the forward.
        out, lse: of the whole forward, after its last shard.
        dlse: gradient of ``lse``, fp32 ``[B, H, Sq]``, or None.
        dq, dk, dv: fp32 accumulators, added to in place; new tensors in the inputs' dtype where None. ``dk`` and
            ``dv`` are passed both or neither.

    Returns:
        ``(dq, dk, dv)``, shaped like q, k and v.

    Raises:
        ValueError: an argument does not fit.
    """
    if (dk is None) != (dv is None):
        raise ValueError("dk and dv: pass both accumulators, or neither")
    check_qkv(q, k, v)
    check_config(config, q, v)
    check_like("out", out, (*q.shape[:3], v.shape[3]), None, q.device)
    for name, given, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):  # before any of them is written
        if given is not None:
            check_like(name, given, tuple(like.shape), torch.float32, like.device, written=True)
    if is_described(config):
        check_describable(TAKES, dk=dk, dv=dv)
    check_tiles(config, q, v, bounds.block, backward=True)
    accum = None if dk is None or dv is None else (dk, dv)
    delta = attention_delta(dout, out, dlse)
    call: dict[str, Any] = {"bounds": bounds, "scores": scores, "softmax_scale": softmax_scale, "config": config}
    return backward_of(dout, q, k, v, lse, delta, dq=dq, accum=accum, **call)


def backward_of(
    *given: torch.Tensor, dq: torch.Tensor | None = None, accum: Pair | None = None, **call: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`attention_backward` of what :func:`attention_dq` is given: one pass or two, by the config or a table."""
    _, q, _, v, *_ = given
    how = launch_traits(call.get("bounds", FULL), call.get("scores", PLAIN))
    if is_single_pass(config := backward_config(call.get("config"), q, v, **how)):
        total = torch.zeros(q.shape, device=q.device, dtype=torch.float32) if dq is None else dq
        made = attention_gradients(*given, dq=total, accum=accum, out=accum, **call | {"config": config})
        return total.to(q.dtype) if dq is None else total, *made
    dq = attention_dq(*given, accum=dq, out=dq, **call)
    return dq, *attention_dkdv(*given, accum=accum, out=accum, **call)
