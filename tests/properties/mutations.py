"""Mutants of functions, made from their syntax trees: one changed wait, record, stream, slot or condition each."""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A single change of one function."""

    module: str
    function: str
    line: int
    number: int  # index of the change within the function
    text: str  # the statement before and after

    def __str__(self) -> str:
        return f"{self.module.removeprefix('ringattn.')}.{self.function}: {self.text}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield replacements for a node."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"))))):
            pass  # without super().__init__() no object exists
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.If() | ast.IfExp():
            for value in (True, False):
                yield replaced(node, test=ast.Constant(value))
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="stream")))]):
            yield ast.If(test=ast.Constant(True), body=node.body, orelse=[])
        case ast.keyword(arg="after" | "keep"):
            yield replaced(node, value=ast.Tuple([], ast.Load()))
        case ast.List(ctx=ast.Load()) | ast.Tuple(ctx=ast.Load()):
            if isinstance(node, ast.List) or any(isinstance(element, ast.Starred) for element in node.elts):
                for place in range(len(node.elts)):
                    yield replaced(node, elts=[*node.elts[:place], *node.elts[place + 1 :]])
        case ast.For():
            for part in ("[1:]", "[:-1]"):
                yield replaced(node, iter=ast.parse(f"[*({ast.unparse(node.iter)})]{part}", mode="eval").body)
        case ast.Compare(ops=[operator]):
            for other in OPERATORS.get(type(operator), ()):
                yield replaced(node, ops=[other()])
        case ast.BoolOp():
            yield replaced(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()):
            yield replaced(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield replaced(node, value=value + 1)
        case ast.Attribute(attr="stream", ctx=ast.Load()) if not isinstance(node.value, ast.Attribute) or (
            node.value.attr == "_copy_stream"
        ):
            if ast.unparse(node) != "torch.cuda.stream":
                yield ast.parse("torch.cuda.current_stream(self._device)", mode="eval").body
        case ast.Call(func=ast.Attribute(attr="current_stream")):
            yield ast.parse("self.stream", mode="eval").body
        case ast.Name(id="LEAVING_SLOT" | "ARRIVING_SLOT"):
            yield ast.Name("ARRIVING_SLOT" if node.id == "LEAVING_SLOT" else "LEAVING_SLOT", ast.Load())
        case ast.Name(id="INSIDE" | "BETWEEN"):
            yield ast.Name("BETWEEN" if node.id == "INSIDE" else "INSIDE", ast.Load())
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *rest]) if name in TAKES_SLOT:
            yield replaced(node, args=[ast.parse(f"({ast.unparse(first)}) + 1", mode="eval").body, *rest])


TAKES_SLOT = ("free", "busy", "pop_uses", "add_use", "mark_computed", "buffers", "tensors", "_part")
OPERATORS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


def replaced(node: ast.AST, **fields: Any) -> Any:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def functions(module: ModuleType) -> tuple[ast.Module, list[tuple[str, ast.FunctionDef]]]:
    """Return the module's tree and its functions and methods by qualified name."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    listed = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            listed.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            listed += [
                (f"{node.name}.{inner.name}", inner) for inner in node.body if isinstance(inner, ast.FunctionDef)
            ]
    return tree, listed


def places(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.AST, str, int | None]]:
    """Yield every node of a body with its parent, field and index. Annotations, errors and assertions are skipped."""
    skipped = (ast.arguments, ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef)
    pending: list[ast.AST] = [function]
    while pending:
        holder = pending.pop()
        for name, value in ast.iter_fields(holder):
            if name in ("args", "returns", "decorator_list", "annotation") and isinstance(holder, ast.FunctionDef):
                continue
            for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.AST) and not isinstance(node, skipped) and name not in ("annotation", "slice"):
                    yield node, holder, name, place
                    pending.append(node)


def mutants(module: str, wanted_functions: Sequence[str]) -> Iterator[Mutant]:
    """Yield the mutants of some functions; a class name means all of its methods, "" the whole module."""
    for name, function in functions(importlib.import_module(module))[1]:
        if any(wanted == "" or name == wanted or name.startswith(f"{wanted}.") for wanted in wanted_functions):
            for number, (node, _, text) in enumerate(mutations(function)):
                yield Mutant(module, name, getattr(node, "lineno", function.lineno), number, text)


def mutations(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, Callable[[], None], str]]:
    """Yield each change of a function: the node, a function that makes the change, and the changed statement."""
    statements = {
        id(inner): outer for outer in ast.walk(function) if isinstance(outer, ast.stmt) for inner in expressions(outer)
    }
    for node, holder, name, place in list(places(function)):
        for change in changes(node):

            def make(holder: ast.AST = holder, name: str = name, place: int | None = place, new: Any = change) -> None:
                if place is None:
                    setattr(holder, name, new)
                else:
                    getattr(holder, name)[place] = new

            statement = statements.get(id(node), node)
            before = ast.unparse(statement).splitlines()[0]
            make()
            after = ast.unparse(change if statement is node else statement).splitlines()[0]
            make(new=node)
            if after != before:
                yield node, make, f"{before}  ->  {after}"


def expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement's own nodes, without nested statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        yield node
        pending += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def apply(mutant: Mutant) -> None:
    """Replace the function's code for the rest of this process."""
    module = importlib.import_module(mutant.module)
    tree, listed = functions(module)
    function = dict(listed)[mutant.function]
    for number, (_, make, _) in enumerate(mutations(function)):
        if number == mutant.number:
            make()
            break
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    plain(module, mutant.function).__code__ = inner_code(code, mutant.function.split("."))


def inner_code(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        code = next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == name)
    return code


def plain(module: ModuleType, name: str) -> FunctionType:
    """Return the function behind its decorators."""
    holder: Any = module
    for part in name.split("."):
        holder = vars(holder)[part]
    for attribute in ("fget", "__func__", "__wrapped__"):
        holder = getattr(holder, attribute, holder)
    assert isinstance(holder, FunctionType)
    return holder
