"""Mutate the kernels and what launches them, and count the mutants that the fast tests on Triton's interpreter miss.

``python -m tests.properties.kernel_mutants --sample 200`` from the root: so many of the mutants that the syntax trees
give, always the same; ``--list`` prints all, ``--only TEXT`` takes those whose text has it. Each runs in a process of
its own, on a copy of the package in which one file differs.

Fails where a survivor is not in tests/kernel_mutants.md with its reason, or where one that is there is caught.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import ast
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton  # imported here, once: the mutants' processes are forks  # noqa: F401

from .mutations import changes, mutations, options_of, replaced, told

ROOT = Path(__file__).parents[2]
REASONS = Path(__file__).with_name("kernel_mutants.md")
SECONDS = 900  # for one mutant, on a busy machine
SECONDS_PER_TEST = 60  # one that hangs, as whoever waits for a wrong turn does, is caught

SINGLE_PASS = ("kernels/test_single_pass.py", "ring/test_backends.py")
DEALT = ("kernels/test_order.py", "kernels/test_splits.py")
MEMORY = ("kernels/test_guarded.py",)
HOPPER = ("kernels/test_hopper.py",)  # on the stand-in for Gluon
HOPPER_BACKWARD = ("kernels/test_hopper_backward.py",)


class Target(NamedTuple):
    """Functions of a module of ``kernels``, none named: all; and what is to catch their mutants."""

    functions: tuple[str, ...]
    tests: tuple[str, ...]


TARGETS = {
    "single_pass": Target((), SINGLE_PASS + MEMORY),
    "dq_sum": Target((), SINGLE_PASS + MEMORY),
    "turns": Target((), SINGLE_PASS),
    "gradients": Target(("attention_gradients", "turns_of"), SINGLE_PASS),
    "key_tile": Target((), (*SINGLE_PASS[:1], *DEALT, "kernels/test_epilogue.py", *MEMORY)),
    "described": Target((), ("kernels/test_epilogue.py",)),
    "hopper": Target((), HOPPER),
    "hopper_ring": Target((), HOPPER + HOPPER_BACKWARD),
    "hopper_backward": Target((), HOPPER_BACKWARD),
    "hopper_backward_ring": Target((), HOPPER_BACKWARD),
    "order": Target((), DEALT),
    "launch": Target(
        ("shape_of", "packed_shape", "check_config", "splits_of", "split_shape", "empty_parts", "dealt"),
        (*DEALT, "kernels/test_epilogue.py"),
    ),
    "backward": Target(("dq_kernel", "dq_tile", "dkdv_kernel", "reduce_kernel", "add_parts"), DEALT + MEMORY),
    "forward": Target(("forward_kernel", "forward_tile"), (*DEALT, "kernels/test_kernel_scores.py", *MEMORY)),
    "tiles": Target(
        (
            "program", "placement", "tile_rows", "as_column", "vector_of", "of_head", "row_limits", "tile_range",
            "visit", "visit_keys", "visit_key_tile", "run_range", "clipped",
        ),
        (*DEALT, *SINGLE_PASS[:1], "kernels/test_tiles.py", *MEMORY),
    ),
    "parts": Target(
        ("load_tile", "near_part", "accumulate", "scaled", "added", "load_lse"), (*SINGLE_PASS[:1], *DEALT, *MEMORY)
    ),
}  # fmt: skip

OTHERS = {
    "stride_s": "stride_h", "stride_h": "stride_s", "stride_b": "stride_h", "lo": "hi", "hi": "lo",
    "rows": "columns", "columns": "rows", "heads": "group", "group": "heads",
    "HEAD_DIM": "HEAD_DIM_V", "HEAD_DIM_V": "HEAD_DIM", "BLOCK_Q": "BLOCK_K", "BLOCK_K": "BLOCK_Q",
    "start": "end", "end": "start", "begin": "end", "head": "batch", "member": "head",
    "minimum": "maximum", "maximum": "minimum",
}  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file."""

    module: str
    function: str
    number: int  # which change of that function
    text: str  # what the changed statement said, and says now

    def __str__(self) -> str:
        return f"{self.module}.{self.function}: {self.text}"


