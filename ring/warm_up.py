"""Compilation of all kernels of a call side by side, before its first hop.

The loops run once with tensors on the meta device and without transfers. They launch nothing, but the launches that
they ask for are recorded and compiled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..comm import Fence, Message, Slots
from ..kernels.gpu import GpuSpec, gpu_specs
from ..kernels.warm_up import Launch, collect_launches, compile_launches, meta_like
from . import loop
from .backends import backward_backends, forward_backends
from .buffers import Pair, RingCall, ignore_post
from .local.fused import TritonAttention
from .prepare import Call
from .schedule.plan import Plan

logger = logging.getLogger(__name__)

META = torch.device("meta")

_COMPILED: set[Hashable] = set()  # kinds of calls whose kernels are compiled


class _PassedFence:
    """Fence of a transfer that does not take place."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        return True


class _NoTransport:
    """Transport that moves nothing, for loops on the meta device."""

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence]) -> Fence:
        return _PassedFence()

    def mark(self) -> Fence:
        return _PassedFence()


def compile_kernels(call: Call, running: RingCall, q: Tensor, k: Tensor, v: Tensor, start: Pair | None) -> None:
    """Compile the kernels of this phase of a call, unless a call of the same kind has compiled them.

    A forward whose inputs need a gradient also compiles the backward. Nothing happens without a GPU, or with another
    local kernel than ``"triton"``.
    """
    gpu = gpu_specs(q.device)
    if q.device.type != "cuda" or gpu is None or not isinstance(call.backend, TritonAttention):
        return
    phases = [running.phase]
    if running.phase == "forward" and call.has_backward:
        phases.append("backward")
    forms = [(x.shape[2:], x.stride()[2:], x.shape[1] % 16 == 0, x.dtype) for x in (q, k, v)]
    scores, wires = running.scores, (running.wire, running.grad_wire)
    modified = (bool(scores.softcap), scores.alibi_slopes is None, scores.dropout_p > 0)
    kind = (
        q.device,
        *phases,
        *forms,
        running.plan.mask_kinds,
        modified,
        call.config,
        len(running.chunks),
        start is None,
    )
    kind = (
        *kind,
        call.args.return_max_logits,
        min(len(running.plan.hops), 3),
        *(None if wire is None else wire.name for wire in wires),
    )
    if kind in _COMPILED:
        return
    _COMPILED.add(kind)
    begin = time.monotonic()
    launches = [x for phase in phases for x in record_phase(gpu, call, running, phase, q, k, v, start)]
    with torch.cuda.device(q.device):
        count = compile_launches(launches, share=call.ring.rank / call.ring.size)
    if count:
        logger.info("%d kernels are ready after %.1f s", count, time.monotonic() - begin)


def record_phase(
    gpu: GpuSpec, call: Call, running: RingCall, phase: str, q: Tensor, k: Tensor, v: Tensor, start: Pair | None
) -> list[Launch]:
    """Return the launches of the forward or the backward of a call, in order."""
    plan = running.plan
    transports: Any = (_NoTransport(),) * len(running.transports)
    dry = replace(
        running,
        plan=_dry_plan(plan),
        phase=phase,
        transports=transports,
        kv_slots=Slots(running.kv_slots.count, META),
        dkv_slots=Slots(max(plan.dkv_slots * len(running.chunks), 1), META),
        record_span=lambda *_: nullcontext(),
        record_wait=lambda *_: nullcontext(),
        on_post=ignore_post,
        posts=[],
    )
    q, k, v = map(meta_like, (q, k, v))
    options: dict[str, Any] = {"softmax_scale": call.softmax_scale, "config": call.config}

    def run() -> None:
        if phase == "forward":
            state = None if start is None else (meta_like(start[0]), meta_like(start[1]))
            options["max_logits"] = call.args.return_max_logits
            loop.forward(dry, forward_backends(call.backend, dry.heads, q, start=state, **options), k, v)
        else:
            out = q.new_empty((*q.shape[:3], v.shape[3]))
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
            backends = backward_backends(call.backend, dry.heads, out, q, out, lse, **options)
            loop.backward(dry, backends, k, v, (k.new_empty(k.shape), v.new_empty(v.shape)))

    return collect_launches(gpu, run)


def _dry_plan(plan: Plan) -> Plan:
    """Return the plan on the meta device."""
    rows = plan.send_index
    # bounds cache tensors, so the loops must not see the real ones
    hop_masks = tuple(tuple(part._replace(bounds=part.bounds.to(META)) for part in parts) for parts in plan.hop_masks)
    rows = None if rows is None else meta_like(rows)
    return replace(plan, hop_masks=hop_masks, send_index=rows, runs=tuple(map(_dry_plan, plan.runs)))
