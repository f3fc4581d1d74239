"""The conformance suite: virtual ranks in threads and processes over gloo. For GPUs see ``test_on_a_gpu``."""

from __future__ import annotations

import itertools
import json
import threading
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import LocalGroup, LocalTransport
from ringattn.comm import transport as comm_transport
from ringattn.comm.transport import PATTERN_BYTES, DoneFence, _pattern, decode_value, encode_value
from ringattn.comm.world import single_rank

from ..support.group_cases import GROUP_CASES, PATIENCE, group_ranks, run_cases
from ..support.rank_processes import GroupProcesses
from ..support.transport_cases import CASES, HANGS, HOST_CASES, on_ranks, wait_until

PROCESSES = 4
CPU = torch.device("cpu")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES | HOST_CASES)
def test_local(name: str, world_size: int) -> None:
    on_ranks(world_size, lambda group: (CASES | HOST_CASES)[name](LocalTransport(group, CPU), CPU))


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Run the cases in processes and return, per global rank, an empty string or a traceback for each case."""
    with GroupProcesses(PROCESSES, run_cases, tmp_path_factory.mktemp("gloo"), timeout=PATIENCE) as ranks:
        return [ranks.receive(rank, 2 * HANGS) for rank in range(PROCESSES)]


def assert_passed(gloo: list[dict[str, str]], ranks: list[int], case: str) -> None:
    errors = {rank: gloo[rank].get(case, "not run: an earlier case failed here") for rank in ranks}
    failed = [f"global rank {rank}:\n{text}" for rank, text in errors.items() if text]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", [*CASES, *HOST_CASES, *GROUP_CASES])
def test_process_group(name: str, world_size: int, gloo: list[dict[str, str]]) -> None:
    assert_passed(gloo, group_ranks(world_size, PROCESSES), f"{name}-{world_size}")


def test_process_group_with_a_dead_peer(gloo: list[dict[str, str]]) -> None:
    assert_passed(gloo, list(range(PROCESSES)), "a_dead_peer")


def test_warm_up_patterns_differ_between_edges_and_under_shifts() -> None:
    ranks = [0, 1, 255, 256, 1023]
    patterns = [_pattern(edge, CPU) for edge in itertools.product(ranks, ranks)]
    for first, second in itertools.combinations(patterns, 2):
        assert int((first != second).sum()) >= PATTERN_BYTES // 4
    for shift in (1, 4, 128, 256, 512, 1024, 2048):
        assert int((patterns[1][shift:] != patterns[1][:-shift]).sum()) > (PATTERN_BYTES - shift) // 2


def test_a_warm_up_sends_its_patterns_after_they_are_written() -> None:
    transport, mark = LocalTransport(single_rank(), CPU), DoneFence()
    transport.mark = lambda: mark  # type: ignore[method-assign]
    transport.post = Mock(wraps=transport.post)  # type: ignore[method-assign]
    transport.warm_up([(0, 0)])
    assert transport.post.call_args.kwargs["after"] == [mark]


def test_long_values_are_compressed() -> None:
    short, long = [[1] * count for count in (50, 2000)]
    assert encode_value(short) == json.dumps(short, separators=(",", ":")).encode() and len(encode_value(long)) < 100
    assert [decode_value(encode_value(value), "a value") for value in (short, long)] == [short, long]


def test_the_timer_of_a_warm_up_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def timers() -> list[threading.Timer]:
        return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]

    def fn(group: LocalGroup) -> None:
        transport, waited_for, begun = LocalTransport(group, CPU), list[threading.Thread](), timers()
        monkeypatch.setattr(comm_transport, "wait_at_exit_for", waited_for.append)
        with transport._deadline("late") as expired:
            (timer,) = {*timers()} - {*begun}
            assert timer.daemon  # a process that ends in between does not wait for it
        timer.join(HANGS)
        assert not timer.is_alive() and not expired.is_set() and not waited_for
        transport._timeout = 0.0
        with transport._deadline("late") as expired:
            assert expired.wait(HANGS)
            wait_until(lambda: transport._hub.stop_reason(transport._channel))
        assert [isinstance(thread, threading.Timer) for thread in waited_for] == [True]

    on_ranks(1, fn)
