"""Main loops of a kernel's SASS or AMDGCN listing, and their instruction mix by unit of the SM."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Loop:
    """Innermost loop with matrix instructions."""

    matrix: int  # matrix instructions
    local: int  # loads and stores of local memory, which are spills
    waits: int  # waits for wgmma (HGMMA)
    is_serialised: bool  # a wait follows every wgmma
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)


MATRIX = re.compile(r"\b([HIQ]G?MMA|UTC\w*MMA|v_mfma_\w+)\b")
LOCAL = re.compile(r"\b(LDL|STL|scratch_(?:load|store)_\w+)\b")


@dataclass
class BasicBlock:
    """Basic block with its instructions and the indices of its successors."""

    lines: list[str]
    successors: list[int]


LABEL = re.compile(r"\s*(\.L\w+):")
INSTRUCTION_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/|\s+[a-z]+_")
BRANCH = re.compile(r"(?:\bBRA\b.*?`\(|\bs_c?branch\w* )(\.L\w+)")
INDIRECT = re.compile(r"\bBRX\b")  # jump through a table that the listing lacks; selects a warp's partition
EXIT_OP = re.compile(r"\b(EXIT|RET\.\S+|s_endpgm)\b")


def basic_blocks(listing: str) -> list[BasicBlock]:
    """Build the control flow graph of a kernel; the first block is the entry."""
    labels: dict[str, int] = {}
    blocks = [BasicBlock([], [])]
    for line in listing.splitlines():
        if label := LABEL.match(line):
            blocks.append(BasicBlock([], []))
            labels[label[1]] = len(blocks) - 1
        elif INSTRUCTION_LINE.match(line):
            blocks[-1].lines.append(line)
            if BRANCH.search(line) or EXIT_OP.search(line) or INDIRECT.search(line):
                blocks.append(BasicBlock([], []))
    for i, block in enumerate(blocks):
        last = block.lines[-1] if block.lines else ""
        branch = BRANCH.search(last)
        if branch and branch[1] in labels:
            block.successors.append(labels[branch[1]])
        # with a guard (@P0, or a uniform predicate as operand) a branch or exit may fall through
        guarded = "@" in last or re.search(r"\bBRA\S*\s+!?U?P\d|\bs_cbranch", last)
        if i + 1 < len(blocks) and (guarded or not (branch or EXIT_OP.search(last))):
            block.successors.append(i + 1)
    for block in blocks:
        if block.lines and INDIRECT.search(block.lines[-1]):  # its targets are the otherwise unreachable labels
            while unreachable := sorted(set(labels.values()) - reachable_from(blocks)):
                block.successors.append(unreachable[0])
    return blocks


def reachable_from(blocks: list[BasicBlock], without: int | None = None) -> set[int]:
    """Return the blocks that are reachable from the entry on paths that avoid block ``without``."""
    reachable: set[int] = set()
    work = [0]
    while work:
        node = work.pop()
        if node != without and node not in reachable:
            reachable.add(node)
            work.extend(blocks[node].successors)
    return reachable


def natural_loops(blocks: list[BasicBlock]) -> list[set[int]]:
    """Return the bodies of all natural loops (Aho, Lam, Sethi, Ullman, Compilers, section 9.6.6).

    Positions in the listing do not suffice, because waits spin in blocks behind the end of the kernel and branch back
    into the middle of a loop.
    """
    reachable = reachable_from(blocks)
    predecessors = {i: [j for j in reachable if i in blocks[j].successors] for i in reachable}
    loops = []
    for header in reachable:
        dominated = reachable - reachable_from(blocks, without=header)  # includes the header
        work = [i for i in predecessors[header] if i in dominated]  # sources of back edges
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
    """Yield the innermost loops with matrix instructions of a SASS listing."""
    blocks = basic_blocks(listing)
    lines = {
        frozenset(body): [line for i in sorted(body) for line in blocks[i].lines] for body in natural_loops(blocks)
    }
    bodies = [body for body in lines if any(map(MATRIX.search, lines[body]))]
    yield from (read_loop(lines[body]) for body in bodies if not any(other < body for other in bodies))


def read_loop(lines: list[str]) -> Loop:
    """Count the instructions in the lines of a loop."""
    matrix = sum(bool(MATRIX.search(line)) for line in lines)
    waits = sum("WARPGROUP.DEPBAR" in line for line in lines)
    hopper = any("HGMMA" in line for line in lines)
    local = sum(bool(LOCAL.search(line)) for line in lines)
    # a chain of k-steps needs one wait, so about one wait per product means that no products overlap
    return Loop(matrix, local, waits, hopper and waits > matrix // 2, tuple(lines))


# instruction mix of an iteration

INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([\w.]+)\s*([^;]*)")
ALWAYS_SKIPPED = "!PT"  # guard that is always false

WARPGROUP = 4  # warps that execute one wgmma
ASYNCHRONOUS = re.compile(r"[HQI]GMMA|UTC\w*MMA")
ASYNC_SHADOW = 8  # clocks of an m16n8k16 on A100 and H100, in which a scheduler issues as many instructions
ROW_BYTES = 32  # bytes of an operand row of wgmma and tcgen05.mma along the depth, for every dtype

UNITS = {
    "special": re.compile(r"MUFU"),
    "exponentials": re.compile(r"MUFU\.EX2"),
    "fma": re.compile(r"(FFMA|FMUL|FADD|HFMA2|HMUL2|HADD2)(?!2)"),
    "packed": re.compile(r"(FFMA2|FMUL2|FADD2)"),  # two fp32 operations per lane, on sm_100
    "integer_multiply": re.compile(r"IMAD"),
    "add": re.compile(r"(IADD|VIADD)"),
    "minmax": re.compile(r"FMNMX"),
    "logic": re.compile(
        r"(FSETP|FSEL|FSET|F2FP|ISETP|SEL|LOP3|PLOP3|SHF|LEA|PRMT|V?IMNMX3?|IABS|MOV|SGXT|BMSK|P2R|R2P|I2FP)\b"
    ),
    "shuffles": re.compile(r"SHFL"),
    "barriers": re.compile(r"BAR\."),
}
"""Instructions by executing unit or purpose. The uniform datapath (such as ``UIADD3``) uses issue slots only."""


@dataclass(frozen=True)
class InstructionMix:
    """Instruction mix of one iteration; instructions are per warp, products and bytes are of the whole block."""

    warps: int
    products: float  # tensor-core multiply-adds, counted as 16-bit ones (TF32 counts twice, fp8 half)
    exponentials: int
    special: int  # all instructions of the special function unit
    fma: int  # fp32 add, multiply, multiply-add
    integer_multiply: int  # includes register moves by IMAD
    add: int
    minmax: int
    logic: int
    shuffles: int
    issued: int
    barriers: int  # barriers of the whole block
    shared_bytes: int  # loads, stores and operands of matrix instructions
    global_bytes: int  # loads, assuming that lanes do not share addresses


def instruction_mix(loop: Loop, warps: int) -> tuple[InstructionMix, InstructionMix]:
    """Return the mix of a loop of a block with ``warps`` warps, and the mix of its exposed instructions.

    Exposed instructions issue while no product of the same warps is in flight.

    Raises:
        ValueError: The shape of a matrix product is unknown.
    """
    all_instructions = list(parse_instructions(loop.lines))
    under_product = overlaps_product(all_instructions)
    exposed = [entry for entry, hidden in zip(all_instructions, under_product, strict=True) if not hidden]
    return count_mix(all_instructions, warps, [*matrix_products(all_instructions, warps)]), count_mix(
        exposed, warps, []
    )


def count_mix(
    instructions: Sequence[tuple[str, str]], warps: int, products_done: Sequence[tuple[float, float]]
) -> InstructionMix:
    """Return the mix of instructions, given as (name, operands), of a block with ``warps`` warps.

    ``products_done`` has the (multiply-adds, operand bytes) of each matrix product among them.
    """
    counts = {unit: sum(bool(kind.match(name)) for name, _ in instructions) for unit, kind in UNITS.items()}
    fma = counts.pop("fma") + 2 * counts.pop("packed")
    moved = sum(access_bytes(name, ("LDS", "STS", "LDSM", "STSM", "LDGSTS")) for name, _ in instructions)
    loaded = tma_bytes(instructions)
    return InstructionMix(
        **counts,
        warps=warps,
        products=sum(multiply_adds for multiply_adds, _ in products_done),
        fma=fma,
        issued=len(instructions),
        shared_bytes=int(warps * moved + loaded + sum(nbytes for _, nbytes in products_done)),
        global_bytes=warps * sum(access_bytes(name, ("LDG", "LDGSTS", "LDL")) for name, _ in instructions) + loaded,
    )


def parse_instructions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, operands) of each instruction; one with a false guard counts as a NOP, which only issues."""
    for line in lines:
        if match := INSTRUCTION.search(line):
            yield ("NOP", "") if match[1] == ALWAYS_SKIPPED else (match[2], match[3].strip())


