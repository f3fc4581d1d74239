"""Checks of compiled kernels for code that computes wrong values, though the kernel's source is right.

- SASS of sm_90: a wgmma reads and writes its registers while later instructions run. :func:`wgmma_hazards` finds
  instructions that use such a register before the wait.
- PTX: :func:`in_place_races` finds tensors that are updated in place and may be stored before all threads have loaded
  the old values.
- TTGIR: :data:`KNOWN_MISCOMPILES` lists patterns that some Triton versions compile to wrong code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, zip_longest
from operator import or_
from typing import Any

import torch
import triton

from .sass import ALWAYS_SKIPPED, INSTRUCTION, basic_blocks

# registers of wgmma in flight

WGMMA = re.compile(r"[HQI]GMMA\.\d+x(\d+)x")
A_REGISTERS = 4  # registers of a thread that hold its part of A, for every dtype
A_SHIFT = 256  # in a mask, bit r is register r of an accumulator, and bit A_SHIFT + r is register r of A
MOST_GROUPS = 8  # groups in flight that are followed; a bound, so that the analysis of a loop without a wait ends
NO_RESULT = re.compile(r"ST|LDGSTS|RED|BAR|BRX|RET|CALL|R2P|R2UR|WARPSYNC|NANOSLEEP|UTMA|UBLKCP|SYNCS|[A-Z]+SETP")

InFlight = tuple[int, ...]
"""Masks of the registers in flight: of the wgmma that are not committed yet, then of each group, the newest first."""


def wgmma_hazards(listing: str) -> list[str]:
    """Return the instructions of a SASS listing that use registers of a wgmma in flight, on any path to them.

    Before the wait, no instruction may access the accumulator or write registers of A (PTX ISA, "wgmma.wait_group").
    Only another wgmma may continue the accumulator.
    """
    if not WGMMA.search(listing):
        return []
    blocks = basic_blocks(listing)
    entry: dict[int, InFlight] = {0: (0,)}
    work, hazards = [0], dict[str, None]()
    while work:
        index = work.pop()
        state = entry[index]
        for match in filter(None, map(INSTRUCTION.search, blocks[index].lines)):
            if match[1] != ALWAYS_SKIPPED:
                state, hazard = run_instruction(state, match[2], [token.strip() for token in match[3].split(",")])
                if hazard:
                    hazards[f"{hazard} by {' '.join(match[0].split())}"] = None
        for successor in blocks[index].successors:
            joined = tuple(a | b for a, b in zip_longest(entry.get(successor, ()), state, fillvalue=0))
            if joined != entry.get(successor):
                entry[successor] = joined
                work.append(successor)
    return [*hazards]


def run_instruction(state: InFlight, name: str, tokens: Sequence[str]) -> tuple[InFlight, str]:
    """Return the state after an instruction, and its hazard or an empty string."""
    in_flight = union(state)
    a_in_flight, accumulators = in_flight >> A_SHIFT, in_flight & (1 << A_SHIFT) - 1
    if shape := WGMMA.match(name):
        read = register_mask(tokens[1], A_REGISTERS)
        written = register_mask(tokens[0], int(shape[1]) // (2 if "F32" in name else 4))
        state = (state[0] | read << A_SHIFT | written, *state[1:])
        if "gsb0" in tokens:  # commits the group
            state = (0, *state[:MOST_GROUPS])
        written &= ~accumulators
    elif name.startswith("WARPGROUP.DEPBAR"):
        return state[: 1 + int(tokens[-1], 16)], ""
    else:
        written, read = register_use(name, tokens) if in_flight else (0, 0)
    if (written | read) & accumulators:
        return state, "an accumulator is used"
    return state, "A is overwritten" if written & a_in_flight else ""


def register_use(name: str, tokens: Sequence[str]) -> tuple[int, int]:
    """Return masks of the registers that an instruction writes and reads."""
    kind, *suffixes = name.split(".")
    is_pair = "64" in suffixes or "WIDE" in suffixes or (kind == "CS2R" and "32" not in suffixes)
    width = 4 if "128" in suffixes else 2 if is_pair else 1  # of the result, or of the value that is stored
    if kind in ("LDSM", "STSM"):
        width = next((int(suffix) for suffix in suffixes if suffix in ("2", "4")), 1)
    sources = [
        token for token in tokens if not re.match(r"U?PT|U?P\d", token)
    ]  # the result of SHFL follows a predicate
    if NO_RESULT.match(name):
        written, read = 0, register_mask(tokens[-1], width)
    else:
        written, read = register_mask("".join(sources[:1]), width), 0
        del sources[:1]
    for register, pair in re.findall(r"(?<!U)\bR(\d+)(\.64)?", " ".join(sources)):
        read |= register_mask(f"R{register}", 2 if pair else 1)
    return written, read


def register_mask(token: str, count: int) -> int:
    match = re.fullmatch(r"[-|~!]*R(\d+)(?:\.\w+)*\|?", token)
    return (1 << count) - 1 << int(match[1]) if match else 0


def union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


# tensors that are updated in place

PTX_STATEMENT = re.compile(r"(@!?%?\w+\s+)?\b([a-z][\w.:]*)\s*([^;]*);")
NAMES = re.compile(r"%\w+|\w+_param_\d+")


def launch_tensors(names: Sequence[str], arguments: Sequence[Any], ttgir: str) -> dict[str, list[str]]:
    """Return the PTX parameters that point to each tensor of a launch, as input of :func:`in_place_races`.

    Arguments that share memory are one tensor with a joint name, such as ``state and out``, because a kernel that
    updates a tensor in place often takes it as two arguments. ``ttgir`` gives the position of every parameter.
    """
    function = re.search(r"tt\.func public @(\w+)\((.*)", ttgir)
    assert function is not None
    position: dict[str, int] = {}
    for index, name in enumerate(re.findall(r'loc\("(\w+)"', function[2])):
        position.setdefault(name, index)
    storages: dict[int, list[str]] = defaultdict(list)
    for name, argument in zip(names, arguments, strict=False):
        tensor = getattr(argument, "ptr", getattr(argument, "base", argument))
        if isinstance(tensor, torch.Tensor) and name in position:
            storages[tensor.untyped_storage()._cdata].append(name)
    return {
        " and ".join(group): [f"{function[1]}_param_{position[name]}" for name in group] for group in storages.values()
    }


def in_place_races(ptx: str, tensors: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tensors with a store that a path reaches from a load without a barrier of the block in between.

    Several threads may load the same element, because layouts replicate rows over threads. If one of them stores the
    new value first, the others add to it again. ``tensors`` has the parameters with the pointers of each tensor.
    """
    statements, labels = parse_ptx(ptx)
    bits = {parameter: 1 << bit for bit, parameters in enumerate(tensors.values()) for parameter in parameters}
    pointers = pointer_registers(statements, bits)
    loads, stores = [0] * len(statements), [0] * len(statements)  # masks of tensors
    for index, (_, op, operands) in enumerate(statements):
        if "param" not in op and not op.startswith("prefetch"):
            is_store = op.startswith(("st.", "red.", "atom.")) or ".global.shared" in op
            addresses = "".join(re.findall(r"\[[^]]*\]", operands))
            (stores if is_store else loads)[index] = union_mask(addresses, pointers)
    races = []
    for bit, name in enumerate(tensors):
        work = [index + 1 for index, mask in enumerate(loads) if mask >> bit & 1]
        reached: set[int] = set()
        while work:
            index = work.pop()
            if index in reached or index >= len(statements):
                continue
            reached.add(index)
            guard, op, operands = statements[index]
            if stores[index] >> bit & 1:
                races.append(f"{name} is stored before all threads have loaded it: {op} {operands}")
                break
            if not op.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")):
                work += [labels[label] for label in re.findall(r"\$\w+", operands) if label in labels]
                work += [index + 1] if guard or not op.startswith(("bra", "brx", "ret", "exit", "trap")) else []
    return races


