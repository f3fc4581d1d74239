"""What people do instead of a ring: gather all keys and values, or exchange heads for tokens; and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .call import DTYPES, Call
from .launch import Device, Launch, whole
from .links import Link, Links
from .program import DKDV, DQ, FOLD, PASSES
from .ring import ideal_seconds, predicted
from .trouble import Trouble

FP32 = 4
LEAST_SLOTS = 2  # of a ring of more than two ranks


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


def ways(call: Call, device: Device, links: Links, trouble: Trouble | None = None) -> list[Way]:
    """All that are possible here, with the same slow ranks and varying launches, the fastest first."""
    trouble = trouble or Trouble()
    trouble.check(call.world)
    found = [flat(call, device, links, trouble), gathered(call, device, links, trouble)]
    if call.nodes > 1 and call.per_node > 1:
        found.append(two_level(call, device, links, trouble))
    found += exchanged(call, device, links, trouble)
    return sorted(found, key=lambda way: way.seconds)


def flat(call: Call, device: Device, links: Links, trouble: Trouble) -> Way:
    """One ring through all ranks."""
    slots = _slots(call, call.world)
    made = _ring("flat ring", replace(call, two_level=False, slots=slots), device, links, trouble)
    return made if slots == call.slots else replace(made, note=f"{slots} slots, which it needs")


def _slots(call: Call, ranks: int) -> int:
    """The call's, or what another ring of so many ranks needs."""
    return max(call.slots, LEAST_SLOTS) if ranks > LEAST_SLOTS else call.slots


def two_level(call: Call, device: Device, links: Links, trouble: Trouble) -> Way:
    """A ring of rings."""
    return _ring("two-level ring", replace(call, two_level=True), device, links, trouble)


def _ring(name: str, call: Call, device: Device, links: Links, trouble: Trouble) -> Way:
    forward, backward = predicted(call, device, links, trouble)
    exposed = forward.waited + backward.waited
    return Way(name, forward.seconds, backward.seconds, exposed, _ideal(call, device))


def gathered(call: Call, device: Device, links: Links, trouble: Trouble) -> Way:
    """All-gather of K and V, then one launch; backward again, then a reduce-scatter of dK and dV in fp32.

    A ring of P ranks moves P - 1 shards past every rank; over several nodes the slowest edge of that ring counts. All
    wait for the rank whose launch takes longest.
    """
    kv, size = 2 * call.batch * call.tokens * call.kv_heads * call.head_dim, DTYPES[call.dtype].itemsize
    link = links.inside if call.nodes == 1 else _rail(call, links)
    there, back = ((call.world - 1) * link.seconds(kv * width) for width in (size, FP32))
    # equal shares of the whole plane, in one launch
    compute = {phase: ideal_seconds(call, device, phase) * trouble.last(call.world) for phase in PASSES}
    forward, backward = compute["forward"] + there, compute["backward"] + there + back
    note = f"every rank holds K and V of all {call.seqlen:,} tokens"
    return Way("all-gather of K/V", forward, backward, 2 * there + back, _ideal(call, device), note)


def _rail(call: Call, links: Links) -> Link:
    """Per rank of a gather over nodes: every rank's NIC brings its part of the other nodes' shards, NVLink the rest."""
    far = (call.world - call.per_node) / call.per_node / max(call.world - 1, 1)
    near = 1.0 if call.per_node > 1 else 0.0
    seconds = max(far / links.between.rate, near / links.inside.rate)
    return Link(1 / seconds, (links.inside if near else links.between).latency)


def exchanged(call: Call, device: Device, links: Links, trouble: Trouble) -> list[Way]:
    """Ulysses over as many ranks as the key heads allow, and a ring of such groups for the rest."""
    degrees = [d for d in range(2, call.kv_heads + 1) if call.kv_heads % d == 0 and call.world % d == 0]
    inside = [d for d in degrees if call.per_node % d == 0] or degrees[-1:]
    if not degrees:
        return []
    most = max(degrees) if max(degrees) == call.world else max(inside)
    link = links.inside if call.nodes == 1 or call.per_node % most == 0 else links.between
    return [_ulysses(call, most, device, links, link, trouble)]


def _ulysses(call: Call, degree: int, device: Device, links: Links, link: Link, trouble: Trouble) -> Way:
    """Four all-to-alls in a forward (q, k, v, out), and twice as many tensors in a backward.

    Neighbours exchange heads, so that as many rings run side by side. One stands for all: at each of its places the
    slowest of the neighbours there.
    """
    ranks, nodes = call.world // degree, call.nodes if call.per_node % degree == 0 else 1
    size = DTYPES[call.dtype].itemsize
    row = call.batch * call.tokens * call.head_dim * size
    tensors = 2 * call.heads + 2 * call.kv_heads
    exchange = (degree - 1) * link.latency + row * tensors * (degree - 1) / degree / link.rate
    group = replace(
        call, tokens=call.tokens * degree, world=ranks, nodes=nodes if ranks % nodes == 0 else 1,
        heads=call.heads // degree, kv_heads=call.kv_heads // degree, chunks=1, slots=_slots(call, ranks),
    )  # fmt: skip
    ideal, note = _ideal(call, device), f"{degree} ranks exchange heads"
    if ranks == 1:
        area = whole(call.seqlen, causal=call.mask.causal)
        forward, backward = (
            trouble.last(call.world) * sum(device.launch_seconds(Launch(one, 0, area), group.form) for one in what)
            for what in ((FOLD,), (DQ, DKDV))
        )
        return Way("Ulysses", forward + exchange, backward + 2 * exchange, 3 * exchange, ideal, note)
    slow: dict[int, float] = {}
    for rank, factor in trouble.slow.items():
        slow[rank // degree] = max(factor, slow.get(rank // degree, 1.0))
    ring = predicted(group, device, links, replace(trouble, slow=slow))
    forward, backward = (one.seconds for one in ring)
    exposed = 3 * exchange + sum(one.waited for one in ring)
    name = f"Ulysses {degree} x ring {ranks}"
    return Way(name, forward + exchange, backward + 2 * exchange, exposed, ideal, note)


def _ideal(call: Call, device: Device, phases: Sequence[str] = PASSES) -> float:
    return sum(ideal_seconds(call, device, phase) for phase in phases)
