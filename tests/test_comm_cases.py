"""The suite's cases of links, overlap, the host's time and virtual ranks: numbers, limits, and what is not here."""

from __future__ import annotations

import pytest
import torch

from ringattn.bench import host_time
from ringattn.bench.host_time import LOWER_BOUND, Row
from ringattn.bench.links.group import Findings
from ringattn.bench.suite import comm_cases, worlds
from ringattn.bench.suite.cases import NotHere, Number
from ringattn.bench.timing import Samples

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def named(found: list[Number], name: str) -> list[Number]:
    return [number for number in found if number.name == name]


def test_links_between_processes() -> None:
    sizes = (512, 4096)
    found = list(comm_cases.links(CPU, transport="process_group", world=2, nbytes=sizes, iters=2, beside="matmul"))
    wrong = named(found, "wrong bytes")
    assert [number.labels["bytes"] for number in wrong] == [*sizes] * 4  # two edges, both ways, the ring
    assert all(number.limit == 0 and not number.fails for number in wrong)
    assert len(named(found, "moved per direction")) == len(wrong)
    assert len(named(found, "compute slowed")) == len(named(found, "transfer slowed")) == 4


def test_a_transport_that_does_not_open_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_cases, "launch", lambda *given: Findings(closed=[("nccl", "no interface")]))
    monkeypatch.setitem(comm_cases.MISSING, "nccl", lambda: None)
    with pytest.raises(RuntimeError, match="nccl does not open: no interface"):
        list(comm_cases.links(CPU, transport="nccl", world=1, nbytes=(64,)))


@pytest.mark.parametrize("name", ["nccl", "copy_engine"])
def test_what_is_missing_is_no_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comm_cases.MISSING, name, lambda: "pip install it")
    with pytest.raises(NotHere, match="pip install it"):
        next(comm_cases.links(CPU, transport=name, world=2, nbytes=(64,)))
    with pytest.raises(NotHere, match="pip install it"):
        next(comm_cases.overlap(CPU, transport=name, world=2, tokens=64, heads=1))
    if name == "nccl":
        with pytest.raises(NotHere, match="pip install it"):
            next(comm_cases.host_time(GPU))


def test_overlap_of_a_blocking_ring_and_another() -> None:
    found = list(
        comm_cases.overlap(
            CPU, transport="process_group", world=2, tokens=64, heads=2, head_dim=8, dtype="float32", repeats=2,
            link_share=0.8,
        )
    )  # fmt: skip
    assert [number.labels["prefetch"] for number in named(found, "overlap")] == [0, 2]
    assert {number.unit for number in found} == {"ms", "%", "times"}


def test_host_time_without_a_gpu_is_a_lower_bound() -> None:
    found = list(comm_cases.host_time(CPU, tokens=64, heads=2, head_dim=16))
    assert [(number.name, number.limit, number.note) for number in found] == [
        ("host time of a hop", None, LOWER_BOUND)
    ] * 2


@pytest.mark.parametrize(("host", "fails"), [(99e-6, False), (101e-6, True)])
def test_the_host_must_be_ahead(host: float, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comm_cases.MISSING, "nccl", lambda: None)
    monkeypatch.setattr(host_time, "measured", lambda *given: [Row("forward", host, 100e-6)])
    assert [number.fails for number in comm_cases.host_time(GPU)] == [False, False, fails]


def test_by_clock_the_host_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comm_cases.MISSING, "nccl", lambda: None)
    asked = list[object]()

    def measured(*given: object) -> list[Row]:
        asked.append(given[-1])
        return [Row("forward", 2.0, 1.0, host_time.BY_CLOCK)]

    monkeypatch.setattr(host_time, "measured", measured)
    found = list(comm_cases.host_time(GPU, timer="clock"))
    assert asked == ["clock"] and not any(number.fails for number in found)
    assert found[0].note == host_time.BY_CLOCK


@pytest.mark.parametrize(("what", "most"), [("forward", 1.08), ("forward and backward", 1.12)])
def test_virtual_ranks_may_cost_little(what: str, most: float) -> None:
    def number(times: float, *, limited: bool) -> Number:
        taken = {f"{what}:LocalWorld": Samples((times * 1e-3,)), f"{what}:one piece": Samples((1e-3,))}
        return worlds.over_one_piece(what, taken, {}, limited=limited)

    assert not number(most - 1e-3, limited=True).fails
    assert number(most + 1e-3, limited=True).fails
    assert not number(9.0, limited=False).fails
