"""Causes of wrong results: what a known mistake would give is computed in float64 and compared with the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .evidence import Evidence, join_parts
from .ranks import Reply
from .standalone import GRADIENTS, OUTPUTS, Results, attend_plainly, number_documents, visible_keys

NO_CAUSE = "no known cause"
ZERO, NOT_FINITE, BLIND = "the output is all zero", "it is not finite", "rows that see no key are not 0 and -inf"
SCALE_TWICE, HEADS = "the scale is applied twice", "query head h reads key/value head h % Hkv"
SINK, SINK_PER_HOP = "the sink is dropped", "the sink is counted once per hop"
BASE_2, BASE_2_MERGE = "lse is in base 2", "parts are merged by powers of 2 of a natural lse"
BASE_E_MERGE, LSE_16 = "parts are merged as if an lse in base 2 were natural", "lse is rounded to 16 bit"
UNSCALED, NOT_NORMALISED = "parts are merged without rescaling", "the sum is not divided by that of the weights"
ONE_PART, LARGEST_LSE = "only one part is used", "lse is the largest part's, not that of the sum"
ZERO_LSE = "an lse of -inf is read as 0"
FUTURE, DOCUMENT, PADDING = "keys from the future are seen", "keys of another document are seen", "padding is attended"
WINDOW_EDGE, OUTSIDE_WINDOW = "the window is off by one", "keys outside the window are seen"
UNSEEN = "visible keys are not seen"
LOCAL, SHIFTED = "dK/dV are not reduced over the ranks", "dK/dV are those of another rank's shard"
MISROUTED = "parts of dK/dV are added to those of other shards"
STALE, NO_GRADIENT = "the backward uses stale K/V", "the gradient is zero"
EQUAL_ROWS, LSE_GRADIENT = "equal rows of a batch get different results", "the gradient of lse is ignored"
DROPOUT_SCALE = "weights that dropout keeps are not divided by 1 - dropout_p"
DROPOUT_RATE, DROPOUT_WORLD = "dropout drops the wrong share", "dropout depends on the number of ranks"
ROUNDING = "too much rounding in 16 bit"
MIXTURE_NOISE = 1e-3  # smaller shares of a gradient do not count
PROBE_THRESHOLD = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}

Hypothesis = tuple[str, Results]
"""A cause, and the results that it would give."""
Runner = Callable[[Case], Reply]
"""Function that runs a case on all its ranks."""


def find_cause(evidence: Evidence, run: Runner) -> str:
    """Return the cause of a wrong result, or :data:`NO_CAUSE`; ``run`` runs the probe."""
    if evidence.is_wrong("out") or evidence.is_wrong("lse"):
        cause = find_output_cause(evidence, _outputs(evidence))
        return cause or (evidence.is_wrong("out") and _find_visibility(evidence, run)) or NO_CAUSE
    for name in filter(evidence.is_wrong, ("dk", "dv", "dq", "dsink")):
        if not evidence.actual[name].any():
            return f"{NO_GRADIENT}: {name}"
        if not evidence.actual[name].isfinite().all():
            return f"{NOT_FINITE}: {name}"
    cause = _match(evidence, GRADIENTS, _gradients(evidence)) or _find_mixture(evidence)
    return cause or (MISROUTED if _is_misrouted(evidence) else NO_CAUSE)


def find_output_cause(evidence: Evidence, hypotheses: Iterator[Hypothesis]) -> str:
    """Return the cause of a wrong ``out`` or ``lse``, or an empty text."""
    out, blind = evidence.actual["out"], evidence.exact["blind"]
    rows = {name: evidence.difference(name) for name in OUTPUTS if name in evidence.actual}
    rows["out"] = rows["out"].amax(-1).transpose(1, 2)
    if evidence.is_wrong("out") and not out.any():
        return ZERO
    if not any((off > evidence.limits[name])[~blind].any() for name, off in rows.items()):
        return BLIND
    return _match(evidence, OUTPUTS, hypotheses) if out.isfinite().all() else NOT_FINITE


def _match(evidence: Evidence, names: Iterable[str], hypotheses: Iterator[Hypothesis]) -> str:
    """Return the first cause that explains every wrong result it predicts, and at least one."""
    for cause, results in hypotheses:
        wrong = [name for name in names if name in results and evidence.is_wrong(name)]
        if wrong and all(_fits(evidence, name, results[name]) for name in wrong):
            return cause
    return ""


def _fits(evidence: Evidence, name: str, alternative: Tensor) -> bool:
    """Return True if a result is what ``alternative`` would give, and not just near the exact result."""
    actual = evidence.actual[name].double()
    off = (actual - alternative).abs().masked_fill(actual == alternative, 0.0).max().item()
    error = evidence.errors[name] if math.isfinite(evidence.errors[name]) else 0.0
    return bool(off <= evidence.limits[name] * max(1.0, 0.02 * error))


def _outputs(evidence: Evidence) -> Iterator[Hypothesis]:
    """Yield mistakes in the forward pass."""
    whole, call = evidence.whole, evidence.case.call()
    scale = call.softmax_scale or call.head_dim**-0.5
    if call.sink is not None:
        yield SINK, attend_plainly(whole, replace(call, sink=None))
    if call.heads != call.kv_heads:
        yield HEADS, attend_plainly(whole, call, heads=torch.arange(call.heads) % call.kv_heads)
    yield SCALE_TWICE, attend_plainly(whole, replace(call, softmax_scale=scale**2))
    neutral: dict[str, tuple[str, Any]] = {
        "scale": ("softmax_scale", None), "softcap": ("softcap", 0.0), "alibi": ("alibi_slopes", None),
    }  # fmt: skip
    if evidence.case.scores in neutral:
        name, value = neutral[evidence.case.scores]
        yield f"{name} is ignored", attend_plainly(whole, replace(call, **{name: value}))
    yield BASE_2, {"lse": evidence.exact["lse"] / math.log(2)}
    if call.dropout_p:
        yield DROPOUT_SCALE, attend_plainly(whole, call, factors=evidence.factors * (1 - call.dropout_p))
    parts = [attend_plainly(whole, call, keys=keys) for keys in _shard_masks(evidence)]
    out, lse, weights = (torch.stack([part[name] for part in parts]) for name in ("out", "lse", "weights"))
    if call.sink is not None:
        yield SINK_PER_HOP, {"out": weigh_parts(out, (lse - lse.amax(0)).exp()), "lse": lse.logsumexp(0)}
    yield from wrong_merges(out, lse)
    largest = weights.amax(-1)  # a part may be relative to its own maximum
    yield UNSCALED, {"out": weigh_parts(out, torch.where(largest > 0, 1 / largest, 0.0))}


def _shard_masks(evidence: Evidence) -> Tensor:
    """Return which rank has which token, ``[ranks, S]``."""
    return torch.stack([torch.zeros(evidence.case.tokens).index_fill(0, at, 1) > 0 for at in evidence.shards])


def weigh_parts(outs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of parts, ``outs [parts, B, S, H, D]`` by ``weights [parts, B, H, S]``."""
    return _add_parts(outs, weights / weights.sum(0).clamp(min=1e-300))


