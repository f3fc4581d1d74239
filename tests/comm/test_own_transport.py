"""Transports from outside the package, written with public names and torch only."""

from __future__ import annotations

import importlib
import itertools
import logging
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ringattn import Layout, LocalWorld, Ring, ring_attention
from ringattn.comm import (
    DONE,
    Fence,
    LocalGroup,
    LocalTransport,
    Message,
    Topology,
    Transport,
    TransportError,
    open_transport,
    open_transports,
    register_transport,
    registry,
    testing,
    transport_names,
    unregister_transport,
)
from ringattn.comm.testing import LARGE_BYTES, check_transport

WORLD, TOKENS, HEADS, HEAD_DIM = 3, 24, 2, 16
KV_BYTES = 2 * (TOKENS // WORLD) * HEADS * HEAD_DIM * 4
EXAMPLE = textwrap.dedent((register_transport.__doc__ or "").split("::\n")[1].split("\n    `ringattn")[0])
IMPORTS = "from ringattn.comm import LocalGroup, open_transport, register_transport\n"


class Counting:
    """A wrapper that counts the bytes that another transport sends."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.sent_bytes = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        self.sent_bytes += sum(message.tensor.nbytes for message in sends)
        return self.inner.post(sends=sends, receives=receives, after=after)


class Opener:
    """A factory that records the transports it opens. With ``waits`` it waits for the other ranks while it opens."""

    def __init__(self, waits: bool = True) -> None:
        self.opened, self.waits = list[Any](), waits

    def __call__(self, group: Any, device: torch.device, *, control: Any, limits: Any, **_: object) -> Any:
        inner = "local" if isinstance(group, LocalGroup) else "process_group"
        if self.waits:
            transport = open_transport(group, transport=inner, device=device, control=control, limits=limits)
        else:
            transport = LocalTransport(group, device)
        self.opened.append(Counting(transport))
        return self.opened[-1]


def train_step(group: Any, transport: str | Opener, opener: Opener | None = None) -> list[torch.Tensor]:
    """Return the output and gradients of one zigzag step, and check the bytes that the forward sends."""
    generator, rank = torch.Generator().manual_seed(7), group.rank()
    layout = Layout.zigzag(TOKENS, WORLD)
    q, k, v, dout = (
        layout.shard(torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator), rank).requires_grad_()
        for _ in range(4)
    )
    with Ring(group, transport=transport) as ring:
        out: Any = ring_attention(q, k, v, ring=ring, layout=layout, causal=True)
        if opener is not None:
            (own,) = [opened for opened in opener.opened if opened.rank == rank]
            assert own.sent_bytes == (WORLD - 1) * KV_BYTES
            assert ring.transport == (transport if isinstance(transport, str) else own.inner.name)
        out.backward(dout)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def check_steps(group: Any, by_object: Opener, by_name: Opener) -> None:
    expected = train_step(group, "auto")
    for transport, opener in ((by_object, by_object), ("counting", by_name)):
        results = train_step(group, transport, opener)
        assert len(results) == 4 and all(map(torch.equal, results, expected))


def in_process(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    by_name = Opener()
    register_transport("counting", by_name)
    check_steps(dist.group.WORLD, Opener(), by_name)
    with pytest.raises(TransportError, match="rank 1: MemoryError: no room"):
        open_transport(transport=partial(fails, no_room, by_name), device="cpu")
    check_transport("counting")
    dist.destroy_process_group()


@pytest.fixture
def name() -> Iterator[str]:
    yield "counting"
    unregister_transport("counting")


def test_training_step_of_virtual_ranks(name: str) -> None:
    by_name = Opener()
    register_transport(name, by_name)
    with LocalWorld(WORLD, device="cpu") as world:
        world.run(partial(check_steps, by_object=Opener(), by_name=by_name))


@pytest.mark.nightly
def test_training_step_of_processes(tmp_path: Path) -> None:
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(in_process, (f"{tmp_path}/store",), nprocs=WORLD)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_example_passes_the_conformance_suite(world_size: int, name: str) -> None:
    exec(IMPORTS + EXAMPLE, {})
    with LocalWorld(world_size, device="cpu", timeout=60) as world:
        world.run(partial(check_transport, name))


def test_entry_points_are_loaded_once(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(group: str) -> list[Any]:
        asked.append(group)
        missing, raising = (partial(importlib.import_module, "no_such_module"), Mock(side_effect=OSError("no libucx")))
        broken = [SimpleNamespace(name="broken", value="no_such_module", load=load) for load in (missing, raising)]
        return [*broken, SimpleNamespace(load=partial(register_transport, name, Opener()))]

    asked: list[str] = []
    monkeypatch.setattr(registry, "entry_points", find)
    registry._load_entry_points.cache_clear()
    assert name in transport_names() and name in transport_names() and asked == ["ringattn.transports"]
    assert "could not load the entry point broken = no_such_module" in caplog.text and "no libucx" in caplog.text


def test_auto_takes_the_transport_with_the_highest_preference(name: str, caplog: pytest.LogCaptureFixture) -> None:
    register_transport(name, Opener(), preference=1000, unavailable=lambda group, device, limits: "on strike")
    refused = open_transport(device="cpu")
    assert refused.reason == "auto selected local; not counting: on strike (rank 0)"
    unregister_transport(name)
    register_transport(name, Opener(), preference=1000)
    assert transport_names()[0] == name
    with caplog.at_level(logging.INFO, "ringattn"):
        opened = open_transport(device="cpu")
        assert (opened.name, opened.reason) == (name, f"auto selected {name}")
        unregister_transport(name)
        register_transport(name, Mock(side_effect=TransportError("no link")), preference=1000)
        assert open_transport(device="cpu").reason == "auto selected local; not counting: no link"
    assert f"rank 0 of 1, tensors on cpu: auto selected {name}" in caplog.messages
    assert f'rank 0: transport "auto" skips {name}: no link' in caplog.messages


def test_auto_takes_an_own_transport_where_no_other_serves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register_transport(name, Opener())  # the default preference is the last that auto takes
    assert open_transport(device="cpu").name == "local"
    monkeypatch.setitem(registry._REGISTRY, "local", replace(registry.find_transport("local"), preference=-1))
    assert open_transport(device="cpu").name == name


def fails(mistake: Callable[[], Any], opener: Opener, group: Any, device: torch.device, **opening: Any) -> Any:
    return mistake() if group.rank() == 1 else opener(group, device, **opening)


def no_room() -> Transport:
    raise MemoryError("no room")


@pytest.mark.parametrize("topology", [None, Topology.grid(2, 2)])
@pytest.mark.parametrize(
    ("mistake", "match"),
    [
        (no_room, "rank 1: MemoryError: no room"),
        (lambda: 3, r"rank 1: TypeError: .* returned 3, which lacks the attributes rank, size, mark, post, "),
        (object, r"rank 1: TypeError: .* returned an object, which lacks the attributes"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_a_factory_that_fails_on_one_rank_fails_on_all(
    mistake: Callable[[], Any], match: str, topology: Topology | None, waits: bool
) -> None:
    opener = Opener(waits)

    def fn(group: LocalGroup) -> None:
        with pytest.raises(TransportError, match=match):
            open_transports(group, transport=partial(fails, mistake, opener), device="cpu", topology=topology)

    with LocalWorld(4, device="cpu", timeout=60) as world:
        world.run(fn)
    assert waits or len(opener.opened) >= 3
    for transport in opener.opened:
        with pytest.raises(TransportError, match="closed"):
            transport.post(sends=[], receives=[])


def test_factories_that_differ_between_ranks_are_refused() -> None:
    openers = Opener(), lambda group, device, **_: LocalTransport(group, device)

    def fn(group: LocalGroup) -> None:
        with pytest.raises(
            TransportError, match=rf"transport differs between ranks \(rank 0: {__name__}.Opener, rank 1: .*lambda"
        ):
            open_transport(group, transport=openers[group.rank()], device="cpu")
        with Ring(group, transport=openers[group.rank()]) as ring, pytest.raises(ValueError, match="transport differs"):
            ring_attention(*torch.randn(3, 1, 4, 1, 16), ring=ring, layout="contiguous")

    with LocalWorld(2, device="cpu", timeout=60) as world:
        world.run(fn)
    assert openers[0].opened == []


def test_registered_transports_keep_their_options(name: str) -> None:
    options: dict[str, Any] = {
        "devices": ("cpu",), "ranks": ("threads",), "preference": 3, "limits": ("ctas",), "across_nodes": False,
        "unavailable": lambda group, device, limits: None,
    }  # fmt: skip
    for given in (options, {}):
        register_transport(name, open_transport, **given)
        assert registry.find_transport(name) == registry.TransportEntry(name, open_transport, **given)
        unregister_transport(name)
    register_transport(name, open_transport)


def test_names_that_cannot_be_registered(name: str) -> None:
    register_transport(name, Opener())
    wrong: list[tuple[Any, Any, str]] = [
        (name, Opener(), "name is 'counting', which is already registered for .*Opener"),
        ("auto", Opener(), "name is 'auto'"),
        ("a,b", Opener(), "name is 'a,b'"),
        ("", Opener(), "name is ''"),
        (3, Opener(), "name is 3"),
        ("other", "counting", "factory is 'counting'; it must be a function"),
    ]
    for wrong_name, factory, match in wrong:
        with pytest.raises(ValueError, match=match):
            register_transport(wrong_name, factory)
    with pytest.raises(TypeError, match=r"^register_transport\(\) got an unexpected keyword argument 'prefer'"):
        register_transport("other", Opener(), prefer=3)  # type: ignore[call-arg]
    for transport in ("countin", 3):
        with pytest.raises(ValueError, match="auto, local, nccl, process_group, counting, nccl_one_sided, or"):
            Ring(transport=transport)  # type: ignore[arg-type]


# Faults of a transport. Each is called in place of a method, with that method and the number of the call.


def spoil(fits: Callable[..., bool], factor: float = 1.0) -> Callable[..., Any]:
    """Return a fault that changes the last value of the received tensors for which ``fits(number, index, tensor)``.

    The value is multiplied by ``factor``, or grows by 1 if that is 1.
    """

    def fault(post: Any, number: int, *, receives: Sequence[Message], **given: Any) -> Any:
        fence = post(receives=receives, **given)
        fence.wait()
        for index, (_, tensor) in enumerate(receives):
            if fits(number, index, tensor):
                last = tensor.flatten()[-1:]
                last.add_(1) if factor == 1.0 else last.mul_(factor)
        return fence

    return fault


def edit(message_kind: str, change: Callable[[list[Message]], Any]) -> Callable[..., Any]:
    """Return a fault that posts other messages, or other fences."""
    return lambda post, number, **given: post(**given | {message_kind: change([*given.get(message_kind, ())])})


def swap_peers(sends: list[Message]) -> list[Message]:
    return [Message(a.peer, b.tensor) for a, b in zip(sends, sends[::-1], strict=True)]


def zero(receives: list[Message]) -> list[Message]:
    return [Message(peer, tensor.zero_()) for peer, tensor in receives]


def call_for_each(function: Callable[[torch.Tensor], object]) -> Callable[[list[Message]], list[Message]]:
    return lambda messages: [message for message in messages if function(message.tensor) or True]


def track(post: Any, number: int, *, receives: Sequence[Message], **given: Any) -> Any:
    fence = post(receives=receives, **given)
    for message in receives:
        message.tensor.requires_grad_()
    return fence


def accept(wrong: int) -> Callable[..., Any]:
    """Return a fault in which call number ``wrong`` does nothing."""
    return lambda method, number, *given, **named: DONE if number == wrong else method(*given, **named)


def fail(wrong: int = 1) -> Callable[..., Any]:
    """Return a fault in which call number ``wrong`` raises."""

    def fault(method: Any, number: int, *given: Any, **named: Any) -> Any:
        if number == wrong:
            raise RuntimeError("out of order")
        return method(*given, **named)

    return fault


class OtherFence:
    """A fence that waits at most ``waits`` times, then raises or does nothing. ``over`` are the results of `done`."""

    def __init__(self, wait: Callable[[], None], waits: int, over: Sequence[bool], raises: bool = True) -> None:
        self.inner, self.waits, self.over, self.raises = wait, waits, [*over], raises

    def wait(self) -> None:
        self.waits -= 1
        if self.waits >= 0:
            self.inner()
        elif self.raises:
            raise RuntimeError("out of order")

    def done(self) -> bool:
        return self.over.pop(0) if len(self.over) > 1 else self.over[0]


def fences(waits: int, *over: bool) -> Callable[..., Any]:
    return lambda method, number, **given: OtherFence(method(**given).wait, waits, over)


def block_in_wait(waits: int, over: bool) -> Callable[..., Any]:
    def fault(post: Any, number: int, **given: Any) -> Any:
        return (
            OtherFence(lambda: post(**given).wait(), waits, (over,), raises=False)
            if given["receives"]
            else post(**given)
        )

    return fault


def is_kind(dtype: torch.dtype, dim: int) -> Callable[..., bool]:
    return lambda number, index, x: (x.dtype, x.dim()) == (dtype, dim) and x.nbytes < LARGE_BYTES


def refuse(fits: Callable[[list[Any]], bool]) -> Callable[..., Any]:
    return lambda method, number, edges: fail(1 if fits(edges) else 0)(method, 1, edges)


BFLOAT, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32


def change_reason(abort: Callable[[str], None], number: int, reason: str) -> None:
    abort("no reason")


VALUE, RAISED, ACCEPTED = "the received value is", "out of order", "no error was raised"
FAULTS: dict[str, list[tuple[str, Callable[..., Any], str]]] = {
    "messages_between_two_ranks_arrive_in_order": [
        ("post", edit("receives", lambda messages: messages[::-1]), VALUE),
        ("post", spoil(lambda number, index, tensor: (number, index) == (4, 2)), "number of values"),
    ],
    "all_sizes_and_dtypes_arrive_unchanged": [
        *(
            ("post", spoil(is_kind(dtype, dim)), f"({dtype}")
            for dtype, dim in itertools.product((BFLOAT, HALF, SINGLE), range(4))
        ),
        ("post", spoil(lambda number, index, x: x.nbytes >= LARGE_BYTES), "(torch.float32, "),
        ("post", spoil(lambda number, index, x: x.dtype == torch.float32, 1 + 2**-20), "(torch.float32, "),
    ],
    "slots_can_be_reused_around_the_ring": [
        ("post", spoil(lambda number, index, x: number == 40 and x.dtype == HALF), "hop 39"),
        ("post", spoil(lambda number, index, x: number == 1 and x.dtype == SINGLE), "hop 0"),
    ],
    "one_post_exchanges_with_both_neighbours": [("post", edit("sends", swap_peers), VALUE)],
    "a_rank_can_send_to_itself": [
        ("post", spoil(lambda *place, fault=fault: place[:2] == fault), VALUE)
        for fault in itertools.product((1, 2), (0, 1))
    ],
    "sends_wait_for_the_fences_in_after": [
        ("post", edit("after", lambda fences: ()), VALUE),
        ("post", edit("sends", lambda m: [Message(x.peer, x.tensor.clone()) for x in m]), VALUE),
    ],
    "receives_wait_for_the_fences_in_after": [
        ("post", edit("after", lambda fences: ()), "the values in the buffer before its fence was over"),
        ("post", edit("receives", zero), "the values in the buffer before its fence was over"),
        ("post", spoil(lambda *_: True), VALUE),
    ],
    "a_post_can_send_what_an_earlier_post_receives": [("post", spoil(lambda number, *_: number == 2), VALUE)],
    "many_posts_can_be_queued_before_any_wait": [("post", spoil(lambda number, *_: number == 6), VALUE)],
    "done_becomes_true_without_a_wait": [
        ("mark", fences(9, False), "never became true"),
        ("post", fences(9, False), "never became true"),
        ("post", fences(9, True, False), "done() of a fence that is over is False"),
        ("post", spoil(lambda *_: True), VALUE),
    ],
    "a_sent_buffer_can_be_overwritten_after_the_wait": [
        ("post", lambda post, number, **given: post(**given) and DONE, VALUE),
    ],
    "a_fence_can_be_waited_for_repeatedly": [
        *((method, fences(waits, True), RAISED) for method, waits in (("mark", 2), ("post", 2), ("post", 3))),
        ("post", edit("sends", lambda m: [Message(x.peer, x.tensor + 1) for x in m]), VALUE),
    ],
    "transfers_do_not_affect_autograd": [
        ("post", track, "requires_grad of the received tensor is True"),
        ("post", edit("sends", call_for_each(lambda x: x.register_hook(lambda grad: 2 * grad))), "the gradient is"),  # type: ignore[no-untyped-call]
        ("post", spoil(lambda *_: True), VALUE),
    ],
    "gather_returns_values_in_rank_order": [
        ("gather", lambda gather, number, value: gather(value)[:: 1 - 2 * (number == 3)], VALUE),
        ("gather", lambda gather, number, value: gather(value)[number == 4 :], VALUE),
    ],
    "invalid_messages_raise_before_anything_is_sent": [
        *(("post", accept(number), ACCEPTED) for number in range(1, 8)),
        *((method, fail(), RAISED) for method in ("post", "gather")),
    ],
    "warm_up_works_for_every_pair_of_ranks": [
        ("warm_up", refuse(lambda edges: (1, 1) in edges), RAISED),
        ("warm_up", refuse(lambda edges: (0, 2) in edges), RAISED),
        ("warm_up", fail(2), RAISED),
        *(("warm_up", accept(number), ACCEPTED) for number in (3, 4)),
        ("warm_up", lambda warm_up, number, edges: edges == [(0, 3)] or warm_up(edges), ACCEPTED),  # one rank too many
    ],
    "posts_after_an_abort_raise_its_reason": [
        ("abort", change_reason, "must contain 'somebody said so'"),
        ("abort", fail(2), RAISED),
        *(("post", accept(number), ACCEPTED) for number in (1, 2)),
        ("close", fail(), RAISED),
    ],
    "abort_ends_a_blocked_receive": [
        ("abort", change_reason, "must contain 'it took too long'"),
        ("post", block_in_wait(9, over=False), "done() of a fence that is over is False"),
        ("post", block_in_wait(1, over=True), ACCEPTED),
        ("post", accept(2), ACCEPTED),
    ],
    "abort_ends_a_post_that_waits": [
        ("abort", lambda abort, number, reason: None, ACCEPTED),
        ("post", edit("receives", zero), VALUE),
        ("abort", change_reason, "must contain 'it took too long'"),
    ],
    "close_can_be_called_twice": [
        ("close", fail(2), RAISED),
        ("close", lambda *_: None, ACCEPTED),
        ("post", accept(1), ACCEPTED),
    ],
}


@pytest.mark.parametrize(
    ("case", "method", "fault", "words"),
    [pytest.param(case, *row, id=f"{case}-{at}") for case, rows in FAULTS.items() for at, row in enumerate(rows)],
)
def test_each_conformance_case_finds_its_faults(
    case: str, method: str, fault: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert case in testing.CASES | testing.HOST_CASES
    for cases in (testing.CASES, testing.HOST_CASES):
        for other in {*cases} - {case}:
            monkeypatch.delitem(cases, other)
    monkeypatch.setattr(testing, "HANG_SECONDS", 0.2)
    opened: list[Any] = []

    def open_broken(*given: Any, **opening: Any) -> Any:
        transport: Any = open_transport(*given, **opening)
        original, numbers = getattr(transport, method), itertools.count(1)
        setattr(transport, method, lambda *given, **named: fault(original, next(numbers), *given, **named))
        opened.append(transport)
        return transport

    monkeypatch.setattr(testing, "open_transport", open_broken)
    caught = pytest.raises(AssertionError, match=re.escape(words))
    with LocalWorld(3, device="cpu", timeout=60) as world, caught as error:
        world.run(partial(check_transport, "local"))
    assert re.match(rf"rank \d, {case}: ", str(error.value))
    assert not any(transport._open for transport in opened) or method == "close"
