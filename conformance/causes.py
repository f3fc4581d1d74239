"""Causes of wrong results: what a known mistake would give is computed in float64 and compared with the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..reference.masks import add_head_dim
from .cases import TWO_SIDED, WINDOW, Case
from .oracle import OUTPUTS, Expected, Results, attend_plainly

NO_CAUSE = "no known cause"
ZERO, NOT_FINITE, BLIND = "the output is all zero", "the output is not finite", "rows that see no key are not zero"
SCALE_TWICE, HEADS = "the scale is applied twice", "query head h reads key/value head h % Hkv"
SINK, SINK_PER_HOP = "the sink is dropped", "the sink is counted once per hop"
BASE_2, BASE_2_MERGE = "lse is in base 2", "parts are merged by powers of 2 of a natural lse"
UNSCALED = "parts are merged without rescaling"
FUTURE, DOCUMENT, PADDING = "keys from the future are seen", "keys of another document are seen", "padding is attended"
WINDOW_EDGE, OUTSIDE_WINDOW = "the window is off by one", "keys outside the window are seen"
UNSEEN = "visible keys are not seen"
LOCAL, SHIFTED = "dK/dV are not reduced over the ranks", "dK/dV are those of another rank's shard"
MISROUTED = "parts of dK/dV are added to those of other shards"
STALE, NO_GRADIENT = "the backward uses stale K/V", "the gradient is zero"
DROPOUT_RATE, DROPOUT_WORLD = "dropout drops the wrong share", "dropout depends on the number of ranks"
MIXTURE_NOISE = 1e-3  # smaller shares of a gradient do not count
ROUNDING = "too much rounding in 16 bit"

Hypothesis = tuple[str, dict[str, Tensor]]
"""A cause, and the results that it would give, each to be compared where it is present."""


@dataclass(frozen=True)
class Evidence:
    """A wrong result with all that is known about it."""

    case: Case
    whole: Results
    actual: Results
    expected: Expected
    shards: Sequence[Tensor]
    """Positions of every rank's tokens."""
    probe: Callable[[], Tensor | None]
    """Function that returns which key moved each query's output, ``[tokens, tokens]``, or None if it cannot run."""

    def is_wrong(self, name: str) -> bool:
        """Return True if a result is present and above its limit."""
        return name in self.actual and not self.expected.distance(name, self.actual[name]) <= 1

    def fits(self, name: str, alternative: Tensor) -> bool:
        """Return True if a result is what ``alternative`` would give, and not just near the exact result."""
        limit, actual = self.expected.limits[name], self.actual[name].double()
        off, gap = (actual - alternative.double()).abs(), self.expected.distance(name, actual)
        return bool(torch.where(actual == alternative, 0.0, off).max().item() <= limit * max(1.0, 0.02 * gap))


def find_cause(evidence: Evidence) -> str:
    """Return the cause of a wrong result, or :data:`NO_CAUSE`."""
    out, blind = evidence.actual["out"], evidence.expected.blind.transpose(1, 2)
    if evidence.is_wrong("out"):
        if not out.any():
            return ZERO
        rows = (evidence.expected.difference("out", out) / evidence.expected.limits["out"]).nan_to_num(2.0) > 1
        if blind.any() and not rows[~blind.expand(rows.shape[:3])].any():
            return BLIND
        if not out.isfinite().all():
            return NOT_FINITE
        return _match(evidence, _outputs(evidence)) or _visibility(evidence) or NO_CAUSE
    if evidence.is_wrong("lse"):
        return _match(evidence, _outputs(evidence)) or NO_CAUSE
    for name in ("dk", "dv", "dq", "dsink"):
        if evidence.is_wrong(name) and not evidence.actual[name].any():
            return f"{NO_GRADIENT}: {name}"
    return _match(evidence, _gradients(evidence)) or _mixture(evidence) or _misrouted(evidence) or NO_CAUSE


def _match(evidence: Evidence, hypotheses: Iterator[Hypothesis]) -> str:
    """Return the first cause that explains every wrong result it predicts, and at least one."""
    for cause, results in hypotheses:
        wrong = [name for name in results if evidence.is_wrong(name)]
        if wrong and all(evidence.fits(name, results[name]) for name in wrong):
            return cause
    return ""


def _outputs(evidence: Evidence) -> Iterator[Hypothesis]:
    """Yield mistakes in the forward pass."""
    case, whole = evidence.case, evidence.whole
    call = case.call()

    def outputs(results: Results) -> Results:
        return {name: results[name] for name in OUTPUTS}

    if call.sink is not None:
        yield SINK, outputs(attend_plainly(whole, case, sink=None))
    if call.heads != call.kv_heads:
        yield HEADS, outputs(attend_plainly(whole, case, heads=torch.arange(call.heads) % call.kv_heads))
    scale = call.softmax_scale or call.head_dim**-0.5
    yield SCALE_TWICE, outputs(attend_plainly(whole, case, softmax_scale=scale**2))
    neutral: dict[str, Any] = {"softmax_scale": None, "softcap": 0.0, "alibi_slopes": None}
    for name, value in neutral.items():
        if getattr(call, name) is not None and getattr(call, name) != 0.0:
            yield f"{name} is ignored", outputs(attend_plainly(whole, case, **{name: value}))
    yield BASE_2, {"lse": evidence.expected.exact["lse"] / torch.log(torch.tensor(2.0, dtype=torch.float64))}
    yield from _merges(evidence)


