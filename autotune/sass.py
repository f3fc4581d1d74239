"""The main loops of a kernel, read from its disassembly, and what an iteration asks of each unit of an SM."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Loop:
    """One innermost loop that holds matrix instructions."""

    matrix: int
    local: int  # loads and stores of local memory: spills
    waits: int  # waits for wgmma (HGMMA) in flight
    serialised: bool  # every wgmma waits for itself
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)


MATRIX = re.compile(r"\b([HIQ]G?MMA|UTC\w*MMA)\b")
LOCAL = re.compile(r"\b(LDL|STL)\b")


@dataclass
class Block:
    """A basic block: its instructions and the blocks that may follow."""

    lines: list[str]
    successors: list[int]


BRANCH = re.compile(r"\bBRA\b.*?`\((\.L_\w+)\)")
INDIRECT = re.compile(r"\bBRX\b")  # by a table that the listing does not show: how warps find their partition
LEAVES = re.compile(r"\b(EXIT|RET\.\S+)\b")


def basic_blocks(listing: str) -> list[Block]:
    """Control flow of a kernel; the first block is its entry."""
    labels: dict[str, int] = {}
    blocks = [Block([], [])]
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            blocks.append(Block([], []))
            labels[label[1]] = len(blocks) - 1
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            blocks[-1].lines.append(line)
            if BRANCH.search(line) or LEAVES.search(line) or INDIRECT.search(line):
                blocks.append(Block([], []))
    for i, block in enumerate(blocks):
        last = block.lines[-1] if block.lines else ""
        branch = BRANCH.search(last)
        if branch and branch[1] in labels:
            block.successors.append(labels[branch[1]])
        # a guard (@P0, or a uniform predicate as operand) may let the branch or the exit fall through
        guarded = "@" in last or re.search(r"\bBRA\S*\s+!?U?P\d", last)
        if i + 1 < len(blocks) and (guarded or not (branch or LEAVES.search(last))):
            block.successors.append(i + 1)
    for block in blocks:
        if block.lines and INDIRECT.search(block.lines[-1]):  # to what is labelled and reached by no other way
            while lost := sorted(set(labels.values()) - reachable_from(blocks)):
                block.successors.append(lost[0])
    return blocks


def reachable_from(blocks: list[Block], without: int | None = None) -> set[int]:
    """The blocks that some way from the entry leads to, past one of them."""
    reachable: set[int] = set()
    work = [0]
    while work:
        node = work.pop()
        if node != without and node not in reachable:
            reachable.add(node)
            work.extend(blocks[node].successors)
    return reachable


def natural_loops(blocks: list[Block]) -> list[set[int]]:
    """Bodies of the loops by header.

    By control flow, not by position: waits spin in blocks behind the end of the kernel, and branch back into the middle
    of its loop. (Aho, Lam, Sethi, Ullman, Compilers, section 9.6.6.)
    """
    reachable = reachable_from(blocks)
    predecessors = {i: [j for j in reachable if i in blocks[j].successors] for i in reachable}
    loops = []
    for header in reachable:
        dominated = reachable - reachable_from(blocks, without=header)  # by it, itself too
        work = [i for i in predecessors[header] if i in dominated]  # the back edges
        if not work:
            continue
        body = {header}
        while work:
            if (node := work.pop()) not in body:
                body.add(node)
                work.extend(predecessors[node])
        loops.append(body)
    return loops


def matrix_loops(listing: str) -> Iterator[Loop]:
    """The innermost loops of a SASS listing that hold matrix instructions."""
    blocks = basic_blocks(listing)
    lines = {
        frozenset(body): [line for i in sorted(body) for line in blocks[i].lines] for body in natural_loops(blocks)
    }
    bodies = [body for body in lines if any(map(MATRIX.search, lines[body]))]
    yield from (read_loop(lines[body]) for body in bodies if not any(other < body for other in bodies))


def read_loop(lines: list[str]) -> Loop:
    matrix = sum(bool(MATRIX.search(line)) for line in lines)
    waits = sum("WARPGROUP.DEPBAR" in line for line in lines)
    hopper = any("HGMMA" in line for line in lines)
    local = sum(bool(LOCAL.search(line)) for line in lines)
    # a chain of k-steps needs one wait; nearly as many waits as products means that none overlaps another
    return Loop(matrix, local, waits, hopper and waits > matrix // 2, tuple(lines))


# what an iteration asks for

INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*([^;]*)")
NEVER = "!PT"  # a guard that always skips

WARPGROUP = 4  # warps that work at one wgmma
ASYNCHRONOUS = re.compile(r"[HQI]GMMA|UTC\w*MMA")
SHADOW = 8  # clocks of a scheduler for an m16n8k16 at A100's and H100's rate, and instructions that it issues meanwhile
ROW_BYTES = 32  # of an operand of a wgmma or tcgen05.mma, along the dimension that is summed over, whatever the dtype

UNITS = {
    "special": re.compile(r"MUFU"),
    "exponentials": re.compile(r"MUFU\.EX2"),
    "fma": re.compile(r"(FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2)(?!2)"),
    "packed": re.compile(r"(FFMA2|FMUL2|FADD2)"),  # two fp32 operations of a lane in one, on sm_100
    "integer_multiply": re.compile(r"IMAD"),
    "add": re.compile(r"(IADD|VIADD)"),
    "minmax": re.compile(r"FMNMX"),
    "logic": re.compile(
        r"(FSETP|FSEL|FSET|F2FP|ISETP|SEL|LOP3|PLOP3|SHF|LEA|PRMT|V?IMNMX3?|IABS|MOV|SGXT|BMSK|P2R|R2P|I2FP)\b"
    ),
    "shuffles": re.compile(r"SHFL"),
    "barriers": re.compile(r"BAR\."),
}
"""By the unit that executes them, or by purpose. The uniform datapath (``UIADD3`` and its like) only takes issue."""


@dataclass(frozen=True)
class Mix:
    """One iteration of a block. Instructions are counted as one warp executes them; products and bytes are of all."""

    warps: int
    products: float  # multiply-adds of the tensor cores, in those of 16 bits (one of TF32 is two of them, of fp8 half)
    exponentials: int
    special: int  # all of their unit
    fma: int  # fp32 add, multiply, multiply-add
    integer_multiply: int  # and what the compiler moves by it
    add: int
    minmax: int
    logic: int
    shuffles: int
    issued: int
    barriers: int  # of the whole block
    shared_bytes: int  # loaded, stored, and read by matrix instructions
    global_bytes: int  # loaded, as if no two lanes had an address in common


def mix_of(loop: Loop, warps: int) -> tuple[Mix, Mix]:
    """Of one loop of a block of ``warps`` warps all, and what issues while no product of the same warps runs.

    Raises:
        ValueError: a matrix product does not tell its shape.
    """
    listed = list(instructions(loop.lines))
    exposed = [one for one, hides in zip(listed, flying(listed), strict=True) if not hides]
    return counted(listed, warps, [*products(listed, warps)]), counted(exposed, warps, [])


def counted(listed: Sequence[tuple[str, str]], warps: int, done: Sequence[tuple[float, float]]) -> Mix:
    """The mix of instructions, wherever they stand, with the products that are done by them."""
    counts = {unit: sum(bool(kind.match(name)) for name, _ in listed) for unit, kind in UNITS.items()}
    fma = counts.pop("fma") + 2 * counts.pop("packed")
    moved = sum(width(name, ("LDS", "STS", "LDSM", "STSM", "LDGSTS")) for name, _ in listed)
    loaded = tma_bytes(listed)
    return Mix(
        **counts,
        warps=warps,
        products=sum(multiply_adds for multiply_adds, _ in done),
        fma=fma,
        issued=len(listed),
        shared_bytes=int(warps * moved + loaded + sum(nbytes for _, nbytes in done)),
        global_bytes=warps * sum(width(name, ("LDG", "LDGSTS", "LDL")) for name, _ in listed) + loaded,
    )


def instructions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, operands) of each; one that its guard always skips takes its issue and no more, like a NOP."""
    for line in lines:
        if match := INSTRUCTION.search(line):
            yield ("NOP", "") if match[1] == NEVER else (match[2], match[3].strip())


