"""What people do instead of a ring: gather all keys and values, or exchange heads for tokens; and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .call import DTYPES, Call
from .launch import Device, Launch, whole
from .links import Link, Links
from .program import DKDV, DQ, FOLD, PASSES
from .ring import ideal_seconds, predicted

FP32 = 4


@dataclass(frozen=True)
class Way:
    """One way to compute the same attention."""

    name: str
    forward: float
    backward: float
    exposed: float
    """Of both, seconds in which nothing is computed."""
    ideal: float
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    @property
    def percent(self) -> float:
        """Of one device divided by the ranks."""
        return 100 * self.ideal / self.seconds


def ways(call: Call, device: Device, links: Links) -> list[Way]:
    """All that are possible here, the fastest first."""
    found = [flat(call, device, links), gathered(call, device, links)]
    if call.nodes > 1 and call.per_node > 1:
        found.append(two_level(call, device, links))
    found += exchanged(call, device, links)
    return sorted(found, key=lambda way: way.seconds)


def flat(call: Call, device: Device, links: Links) -> Way:
    """One ring through all ranks."""
    return _ring("flat ring", replace(call, two_level=False), device, links)


def two_level(call: Call, device: Device, links: Links) -> Way:
    """A ring of rings."""
    return _ring("two-level ring", replace(call, two_level=True), device, links)


def _ring(name: str, call: Call, device: Device, links: Links) -> Way:
    forward, backward = predicted(call, device, links)
    exposed = forward.waited + backward.waited
    return Way(name, forward.seconds, backward.seconds, exposed, _ideal(call, device))


def gathered(call: Call, device: Device, links: Links) -> Way:
    """All-gather of K and V, then one launch; backward again, then a reduce-scatter of dK and dV in fp32.

    A ring of P ranks moves P - 1 shards past every rank; over several nodes the slowest edge of that ring counts.
    """
    kv, size = 2 * call.batch * call.tokens * call.kv_heads * call.head_dim, DTYPES[call.dtype].itemsize
    link = links.inside if call.nodes == 1 else _rail(call, links)
    there, back = ((call.world - 1) * link.seconds(kv * width) for width in (size, FP32))
    # equal shares of the whole plane, in one launch
    compute = {phase: ideal_seconds(call, device, phase) for phase in PASSES}
    forward, backward = compute["forward"] + there, compute["backward"] + there + back
    note = f"every rank holds K and V of all {call.seqlen:,} tokens"
    return Way("all-gather of K/V", forward, backward, 2 * there + back, _ideal(call, device), note)


def _rail(call: Call, links: Links) -> Link:
    """Per rank of a gather over nodes: every rank's NIC brings its part of the other nodes' shards, NVLink the rest."""
    far = (call.world - call.per_node) / call.per_node / max(call.world - 1, 1)
    near = 1.0
    seconds = max(far / links.between.rate, near / links.inside.rate)
    return Link(1 / seconds, links.inside.latency)


def exchanged(call: Call, device: Device, links: Links) -> list[Way]:
    """Ulysses over as many ranks as the key heads allow, and a ring of such groups for the rest."""
    found = []
    degrees = [d for d in range(2, call.kv_heads + 1) if call.kv_heads % d == 0 and call.world % d == 0]
    inside = [d for d in degrees if call.per_node % d == 0] or degrees[-1:]
    if not degrees:
        return []
    most = max(degrees) if max(degrees) == call.world else max(inside)
    for degree in {most}:
        link = links.inside if call.nodes == 1 or call.per_node % degree == 0 else links.between
        found.append(_ulysses(call, degree, device, links, link))
    return found


def _ulysses(call: Call, degree: int, device: Device, links: Links, link: Link) -> Way:
    """Four all-to-alls in a forward (q, k, v, out), and twice as many tensors in a backward."""
    ranks, nodes = call.world // degree, call.nodes if call.per_node % degree == 0 else 1
    size = DTYPES[call.dtype].itemsize
    row = call.batch * call.tokens * call.head_dim * size
    tensors = 2 * call.heads + 2 * call.kv_heads
    exchange = (degree - 1) * link.latency + row * tensors * (degree - 1) / degree / link.rate
    group = replace(
        call, tokens=call.tokens * degree, world=ranks, nodes=nodes if ranks % nodes == 0 else 1,
        heads=call.heads // degree, kv_heads=call.kv_heads // degree, chunks=1,
    )  # fmt: skip
    ideal, note = _ideal(call, device), f"{degree} ranks exchange heads"
    if ranks == 1:
        area = whole(call.seqlen, causal=call.mask.causal)
        forward, backward = (
            sum(device.launch_seconds(Launch(one, 0, area), group.form) for one in what)
            for what in ((FOLD,), (DQ, DKDV))
        )
        return Way("Ulysses", forward + exchange, backward + 2 * exchange, 3 * exchange, ideal, note)
    ring = predicted(group, device, links)
    forward, backward = (one.seconds for one in ring)
    exposed = 3 * exchange + sum(one.waited for one in ring)
    name = f"Ulysses {degree} x ring {ranks}"
    return Way(name, forward + exchange, backward + 2 * exchange, exposed, ideal, note)


def _ideal(call: Call, device: Device, phases: Sequence[str] = PASSES) -> float:
    return sum(ideal_seconds(call, device, phase) for phase in phases)