def _add_parts(outs: Tensor, weights: Tensor) -> Tensor:
    return (weights.transpose(2, 3)[..., None] * outs).sum(0)


def wrong_merges(outs: Tensor, lses: Tensor) -> Iterator[Hypothesis]:
    """Yield wrong ways to merge parts, ``outs [parts, B, S, H, D]`` with ``lses [parts, B, H, S]``."""
    largest, total, base = lses.amax(0), lses.logsumexp(0), math.log(2)
    pivot = largest.nan_to_num(neginf=0.0)
    for cause, factor in ((BASE_2_MERGE, base), (BASE_E_MERGE, 1 / base)):
        yield cause, {"out": weigh_parts(outs, ((lses - pivot) * factor).exp())}
        for at in (pivot, total.nan_to_num(neginf=0.0)):
            yield f"{cause}, and {NOT_NORMALISED}", {"out": _add_parts(outs, ((lses - at) * factor).exp())}
    yield NOT_NORMALISED, {"out": _add_parts(outs, (lses - pivot).exp())}
    for other in (lses.bfloat16(), lses.half(), lses.nan_to_num(neginf=0.0)):
        merged = {"out": weigh_parts(outs, (other - pivot).exp()), "lse": other.double().logsumexp(0)}
        yield ZERO_LSE if other.dtype == lses.dtype else LSE_16, merged
    yield from (
        (UNSCALED, {"out": x}) for x in (outs.sum(0), outs.mean(0), weigh_parts(outs, (lses > -math.inf) * 1.0))
    )
    yield from ((ONE_PART, {"out": x}) for x in (outs[0], outs[-1]))
    yield from ((BASE_2, {"lse": total / base}), (LARGEST_LSE, {"lse": largest}))


