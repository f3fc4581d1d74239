"""The ring on the recorder: every rank's ``ring_attention`` calls, up to the caller's next use of its tensors.

Everything that depends on how the ring and its transports open is here.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

import ringattn.ring.ring as ring_module
from ringattn import LocalWorld, Ring, halo, ring_attention, unshard
from ringattn.comm import LocalGroup, LocalTransport, Slots, Topology
from ringattn.comm.control import open_control
from ringattn.comm.limits import NO_LIMITS
from ringattn.comm.registry import find_transport
from ringattn.comm.transport import WARM_UP_SECONDS
from ringattn.comm.transports import selection
from ringattn.comm.world import LocalMesh
from ringattn.kernels import shared_cache as shared_module
from ringattn.kernels.shared_cache import SharedValue
from ringattn.ring import Layout, Mask, buffers, moves, ops, prepare
from ringattn.ring import row_packing as rows_module
from ringattn.ring.buffers import PostKey
from ringattn.ring.schedule import plan as plan_module
from ringattn.ring.schedule.plan import plan
from ringattn.ring.schedule.visibility import sent_keys

from .cases import GIVEN, HALO, Case, expected, shard, visible_parts
from .device import PATIENCE, Use
from .graph import Graph
from .kernels import install_kernels
from .memory import Ref
from .operators import acting
from .recorder import GPU, Recorder, install
from .replay import Replay

ARRIVES = ("recv", "copy", "await")
CACHED_BY = "the cached value of "


def fresh(layout: Layout) -> Layout:
    """Return an equal layout without cached values."""
    return Layout(layout.spans_per_rank)


def cached_by() -> str:
    """Return our function that is creating or reading a cached value."""
    frame, ours = sys._getframe(1), ("ringattn.kernels.", "ringattn.ring.")
    while not (name := frame.f_globals["__name__"]).startswith(ours) or name == shared_module.__name__:
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_code.co_qualname)  # type: ignore[attr-defined]


def name_cached(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Name every cached device tensor after our function that made it."""
    original_init = SharedValue.__init__

    def named_init(self: SharedValue[Any], value: Any, tensors: Any) -> None:
        present = [x for x in tensors if x is not None]
        original_init(self, value, present)
        for x in present:
            if recorder.on_device(x):
                recorder.name(x, f"{CACHED_BY}{cached_by()}")

    monkeypatch.setattr(SharedValue, "__init__", named_init)