def access_bytes(name: str, kinds: tuple[str, ...]) -> int:
    """Return the bytes that a warp moves with a load or store of ``kinds``, or 0 for other instructions."""
    kind, *suffixes = name.split(".")
    if kind not in kinds:
        return 0
    if kind in ("LDSM", "STSM"):  # one, two or four 8 x 8 matrices of 16-bit values
        return 128 * (int(suffixes[-1]) if suffixes[-1] in ("2", "4") else 1)
    bits = next((int(suffix.lstrip("US")) for suffix in suffixes if re.fullmatch(r"[US]?(8|16|64|128)", suffix)), 32)
    return 32 * bits // 8


def tma_bytes(instructions: Sequence[tuple[str, str]]) -> int:
    """Return the bytes that TMA loads for a block, which the mbarriers are told to expect."""
    expected, constants = 0, dict[str, int]()
    for name, operands in instructions:
        first, *_, last = operands.split(", ") if ", " in operands else (operands, "")
        if name.startswith("SYNCS.ARRIVE.TRANS64"):
            expected += constants.get(last, 0)
        elif name in ("MOV", "UMOV", "IMAD.MOV.U32") and last.startswith("0x"):
            constants[first] = int(last, 16)
        else:
            constants.pop(first, None)
    return expected if any(name.startswith(("UTMALDG", "UBLKCP")) for name, _ in instructions) else 0


