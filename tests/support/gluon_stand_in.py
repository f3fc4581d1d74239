"""A CPU emulator for Gluon that runs the Hopper kernels' own source with interleaved partitions.

``jit`` returns functions unchanged (:func:`kernel`), tensors are torch's, and a partition is a thread. One partition
runs at a time. Control can switch at every barrier operation, at the start and wait of every wgmma, and when a TMA load
lands; ``choose`` picks what runs next.

The emulator checks that no slot is written while a wgmma may read it, and that none is read before its load has landed.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

KERNELS = Path(__file__).parents[2] / "kernels"
FILES = {"tiles": "device/tiles.py"} | {name: f"hopper/{name}.py" for name in ("step_order", "forward", "backward")}

Choose = Callable[[list[str]], int]
"""Function that picks the next partition or load, by its index in the list of runnable names."""


class Tensor(torch.Tensor):
    """A torch tensor with a dummy layout."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)


def tensor(value: Any) -> Any:
    return torch.as_tensor(value).as_subclass(Tensor)


class Pointer:
    """Address in the flat ``memory`` of a tensor, or a block of addresses: element offsets into that memory."""

    def __init__(self, memory: torch.Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + offsets)


def pointer(x: torch.Tensor | None) -> Pointer | None:
    if x is None:
        return None
    return Pointer(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), x.storage_offset())


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Any:
    offsets = torch.as_tensor(pointer.offsets)
    mask = torch.ones_like(offsets, dtype=torch.bool) if mask is None else mask.expand(offsets.shape)
    loaded = torch.full(offsets.shape, 0 if other is None else other, dtype=pointer.memory.dtype)
    loaded[mask] = pointer.memory[offsets[mask]]
    return loaded.as_subclass(Tensor)


def store(pointer: Pointer, value: Any, mask: Any) -> None:
    mask = mask.expand(pointer.offsets.shape)
    pointer.memory[pointer.offsets[mask]] = value[mask].as_subclass(torch.Tensor).to(pointer.memory.dtype)


class Barrier:
    """An mbarrier whose phase completes when all its arrivals and bytes are in."""

    def __init__(self) -> None:
        self.count = self.phases = self.arrived = self.owed = 0

    def passes(self, parity: int) -> bool:
        """Return True if the phase with this parity has completed; before the first phase, parity 1 has."""
        return self.phases % 2 != parity

    def settle(self) -> None:
        """Complete the current phase if all its arrivals and bytes are in."""
        if self.arrived == self.count and self.owed == 0:
            self.phases, self.arrived = self.phases + 1, 0


class Slot:
    """Buffer in shared memory; counts the products that read it and the loads that are still writing it."""

    def __init__(self, name: str, shape: list[int], dtype: torch.dtype, machine: Machine) -> None:
        self.name, self.data, self.machine = name, torch.full(shape, float("nan"), dtype=dtype), machine
        self.readers = self.landing = 0


@dataclass(frozen=True)
class View:
    """Tile in a slot as an operand of a wgmma, optionally transposed or cut to ``columns`` (begin, length)."""

    slot: Slot
    shape: list[int]
    swapped: bool = False
    columns: tuple[int, int] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.slot.data.dtype

    def reshape(self, shape: list[int]) -> View:
        return replace(self, shape=shape)

    def permute(self, order: tuple[int, int]) -> View:
        assert order == (1, 0)
        return replace(self, swapped=True)

    def slice(self, begin: int, length: int, dim: int) -> View:
        assert dim == 1 and self.columns is None and not self.swapped
        return replace(self, columns=(begin, length))

    def store(self, value: torch.Tensor) -> None:
        self.slot.machine.put(self.slot, value)

    def load(self, layout: Any) -> Any:
        return self.slot.machine.get(self.slot)

    def value(self) -> torch.Tensor:
        data = self.slot.data.reshape(self.shape).float()
        data = data if self.columns is None else data.narrow(1, *self.columns)
        return data.T if self.swapped else data