@dataclass
class Recording:
    """The graph of a case, and the posts of its ranks."""

    case: Case
    recorder: Recorder
    graph: Graph
    results: list[dict[str, Ref]]  # per rank, results that the caller read
    keys: list[list[tuple[int, PostKey]]]  # per rank, call and key of its posts, in order

    def problems(self) -> list[str]:
        failures = self.graph.problems() + self.out_of_order() + self.wrong_launch_counts()
        return failures if self.graph.cyclic else failures + self.early_waits()

    def out_of_order(self) -> list[str]:
        """Return posts out of key order, and transfers whose two ends have different keys."""
        failures = []
        for rank, keys in enumerate(self.keys):
            places = [(call, key.phase == "backward", *_place(key)) for call, key in keys]
            for (_, first), (_, second), a, b in zip(keys, keys[1:], places, places[1:], strict=False):
                if a >= b:
                    failures.append(f"rank {rank} posts '{second}' after '{first}': that is not the order of keys")
        for op in self.graph.log:
            if op.kind not in ("recv", "await") or op.source is None or op.label not in self._by_label:
                continue
            if self.key(op.label) != self.key(op.source.label):
                failures.append(f"{op.source} is received by {op}: their keys differ")
        return failures

    def early_waits(self) -> list[str]:
        """Return forward kernels that wait for K/V of a later hop, which would expose the transfer."""
        failures = []
        arrivals = [op for op in self.graph.log if op.kind in ARRIVES and op.label in self._by_label]
        for kernel in self.graph.log:
            if kernel.detail != "forward_kernel":
                continue
            call, _, rest = kernel.label.partition(",")
            hop = int(rest.split()[2])
            for op in arrivals:
                later = op.label.startswith(f"{call}, forward") and self._by_label[op.label].payload_hop > hop
                if later and op.rank == kernel.rank and self.graph.happens_before(op, kernel):
                    failures.append(f"{kernel} waits for {op}, which it does not need")
        return failures

    def wrong_launch_counts(self) -> list[str]:
        """Return kernels that a rank did not launch once per mask part of each visible shard and of its own."""
        launch_counts = Counter(
            (op.rank, op.label.partition(",")[0], op.detail) for op in self.graph.log if op.kind == "kernel"
        )
        failures = []
        for number, call in enumerate(self.case.calls):
            call, ulysses = self.case.on_ring(call), self.case.ulysses
            runs = self.case.runs(call)
            groups = self.case.chunks(call) // len(runs)
            for rank in (rank for rank in range(self.case.world) if call.layout.lengths[rank // ulysses]):
                ring_rank = rank // ulysses
                keys = [
                    run.positions(other) for run in runs for other in range(call.layout.world) if other != ring_rank
                ]
                own = [run.positions(ring_rank) for run in runs]
                others = sum(visible_parts(call, ring_rank, part) for part in keys)
                for kernel in self.case.kernels(call):
                    # kernels with a program per key launch nothing for an empty run
                    by_row = kernel in ("forward_kernel", "dq_kernel")
                    mine = sum(max(visible_parts(call, ring_rank, part), by_row or len(part) > 0) for part in own)
                    wanted = groups * (others + mine)
                    count = launch_counts[rank, f"call {number}", kernel]
                    if count != wanted:
                        failures.append(f"rank {rank} launches {kernel} {count} times in call {number}, not {wanted}")
        return failures

    def key(self, label: str) -> tuple[int, ...]:
        return _place(self._by_label[label])

    @cached_property
    def _by_label(self) -> dict[str, PostKey]:
        return {f"call {call}, {key}": key for keys in self.keys for call, key in keys}

    def replayed(self, seed: int, before: list[set[int]] | None = None) -> list[dict[str, Tensor]]:
        """Return every rank's results with the operations run in an order drawn by `seed`."""
        replay = Replay(self.recorder)
        replay.run(self.graph, seed, before)
        return [{name: replay.tensor(ref) for name, ref in results.items()} for results in self.results]

    def wrong(self, seed: int, before: list[set[int]] | None = None) -> list[str]:
        """Return the results that are wrong after a replay with this seed."""
        failures = []
        results = self.replayed(seed, before)
        for rank, (got, want) in enumerate(zip(results, self.wanted, strict=True)):
            assert got.keys() == want.keys()
            failures += [f"{name} of rank {rank} is wrong" for name in want if not _same(got[name], want[name])]
        return failures

    @cached_property
    def wanted(self) -> list[dict[str, Tensor]]:
        return expected(self.case)


def _same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got, want)


def _place(key: PostKey) -> tuple[int, ...]:
    return key.hop, key.kind, key.payload_hop, key.chunk


def record(case: Case) -> Recording:
    """Run a case on a recorder of its own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _Session(case, monkeypatch).run()


class _Session:
    """The recording of one case, with one thread per rank."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case = case
        self.recorder, self.fabric = install(monkeypatch)
        install_kernels(monkeypatch, self.recorder)
        self.slots: list[tuple[str, int, int, int]] = []  # name, storage, start of slot 0, bytes per slot
        self.rings: dict[int, Ring] = {}
        self.exchanges: dict[int, Ring] = {}  # Ulysses rings
        self.meshes: dict[int, LocalMesh] = {}
        self.calls = [0] * case.world  # index of each rank's current call
        self.results: list[dict[str, Ref]] = [{} for _ in range(case.world)]
        self.kept: list[Tensor] = []
        self.keys: list[list[tuple[int, PostKey]]] = [[] for _ in range(case.world)]
        self._barrier = threading.Barrier(case.world)
        monkeypatch.setattr(ring_module, "open_transports", self.open)
        monkeypatch.setattr(ring_module, "open_transport", lambda *rest, **more: self.open(*rest, **more, flat=True)[0])
        monkeypatch.setattr(prepare, "build_mask", self.build_mask)
        # Bypass the dispatcher, because the stand-in's modes are off inside custom ops.
        monkeypatch.setattr(ops, "_FORWARD", ops._ring_attention)
        monkeypatch.setattr(ops, "_GRADIENTS", ops.run_backward)
        monkeypatch.setattr(ring_module, "default_ring", lambda *_: self.exchange)
        new_ring = lambda group, deadline, **_: Ring(group, transport=case.transport, deadline=deadline)  # noqa: E731
        monkeypatch.setattr(ring_module, "_new_ring", new_ring)
        self._caches: list[Any] = []
        for module, name in (
            (plan_module, "_shared_plan"), (rows_module, "_cached_rows"), (prepare, "ulysses_layout"),
            (moves, "plan_exchanges"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self.of_process(getattr(module, name)))
        # One layout per process, because layouts cache device tensors.
        self.layouts = [{call.layout: fresh(call.layout) for call in case.calls} for _ in self._processes]
        name_cached(monkeypatch, self.recorder)
        self._label(monkeypatch)

    def run(self) -> Recording:
        for layout, mask, *_ in map(self.case.on_ring, self.case.calls):
            sent_keys(layout, mask, layout)  # fill this host-only cache once for all ranks
        with LocalWorld(self.case.world, device=GPU, timeout=PATIENCE) as world:
            world.run(self.rank)
        graph = Graph(self.recorder.log, self.where)
        return Recording(self.case, self.recorder, graph, self.results, self.keys)

    def build_mask(self, *_: object, **__: object) -> Mask:
        """Replace the ring's function, because the cases use masks of any kind."""
        return self.case.calls[self.calls[self.recorder.thread.rank]].mask

    @property
    def _processes(self) -> range:
        """The emulated processes: virtual ranks share one process and device, other ranks have one each."""
        return range(1 if self.case.transport == "local" else self.case.world)

    @property
    def _process(self) -> int:
        return self.recorder.thread.rank % len(self._processes)

    def of_process(self, cached: Any) -> Callable[..., Any]:
        """Return `cached` with one cache per emulated process of this recording."""
        caches = [lru_cache(cached.__wrapped__) for _ in self._processes]
        self._caches += caches
        return lambda *given, **more: caches[self._process](*given, **more)

    def forget(self) -> None:
        """Clear all caches, as many other calls would."""
        for cache in self._caches:
            cache.cache_clear()
        for layout in (layout for layouts in self.layouts for layout in layouts.values()):
            layout.__dict__.pop("_orders", None)

    def begin(self) -> None:
        """Clear the caches and start the recording."""
        self.forget()
        for results, keys in zip(self.results, self.keys, strict=True):
            results.clear()
            keys.clear()
        self.recorder.begin()

    @property
    def exchange(self) -> Ring:
        return self.exchanges[self.recorder.thread.rank]

    # one rank

    def rank(self, group: LocalGroup) -> None:
        try:
            # Emulate a rank that never called torch.cuda.set_device: its tensors are on another device.
            with acting(self.recorder, group.rank()), torch.cuda.device(0):
                self._rank(group, group.rank())
        except BaseException:
            self._barrier.abort()  # release the ranks that wait for this one
            raise

    def _rank(self, group: LocalGroup, rank: int) -> None:
        # Close the ring even if the case fails: its watch would query these events on torch's own CUDA.
        mesh = self.meshes[rank] = group.mesh(self.case.world // self.case.ulysses, self.case.ulysses)
        group = group if self.case.ulysses == 1 else mesh.ring
        with ExitStack() as open_rings:
            ring = open_rings.enter_context(Ring(group, transport=self.case.transport, **self.case.ring))
            self.rings[rank] = self.exchanges[rank] = ring
            if self.case.ulysses > 1:
                self.exchanges[rank] = ring.partner(mesh.ulysses)  # closed with the ring
            ring._trace = _Spans(self.recorder, lambda: self.calls[rank])  # type: ignore[assignment]
            # Warm up while bytes still move, because the warm-up checks them.
            for call in map(self.case.on_ring, self.case.calls):
                where = (ring.rank, ring.direction, GPU, ring.topology, ring.slots)
                steps = plan(call.layout, call.mask, *where, runs=len(self.case.runs(call)))
                for transport, edges in zip(ring.open(GPU), steps.edges, strict=False):
                    transport.warm_up(edges)
            if self.case.unshards or self.case.halos or self.case.ulysses > 1:
                with self.exchange._exchange("warm-up", GPU):
                    pass
            tensors = [self.given(0, rank)]
            if self.case.streams > 1:  # allocate slots now: a later allocation would make the host wait
                self.call(ring, rank, 0, tensors[0])
            self.together(rank, self.begin)
            self.fabric.moves = self.recorder.blocks = False
            extra_streams = [torch.cuda.Stream(GPU) for _ in range(self.case.streams - 1)]
            streams = [torch.cuda.current_stream(GPU), *extra_streams]
            for number in range(len(self.case.calls)):
                with torch.cuda.stream(streams[number % len(streams)]):
                    if number and extra_streams:
                        tensors.append(self.given(number, rank))
                    self.call(ring, rank, number, tensors[-1])
                    self.use_again(rank, number, tensors[-1])
            if extra_streams:
                ring._warm.clear()  # it holds plans
                self.together(rank, self.forget)
            self.together(rank, self.recorder.end)

    def call(self, ring: Ring, rank: int, number: int, tensors: dict[str, Tensor]) -> None:
        self.calls[rank] = number
        layout, mask, backward, hidden, dropout = self.case.calls[number]
        layout = self.layouts[self._process][layout]
        if self.case.unshards or self.case.halos:
            return self.move(ring, rank, number, layout, tensors["q"])
        extra: dict[str, Any] = {}
        if hidden:
            extra["key_mask"] = torch.ones(1, layout.seqlen).index_fill(1, torch.tensor(hidden), 0).bool()
        if dropout:
            extra |= {"dropout_p": 0.5, "dropout_seed": 7 + number}
        if self.case.ulysses > 1:
            extra["group"] = self.meshes[rank]
        q, k, v = (tensors[name].detach().requires_grad_(backward) for name in "qkv")
        out, lse = ring_attention(
            q, k, v, layout=layout, ring=ring, causal=mask.causal, return_lse=True, config=self.case.config, **extra
        )
        self.read(rank, f"out{number}", out)
        self.read(rank, f"lse{number}", lse)
        if backward:
            grads = (tensors["dout"], tensors["dlse"])
            # not torch.autograd.grad, which would hide torch's calls from the modes
            grads_of_qkv = _engine_run_backward((out, lse), grads, False, False, (q, k, v), True, accumulate_grad=False)
            for name, grad in zip(("dq", "dk", "dv"), grads_of_qkv, strict=True):
                self.read(rank, f"{name}{number}", grad)

    def move(self, ring: Ring, rank: int, number: int, layout: Layout, tensors: Tensor) -> None:
        """Unshard q, or take its halo, on every rank; each rank has its own loss."""
        q = tensors.detach().requires_grad_()
        options: dict[str, Any] = {"layout": layout, "group": ring.group}
        whole = torch.cat(halo(q, *HALO, **options), 1) if self.case.halos else unshard(q, **options, grad="sum")
        self.read(rank, f"whole{number}", whole)
        grads = _engine_run_backward(
            (whole,), (whole.detach() * (rank + 1),), False, False, (q,), True, accumulate_grad=False
        )
        self.read(rank, f"dq{number}", grads[0])

    def use_again(self, rank: int, number: int, tensors: dict[str, Tensor]) -> None:
        """Overwrite or free the caller's tensors as soon as a call has returned."""
        with self.recorder.labelled("the caller, afterwards"), torch.no_grad():
            for x in tensors.values():
                x.fill_(float("nan"))
            if number + 1 == len(self.case.calls) or self.case.streams > 1:
                return
            if self.case.calls[number].layout != self.case.calls[number + 1].layout:
                tensors.clear()
                tensors |= self.given(number + 1, rank)
            else:
                for name, x in tensors.items():
                    x.copy_(shard(self.case, number + 1, name, rank))

    def read(self, rank: int, name: str, result: Tensor) -> None:
        with self.recorder.labelled(f"the caller reads {name}"), torch.no_grad():
            copy = result.detach().clone()
        self.kept.append(copy)
        self.results[rank][name] = self.recorder.replay_argument(copy)

    def given(self, number: int, rank: int) -> dict[str, Tensor]:
        tensors = {name: shard(self.case, number, name, rank).contiguous().to(GPU) for name in GIVEN}
        for name, tensor in tensors.items():
            self.recorder.name(tensor, f"rank {rank}'s {name}")
        return tensors

    def together(self, rank: int, action: Callable[[], None]) -> None:
        """Run ``action`` once, while every rank waits."""
        self._barrier.wait(PATIENCE)
        if rank == 0:
            action()
        self._barrier.wait(PATIENCE)

    # transports

    def open(
        self, group: LocalGroup, *, transport: str, device: torch.device, topology: Topology | None = None,
        flat: bool = False, **_: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return one transport per level of the ring, like `open_transports` between processes."""
        if transport == "local":
            return tuple(LocalTransport(group, device) for _ in range(1 + bool(topology and topology.two_level)))
        options = {"control": open_control(group), "limits": NO_LIMITS, "timeout": WARM_UP_SECONDS}
        return tuple(
            find_transport(transport).open(group, device, members=level.members, nodes=level.nodes, **options)
            for level in selection._levels(group.rank(), topology or Topology.flat(group.size()), flat=flat)
        )

    # names

    def where(self, use: Use) -> str:
        """Name a place in memory; slots are named by their number."""
        storage = self.recorder.memory.storages[use.storage]
        first = (use.bytes & -use.bytes).bit_length() - 1
        for name, number, start, nbytes in self.slots:
            if number == use.storage and first >= start:
                return f"{name} {(first - start) // nbytes}"
        return storage.name or f"an allocation of {storage.nbytes} bytes on {storage.owner.name}"

    def _label(self, monkeypatch: pytest.MonkeyPatch) -> None:
        post, tensors, session = buffers.RingCall.post, Slots.tensors, self

        def labelled(call: buffers.RingCall, level: int, key: PostKey, sends: Any, receives: Any, after: Any) -> Any:
            rank = session.recorder.thread.rank
            if sends.messages or receives.messages:
                session.keys[rank].append((session.calls[rank], key))
            with session.recorder.labelled(f"call {session.calls[rank]}, {key}"):
                return post(call, level, key, sends, receives, after)

        def named(slots: Slots, slot: int, specs: Any) -> Any:
            session.note(slots)
            return tensors(slots, slot, specs)

        monkeypatch.setattr(buffers.RingCall, "post", labelled)
        monkeypatch.setattr(Slots, "tensors", named)

    def note(self, slots: Slots) -> None:
        storage, rank = self.recorder.memory.find(slots._arena), self.recorder.thread.rank
        assert storage is not None
        if storage.number not in {number for _, number, _, _ in self.slots}:
            what = "K/V" if slots is self.rings[rank]._kv else "sums"
            start = int(slots._arena.storage_offset())
            self.slots.append((f"rank {rank}'s {what} slot", storage.number, start, slots.nbytes))


class _Spans:
    """A trace whose spans label the recorded operations."""

    def __init__(self, recorder: Recorder, call: Callable[[], int]) -> None:
        self._recorder = recorder
        self._call = call

    @contextmanager
    def span(self, phase: str, kind: str, hop: Any) -> Iterator[None]:
        with self._recorder.labelled(f"call {self._call()}, {phase} hop {hop.index} {kind}"):
            yield

    def wrap_call(self, call: buffers.RingCall) -> buffers.RingCall:
        """Return the call with this trace's spans; the recorder itself sees transfers and waits."""
        return replace(call, record_span=partial(self.span, call.phase))
