"""A schedule as text: which shard each rank computes with at every hop, and how partial dK/dV move."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schedule import Hop, Schedule

WIDTH = 80  # columns of a terminal
MAX_PRINTED = 16  # most ranks and hops that are printed; the middle of a larger table is left out
OUTER_SEPARATOR = "|"  # separates the outer steps of a two-level ring

Cell = Callable[["Schedule", "Hop"], str]


def format_schedule(plan: Schedule) -> str:
    """Return a header and two tables, for K/V and for dK/dV, with a row per rank in ring order and a column per hop."""
    several = len(plan.nodes) > 1
    sent = "> sends it on" + (", » sends it on by rail" if several else "")
    back = "^ returns them to the root" if several else "^ returns them to the owner"
    root = "< receives them back, » sends them to the owner by rail" if several else "< receives them back"
    return "\n".join(
        [
            textwrap.fill(_header(plan), WIDTH),
            "",
            _legend(f"K/V: N computes with shard N, (N) only passes it on, {sent}, . nothing"),
            *_table(plan, _kv_cell),
            "",
            _legend(f"dK/dV: N holds dK/dV of shard N, > sends them on, {back}, {root}, . nothing"),
            *_table(plan, _dkv_cell),
        ]
    )


def _legend(signs: str) -> str:
    """Wrap a legend at its commas only."""
    unbroken = signs.replace(" ", "\xa0").replace(",\xa0", ", ")
    return textwrap.fill(unbroken, WIDTH).replace("\xa0", " ")


def _header(plan: Schedule) -> str:
    to = "next" if plan.direction == 1 else "previous"
    ranks, moves = (
        f"{plan.world} rank{'s' * (plan.world != 1)}",
        f"K/V move to {_goal(plan.steps, len(plan.nodes[0]), to, 'rank')}",
    )
    if len(plan.nodes) > 1:
        ranks += f" ({len(plan.nodes)} nodes of {len(plan.nodes[0])} ranks)"
        moves += f", every {plan.inner} hops to {_goal(plan.outer_steps, len(plan.nodes), to, 'node')}"
    return f"{ranks}, {moves}, {sum(map(sum, plan.active))} of {plan.world * plan.count} hops compute"


def _goal(distances: Sequence[int], count: int, to: str, what: str) -> str:
    """Describe where K/V move: to a neighbour, or to ranks at signed distances from the owner, the short way round."""
    if [*distances] == [*range(len(distances))]:
        return f"the {to} {what}"
    away = [far if 2 * far <= count else far - count for far in distances]
    listed = ", ".join(
        "…" if index is None else f"{away[index]:+}" for index in printed_indices(len(away)) if index != 0
    )
    return f"the {what}s {listed} from the owner"


def _kv_cell(plan: Schedule, hop: Hop) -> str:
    """Format what a rank does with K/V at a hop, in the signs of the legend."""
    leaves = (" >" if hop.kv_to is not None else "") + (" »" if hop.rail_to is not None else "")
    if not hop.computes and hop.kv_from is None and not leaves:
        return "."
    return (f"{hop.shard}" if hop.computes else f"({hop.shard})") + leaves


def _dkv_cell(plan: Schedule, hop: Hop) -> str:
    """Format what a rank does with dK/dV at a hop, in the signs of the legend."""
    comes = hop.index % plan.inner == 0 and hop.dkv_from is not None
    leaves = hop.dkv_to is not None
    marks = (" <" if comes else "") + (" »" if hop.return_to is not None else "")
    if leaves:
        last = plan.active_ranges[hop.shard][hop.index // plan.inner][1]
        marks = " ^" if hop.index % plan.inner == last else " >"
    return f"{hop.shard}{marks}" if marks else "."


def _table(plan: Schedule, cell: Cell) -> list[str]:
    """Format a table with as many hops as fit into `WIDTH`."""
    tables = (_lines(plan, cell, printed_indices(plan.count, most)) for most in range(MAX_PRINTED, 2, -1))
    return next(lines for lines in tables if max(map(len, lines)) <= WIDTH)


def _lines(plan: Schedule, cell: Cell, columns: Sequence[int | None]) -> list[str]:
    """Format the rows in ring order, so that a shard sent by one row arrives in the next row."""
    order = [rank for node in plan.nodes for rank in node]
    rows = [["", *_columns(plan, columns, lambda hop: f"hop {hop}")]]
    for place in printed_indices(plan.world):
        if place is None:
            rows.append([OUTER_SEPARATOR if column == OUTER_SEPARATOR else "…" for column in rows[0]])
            continue
        hops = plan.hops(order[place])
        node = f"node {place // len(plan.nodes[0])} " if len(plan.nodes) > 1 else ""
        cells = _columns(plan, columns, lambda hop, hops=hops: cell(plan, hops[hop]))  # type: ignore[misc]
        rows.append([f"{node}rank {order[place]}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _columns(plan: Schedule, numbers: Sequence[int | None], cell: Callable[[int], str]) -> Iterator[str]:
    """Yield the cells of one row, with separators between outer steps."""
    for hop in numbers:
        if hop and hop % plan.inner == 0:
            yield OUTER_SEPARATOR
        yield "…" if hop is None else cell(hop)


def printed_indices(count: int, max_count: int = MAX_PRINTED) -> Sequence[int | None]:
    """Return the indices of the ranks or hops to print; None stands for a gap."""
    if count <= max_count:
        return range(count)
    last = max(1, max_count // 5)
    return [*range(max_count - last - 1), None, *range(count - last, count)]