def parse_ptx(ptx: str) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    """Return guard, name and operands of each statement, and the index of the statement after each label.

    An indirect branch has the labels of its table as operands.
    """
    tables = dict(re.findall(r"(\$\w+):\s*\.branchtargets([^;]*);", ptx))
    statements: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in ptx.splitlines():
        code = line.partition("//")[0]
        if label := re.match(r"(\$L__BB\w+):", code):
            labels[label[1]] = len(statements)
        for guard, op, operands in PTX_STATEMENT.findall(code):
            targets = [table for name, table in tables.items() if name in operands]
            statements.append((guard, op, targets[0] if targets else operands))
    return statements, labels


def pointer_registers(statements: Sequence[tuple[str, str, str]], parameters: Mapping[str, int]) -> dict[str, int]:
    """Return the masks of the registers that are computed from ``parameters``, which maps names to masks."""
    masks, before = dict(parameters), -1
    while (count := sum(map(int.bit_count, masks.values()))) != before:  # repeated because of loops
        before = count
        for _, op, operands in statements:
            if "[" not in operands or op.startswith("ld.param"):
                target = re.match(r"\{[^}]*\}|[^,]*", operands)
                assert target is not None
                if mask := union_mask(operands[target.end() :], masks):
                    for register in NAMES.findall(target[0]):
                        masks[register] = masks.get(register, 0) | mask
    return masks