def width(name: str, kinds: tuple[str, ...]) -> int:
    """Bytes that a warp moves by a load or store of one of ``kinds``, 0 for any other instruction."""
    kind, *suffixes = name.split(".")
    if kind not in kinds:
        return 0
    if kind in ("LDSM", "STSM"):  # one, two or four matrices of 8 x 8 values of 16 bits
        return 128 * (int(suffixes[-1]) if suffixes[-1] in ("2", "4") else 1)
    bits = next((int(suffix.lstrip("US")) for suffix in suffixes if re.fullmatch(r"[US]?(8|16|64|128)", suffix)), 32)
    return 32 * bits // 8


def tma_bytes(listed: Sequence[tuple[str, str]]) -> int:
    """What TMA loads for a block: the bytes that a barrier in shared memory is told to expect, where TMA is used."""
    expected, constants = 0, dict[str, int]()
    for name, operands in listed:
        first, *_, last = operands.split(", ") if ", " in operands else (operands, "")
        if name.startswith("SYNCS.ARRIVE.TRANS64"):
            expected += constants.get(last, 0)
        elif name in ("MOV", "UMOV", "IMAD.MOV.U32") and last.startswith("0x"):
            constants[first] = int(last, 16)
        else:
            constants.pop(first, None)
    return expected if any(name.startswith(("UTMALDG", "UBLKCP")) for name, _ in listed) else 0