def weigh_parts(outs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of parts, ``outs [parts, B, S, H, D]`` by ``weights [parts, B, H, S]``."""
    scaled = weights.transpose(2, 3)[..., None]
    return (scaled * outs).sum(0) / scaled.sum(0).clamp(min=1e-300)


def _merges(evidence: Evidence) -> Iterator[Hypothesis]:
    """Yield wrong ways to merge the parts of the ranks' shards."""
    visible, tokens = add_head_dim(evidence.case.visible())[:, 0], evidence.case.tokens
    masks = [visible & torch.zeros(tokens, dtype=torch.bool).index_fill(0, at, True) for at in evidence.shards]
    parts = [attend_plainly(evidence.whole, evidence.case, visible=mask) for mask in masks]
    lse, out = (torch.stack([part[name] for part in parts]) for name in ("lse", "out"))
    has_keys = (~torch.stack([part["blind"] for part in parts])).double()

    def merge(weights: Tensor) -> Tensor:
        return weigh_parts(out, weights * has_keys)

    if evidence.case.scores == "sink":
        yield SINK_PER_HOP, {"out": merge((lse - lse.amax(0)).exp()), "lse": lse.logsumexp(0)}
    largest = torch.stack([part["weights"].amax(-1) for part in parts]).clamp(min=1e-300)
    yield BASE_2_MERGE, {"out": merge((lse - lse.amax(0).nan_to_num(neginf=0.0)).exp2())}
    yield UNSCALED, {"out": out.sum(0)}
    yield UNSCALED, {"out": merge(torch.ones_like(lse))}
    yield UNSCALED, {"out": merge(1 / largest)}  # every part is relative to its own maximum


def _visibility(evidence: Evidence) -> str:
    """Return what the probe finds: keys that move an output that must not see them, and keys that do not."""
    influence = evidence.probe()
    if influence is None:
        return ""
    case, edges = evidence.case, evidence.case.cu_seqlens or (0,)
    lengths = case.call(probe=True).seqused_k
    visible = case.visible(seqused_k=None if lengths is None else lengths[:1])
    visible = visible[0] if visible.dim() == 3 else visible
    at = torch.arange(case.tokens)
    documents = torch.bucketize(at, torch.tensor(edges), right=True)
    leaks, causes = influence & ~visible, dict[str, Tensor]()
    causes[DOCUMENT] = leaks & (documents[:, None] != documents)
    causes[FUTURE] = leaks & (at > at[:, None]) & case.call().causal & (documents[:, None] == documents)
    if lengths is not None:
        causes[PADDING] = leaks & (at >= lengths[0])
    if "window" in case.mask:
        left, right = WINDOW if case.mask == "window" else TWO_SIDED
        back = at[:, None] - at
        edge = (back == left) | (back == left + 1) | (back == -right) | (back == -right - 1)
        causes[WINDOW_EDGE] = (leaks | (visible & ~influence)) & edge
        causes[OUTSIDE_WINDOW] = leaks & ((back > left + 1) | (-back > right + 1))
    causes[UNSEEN] = visible & ~influence & ~causes.get(WINDOW_EDGE, torch.zeros_like(influence))
    if case.scores == "alibi" or case.dtype != "float32":  # a weight may be too small to see
        causes[UNSEEN] = torch.zeros_like(influence)
    if causes.get(OUTSIDE_WINDOW, influence[:0]).any():
        del causes[WINDOW_EDGE]
    return "; ".join(_describe_pairs(evidence, cause, pairs) for cause, pairs in causes.items() if pairs.any())


def _describe_pairs(evidence: Evidence, cause: str, pairs: Tensor) -> str:
    query, key = pairs.nonzero()[0].tolist()
    ranks = [next(r for r, at in enumerate(evidence.shards) if token in at) for token in (query, key)]
    example = f"such as key {key} of rank {ranks[1]} by query {query} of rank {ranks[0]}"
    return f"{cause} ({int(pairs.sum())} pairs, {example})"


def _parts_by_queries(evidence: Evidence) -> list[Results]:
    """Return the exact gradients that the queries of every rank contribute."""
    masks = [torch.zeros(evidence.case.tokens, dtype=torch.float64).index_fill(0, at, 1.0) for at in evidence.shards]
    dout, dlse = evidence.whole["dout"], evidence.whole["dlse"]
    grads = [{"dout": dout * mask[:, None, None], "dlse": dlse * mask} for mask in masks]
    return [attend_plainly(evidence.whole | pair, evidence.case) for pair in grads]


def _misrouted(evidence: Evidence) -> str:
    """Return MISROUTED if every rank's dK and dV is a sum of whole parts, each of any rank's queries and any shard."""
    shards, parts = evidence.shards, _parts_by_queries(evidence)
    if len({len(at) for at in shards}) > 1 or evidence.is_wrong("dq"):
        return ""
    for name in ("dk", "dv"):
        actual = evidence.actual[name].double()
        for at in shards:
            basis = torch.stack([part[name][:, other].flatten() for part in parts for other in shards], 1)
            weights = torch.linalg.lstsq(basis, actual[:, at].flatten()[:, None]).solution
            off = (basis @ weights.round() - actual[:, at].flatten()[:, None]).abs().max().item()
            if not off <= evidence.expected.limits[name]:
                return ""
    return MISROUTED


def _gradients(evidence: Evidence) -> Iterator[Hypothesis]:
    """Yield mistakes in the backward pass, given that the forward is right."""
    case, exact = evidence.case, evidence.expected.exact
    if case.world > 1:
        local = {name: torch.zeros_like(exact[name]) for name in ("dk", "dv")}
        for at, part in zip(evidence.shards, _parts_by_queries(evidence), strict=True):
            for name in local:
                local[name][:, at] = part[name][:, at]
        yield LOCAL, local
    if len({len(at) for at in evidence.shards}) > 1:
        return
    if case.scores in ("plain", "scale"):
        for step, reach in product((1, -1), (1, case.world)):  # the K/V of the hop before, or always the first
            yield STALE, {"dq": _stale_dq(evidence, step, reach)}


def _stale_dq(evidence: Evidence, step: int, reach: int) -> Tensor:
    """Return dq if a hop used the K/V of ``reach`` hops before, at least of the first; hops go by ``step`` ranks."""
    case, exact, call = evidence.case, evidence.expected.exact, evidence.case.call()
    world, groups = case.world, torch.arange(call.heads) // (call.heads // call.kv_heads)
    scale = call.softmax_scale or call.head_dim**-0.5
    q, dout, out = (x.double().transpose(1, 2) for x in (evidence.whole["q"], evidence.whole["dout"], exact["out"]))
    k, v = (evidence.whole[name].double().transpose(1, 2)[:, groups] for name in "kv")
    delta = (dout * out).sum(-1) - evidence.whole["dlse"].double() * call.needs_lse
    visible, dq = add_head_dim(case.visible()), torch.zeros_like(q)
    for rank, rows in enumerate(evidence.shards):
        for hop in range(world):
            real, used = (evidence.shards[(rank - step * at) % world] for at in (hop, max(hop - reach, 0)))
            scores = scale * q[:, :, rows] @ k[:, :, used].mT - exact["lse"][:, :, rows, None]
            weights = scores.exp().masked_fill(~visible[:, :, rows][..., real], 0.0)
            ds = weights * (dout[:, :, rows] @ v[:, :, used].mT - delta[:, :, rows, None])
            dq[:, :, rows] += scale * ds @ k[:, :, used]
    return dq.transpose(1, 2)


def _mixture(evidence: Evidence) -> str:
    """Return of which exact gradients, of which ranks, every wrong gradient is the sum; empty if of none."""
    texts, world = [], evidence.case.world
    exact, order = evidence.expected.exact, torch.cat([*evidence.shards]).argsort()
    is_even = len({len(at) for at in evidence.shards}) == 1
    for name in ("dq", "dk", "dv", "dsink"):
        if not evidence.is_wrong(name):
            continue
        parts = {(name, 0): exact[name]}
        for other, shift in product(("dk", "dv"), range(world if is_even else 1)) if name in ("dk", "dv") else ():
            shards = [evidence.shards[(rank + shift) % world] for rank in range(world)]
            parts[other, shift] = exact[other][:, torch.cat(shards)][:, order]
        basis = torch.stack([part.flatten() for part in parts.values()], 1)
        weights = torch.linalg.lstsq(basis, evidence.actual[name].double().flatten()[:, None]).solution[:, 0]
        if not evidence.fits(name, (basis @ weights).view_as(exact[name])):
            return ""
        pairs = zip(parts, weights.tolist(), strict=True)
        terms = [(f"{share:.3g} {other}", shift) for (other, shift), share in pairs if abs(share) > MIXTURE_NOISE]
        shares = [f"{term}{f' of the rank {shift} further' if shift else ''}" for term, shift in terms]
        only_shift = len(terms) == 1 and terms[0][1] and terms[0][0] == f"1 {name}"
        texts.append(SHIFTED if only_shift else f"{name} is {' + '.join(shares)}")
    return "; ".join(dict.fromkeys(texts))
