"""A schedule as text: what each rank computes with at every hop, and how partial dK/dV move behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .schedule import Hop, Schedule

PRINTED = 16  # ranks and hops: a larger table is printed with its middle left out
OUTER = "|"  # stands between the outer steps of a two-level ring

Cell = Callable[[Schedule, Hop], str]


def text(plan: Schedule) -> str:
    """The header, and two tables: a row per rank in ring order, a column per hop."""
    several = len(plan.nodes) > 1
    passing = "(N) only passes, > goes on" + (", » leaves by rail" if several else "")
    back = "^ return to the outer root" if several else "^ return to the owner"
    first = "root: < arrive, » return to the owner by rail" if several else "hop 0: < arrive"
    return "\n".join(
        [
            _header(plan),
            "",
            f"K/V: N shard N is computed with, {passing}, . nothing comes",
            *_table(plan, _kv_cell),
            "",
            f"dK/dV: N of shard N, > sent on, {back}, . none; {first}",
            *_table(plan, _dkv_cell),
        ]
    )


def _header(plan: Schedule) -> str:
    to = "next" if plan.direction == 1 else "previous"
    ranks, moves = f"{plan.world} ranks", f"K/V move to {_goal(plan.steps, len(plan.nodes[0]), to, 'rank')}"
    if len(plan.nodes) > 1:
        ranks += f" ({len(plan.nodes)} nodes of {len(plan.nodes[0])} ranks)"
        moves += f", every {plan.inner} hops to {_goal(plan.outer_steps, len(plan.nodes), to, 'node')}"
    return f"{ranks}, {moves}, {sum(map(sum, plan.active))} of {plan.world * plan.count} hops compute"


def _goal(distances: Sequence[int], count: int, to: str, what: str) -> str:
    """Where K/V move; the distances of the hops where these do more than count up, the short way round."""
    if [*distances] == [*range(len(distances))]:
        return f"the {to} {what}"
    away = [far if 2 * far <= count else far - count for far in distances]
    listed = ", ".join("…" if index is None else f"{away[index]:+}" for index in shown(len(away)) if index != 0)
    return f"the {what}s {listed} from their owner's"


def _kv_cell(plan: Schedule, hop: Hop) -> str:
    leaves = (" >" if hop.kv_to is not None else "") + (" »" if hop.rail_to is not None else "")
    if not hop.computes and hop.kv_from is None and not leaves:
        return "."
    return (f"{hop.shard}" if hop.computes else f"({hop.shard})") + leaves


def _dkv_cell(plan: Schedule, hop: Hop) -> str:
    comes = hop.index % plan.inner == 0 and hop.dkv_from is not None
    leaves = hop.dkv_to is not None
    marks = (" <" if comes else "") + (" »" if hop.return_to is not None else "")
    if leaves:
        last = plan.active_ranges[hop.shard][hop.index // plan.inner][1]
        marks = " ^" if hop.index % plan.inner == last else " >"
    return f"{hop.shard}{marks}" if marks else "."


def _table(plan: Schedule, cell: Cell) -> list[str]:
    """Rows in ring order, so that what leaves a row comes in one row further; outer steps are set apart."""
    numbers, order = shown(plan.world), [rank for node in plan.nodes for rank in node]
    columns = shown(plan.count)
    rows = [["", *_columns(plan, columns, lambda hop: f"hop {hop}")]]
    for place in numbers:
        if place is None:
            rows.append([OUTER if column == OUTER else "…" for column in rows[0]])
            continue
        hops = plan.hops(order[place])
        node = f"node {place // len(plan.nodes[0])} " if len(plan.nodes) > 1 else ""
        cells = _columns(plan, columns, lambda hop, hops=hops: cell(plan, hops[hop]))  # type: ignore[misc]
        rows.append([f"{node}rank {order[place]}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _columns(plan: Schedule, numbers: Sequence[int | None], cell: Callable[[int], str]) -> Iterator[str]:
    for hop in numbers:
        if hop and hop % plan.inner == 0:
            yield OUTER
        yield "…" if hop is None else cell(hop)


def shown(count: int) -> Sequence[int | None]:
    """The ranks or hops that are printed; None where some are left out."""
    if count <= PRINTED:
        return range(count)
    return [*range(PRINTED - 4), None, *range(count - 3, count)]