def products(listed: Sequence[tuple[str, str]], warps: int) -> Iterator[tuple[float, float]]:
    """The matrix products; those of sm_100 tell their shape by a constant that a register was set to before."""
    constants: dict[str, int] = {}
    for last in (False, True):  # what the end of an iteration sets holds at the start of the next
        for name, operands in listed:
            if name == "UMOV" and (constant := re.fullmatch(r"(UR\d+),\s*(0x[0-9a-f]+)", operands)):
                constants[constant[1]] = int(constant[2], 16)
            elif last and MATRIX.search(name):
                yield product(name, operands, constants, warps)


def product(name: str, operands: str, constants: Mapping[str, int], warps: int) -> tuple[float, float]:
    """(multiply-adds of 16 bits that take as long, bytes of operands in shared memory) of one matrix instruction.

    By its name, ``HMMA.16816…``, ``HGMMA.64x128x16…``; that of sm_100 by its instruction descriptor (PTX ISA, tcgen05).
    """
    weight = 2.0 if "TF32" in name else 0.5 if name.startswith(("QGMMA", "QMMA", "UTCQMMA")) else 1.0
    copies: float  # warps or warpgroups that do one each
    register = re.search(r"idesc\[(UR\d+)\]", operands)
    if shape := re.search(r"\.(\d+)x(\d+)x(\d+)", name):
        rows, columns, depth = map(int, shape.groups())
        from_shared = re.match(r"R\d+,\s*gdesc", operands) is not None  # else the left operand lies in registers
        copies, shared_rows = warps / WARPGROUP, columns + rows * from_shared
    elif fragment := re.search(r"\.(16)(8)(4|8|16|32)\b", name):
        rows, columns, depth = map(int, fragment.groups())
        copies, shared_rows = warps, 0
    elif register is not None and register[1] in constants:
        descriptor = constants[register[1]]
        rows, columns = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
        tf32 = name.startswith("UTCHMMA") and descriptor >> 7 & 7 == 2
        depth = 32 if name.startswith("UTCQMMA") else 8 if tf32 else 16
        weight = 2.0 if tf32 else weight
        # one for the whole block; else the left operand lies in tensor memory
        copies, shared_rows = 1, columns + rows * operands.startswith("gdesc")
    else:
        raise ValueError(f"{name} {operands} does not tell the shape of its product")
    return rows * columns * depth * copies * weight, shared_rows * ROW_BYTES * copies


def flying(listed: Sequence[tuple[str, str]]) -> list[bool]:
    """Of each instruction, whether a product of the same warps runs beside it.

    wgmma and tcgen05.mma run from their start to the wait that leaves none in flight (of sm_100: to the next wait for
    a barrier in shared memory, where it is counted). An HMMA runs for at least ``SHADOW`` clocks.
    """
    under: list[bool] = []
    asynchronous = any(ASYNCHRONOUS.match(name) for name, _ in listed)
    sm_100 = any(name.startswith("UTC") for name, _ in listed)
    left = 0.0
    for _ in range(2):  # what the end of an iteration starts runs on in the next
        under = []
        for name, operands in listed:
            left = max(left - 1, 0)
            if MATRIX.search(name):
                left = math.inf if asynchronous else SHADOW
            elif (name.startswith("WARPGROUP.DEPBAR") and operands.endswith(" 0x0")) or (
                sm_100 and name.startswith("SYNCS.PHASECHK")
            ):
                left = 0
            under.append(left > 0)
    return under