def _find_visibility(evidence: Evidence, run: Runner) -> str:
    """Return what a probe finds: keys that move an output that must not see them, and keys that do not."""
    probe = replace(evidence.case, gradients="none", is_probe=True)
    if probe.scores == "dropout" or (reply := run(probe)).status != "ok":  # without dropout, it is right
        return ""
    out = join_parts(probe, reply.values)[0]["out"].double()
    changes = (out - out[-1]).abs().amax((2, 3)) > PROBE_THRESHOLD[probe.dtype]
    if changes[0].any():
        return EQUAL_ROWS
    influence = changes[1:-1].T
    call, visible = probe.call(), visible_keys(probe.call())[0]
    document, at, (left, right) = number_documents(call), torch.arange(call.tokens), call.window_size
    leaks, unseen = influence & ~visible, visible & ~influence
    same, back = document[:, None] == document, at[:, None] - at
    causes = {DOCUMENT: leaks & ~same, FUTURE: leaks & same & (back < 0) & call.causal}
    if call.seqused_k is not None:
        causes[PADDING] = leaks & (at >= call.seqused_k[0])
    if "window" in probe.mask:
        outside = leaks & ((back > left + 1) | (-back > right + 1))
        edge = (back == left) | (back == left + 1) | (back == -right) | (back == -right - 1)
        causes |= {WINDOW_EDGE: (leaks | unseen) & edge & ~outside.any(), OUTSIDE_WINDOW: outside}
        unseen = unseen & ~edge
    if probe.scores != "alibi" and probe.dtype == "float32":  # else a weight may be too small to see
        causes[UNSEEN] = unseen
    return "; ".join(_describe_pairs(evidence, cause, pairs) for cause, pairs in causes.items() if pairs.any())


def _describe_pairs(evidence: Evidence, cause: str, pairs: Tensor) -> str:
    query, key = pairs.nonzero()[0].tolist()
    example = f"key {key} of rank {evidence.owner(key)} by query {query} of rank {evidence.owner(query)}"
    return f"{cause} ({int(pairs.sum())} pairs, such as {example})"


def _gradients(evidence: Evidence) -> Iterator[Hypothesis]:
    """Yield mistakes in the backward pass, given that the forward is right."""
    world, call, parts = evidence.case.world, evidence.case.call(), _parts_by_queries(evidence)
    owner = _shard_masks(evidence).double()[:, None, :, None, None]
    if call.needs_lse:
        yield LSE_GRADIENT, attend_plainly(evidence.whole, replace(call, needs_lse=False), factors=evidence.factors)
    if world > 1:
        yield LOCAL, {name: (torch.stack([part[name] for part in parts]) * owner).sum(0) for name in ("dk", "dv")}
    if evidence.case.scores in ("plain", "scale") and evidence.is_even:
        for step, reach in product((1, -1), (1, world)):  # the K/V of the hop before, or always the first
            yield STALE, {"dq": _compute_stale_dq(evidence, step, reach)}


def _parts_by_queries(evidence: Evidence) -> list[Results]:
    """Return the exact gradients that the queries of every rank contribute."""
    whole, call = evidence.whole, evidence.case.call()
    grads = [{"dout": whole["dout"] * at[:, None, None], "dlse": whole["dlse"] * at} for at in _shard_masks(evidence)]
    return [attend_plainly(whole | pair, call, factors=evidence.factors) for pair in grads]


