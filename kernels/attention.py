"""Host entries of the attention kernels: argument checks, allocation and launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .bounds import FULL, Bounds
from .checks import (
    check_backward_inputs,
    check_four_dims,
    check_inputs,
    check_like,
    check_qkv,
    resolve_dkdv_output,
    resolve_grad_output,
)
from .config import KernelConfig, Tile, is_single_pass
from .device.backward import delta_kernel, dkdv_kernel, dq_kernel, reduce_kernel
from .device.forward import forward_kernel
from .device.tile_ops import MAX_PART_WIDTH
from .device.tiles import LaunchShape
from .hopper_forward_launch import launch_hopper_forward, runs_hopper_forward
from .launch import (
    DESCRIPTOR_ERROR_PREFIX,
    Pair,
    check_descriptor_support,
    check_tma_alignment,
    empty_split_sums,
    grid_size,
    has_descriptor_epilogue,
    head_dims,
    launch,
    launch_shape,
    mask_interval,
    score_modifiers,
    strided_tensor,
    tile_options,
    tma_descriptor,
)
from .launch_plan import LaunchPlan, QueryLauncher, backward_config, check_config, check_tiles, tile_criteria
from .scores import PLAIN, Scores
from .single_pass import attention_gradients
from .tile_schedule import resolve_splits, split_shape, tile_schedule

REDUCE_BLOCK = 16
"""Keys per program of `reduce_kernel`. All parts of a few rows are many bytes already, and 16 divides every tile."""

REDUCE_WARPS = 8  # with 4 warps, ptxas keeps two addresses in local memory on sm_100

DELTA_BLOCK = 64
"""Queries per program of `delta_kernel`: enough loads in flight, and few idle rows at the end of a shard."""


def delta_warps(head_dim_v: int) -> int:
    """Return the warps per program with which `delta_kernel` does not spill in fp32."""
    return 4 if head_dim_v <= MAX_PART_WIDTH else 8


class ForwardLauncher(QueryLauncher):
    """Forward of one query tensor over one key shard after another; the kernel updates the softmax state."""

    def __init__(
        self, q: Tensor, softmax_scale: float, config: KernelConfig | None, state: Pair | None = None,
        max_logits: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(q, softmax_scale, config)
        self._state, self._row_max = state, None
        if max_logits:
            self._row_max = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)

    def fold(self, k: Tensor, v: Tensor, bounds: Bounds, *, scores: Scores = PLAIN, final: bool) -> None:
        """Add the keys and values of one shard to the state."""
        q, plan = self._q, self._get_plan("forward", k, v, bounds, scores)
        dtype, out = q.dtype if final else torch.float32, None
        if self._state is None:
            lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device, dtype=torch.float32)
        else:
            out, lse = self._state
        in_place = out is not None and out.dtype == dtype
        result = out if out is not None and in_place else q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
        self._state = result, lse
        if plan.is_hopper and self._runs_hopper(
            id(plan),
            k,
            v,
            lambda: runs_hopper_forward(q, k, v, bounds, scores, plan.tile, requested=self._config is not None),
        ):
            launch_hopper_forward(
                q, k, v, out, result, lse, bounds, self._scale, plan.tile, self._descriptors, self._row_max
            )
            return
        q_rows, k_rows = None if plan.shape.packed else plan.tile.block_q, plan.tile.block_k
        for columns in plan.value_parts:
            # All launches read the carried lse, and only the last one may update it.
            is_last = columns is plan.value_parts[-1]
            v_part, state, part = (
                x if columns is None else x[..., columns] for x in (v, result if out is None else out, result)
            )
            first, second = self._load_arguments(plan, (q, q_rows), (k, k_rows), (v_part, k_rows))
            launch(
                forward_kernel, plan.grid, q.device,
                *first, self._cached_carried(state), self._cached_carried(part),
                lse if is_last or out is None else lse.clone(),
                mask_interval(bounds), plan.shape, self._scale, score_modifiers(scores), *second, self._row_max,
                HAS_STATE=out is not None, IN_PLACE=in_place, **plan.options | {"HEAD_DIM_V": v_part.shape[3]},
            )  # fmt: skip

    def result(self) -> Pair:
        """Return ``(out, lse)`` after the final shard."""
        assert self._state is not None
        return self._state

    def max_logits(self) -> Tensor:
        """Return the largest score of each head so far, fp32 ``[H]``; -inf for a head that has seen no key."""
        row_max = self._row_max
        assert row_max is not None, "max_logits was False"
        return row_max.amax((0, 2)) if row_max.numel() else row_max.new_full(row_max.shape[1:2], -torch.inf)


class BackwardLauncher(QueryLauncher):
    """Two-pass backward of one query tensor over one key shard after another."""

    def __init__(
        self, dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, softmax_scale: float,
        config: KernelConfig | None,
    ) -> None:  # fmt: skip
        super().__init__(q, softmax_scale, config)
        self._dout, self._lse, self._delta = dout, lse, delta
        self._dout_and_q = strided_tensor(dout), self._q_arg

    def dq(
        self, k: Tensor, v: Tensor, *, bounds: Bounds, scores: Scores, accum: Tensor | None,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Write ``accum`` plus dQ from one key shard to ``out``, which may be ``accum`` itself."""
        q, plan = self._q, self._get_plan("dq", k, v, bounds, scores)
        sum_arg = self._cached_carried(out if accum is None else accum)
        q_rows, k_rows = None if plan.shape.packed else plan.tile.block_q, plan.tile.block_k
        first, second = self._load_arguments(plan, (self._dout, q_rows), (q, q_rows), (k, k_rows), (v, k_rows))
        launch(
            dq_kernel, plan.grid, q.device,
            *first, self._lse, self._delta, sum_arg,
            self._cached_carried(out),
            mask_interval(bounds), plan.shape, self._scale, score_modifiers(scores), *second,
            **plan.options, HAS_SUM=accum is not None, IN_PLACE=out is accum,
        )  # fmt: skip

    def dkdv(self, k: Tensor, v: Tensor, *, bounds: Bounds, scores: Scores, accum: Pair | None, out: Pair) -> None:
        """Write ``accum`` plus dK and dV of one key shard to ``out``, which may be ``accum`` itself."""
        q, plan, (dk, dv) = self._q, self._get_plan("dkdv", k, v, bounds, scores), out
        sums = out if accum is None else accum
        in_place = dk is sums[0] and dv is sums[1]
        parts = out if plan.splits == 1 else (empty_split_sums(k, plan.splits), empty_split_sums(v, plan.splits))
        to_arg = self._output_arg(plan, v, out, sums)
        out_args = to_arg(parts[0]), to_arg(parts[1])
        sum_args = out_args if in_place or plan.splits > 1 else (to_arg(sums[0]), to_arg(sums[1]))
        query_bounds = mask_interval(bounds.transposed(k.shape[1]))
        launch(
            dkdv_kernel, plan.grid, q.device,
            *self._dout_and_q, strided_tensor(k), strided_tensor(v), self._lse, self._delta, *sum_args, *out_args,
            query_bounds,
            plan.shape, self._scale, score_modifiers(scores, rows_are_keys=True),
            **plan.options, HAS_SUM=accum is not None and plan.splits == 1, IN_PLACE=accum is not None and in_place,
        )  # fmt: skip
        if plan.splits > 1:
            launch(
                reduce_kernel, grid_size(k.shape[1], REDUCE_BLOCK, k), q.device,
                *map(strided_tensor, parts), *map(strided_tensor, sums), strided_tensor(dk), strided_tensor(dv),
                query_bounds,
                launch_shape(k, q)._replace(splits=plan.splits), **head_dims(q, v), BLOCK_Q=plan.tile.block_q,
                BLOCK_K=plan.tile.block_k, BLOCK_ROWS=REDUCE_BLOCK, HAS_SUM=accum is not None,
                IN_PLACE=accum is not None and in_place, num_warps=REDUCE_WARPS,
            )  # fmt: skip

    def _output_arg(self, plan: LaunchPlan, v: Tensor, out: Pair, accum: Pair) -> Callable[[Tensor], Any]:
        """Return the function that makes a kernel argument of dK or dV: a `StridedTensor` or a TMA descriptor."""
        if not has_descriptor_epilogue(plan.config):
            return strided_tensor
        try:
            check_descriptor_support(self._q, v)
            outputs = {"out[0]": out[0], "out[1]": out[1], "accum[0]": accum[0], "accum[1]": accum[1]}
            check_tma_alignment(DESCRIPTOR_ERROR_PREFIX, **outputs)
        except ValueError:
            if self._config is not None:
                raise
            return strided_tensor  # a tuned table chose descriptors, not the caller, so fall back
        return partial(tma_descriptor, rows=plan.tile.block_k) if v.numel() else strided_tensor

    def _make_plan(self, tile: Tile, config: KernelConfig | None, kernel: str, k: Tensor, v: Tensor) -> LaunchPlan:
        if kernel == "dq":
            return super()._make_plan(tile, config, kernel, k, v)
        splits = resolve_splits(config, self._q, k, tile.block_k)
        shape = split_shape(launch_shape(k, self._q), splits)
        grid, shape = tile_schedule(config, shape, tile, (self._q, self._dout), rows_are_keys=True)
        return LaunchPlan(tile, config, grid, shape, {**head_dims(self._q, v), **tile_options(tile)}, splits)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *,
    bounds: Bounds = FULL, scores: Scores = PLAIN, softmax_scale: float | None = None, state: Pair | None = None,
    final: bool = True, config: KernelConfig | None = None,
) -> Pair:  # fmt: skip
    """Compute ``out = softmax(scale * q k^T) v`` over the keys of one shard, continuing ``state``.

    The kernel runs the online softmax of FlashAttention (Dao et al., arXiv:2205.14135, algorithm 1) and merges the
    carried ``(out, lse)``. To add shard after shard, omit ``state`` in the first call and pass ``final=False`` in all
    calls but the last.

    A NaN or infinity reaches the rows that can see it. In ``v`` it can also reach masked rows of the same tile,
    because 0 * NaN is NaN.

    Args:
        q: Queries ``[B, Sq, H, D]``, float16, bfloat16 or float32. The last stride must be 1.
        k: Keys ``[B, Sk, Hkv, D]``. ``H`` must be a multiple of ``Hkv``.
        v: Values ``[B, Sk, Hkv, Dv]``.
        bounds: The keys that each query row sees.
        scores: Changes to ``scale * q k^T``: softcap, ALiBi and dropout.
        softmax_scale: Factor of ``q k^T``, 1e-30 to 1e30. Default: ``1 / sqrt(D)``.
        state: ``(out, lse)`` over the earlier shards, fp32 ``[B, Sq, H, Dv]`` and fp32 ``[B, H, Sq]``. Both are
            updated in place, except ``out`` of a ``final`` call with 16-bit queries.
        final: Return ``out`` in q's dtype. If False, return fp32, to be passed on as ``state``.
        config: Tiles and options. Default: by GPU and shape, with the portable kernel.

    Returns:
        ``out [B, Sq, H, Dv]``, and ``lse [B, H, Sq]`` in fp32, the natural log of the sum of exponentials. A row that
        has seen no key has ``out = 0`` and ``lse = -inf``.

    Raises:
        ValueError: If an argument does not fit. The message names the argument, its value and what is allowed.
    """
    scale = check_inputs(q, k, v, bounds, scores, softmax_scale)
    out, lse = state if state is not None else (None, None)
    if (out is None) != (lse is None):
        raise ValueError("state has only one of out and lse: pass both, or no state")
    if out is None or lse is None:
        state = None
    else:
        check_like("state[0]", out, (*q.shape[:3], v.shape[3]), torch.float32, q.device, is_output=True)
        check_like(
            "state[1]", lse, (q.shape[0], q.shape[2], q.shape[1]), torch.float32, q.device, needs_contiguous=True
        )
    launcher = ForwardLauncher(q, scale, config, state)
    launcher.fold(k, v, bounds, scores=scores, final=final)
    return launcher.result()