@dataclass(frozen=True)
class Array:
    """An allocation of slots or barriers."""

    parts: list[Any]

    def index(self, i: Any) -> Any:
        part = self.parts[int(i)]
        return View(part, list(part.data.shape)) if isinstance(part, Slot) else part


class Descriptor:
    """TMA descriptor of ``[1, rows, 1, D]`` tiles of ``[B, S, H, D]``; reads past the end are zero."""

    layout = None

    def __init__(self, base: torch.Tensor, rows: int, columns: int | None = None) -> None:
        self.base, self.dtype = base, base.dtype
        shape = [1, rows, 1, columns or base.shape[3]]
        self.block_type = SimpleNamespace(shape=shape, nbytes=rows * shape[3] * base.element_size())

    def read(self, where: list[Any]) -> torch.Tensor:
        batch, row, head, column = (int(x) for x in where)
        assert column == 0 and row >= 0
        block = torch.zeros(self.block_type.shape, dtype=self.dtype)
        rows = self.base[batch, row : row + block.shape[1], head]
        block[0, : rows.shape[0], 0] = rows
        return block

    def add(self, where: list[Any], block: torch.Tensor) -> None:
        """Add a tile to ``base``, without the rows past its end."""
        batch, row, head, column = (int(x) for x in where)
        rows = self.base[batch, row : row + block.shape[1], head, column : column + block.shape[3]]
        rows += block[0, : rows.shape[0], 0]


class Product(NamedTuple):
    """An asynchronous wgmma in flight."""

    reads: list[Slot]
    finish: Callable[[], Any]
    result: list[Any]


