"""Results of a case beside the truth in float64, and how far each may be from it.

A result may be off by twice the error of PyTorch's plain formula in the same dtype, plus one rounding of its largest
term per rank, because a ring may round the part of every hop. The largest term counts, not the sum, since terms cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .protocol import Target, TargetCall
from .standalone import GRADIENTS, OUTPUTS, Results, attend_plainly, number_documents, run_target, token_dim

RATE_SIGMAS = 6.0  # deviation of the share of dropped weights that chance does not explain


def run_case(target: Target, rank: int, case: Case) -> dict[str, Any]:
    """Run one rank of a case; return its ``positions``, its results and ``notes`` on what else it did."""
    call = case.call(rank)
    sink = None if call.sink is None else call.sink.to(target.device)
    call = replace(call, positions=target.positions(call), sink=sink)
    results, notes = run_target(target.adapter.attend, case.inputs(), call, target.device)
    return {"positions": call.positions, "notes": notes, **results}


def join_parts(case: Case, parts: Sequence[dict[str, Any]]) -> tuple[Results, list[Tensor]]:
    """Return the results of the whole sequence and the positions of every rank's tokens.

    Raises:
        ValueError: If the shards do not hold every token once.
    """
    shards = [part["positions"] for part in parts]
    order = torch.cat(shards)
    if order.sort().values.tolist() != [*range(case.tokens)]:
        counts = torch.bincount(order.clamp(min=0), minlength=case.tokens)
        odd = (counts != 1).nonzero().flatten().tolist()
        raise ValueError(f"its shards do not hold every token once: see token {odd[0] if odd else order.max()}")
    results = Results()
    for name in (*OUTPUTS, *GRADIENTS):
        if all(name in part for part in parts):
            tensors, dim = [part[name] for part in parts], token_dim(name)
            if name == "dsink":
                results[name] = torch.stack(tensors).double().sum(0)
            else:
                results[name] = torch.cat(tensors, dim).index_select(dim, order.argsort())
    return results, shards


@dataclass(frozen=True)
class Evidence:
    """Results of a case with all that is known about them."""

    case: Case
    whole: Results
    """q, k, v, dout and dlse."""
    actual: Results
    shards: Sequence[Tensor]
    """Positions of every rank's tokens."""
    exact: Results
    limits: dict[str, float]
    """Error that each result may have."""
    factors: Tensor
    """Dropout factors that the target drew, ``[B, H, S, S]``, or 1."""
    wrong_rate: str
    """Share of the weights that the target dropped, if chance does not explain it."""

    @cached_property
    def errors(self) -> dict[str, float]:
        """The largest error of each result as a multiple of its limit; infinite for NaN."""
        return {name: float(self.difference(name).max()) / self.limits[name] for name in self.actual}

    def difference(self, name: str) -> Tensor:
        """Return the error of every element; an infinity is right where the exact result is the same."""
        actual, exact = self.actual[name].double(), self.exact[name]
        off = (actual - exact).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return off.masked_fill(actual == exact, 0.0)

    def is_wrong(self, name: str) -> bool:
        """Return True if a result is present and above its limit."""
        return self.errors.get(name, 0.0) > 1

    @property
    def is_even(self) -> bool:
        """True if all ranks have equally many tokens."""
        return len({len(at) for at in self.shards}) == 1

    def owner(self, token: int) -> int:
        """Return the rank that has a token."""
        return next(rank for rank, at in enumerate(self.shards) if token in at)

    def locate(self, name: str) -> str:
        """Describe the largest error of a result: rank, token, document, head, and by how much."""
        off = self.difference(name)
        place = [int(at) for at in torch.unravel_index(off.argmax(), off.shape)]
        size = f"off by {off.max().item():.3g}, at most {self.limits[name]:.2g} allowed"
        if name == "dsink":
            return f"{name} of head {place[0]}: {size}"
        token, head = place[token_dim(name)], place[3 - token_dim(name)]
        documents = number_documents(self.case.call())
        document = f", document {int(documents[token]) - 1}" if self.case.documents != "none" else ""
        others = ", ".join(other for other in self.errors if self.is_wrong(other) and other != name)
        place_text = f"{name} of rank {self.owner(token)}, row {place[0]}, token {token}{document}, head {head}"
        return f"{place_text}: {size}{f'; {others} wrong, too' if others else ''}"


def collect_evidence(case: Case, parts: Sequence[dict[str, Any]]) -> Evidence:
    """Join what the ranks returned, and compute the exact results and the limits.

    With dropout, the values are the identity, so ``out`` is the weights after dropout and shows which were dropped.

    Raises:
        ValueError: If the shards do not hold every token once.
    """
    (actual, shards), whole, call = join_parts(case, parts), case.inputs(), case.call()
    exact, factors, wrong_rate = attend_plainly(whole, call), torch.ones(()), ""
    if rate := call.dropout_p:
        kept = actual["out"].double().transpose(1, 2) > 0.5 * exact["weights"]
        draws = kept[exact["weights"] > 0].double()
        share, sigma = 1 - draws.mean().item(), (rate * (1 - rate) / len(draws)) ** 0.5
        wrong_rate = f"{share:.3f}, not {rate}" if abs(share - rate) > RATE_SIGMAS * sigma else ""
        factors = kept.double() / (1 - rate)
        exact = attend_plainly(whole, call, factors=factors)
    rounded = attend_plainly(whole, call, dtype=call.dtype, factors=factors)
    sizes, limits = _sizes(whole, call, exact), dict[str, float]()
    for name in actual:
        error = (rounded[name].double() - exact[name]).abs().nan_to_num(nan=0.0).max().item()  # of -inf and -inf
        limits[name] = 2 * error + torch.finfo(call.dtype).eps * sizes[name] * case.world
    return Evidence(case, whole, actual, shards, exact, limits, factors, wrong_rate)


def _sizes(whole: Results, call: TargetCall, exact: Results) -> dict[str, float]:
    """Return the largest sum of absolute terms behind an element of each result."""
    group = call.heads // call.kv_heads
    q, k, v, dout = (whole[name].double().abs().transpose(1, 2) for name in ("q", "k", "v", "dout"))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    weights, lse = exact["weights"], exact["lse"].abs().nan_to_num(posinf=0.0)
    delta = (dout * exact["out"].transpose(1, 2).abs()).sum(-1) + whole["dlse"].double().abs() * call.needs_lse
    ds = weights * (dout @ v.mT + delta[..., None]) * (call.softmax_scale or call.head_dim**-0.5)
    dk, dv = ((x @ y).reshape(len(x), -1, group, *y.shape[2:]).sum(2) for x, y in ((ds.mT, q), (weights.mT, dout)))
    terms = {"out": weights @ v, "lse": lse, "dq": ds @ k, "dk": dk, "dv": dv, "dsink": delta.sum((0, 2))}
    # A score is a sum of products, and its rounding changes lse and the weights by as much.
    return {name: max(float(x.max()), 1.0 if name == "lse" else 0.0) for name, x in terms.items()}