def attention_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Compute ``delta = rowsum(dout * out) - dlse``, fp32 ``[B, H, S]`` (arXiv:2307.08691, algorithm 2, line 4).

    Args:
        dout: Gradient of ``out``, ``[B, S, H, Dv]``. The last stride must be 1.
        out: Output of the forward, ``[B, S, H, Dv]``. The last stride must be 1.
        dlse: Gradient of ``lse``, fp32 ``[B, H, S]``, or None.

    Raises:
        ValueError: If a shape or stride does not fit.
    """
    check_four_dims("out", out)
    check_like("out", out, tuple(out.shape), None, out.device)
    check_like("dout", dout, tuple(out.shape), None, out.device)
    batch, rows, heads, _ = out.shape
    if dlse is not None:
        check_like("dlse", dlse, (batch, heads, rows), torch.float32, out.device, needs_contiguous=True)
    delta = torch.empty(batch, heads, rows, device=out.device, dtype=torch.float32)
    launch(
        delta_kernel, grid_size(rows, DELTA_BLOCK, out), out.device,
        strided_tensor(dout), strided_tensor(out), dlse, delta, LaunchShape(rows, rows, heads, 1),
        HEAD_DIM_V=out.shape[3], BLOCK_Q=DELTA_BLOCK, num_warps=delta_warps(out.shape[3]),
    )  # fmt: skip
    return delta


def attention_dq(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *,
    bounds: Bounds = FULL, scores: Scores = PLAIN, softmax_scale: float | None = None, accum: Tensor | None = None,
    out: Tensor | None = None, config: KernelConfig | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``dQ = scale * dS K`` over the keys of one shard, plus ``accum``.

    ``accum`` is dQ from the earlier key shards, fp32 ``[B, Sq, H, D]``. ``out`` receives the result and may be
    ``accum``; by default it is a new tensor in q's dtype. ``delta`` is the result of :func:`attention_delta`. The other
    arguments are those of :func:`attention_backward`.

    Raises:
        ValueError: If an argument does not fit. The message names the argument, its value and what is allowed.
    """
    scale = check_backward_inputs(dout, q, k, v, lse, delta, bounds, scores, softmax_scale)
    dq = resolve_grad_output("out", out, "accum", accum, q)
    BackwardLauncher(dout, q, lse, delta, scale, config).dq(k, v, bounds=bounds, scores=scores, accum=accum, out=dq)
    return dq


