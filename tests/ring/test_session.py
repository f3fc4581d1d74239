"""A framework integration's session, used through public names only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ringattn import LocalWorld, Ring, Session, single_rank
from ringattn.comm import GroupLike, LocalGroup, TransportError
from ringattn.ring.ring import call_device

from ..support.rank_processes import group_results
from ..support.ring_cases import run_ranks


def whole(member: LocalGroup) -> GroupLike:
    return member


def mesh(member: LocalGroup) -> GroupLike:
    return member.mesh(2, member.size() // 2)


def gathered(session: Session) -> tuple[int, int, list[object]]:
    with session.call():
        layout = session.resolve_layout("zigzag", 12)
        session.agree({"call": "an integration", "layout": layout})
        assert layout.world == session.size
        return session.rank, session.size, session.gather({"rank": session.rank})


@pytest.mark.parametrize("group", [whole, mesh])
def test_values_arrive_in_rank_order(group: Callable[[LocalGroup], GroupLike]) -> None:
    values = run_ranks(6, lambda member: gathered(Session(group(member))))
    assert values == [(rank, 6, [{"rank": other} for other in range(6)]) for rank in range(6)]


def in_process(_rank: int) -> list[object]:
    return gathered(Session())[2]


def test_processes_gather_values() -> None:
    assert group_results(2, in_process) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_one_rank_gathers_its_own_value() -> None:
    assert gathered(Session()) == (0, 1, [{"rank": 0}])


def errors(body: Callable[[Session], object], group: Callable[[LocalGroup], GroupLike] = whole) -> list[Exception]:
    """Return the error of each of four ranks whose sessions run ``body``."""

    def on_rank(member: LocalGroup) -> Exception:
        session = Session(group(member))
        try:
            with session.call():
                body(session)
        except Exception as error:
            return error
        raise AssertionError(f"rank {member.rank()} saw no error")

    with LocalWorld(4, timeout=20) as world:
        raised: list[Exception] = world.run(on_rank)
    return raised


@pytest.mark.parametrize("group", [whole, mesh])
@pytest.mark.parametrize("agreed", [False, True])
def test_an_error_on_one_rank_reaches_all(agreed: bool, group: Callable[[LocalGroup], GroupLike]) -> None:
    def body(session: Session) -> object:
        if session.rank == 2 and not agreed:
            raise KeyError("my_framework: x is missing")
        session.agree({"call": "an integration"})
        if session.rank == 2:
            raise KeyError("my_framework: x is missing")
        return session.gather(1)

    raised = errors(body, group)
    assert isinstance(raised[2], KeyError)
    for rank in (0, 1, 3):
        assert isinstance(raised[rank], TransportError if agreed else ValueError)
        # After the comparison, a rank may first meet another one that already returned because of the error.
        assert agreed or "rank 2 refused this call: KeyError: 'my_framework: x is missing'" in str(raised[rank])


@pytest.mark.parametrize("group", [whole, mesh])
@pytest.mark.parametrize("by_value", [False, True])
def test_differing_calls_are_refused_on_all_ranks(by_value: bool, group: Callable[[LocalGroup], GroupLike]) -> None:
    def body(session: Session) -> None:
        differing = {"width": 3 + (session.rank == 3)}
        fields: dict[str, object] = {"call": "an integration", **({} if by_value else differing)}
        session.agree(fields, differing if by_value else None)

    for error in errors(body, group):
        assert isinstance(error, ValueError)
        assert "width" in str(error)


def test_always_compares_a_call_that_all_ranks_expect() -> None:
    def on_rank(member: LocalGroup) -> None:
        session = Session(member)
        for _ in range(4):
            with session.call():
                session.agree({"call": "an integration"}, always=True)
        with pytest.raises(ValueError, match="call differs between ranks"), session.call():
            session.agree({"call": f"of rank {member.rank()}" if member.rank() else "an integration"}, always=True)

    run_ranks(2, on_rank)


def test_a_session_takes_the_ring_it_is_given() -> None:
    def on_rank(member: LocalGroup) -> bool:
        with Ring(member, chunks=2) as ring:
            return Session(ring=ring).ring is ring and Session(member).ring is not ring

    assert all(run_ranks(2, on_rank))
    with pytest.raises(ValueError, match="ring and group are both given"):
        Session(single_rank(), ring=Ring())


def test_a_session_works_on_the_device_it_is_given() -> None:
    gpu, none = torch.device("cuda", 1), torch.device("meta")
    assert [Session(device=device).device for device in (gpu, none)] == [gpu, call_device()]
