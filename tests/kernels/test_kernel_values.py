"""Where a NaN or an infinity goes: to the rows that see it, and no further than their tiles."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ringattn.kernels import Bounds, attention_forward

from ..support.baselines import Results
from ..support.kernel_cases import Inputs, Sizes, dense, documents, inputs, interval, of, ours, tiles

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, about NaN in the interpreter
]

BLOCK = 16
TOKENS = 48
PLACE = 21  # inside its tile, with rows of the same tile on either side
MASKS = {
    "full": interval("full", TOKENS, TOKENS),
    "causal": interval("causal", TOKENS, TOKENS),
    "documents": documents([(19, 19), (5, 5), (24, 24)]),
    "window": of(torch.arange(TOKENS) - 6, torch.arange(TOKENS) + 3, TOKENS),
}


class Reach(NamedTuple):
    """Which query rows and which keys something reaches: surely, and at most."""

    rows: Tensor
    rows_at_most: Tensor
    keys: Tensor
    keys_at_most: Tensor


def reach(name: str, bounds: Bounds) -> Reach:
    """Of something at PLACE in ``name``: from a key to the rows that see it, from these to all the keys they see."""
    seen = dense(bounds, TOKENS, TOKENS)
    tiled = seen.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    touched = tiled.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    if name in ("k", "v"):
        rows, rows_at_most = seen[:, PLACE], touched[:, PLACE]
    else:
        rows = rows_at_most = torch.arange(TOKENS) == PLACE
    return Reach(rows, rows_at_most, seen[rows].any(0), touched[rows_at_most].any(0))


def check(name: str, got: Tensor, clean: Tensor, surely: Tensor, at_most: Tensor) -> None:
    """``[B, S, H, D]``: nothing finite in the rows ``surely``, and the same bits as without it outside ``at_most``."""
    assert not got[:, surely].isfinite().any(-1).any(), f"{name}: a row that sees it is finite"
    assert torch.equal(got[:, ~at_most], clean[:, ~at_most]), f"{name}: a row that never touches it has changed"


def run(x: Inputs, bounds: Bounds) -> Results:
    made = ours(x, bounds, config=tiles(BLOCK, BLOCK))
    return made._replace(lse=made.lse.transpose(1, 2).unsqueeze(-1))  # [B, S, H, 1], like the others


def check_all(name: str, got: Results, clean: Results, where: Reach) -> None:
    none = torch.zeros_like(where.rows)
    check("out", got.out, clean.out, *((none, none) if name == "dout" else (where.rows, where.rows_at_most)))
    # exactly, and not from v: the mask comes after the scores
    check("lse", got.lse, clean.lse, *((where.rows, where.rows) if name in ("q", "k") else (none, none)))
    check("dq", got.dq, clean.dq, where.rows, where.rows_at_most)
    check("dk", got.dk, clean.dk, where.keys, where.keys_at_most)
    # dV is P^T dO, which has no v in it
    check("dv", got.dv, clean.dv, *((none, none) if name == "v" else (where.keys, where.keys_at_most)))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("kind", MASKS)
def test_it_reaches_the_rows_that_see_it(kind: str, name: str) -> None:
    x, bounds = inputs(Sizes(TOKENS, TOKENS)), MASKS[kind]
    clean = run(x, bounds)
    for value in (math.nan, math.inf):
        getattr(x, name)[:, PLACE] = value
        check_all(name, run(x, bounds), clean, reach(name, bounds))


def test_in_k_it_reaches_only_the_rows_that_see_it() -> None:
    """Not even those of its tile: masked scores are replaced, whatever they are."""
    x, bounds = inputs(Sizes(TOKENS, TOKENS)), MASKS["causal"]
    clean = run(x, bounds)
    x.k[:, PLACE] = math.nan
    rows = reach("k", bounds).rows
    check("out", run(x, bounds).out, clean.out, rows, rows)


@pytest.mark.parametrize("part", [0, 1])
def test_in_the_state_it_stays_in_its_row(part: int) -> None:
    x = inputs(Sizes())
    state = torch.randn(1, 40, 1, 16), torch.randn(1, 1, 40)
    clean, _ = attention_forward(x.q, x.k, x.v, state=(state[0].clone(), state[1].clone()))
    (state[0][:, PLACE] if part == 0 else state[1][..., PLACE]).fill_(math.nan)
    out, _ = attention_forward(x.q, x.k, x.v, state=state)
    row = torch.arange(40) == PLACE
    check("out", out, clean, row, row)


def test_past_the_end_of_the_keys_nothing_is_read() -> None:
    """Not even to be masked: what lies behind a shard in its storage may be NaN."""
    x = inputs(Sizes(20, 20))
    q, k, v, dout = (torch.cat([t, torch.full_like(t, math.nan)], 1)[:, :20] for t in x[:4])
    cut = Inputs(q, k, v, dout, x.dlse)
    for got, clean in zip(run(cut, MASKS["full"]), run(x, MASKS["full"]), strict=True):
        assert torch.equal(got, clean)
