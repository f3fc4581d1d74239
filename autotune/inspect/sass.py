"""Read the main loop of a kernel from its disassembly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Loop:
    """One innermost loop that holds matrix instructions."""

    matrix: int
    local: int  # loads and stores of local memory: spills
    waits: int  # waits for wgmma (HGMMA) in flight
    serialised: bool  # every wgmma waits for itself
    instructions: int = 0  # of all kinds
    lines: tuple[str, ...] = field(default=(), repr=False, compare=False)


MATRIX = re.compile(r"\b([HIQ]G?MMA|UTC\w*MMA)\b")
TMA = re.compile(r"\b(UTMALDG|UBLKCP)\b")
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


def reachable_from(blocks: list[Block]) -> set[int]:
    """The blocks that some way from the entry leads to."""
    reachable, work = {0}, [0]
    while work:
        new = set(blocks[work.pop()].successors) - reachable
        reachable |= new
        work.extend(new)
    return reachable


def natural_loops(blocks: list[Block]) -> list[set[int]]:
    """Bodies of the loops by header.

    By control flow, not by position: waits spin in blocks behind the end of the kernel, and branch back into the middle
    of its loop. (Aho, Lam, Sethi, Ullman, Compilers, section 9.6.6.)
    """
    dominators = dominators_of(blocks)
    predecessors: dict[int, list[int]] = {i: [] for i in dominators}
    for i in dominators:
        for j in blocks[i].successors:
            predecessors[j].append(i)
    bodies: dict[int, set[int]] = {}
    for i in dominators:
        for header in set(blocks[i].successors) & dominators[i]:  # a back edge
            body, work = bodies.setdefault(header, {header}), [i]
            while work:
                if (node := work.pop()) not in body:
                    body.add(node)
                    work.extend(predecessors[node])
    return list(bodies.values())


def dominators_of(blocks: list[Block]) -> dict[int, set[int]]:
    """For every reachable block, the blocks that lie on all ways to it."""
    reachable = reachable_from(blocks)
    dominators = {i: set(reachable) for i in reachable}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for i in sorted(reachable - {0}):
            before = [dominators[j] for j in reachable if i in blocks[j].successors]
            now = {i} | set.intersection(*before)
            changed |= now != dominators[i]
            dominators[i] = now
    return dominators


def matrix_loops(listing: str) -> Iterator[Loop]:
    """The innermost loops of a SASS listing that hold matrix instructions."""
    yield from map(read_loop, innermost(listing, lambda lines: any(map(MATRIX.search, lines))))


def tma_loads(listing: str) -> int:
    """Loads by TMA in an iteration of the warps that load for others: of the innermost loops without products."""

    def loads(lines: list[str]) -> int:
        return sum(bool(TMA.search(line)) for line in lines)

    if not TMA.search(listing):
        return 0
    alone = innermost(listing, lambda lines: loads(lines) > 0 and not any(map(MATRIX.search, lines)))
    return max(map(loads, alone), default=0)


def innermost(listing: str, wanted: Callable[[list[str]], bool]) -> Iterator[list[str]]:
    """The lines of every wanted loop that holds no other wanted one."""
    blocks = basic_blocks(listing)
    lines = {
        frozenset(body): [line for i in sorted(body) for line in blocks[i].lines] for body in natural_loops(blocks)
    }
    bodies = [body for body in lines if wanted(lines[body])]
    yield from (lines[body] for body in bodies if not any(other < body for other in bodies))


def read_loop(lines: list[str]) -> Loop:
    matrix = sum(bool(MATRIX.search(line)) for line in lines)
    waits = sum("WARPGROUP.DEPBAR" in line for line in lines)
    hopper = any("HGMMA" in line for line in lines)
    local = sum(bool(LOCAL.search(line)) for line in lines)
    # a chain of k-steps needs one wait; nearly as many waits as products means that none overlaps another
    return Loop(matrix, local, waits, hopper and waits > matrix // 2, len(lines), tuple(lines))