def matrix_products(instructions: Sequence[tuple[str, str]], warps: int) -> Iterator[tuple[float, float]]:
    """Yield :func:`matrix_product` of each matrix instruction; sm_100 takes the shape from a constant in a register."""
    constants: dict[str, int] = {}
    for last in (False, True):  # two passes, because the previous iteration may have set a constant
        for name, operands in instructions:
            if name == "UMOV" and (constant := re.fullmatch(r"(UR\d+),\s*(0x[0-9a-f]+)", operands)):
                constants[constant[1]] = int(constant[2], 16)
            elif last and MATRIX.search(name):
                yield matrix_product(name, operands, constants, warps)


def matrix_product(name: str, operands: str, constants: Mapping[str, int], warps: int) -> tuple[float, float]:
    """Return a block's 16-bit multiply-adds in one matrix instruction, and the bytes read from shared memory.

    TF32 counts double and 8 bits half. ``warps`` is the number of warps of the block, and ``constants`` holds the known
    values of registers.
    The shape is in the name, as in ``HMMA.16816…`` and ``HGMMA.64x128x16…``, or on sm_100 in the instruction
    descriptor (PTX ISA, tcgen05).
    """
    weight = 2.0 if "TF32" in name else 0.5 if name.startswith(("QGMMA", "QMMA", "UTCQMMA")) else 1.0
    copies: float  # number of warps or warpgroups that each execute the instruction
    register = re.search(r"idesc\[(UR\d+)\]", operands)
    if shape := re.search(r"\.(\d+)x(\d+)x(\d+)", name):
        rows, columns, depth = map(int, shape.groups())
        from_shared = re.match(r"R\d+,\s*gdesc", operands) is not None  # otherwise the left operand is in registers
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
        # one instruction per block; without gdesc the left operand is in tensor memory
        copies, shared_rows = 1, columns + rows * operands.startswith("gdesc")
    else:
        raise ValueError(f"the shape of the matrix instruction {name} {operands} is unknown")
    return rows * columns * depth * copies * weight, shared_rows * ROW_BYTES * copies


def overlaps_product(instructions: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each instruction whether a product of the same warps is in flight.

    wgmma is in flight until the wait for all wgmma, and tcgen05.mma until the next mbarrier wait. An HMMA is in flight
    for at least ``ASYNC_SHADOW`` clocks.
    """
    in_flight: list[bool] = []
    is_async = any(ASYNCHRONOUS.match(name) for name, _ in instructions)
    is_sm_100 = any(name.startswith("UTC") for name, _ in instructions)
    clocks_left = 0.0
    for _ in range(2):  # two passes, because a product may still be in flight in the next iteration
        in_flight = []
        for name, operands in instructions:
            clocks_left = max(clocks_left - 1, 0)
            if MATRIX.search(name):
                clocks_left = math.inf if is_async else ASYNC_SHADOW
            elif (name.startswith("WARPGROUP.DEPBAR") and operands.endswith(" 0x0")) or (
                is_sm_100 and name.startswith("SYNCS.PHASECHK")
            ):
                clocks_left = 0
            in_flight.append(clocks_left > 0)
    return in_flight