def kernel_changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node of a kernel: also another stride, bound or head, no mask, no scale."""
    if not isinstance(node, ast.For | ast.List | ast.Tuple):
        yield from changes(node)
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in OTHERS:
            yield replaced(node, attr=OTHERS[name])
        case ast.Name(id=name, ctx=ast.Load()) if name in OTHERS:
            yield replaced(node, id=OTHERS[name])
        case ast.keyword(arg="mask"):
            yield replaced(node, value=ast.Constant(None))
        case ast.keyword(arg="other"):
            yield replaced(node, value=ast.Constant(1.0))
        case ast.BinOp(op=ast.Mult() | ast.BitAnd()):
            yield node.left
            yield node.right
        case ast.BinOp(op=ast.FloorDiv()):
            yield replaced(node, op=ast.Mod())
        case ast.BinOp(op=ast.Mod()):
            yield replaced(node, op=ast.FloorDiv())
        case ast.UnaryOp(op=ast.USub()):
            yield node.operand
        case ast.Call(func=ast.Attribute(attr="where")) if len(node.args) == 3:
            yield node.args[1]
        case ast.Constant(value=bool(value)):
            yield replaced(node, value=not value)


def every_mutant() -> Iterator[Mutant]:
    """Of every target."""
    for module, (wanted, _) in TARGETS.items():
        for function in functions(parsed(module)):
            if not wanted or function.name in wanted:
                for number, (_, _, text) in enumerate(mutations(function, kernel_changes)):
                    yield Mutant(module, function.name, number, text)


def file_of(module: str) -> Path:
    """Of a module of ``kernels``, by its name alone."""
    (found,) = (ROOT / "kernels").rglob(f"{module}.py")
    return found


def parsed(module: str) -> ast.Module:
    """A module of ``kernels``."""
    return ast.parse(file_of(module).read_text())


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Of a module, by the order in its file."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def written(mutant: Mutant) -> str:
    """The module with that change."""
    tree = parsed(mutant.module)
    function = next(one for one in functions(tree) if one.name == mutant.function)
    for number, (_, make, _) in enumerate(mutations(function, kernel_changes)):
        if number == mutant.number:
            make()
            break
    return ast.unparse(ast.fix_missing_locations(tree))


# each in a process of its own


def stage(folder: Path) -> Path:
    """A copy of the package and its tests, called as what the tests import, whatever the clone is called."""
    leave = shutil.ignore_patterns("__pycache__", "results", ".*", "build", "shared")
    copy = folder / "ringattn"
    shutil.copytree(ROOT, copy, ignore=leave)
    return copy


class First:
    """A plugin of pytest: the first test that fails."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} is not imported"


def serve(copy: Path, tests: tuple[str, ...], connection: Connection) -> None:
    """Run tests of a copy; send which one failed, "" where none did."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy.parent)
    sys.path.insert(0, str(copy.parent))
    sys.dont_write_bytecode = True  # of the next mutant, written within the same second, it would be taken for
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    first = First()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", str(SECONDS_PER_TEST)]
    code = pytest.main([*(f"tests/{name}" for name in tests), *options], plugins=[first])
    imported = Path(str(sys.modules["ringattn"].__file__)).parent
    if imported != copy:  # caught too, and the first run is of no mutant: it ends the command
        first.failed = f"the tests import {imported}, not {copy}"
    connection.send(first.failed or ("" if code == pytest.ExitCode.OK else f"pytest ends with {code}"))
    connection.close()
    os._exit(0)  # whatever a mutant left behind


def examined(copy: Path, tests: tuple[str, ...]) -> str:
    """Which test fails, "" where none does."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(copy, tests, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return str(ours.recv()) if ours.poll(SECONDS) else "takes too long"
    except EOFError:
        return "its process ends"
    finally:
        process.kill()
        process.join()


def survivors(chosen: list[Mutant], show: bool) -> list[str]:
    """Those of the mutants that no test catches, in words."""
    left = []
    with tempfile.TemporaryDirectory() as folder:
        copy = stage(Path(folder))
        for tests in dict.fromkeys(TARGETS[mutant.module].tests for mutant in chosen):
            reason = examined(copy, tests)
            assert not reason, f"without a mutant: {reason}"
        for mutant in chosen:
            source = file_of(mutant.module)
            file = copy / source.relative_to(ROOT)
            file.write_text(written(mutant))
            begun = time.monotonic()
            reason = examined(copy, TARGETS[mutant.module].tests)
            shutil.copy(source, file)
            if show:
                took = time.monotonic() - begun
                print(f"{'caught' if reason else 'SURVIVED'} {took:.0f} s  {mutant}\n    {reason}", flush=True)
            if not reason:
                left.append(str(mutant))
    return left


def main(arguments: list[str]) -> int:
    """See the module."""
    options = options_of(arguments, __doc__)
    torch.set_num_threads(1)
    everyone = [mutant for mutant in every_mutant() if options.only in str(mutant)]
    # a smaller sample is the beginning of a larger one, and keeps its mutants when others come
    everyone.sort(key=lambda mutant: sha256(str(mutant).encode()).digest())
    chosen = everyone[: options.sample]
    if options.list:
        print(*sorted(map(str, chosen)), sep="\n")
        return 0
    left = survivors(chosen, options.show)
    return told(chosen, left, REASONS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