class Machine:
    """One program: its shared memory, its partitions and their scheduler."""

    def __init__(self, program: int, choose: Choose) -> None:
        self.program, self.choose = program, choose
        self.flying: dict[str, Callable[[], None]] = {}
        self.names = 0
        self.products: dict[str, list[Product]] = {}
        self.sends: dict[str, list[str]] = {}
        self.loaded: dict[str, list[Pointer]] = {}
        self.ready: dict[str, Callable[[], bool]] = {}
        self.turn = threading.Condition()
        self.running: str | None = None
        self.error: BaseException | None = None

    # called by the partitions

    def name(self, kind: str) -> str:
        """Return a new unique name that begins with ``kind``."""
        self.names += 1
        return f"{kind}{self.names}"

    def here(self) -> str:
        """Return the name of the partition that this thread runs."""
        return threading.current_thread().name

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Yield control to the scheduler until ``until`` holds and this partition is chosen."""
        me = self.here()
        if me not in self.products:  # the partitions have not started yet
            return
        with self.turn:
            self.ready[me] = until
            self.running = None
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.running == me or self.error is not None)
            if self.error is not None:
                raise SystemExit

    def load(self, where: Pointer, mask: Any = None, other: Any = None) -> Any:
        self.loaded.setdefault(self.here(), []).append(where)
        return load(where, mask, other)

    def store(self, where: Pointer, value: Any, mask: Any) -> None:
        """Store to global memory, but not where another thread of the partition may still load."""
        for other in self.loaded.get(self.here(), ()):
            same = other.memory.data_ptr() == where.memory.data_ptr()
            assert not (same and torch.isin(where.offsets, other.offsets).any()), "no barrier between load and store"
        store(where, value, mask)

    def barrier(self) -> None:
        """Wait for all threads of the partition."""
        self.loaded.pop(self.here(), None)

    # scheduling

    def specialise(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run all partitions, given as (function, arguments), until they end; raise the first error."""
        names = [f"{function.__name__}{i}" for i, (function, _) in enumerate(partitions)]
        self.products = {name: [] for name in names}
        self.sends = {name: [] for name in names}

        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            try:
                self.pause()
                function(*arguments)
            except BaseException as error:
                self.error = self.error or error
            with self.turn:
                self.ready.pop(self.here(), None)
                self.running = None
                self.turn.notify_all()

        threads = [
            threading.Thread(target=run, args=partition, name=name, daemon=True)
            for name, partition in zip(names, partitions, strict=True)
        ]
        with self.turn:
            for thread in threads:
                thread.start()
            self.turn.wait_for(lambda: len(self.ready) == len(names))
            self.schedule()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def schedule(self) -> None:
        """Resume partitions and finish transfers, one at a time as ``choose`` decides, until all partitions end."""
        while self.ready and self.error is None:
            able = [name for name, until in self.ready.items() if until()]
            options = [*able, *self.flying]
            if not options:
                self.error = AssertionError(f"deadlock: {list(self.ready)} wait for each other")
                break
            chosen = options[self.choose(options)]
            if chosen in self.flying:
                self.flying.pop(chosen)()
                continue
            del self.ready[chosen]
            self.running = chosen
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.running is None)
        self.turn.notify_all()

    # operations

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Array:
        """Return an array of barriers or of slots; ``shape[0]`` is their number."""
        if layout == "barrier":
            return Array([Barrier() for _ in range(shape[0])])
        return Array([Slot(self.name("slot"), list(shape[1:]), dtype, self) for _ in range(shape[0])])

    def wait(self, barrier: Barrier, phase: Any) -> None:
        parity = int(phase)
        self.pause(lambda: barrier.passes(parity))

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.arrived += count
        barrier.settle()
        self.pause()

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        """Arrive at a barrier and make its phase wait for ``nbytes`` of loads."""
        barrier.arrived, barrier.owed = barrier.arrived + 1, barrier.owed + int(nbytes)
        barrier.settle()
        self.pause()

    def copy(self, descriptor: Descriptor, where: list[Any], barrier: Barrier, view: View) -> None:
        """Start a TMA load into a slot; the tile lands later, when the scheduler picks it."""
        slot, block = view.slot, descriptor.read(where)
        assert slot.readers == 0, f"{slot.name} is overwritten while a product reads it"
        slot.landing += 1
        flight = self.name("load")
        slot.data.fill_(float("nan"))
        nbytes = descriptor.block_type.nbytes

        def land() -> None:
            slot.data.copy_(block)
            slot.landing -= 1
            barrier.owed -= nbytes
            barrier.settle()

        self.flying[flight] = land
        self.pause()

    def product(self, a: Any, b: View, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Product:
        """Start a wgmma ``acc + a @ b``, which reads its operands until :meth:`drain` finishes it."""
        assert is_async
        reads = [view.slot for view in (a, b) if isinstance(view, View)]
        for slot in reads:
            assert slot.landing == 0 and not slot.data.isnan().any(), f"{slot.name} is read before its tile has landed"
            slot.readers += 1

        def finish() -> Any:
            left = a.value() if isinstance(a, View) else a.float()
            before = acc.result[0] if isinstance(acc, Product) else acc
            return tensor(left @ b.value() + (before if use_acc else 0))

        wgmma = Product(reads, finish, [])
        self.products[self.here()].append(wgmma)
        self.pause()
        return wgmma

    def drain(self, left: int, deps: list[Product]) -> Any:
        """Finish all products of this partition but the last ``left``, and return the results of ``deps``."""
        self.pause()
        under_way = self.products[self.here()]
        while len(under_way) > left:
            done = under_way.pop(0)
            done.result.append(done.finish())
            for slot in done.reads:
                slot.readers -= 1
        results = tuple(dep.result[0] for dep in deps)  # raises if the product is still in flight
        return results if len(results) > 1 else results[0]

    def put(self, slot: Slot, value: torch.Tensor) -> None:
        """Write a tile into a slot that no product reads and no load fills."""
        assert slot.readers == 0 and slot.landing == 0, f"{slot.name} is overwritten while it is read or loaded"
        slot.data.copy_(value.reshape(slot.data.shape))
        self.pause()

    def get(self, slot: Slot) -> Any:
        """Return a copy of a slot that was written before."""
        assert slot.landing == 0 and not slot.data.isnan().any(), f"{slot.name} is read before it was written"
        return tensor(slot.data.clone())

    def send(self, descriptor: Descriptor, where: list[Any], view: View) -> None:
        """Add a tile to global memory at some time before the matching :meth:`sent` returns."""
        slot, me, flight = view.slot, self.here(), self.name("send")
        assert list(slot.data.shape) == descriptor.block_type.shape
        slot.readers += 1
        self.sends[me].append(flight)

        def land() -> None:
            descriptor.add(where, slot.data)
            slot.readers -= 1
            self.sends[me].remove(flight)

        self.flying[flight] = land
        self.pause()

    def sent(self, left: int) -> None:
        """Wait until at most ``left`` sends of this partition are not complete."""
        me = self.here()
        self.pause(lambda: len(self.sends[me]) <= left)


# The kernels' modules, executed with stand-ins for Triton's.


def language(machine: Machine) -> SimpleNamespace:
    """Return one namespace that stands in for every Triton module that the kernels import."""

    def constexpr(value: Any) -> Any:
        return type("constexpr", (type(value),), {"value": value})(value)

    def pair(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda a, b: function(tensor(a), tensor(b))

    dtypes = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
    layouts = ("SliceLayout", "DotOperandLayout", "NVMMADistributedLayout", "SwizzledSharedLayout", "BlockedLayout")
    namespace = SimpleNamespace(
        **dtypes, **{name: lambda *a, **k: None for name in layouts}, jit=pass_through, constexpr_function=pass_through,
        NVMMASharedLayout=SimpleNamespace(get_default_for=lambda block, dtype: None),
        constexpr=constexpr, static_range=range, load=machine.load, store=machine.store,
        program_id=lambda axis: tensor(machine.program),
        cdiv=lambda a, b: (a + b - 1) // b,
        arange=lambda begin, end, layout=None: tensor(torch.arange(begin, end)),
        zeros=lambda shape, dtype, layout=None: tensor(torch.zeros(list(map(int, shape)), dtype=dtype)),
        where=lambda condition, a, b: torch.where(tensor(condition), a, b),
        maximum=pair(torch.maximum), minimum=pair(torch.minimum),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2, log2=torch.log2, convert_layout=lambda x, layout: x,
        allocate_shared_memory=machine.allocate, tensor_descriptor=Descriptor,
        warp_specialize=lambda partitions, warps, registers: machine.specialise(partitions),
        fence_async_shared=lambda: None, debug_barrier=machine.barrier,
        warpgroup_mma=machine.product, warpgroup_mma_wait=machine.drain,
        tma=SimpleNamespace(async_load=machine.copy, async_atomic_add=machine.send, store_wait=machine.sent),
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=lambda namespace, count: setattr(namespace, "count", int(count)),
            wait=machine.wait, arrive=machine.arrive, expect=machine.expect,
        ),
    )  # fmt: skip
    namespace.language = namespace.gluon = namespace
    return namespace


def pass_through(function: Any = None, **options: Any) -> Any:
    return pass_through if function is None else function


def kernel(machine: Machine, name: str = "forward") -> SimpleNamespace:
    """Return the module ``kernels.hopper.<name>``, executed with this machine in place of Triton."""
    triton, modules = language(machine), dict[str, SimpleNamespace]()

    def imported(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "triton":
            return triton
        *_, wanted, level = args
        if not level:
            return __import__(name, *args)
        return module(name) if name in FILES else SimpleNamespace(**{file: module(file) for file in wanted})

    def module(name: str) -> SimpleNamespace:
        if name not in modules:
            values = {"__name__": name, "__builtins__": vars(builtins) | {"__import__": imported}}
            exec(compile((KERNELS / FILES[name]).read_text(), FILES[name], "exec"), values)
            modules[name] = SimpleNamespace(**values)
        return modules[name]

    return module(name)
