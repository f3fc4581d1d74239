"""Transports from outside the package, written with public names and torch only."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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


def test_training_step_of_processes(tmp_path: Path) -> None:
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(in_process, (f"{tmp_path}/store",), nprocs=WORLD)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_example_passes_the_conformance_suite(world_size: int, name: str) -> None:
    exec(IMPORTS + EXAMPLE, {})
    with LocalWorld(world_size, device="cpu", timeout=60) as world:
        world.run(partial(check_transport, name))


def test_example_as_an_entry_point_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(IMPORTS + EXAMPLE)
    (tmp_path / "counted-1.dist-info").mkdir()
    points = "[ringattn.transports]\ncounting = counted\nbroken = no_such_module\n"
    (tmp_path / "counted-1.dist-info" / "entry_points.txt").write_text(points)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = "bench links --device cpu --world 2 --transport counting -b 1k -e 1k -n 1 -w 0 --beside none"
    command = [sys.executable, "-m", "ringattn", *flags.split()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": paths})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "best between processes: counting" in ran.stdout
    assert "could not load the entry point broken = no_such_module" in ran.stderr


def test_auto_takes_the_transport_with_the_highest_preference(name: str) -> None:
    register_transport(name, Opener(), preference=1000, unavailable=lambda group, device, limits: "on strike")
    refused = open_transport(device="cpu")
    assert refused.reason == "auto selected local; not counting: on strike (rank 0)"
    unregister_transport(name)
    register_transport(name, Opener(), preference=1000)
    assert transport_names()[0] == name
    assert (open_transport(device="cpu").name, open_transport(device="cpu").reason) == (name, f"auto selected {name}")


def fails(mistake: Callable[[], Any], opener: Opener, group: Any, device: torch.device, **opening: Any) -> Any:
    return mistake() if group.rank() == 1 else opener(group, device, **opening)


def no_room() -> Transport:
    raise MemoryError("no room")


@pytest.mark.parametrize("topology", [None, Topology.grid(2, 2)])
@pytest.mark.parametrize(
    ("mistake", "match"),
    [
        (no_room, "rank 1: MemoryError: no room"),
        (lambda: 3, r"rank 1: TypeError: .* returned 3, without the attributes rank, size, mark, post, "),
        (object, r"rank 1: TypeError: .* returned an object, without the attributes"),
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
            TransportError, match=r"transport differs between ranks \(rank 0: .*Opener, rank 1: .*<lambda>\)"
        ):
            open_transport(group, transport=openers[group.rank()], device="cpu")
        with Ring(group, transport=openers[group.rank()]) as ring, pytest.raises(ValueError, match="transport differs"):
            ring_attention(*torch.randn(3, 1, 4, 1, 16), ring=ring, layout="contiguous")

    with LocalWorld(2, device="cpu", timeout=60) as world:
        world.run(fn)
    assert openers[0].opened == []


def test_names_that_cannot_be_registered(name: str) -> None:
    register_transport(name, Opener())
    wrong: list[tuple[Any, Any, str]] = [
        (name, Opener(), "name is 'counting', which is already registered for .*Opener"),
        ("auto", Opener(), "name is 'auto'"),
        ("a,b", Opener(), "name is 'a,b'"),
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


class Broken:
    """A local transport with one mistake."""

    def __init__(self, group: LocalGroup, device: torch.device, mistake: str, **_: object) -> None:
        self.inner, self.mistake, self.posts = LocalTransport(group, device), mistake, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def post(self, *, sends: Sequence[Message], receives: Sequence[Message], after: Sequence[Fence] = ()) -> Fence:
        self.posts += 1
        given = [*receives]
        if self.mistake == "order":
            given = given[::-1]
        if self.mistake == "early":
            sends = [Message(message.peer, message.tensor.clone()) for message in sends]
        try:
            fence = self.inner.post(sends=sends, receives=given, after=() if self.mistake == "after" else after)
        except ValueError as error:
            raise RuntimeError if self.mistake == "refusal" else error from error
        large = given and given[-1].tensor.nbytes >= LARGE_BYTES
        if given and (self.mistake == "bits" or (self.mistake == "large" and large) or self.mistake == f"{self.posts}"):
            fence.wait()
            given[-1].tensor.flatten()[-1:].add_(1)
        return DONE if self.mistake == "fence" else fence

    def gather(self, value: object) -> list[object]:
        gathered = self.inner.gather(value)
        return gathered[::-1] if self.mistake == "gather" else gathered

    def abort(self, reason: str) -> None:
        self.inner.abort("something happened" if self.mistake == "abort" else reason)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        ("order", "messages_between_two_ranks_arrive_in_order"),
        ("after", "sends_wait_for_the_fences_in_after"),
        ("early", "sends_wait_for_the_fences_in_after"),
        ("bits", "messages_between_two_ranks_arrive_in_order"),
        ("large", "all_sizes_and_dtypes_arrive_unchanged"),
        ("40", "slots_can_be_reused_around_the_ring"),
        ("refusal", "invalid_messages_raise_before_anything_is_sent"),
        ("fence", "a_sent_buffer_can_be_overwritten"),
        ("gather", "gather_returns_values_in_rank_order"),
        ("abort", "posts_after_an_abort_raise_its_reason"),
    ],
)
def test_the_conformance_suite_finds_a_mistake(mistake: str, case: str) -> None:
    broken: Any = partial(Broken, mistake=mistake)
    with LocalWorld(2, device="cpu", timeout=60) as world, pytest.raises(AssertionError, match=case):
        world.run(partial(check_transport, broken))
