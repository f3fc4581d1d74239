"""comm/transports/copy_engine/sockets.py: one verdict on every rank before anything is connected."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringattn.comm import LocalGroup, LocalWorld, TransportError
from ringattn.comm.control import control_of
from ringattn.comm.transports.copy_engine import sockets
from ringattn.comm.transports.copy_engine.sockets import Card, Listener, join_node, problem_of

from ..support.stand_in_cuda import Driver, Result, install_driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    install_driver(monkeypatch, driver)
    yield driver
    assert not +driver.retained, "a context is held"
    assert not driver.registered


def joined(group: LocalGroup, members: list[int] | None = None, missing: str | None = None) -> Any:
    members = list(range(group.size())) if members is None else members
    device = torch.device("cpu", group.rank())  # a device of its own on the stand-in
    control = control_of(group)
    return join_node(control, group.rank(), members, device, missing=missing, first=7, timeout=2.0)


def refused(world_size: int, *arguments: Any) -> str:
    """What every rank is told, which is the same."""

    def fn(group: LocalGroup) -> str:
        with pytest.raises(TransportError) as caught:
            joined(group, *arguments)
        return str(caught.value)

    with LocalWorld(world_size, device="cpu", timeout=10) as world:
        (told,) = set(world.run(fn))
    return told


def test_flags_and_lines_of_a_node(driver: Driver) -> None:
    def fn(group: LocalGroup) -> None:
        context, flags, lines = joined(group)
        control = control_of(group)
        assert flags.board.load(17) == 7
        assert driver.flag_identity(flags.address(5)) == (driver.flag_identity(flags.address(0))[0], 5 * 128)
        same = control.gather(driver.flag_identity(flags.address(5)), what="the test")
        assert len(set(map(str, same))) == 1
        lines.send((group.rank() + 1) % 3, b"hello", 1.0)
        assert lines.receive((group.rank() - 1) % 3, "waits", 1.0) == b"hello"
        control.gather(None, what="the test")
        with context.current():
            flags.close()
        lines.close()
        context.release()

    with LocalWorld(3, device="cpu", timeout=10) as world:
        world.run(fn)


def test_devices_that_cannot_read_each_other(driver: Driver) -> None:
    driver.strangers.add((2, 0))
    told = refused(3)
    assert told == (
        'transport "copy_engine": the device of rank 2 (0000:02:00.0) cannot read that of rank 0 (0000:00:00.0)'
    )


def test_no_ipc(driver: Driver) -> None:
    driver.has_ipc = False
    assert refused(2) == 'transport "copy_engine": on rank 0 the device has no CUDA IPC'


def test_no_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    def no_library(flags: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(driver, "cuInit", no_library)
    assert refused(2) == 'transport "copy_engine": on rank 0 Failed to dlopen libcuda.so.1'


def test_something_is_missing(driver: Driver) -> None:
    assert refused(2, None, "no bindings") == 'transport "copy_engine": on rank 0 no bindings'


def test_a_rank_that_cannot_connect(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Listener.connect

    def broken(listener: Listener, rank: int, *arguments: Any) -> None:
        if rank == 1:
            raise ConnectionRefusedError("refused")
        connect(listener, rank, *arguments)

    monkeypatch.setattr(Listener, "connect", broken)
    told = refused(2)
    assert "rank 0 cannot join its node's other ranks (timed out): do they share one container?" in told
    assert "rank 1 cannot join its node's other ranks (refused)" in told


def test_a_board_that_cuda_does_not_take(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    register = driver.cuMemHostRegister

    def refuse_rank_1(host: int, nbytes: int, flags: int) -> Any:
        if threading.current_thread().name.startswith("ringattn-rank1"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        return register(host, nbytes, flags)

    monkeypatch.setattr(driver, "cuMemHostRegister", refuse_rank_1)
    held = len(os.listdir("/proc/self/fd"))
    assert "rank 1 cannot join its node's other ranks (cuMemHostRegister failed: CUDA_ERROR_INVALID_VALUE)" in refused(
        2
    )
    assert len(os.listdir("/proc/self/fd")) <= held


CARDS = [Card((0, 1), None, "a", "host-a", "0"), Card((0, 1), None, "a", "host-a", "1")]


@pytest.mark.parametrize(
    ("index", "change", "problem"),
    [
        (0, {}, None),
        (1, {"problem": "it is broken"}, "on rank 1 it is broken"),
        (1, {"members": (0, 1, 2)}, "the ranks disagree on members (rank 0: [0, 1], rank 1: [0, 1, 2])"),
        (1, {"node": "b", "host": "host-b"}, "several (rank 0 on host-a, rank 1 on host-b)"),
        (0, {"unreadable": ("1",)}, "the device of rank 0 (0) cannot read that of rank 1 (1)"),
        (0, {"unreadable": ("2",)}, None),
        (1, {"pci_id": "0"}, None),  # two processes on one device
    ],
)
def test_problems(index: int, change: dict[str, Any], problem: str | None) -> None:
    cards = list(CARDS)
    cards[index] = cards[index]._replace(**change)
    found = problem_of((0, 1), dict(enumerate(cards)))
    assert found is None if problem is None else found is not None and problem in found


def test_what_is_wrong_elsewhere_is_no_problem_here() -> None:
    cards = [*CARDS, sockets.Card((2,), "it is broken", "b")]
    assert problem_of((0, 1), dict(enumerate(cards))) is None
