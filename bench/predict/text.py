"""A prediction as JSON, and as the terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..common.attention import mask_title
from ..common.flags import human
from ..common.provenance import provenance
from ..common.tables import table
from .answers import Needed, Straggling, straggling, tokens_needed
from .apart import told_apart
from .call import Call
from .given import Given
from .memory import memory
from .others import MIXTURE, Way, ways
from .ring import Pass, ideal_seconds
from .speed import Speed
from .sweep import Point
from .trouble import Trouble

SCHEMA = "ringattn predict 1"
SWEEP_SCHEMA = "ringattn predict sweep 1"
STEP = "step"  # a forward and a backward
MOST_MIXTURES = 3  # of Ulysses and a ring that the terminal shows


def heading(schema: str, call: Call, given: Given) -> dict[str, Any]:
    """What every file begins with."""
    return {
        "schema": schema,
        "provenance": provenance(given.place),
        "call": without(asdict(call), "mask"),
        "mask": mask_title(call.mask),
        "speed": asdict(given.device),
        "links": asdict(given.links),
        "measured": list(given.told),
    }


def map_report(call: Call, given: Given, trouble: Trouble, points: Sequence[Point]) -> dict[str, Any]:
    """A map, for JSON; the call is what all points have in common."""
    found = heading(SWEEP_SCHEMA, call, given)
    shared = {name: value for name, value in found["call"].items() if name not in ("tokens", "world", "nodes")}
    found["call"] = shared | {"per_node": call.per_node}
    return found | ({"trouble": trouble.words} if trouble.is_there else {}) | {"points": list(points)}


def report(call: Call, given: Given, passes: Sequence[Pass], trouble: Trouble) -> dict[str, Any]:
    """Everything, for JSON."""
    device, links = given.device, given.links
    ideal = {one.phase: ideal_seconds(call, device, one.phase) for one in passes}
    found = heading(SCHEMA, call, given) | {
        "passes": [
            {"phase": one.phase, **_row(one.seconds, one.waited, ideal[one.phase]), "exposed_by_hop": one.by_hop}
            for one in passes
        ],
        "step": _row(sum(one.seconds for one in passes), sum(one.waited for one in passes), sum(ideal.values())),
        "memory": memory(call),
    }  # fmt: skip
    apart = call if call.is_plain or not isinstance(device, Speed) else told_apart(call, trouble)
    if apart != call:
        nodes = f" on {apart.nodes} nodes" if call.nodes > 1 else ""
        found["stands_in"] = f"a ring of {apart.world} GPUs{nodes} takes as long: its windows meet no more ranks"
    if not isinstance(device, Speed):
        found["left_out"] = "of GPUs alone, and this is a CPU's speed"
    elif not call.is_plain:
        found["left_out"] = "of contiguous, zigzag (of even shards) and striped alone, full or causal"
    elif call.world == 1:
        found["left_out"] = "of 2 GPUs or more"
    else:
        found["tokens_needed"] = asdict(tokens_needed(call, device, links))
    if trouble.is_there:
        found["trouble"] = trouble.words
    if trouble.slow:
        found["slow"] = asdict(straggling(call, device, links, trouble, passes))
    if "left_out" not in found:  # last, since the programs of other rings take the place of those that are kept
        every = ways(call, device, links, trouble, capacity=given.capacity, passes=passes)
        found["ways"] = [asdict(way) | {"percent_of_ideal": way.percent} for way in every]
    return found


def _row(seconds: float, exposed: float, ideal: float) -> dict[str, float]:
    return {"seconds": seconds, "exposed": exposed, "ideal": ideal, "percent_of_ideal": 100 * ideal / seconds}


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """For CSV: the passes and the step, which is both of them; then, with its number, what is exposed of every hop."""
    passes, step = found["passes"], {"phase": STEP, "hop": None, **found["step"]}
    whole = [{"phase": one["phase"], "hop": None, **{key: one[key] for key in found["step"]}} for one in passes]
    empty = dict.fromkeys(found["step"])
    hops = [
        {"phase": one["phase"], "hop": hop, **empty, "exposed": exposed}
        for one in passes
        for hop, exposed in enumerate(one["exposed_by_hop"])
    ]
    return [*whole, step, *hops]


def text(call: Call, given: Given, found: dict[str, Any]) -> str:
    """The same, for the terminal."""
    links = given.links
    where = "1 GPU" if call.world == 1 else f"each of {call.world:,} GPUs"
    if call.nodes > 1:
        where += f" on {call.nodes:,} nodes"
    lines = [
        f"{call.layout}, {found['mask']}, {call.tokens:,} tokens on {where}, B{call.batch} "
        f"H{call.heads}/{call.kv_heads} D{call.head_dim} {call.dtype}",
        f"links: {links.inside.rate / 1e9:.0f} GB/s inside nodes ({links.inside.source})"
        + (f", {links.between.rate / 1e9:.0f} between ({links.between.source})" if call.nodes > 1 else ""),
    ]
    if given.told:
        lines.append(f"speed: {'; '.join(given.told)}")
    if "stands_in" in found:
        lines.append(f"predicted: {found['stands_in']}")
    if "trouble" in found:
        lines.append(f"trouble: {found['trouble']}")
    rows = [
        {
            "": one["phase"], "ms": 1e3 * one["seconds"], "ideal ms": 1e3 * one["ideal"],
            "% of ideal": one["percent_of_ideal"], "exposed ms": 1e3 * one["exposed"],
            "worst hop": _worst(one["exposed_by_hop"]) if "exposed_by_hop" in one else "",
        }
        for one in (*found["passes"], {"phase": STEP, **found["step"]})
    ]  # fmt: skip
    parts = ["\n".join(lines), table(rows)]
    if "ways" in found:
        parts.append(_ways([Way(**without(one, "percent_of_ideal")) for one in found["ways"]]))
        parts.append(_needed(Needed(**found["tokens_needed"]), "slow" in found))
    else:
        parts.append(f"left out: other ways, and the tokens per GPU that hide the links, are told {found['left_out']}")
    if "slow" in found:
        parts.append(_slow(Straggling(**found["slow"])))
    total = sum(found["memory"].values())
    parts.append(f"memory per GPU: {human(total, 'B')}: " + ", ".join(
        f"{name} {human(nbytes, 'B')}" for name, nbytes in found["memory"].items()
    ))  # fmt: skip
    return "\n\n".join(parts)


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    """A row less one of its columns."""
    return {key: value for key, value in row.items() if key != name}


def _worst(by_hop: Sequence[float]) -> str:
    most = max(by_hop, default=0.0)
    return f"{list(by_hop).index(most)}: {1e3 * most:.3f} ms" if most > 0 else "none"


def _ways(every: Sequence[Way]) -> str:
    """All but the slower ones of many mixtures."""
    mixed = [way for way in every if MIXTURE in way.name]
    left_out = mixed[MOST_MIXTURES:]
    told = table([_way_row(way) for way in every if way not in left_out])
    return told + (
        f"\n{len(left_out)} more of Ulysses{MIXTURE}a ring, none faster: --json has them" if left_out else ""
    )


def _way_row(way: Way) -> dict[str, Any]:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1e3 * seconds

    return {
        "way": way.name, "forward ms": ms(way.forward), "backward ms": ms(way.backward), "% of ideal": way.percent,
        "exposed ms": ms(way.exposed), "memory": human(way.memory, "B"), "note": way.note,
    }  # fmt: skip


def _needed(needed: Needed, is_slow: bool) -> str:
    alike = ", no GPU slow" if is_slow else ""

    def told(tokens: int | None) -> str:
        return "more than 4m" if tokens is None else f"{tokens:,}"

    return (
        f"tokens per GPU that hide the links to 1%{alike}: forward {told(needed.forward)} (closed form "
        f"{needed.closed_forward:,.0f}), backward {told(needed.backward)} (closed form {needed.closed_backward:,.0f})"
    )


def _slow(found: Straggling) -> str:
    return (
        f"slow GPUs: {1e3 * found.even:.3f} ms without, {1e3 * found.slow:.3f} ms with equal shards "
        f"({found.slow / found.even - 1:+.1%}), {1e3 * found.balanced:.3f} ms with Layout.balanced "
        f"({found.balanced / found.even - 1:+.1%})"
    )
