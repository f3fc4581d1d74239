"""The conformance suite: virtual ranks in threads and processes over gloo. For GPUs see ``test_on_a_gpu``."""

from __future__ import annotations

import itertools
import json
import re
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ringattn.comm import LocalGroup, LocalTransport, Message, check_messages
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


@pytest.mark.parametrize(
    ("sends", "receives", "text"),
    [
        ([], [(2, torch.ones(1))], "receives[0]: peer is 2; it must be between 0 and 1"),
        ([(1, torch.ones(1)), (0, torch.ones(1, device="meta"))], [], "sends[1]: the tensor is on meta; it must be on"),
        ([(1, torch.ones(2, 3).T)], [], "sends[0]: the tensor of shape (3, 2) and strides (1, 3) is not contiguous"),
        ([(1, torch.ones(0))], [], "sends[0]: the tensor of shape (0,) is empty"),
        (
            [(0, torch.ones(6))],
            [(1, torch.ones(3))],
            "rank 0 sends itself messages of [24] bytes, but receives [] bytes",
        ),
    ],
)
def test_errors_of_messages_say_which_and_why(sends: list[Any], receives: list[Any], text: str) -> None:
    transport: Any = SimpleNamespace(rank=0, size=2)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        check_messages(transport, CPU, *([Message(*message) for message in posted] for posted in (sends, receives)))


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