def _compute_stale_dq(evidence: Evidence, step: int, reach: int) -> Tensor:
    """Return dq if a hop used the K/V of ``reach`` hops before, at least of the first; hops go by ``step`` ranks."""
    call, world, shards = evidence.case.call(), evidence.case.world, evidence.shards
    scale, group = call.softmax_scale or call.head_dim**-0.5, call.heads // call.kv_heads
    q, k, v, dout = (evidence.whole[name].double().transpose(1, 2) for name in ("q", "k", "v", "dout"))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    delta = (dout * evidence.exact["out"].transpose(1, 2)).sum(-1) - evidence.whole["dlse"] * call.needs_lse
    hidden, dq = ~visible_keys(call)[:, None], torch.zeros_like(q)
    for rank, rows in enumerate(shards):
        used = torch.empty(call.tokens, dtype=torch.long)  # the token whose K/V stand in for those of each token
        for hop in range(world):
            used[shards[(rank - step * hop) % world]] = shards[(rank - step * max(hop - reach, 0)) % world]
        scores = scale * q[:, :, rows] @ k[:, :, used].mT - evidence.exact["lse"][:, :, rows, None]
        weights = scores.exp().masked_fill(hidden[:, :, rows], 0.0)
        dq[:, :, rows] = (
            scale * weights * (dout[:, :, rows] @ v[:, :, used].mT - delta[:, :, rows, None]) @ k[:, :, used]
        )
    return dq.transpose(1, 2)


def _find_mixture(evidence: Evidence) -> str:
    """Return of which exact gradients, of which ranks, every wrong gradient is the sum; empty if of none."""
    texts, world, shards = [], evidence.case.world, evidence.shards
    order = torch.cat([*shards]).argsort()
    for name in filter(evidence.is_wrong, GRADIENTS):
        parts = {(name, 0): evidence.exact[name]}
        for other, shift in (
            product(("dk", "dv"), range(world if evidence.is_even else 1)) if name in ("dk", "dv") else ()
        ):
            moved = torch.cat([shards[(rank + shift) % world] for rank in range(world)])
            parts[other, shift] = evidence.exact[other][:, moved][:, order]
        shares, mixture = _solve([*parts.values()], evidence.actual[name])
        if not _fits(evidence, name, mixture):
            return ""
        terms = {
            part: f"{share:.5g} {part[0]}"
            for part, share in zip(parts, shares.tolist(), strict=True)
            if abs(share) > MIXTURE_NOISE
        }
        shifts = [f"{term}{f' of the rank {shift} further' if shift else ''}" for (_, shift), term in terms.items()]
        is_shifted = len(terms) == 1 and (name, 0) not in terms and f"1 {name}" in terms.values()
        texts.append(SHIFTED if is_shifted else f"{name} is {' + '.join(shifts)}")
    return "; ".join(dict.fromkeys(texts))


def _is_misrouted(evidence: Evidence) -> bool:
    """Return True if every rank's dK and dV is a sum of whole parts, each of any rank's queries and any shard."""
    if not evidence.is_even or evidence.is_wrong("dq"):
        return False
    shards, parts = evidence.shards, _parts_by_queries(evidence)
    for name, at in product(("dk", "dv"), shards):
        pieces = [part[name][:, other] for part in parts for other in shards]
        actual = evidence.actual[name][:, at].double()
        shares, _ = _solve(pieces, actual)
        off = (torch.stack(pieces, -1) @ shares.round() - actual).abs().max().item()
        if not off <= evidence.limits[name]:
            return False
    return True


def _solve(parts: list[Tensor], total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of parts whose sum is nearest to a tensor, and this sum."""
    basis = torch.stack(parts, -1)
    shares = torch.linalg.lstsq(basis.flatten(0, -2), total.double().flatten()[:, None]).solution[:, 0]
    return shares, basis @ shares