def attention_dkdv(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, *,
    bounds: Bounds = FULL, scores: Scores = PLAIN, softmax_scale: float | None = None, accum: Pair | None = None,
    out: Pair | None = None, config: KernelConfig | None = None,
) -> Pair:  # fmt: skip
    """Compute ``dK = scale * dS^T Q`` and ``dV = P^T dO`` of one key shard, plus ``accum``.

    The query heads that share a key head are summed in a fixed order, also if ``KernelConfig.dkdv_splits`` divides
    them among programs. The result is deterministic.

    ``accum`` is ``(dk, dv)`` from the earlier query shards, fp32 ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``. ``out``
    receives the result and may be ``accum``; by default it is a pair of new tensors in the dtype of k and v. ``delta``
    is the result of :func:`attention_delta`. The other arguments are those of :func:`attention_backward`.

    Raises:
        ValueError: If an argument does not fit. The message names the argument, its value and what is allowed.
    """
    scale = check_backward_inputs(dout, q, k, v, lse, delta, bounds, scores, softmax_scale)
    dk_dv = resolve_dkdv_output(out, accum, k, v)
    BackwardLauncher(dout, q, lse, delta, scale, config).dkdv(
        k, v, bounds=bounds, scores=scores, accum=accum, out=dk_dv
    )
    return dk_dv


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    dlse: Tensor | None = None, bounds: Bounds = FULL, scores: Scores = PLAIN, softmax_scale: float | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, config: KernelConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of :func:`attention_forward` for one query shard and one key shard.

    With ``out`` and ``lse`` of the whole sequence, the results of all pairs of shards add up to the exact gradient
    (Dao, arXiv:2307.08691, algorithm 2). By default delta, dQ and dK/dV are one kernel each, and the result is
    deterministic. ``config.backward="single_pass"`` computes dQ, dK and dV in one kernel and adds to dQ in no fixed
    order; see :func:`attention_gradients`. If no config is given and a tuned table measured
    ``"single_pass_deterministic"`` as faster, the call uses that mode.

    Args:
        dout: Gradient of ``out``, ``[B, Sq, H, Dv]`` in the dtype of q.
        q: Queries ``[B, Sq, H, D]``.
        k: Keys ``[B, Sk, Hkv, D]``.
        v: Values ``[B, Sk, Hkv, Dv]``.
        out: Output of the forward after the last shard, ``[B, Sq, H, Dv]``.
        lse: ``lse`` of the forward after the last shard, fp32 ``[B, H, Sq]``.
        dlse: Gradient of ``lse``, fp32 ``[B, H, Sq]``, or None.
        bounds: The keys that each query row sees.
        scores: Score modifiers of the forward.
        softmax_scale: Factor of ``q k^T``. Default: ``1 / sqrt(D)``.
        dq: fp32 accumulator, updated in place. Default: a new tensor in q's dtype.
        dk: fp32 accumulator, updated in place. Default: a new tensor in k's dtype.
        dv: fp32 accumulator, updated in place. Pass both of ``dk`` and ``dv``, or neither.
        config: Tiles and options. Default: by GPU and shape.

    Returns:
        ``(dq, dk, dv)``, shaped like q, k and v.

    Raises:
        ValueError: If an argument does not fit. The message names the argument, its value and what is allowed.
    """
    if (dk is None) != (dv is None):
        raise ValueError("only one of dk and dv is given: pass both accumulators, or neither")
    check_qkv(q, k, v)
    check_config(config, q, v)
    check_like("out", out, (*q.shape[:3], v.shape[3]), None, q.device)
    for name, grad, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):  # check all before any is written
        if grad is not None:
            check_like(name, grad, tuple(like.shape), torch.float32, like.device, is_output=True)
    if has_descriptor_epilogue(config):
        check_tma_alignment(DESCRIPTOR_ERROR_PREFIX, dk=dk, dv=dv)
    check_tiles(config, q, v, bounds.block, backward=True)
    accum = None if dk is None or dv is None else (dk, dv)
    delta = attention_delta(dout, out, dlse)
    call: dict[str, Any] = {"bounds": bounds, "scores": scores, "softmax_scale": softmax_scale, "config": config}
    return backward_from_delta(dout, q, k, v, lse, delta, dq=dq, accum=accum, **call)


def backward_from_delta(
    *inputs: Tensor, dq: Tensor | None = None, accum: Pair | None = None, **call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ, dK and dV from delta, in one pass or two as the config or a tuned table says.

    ``inputs`` are the positional arguments of :func:`attention_dq`, and ``call`` holds its keyword arguments.
    """
    _, q, _, v, *_ = inputs
    criteria = tile_criteria(call.get("bounds", FULL), call.get("scores", PLAIN))
    if is_single_pass(config := backward_config(call.get("config"), q, v, **criteria)):
        dq_sum = torch.zeros(q.shape, device=q.device, dtype=torch.float32) if dq is None else dq
        dk_dv = attention_gradients(*inputs, dq=dq_sum, accum=accum, out=accum, **call | {"config": config})
        return dq_sum.to(q.dtype) if dq is None else dq_sum, *dk_dv
    dq = attention_dq(*inputs, accum=dq, out=dq, **call)
    return dq, *attention_dkdv(*inputs, accum=accum, out=accum, **call)