def union_mask(operands: str, masks: Mapping[str, int]) -> int:
    return union(masks.get(name, 0) for name in NAMES.findall(operands))


# miscompiles that are known


@dataclass(frozen=True)
class KnownMiscompile:
    """Pattern in TTGIR that Triton versions before ``fixed_in`` compile to wrong code."""

    issue: str
    arch: int
    fixed_in: tuple[int, ...]
    matches: Callable[[str], bool]
    pattern: str


def has_accumulator_cycle(ttgir: str) -> bool:
    """Return True if pipelined products add in turn to several accumulators and copy the sum from one to the next.

    The pipeliner starts the first product of an iteration before the last one of the previous iteration has finished.
    A product that is waited for at once is not pipelined.
    """
    steps = re.findall(r"ttng\.(tc_gen5_mma|wait_barrier|tmem_load|tmem_store) ([^:\n]*)", ttgir)
    pipelined = {
        re.findall(r"%\w+", operands)[2]
        for (name, operands), (after, _) in pairwise([*steps, ("", "")])
        if name == "tc_gen5_mma" and after != "wait_barrier"
    }
    sources: dict[str, set[str]] = {}  # accumulators from which a value is computed
    copies: dict[str, set[str]] = defaultdict(set)
    for line in ttgir.splitlines():
        if load := re.search(r"(%\w+)\S* = ttng\.tmem_load (%\w+)", line.replace(", %", ",%")):
            sources[load[1]] = {load[2]}
        elif store := re.search(r"ttng\.tmem_store (%\w+), (%\w+)", line):
            copies[store[2]] |= sources.get(store[1], set()) - {store[2]}
        elif result := re.match(r"\s*(%\w+)\S* = (.*)", line):
            sources[result[1]] = set().union(*(sources.get(name, set()) for name in re.findall(r"%\w+", result[2])))
    for _ in copies:  # transitive closure
        for accumulator, origins in copies.items():
            copies[accumulator] = origins.union(*(copies.get(origin, set()) for origin in origins))
    return any(accumulator in pipelined & origins for accumulator, origins in copies.items())


def stores_transposed_product(ttgir: str) -> bool:
    """Return True if the transposed 16-bit result of a matrix product is stored to shared memory."""
    layouts = re.findall(r"^(#\w+) = #ttg\.nvidia_mma<", ttgir, re.MULTILINE)
    transposed = re.findall(r"(%\w+) = tt\.trans [^\n]*: tensor<[\dx]+x(?:bf16|f16), (#\w+)> ->", ttgir)
    return any(
        layout in layouts and re.search(rf"ttg\.local_(alloc|store) {value}\b", ttgir) for value, layout in transposed
    )


KNOWN_MISCOMPILES = (
    KnownMiscompile(
        "https://github.com/triton-lang/triton/issues/10821", 100, (3, 9), has_accumulator_cycle,
        "several products in a pipelined loop add to one loop-carried accumulator",
    ),
    KnownMiscompile(
        "https://github.com/fla-org/flash-linear-attention/issues/640", 90, (3, 7, 1), stores_transposed_product,
        "the transposed result of a product is stored to shared memory in 16 bits",
    ),
)  # fmt: skip


def known_miscompiles(ttgir: str, arch: int) -> list[str]:
    """Return the known miscompiles of this Triton that a kernel's TTGIR matches."""
    version = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))
    return [
        f"Triton {triton.__version__} may miscompile this kernel: {known.pattern} ({known.issue})"
        for known in KNOWN_MISCOMPILES
        if known.arch == arch and version < known.fixed_in and known.matches(ttgir)
    ]
