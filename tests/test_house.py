"""Tests of the repository's rules: imports between folders, names, docstrings, packaging and import cost."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

import ringattn

from .conftest import profile

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))

ARROWS = {
    "validators": set[str](),
    "kernels": set[str](),
    "comm": {"validators", "__version__"},
    "ring": {"kernels", "comm", "validators", "__version__"},
    "integrations": {*ringattn.__all__},
    "reference": set[str](),
    "conformance": {"", "autotune", "bench"},  # only its adapters import the public API
    "examples": {*ringattn.__all__},
}
"""What else of this package each folder may import; ``autotune``, ``bench`` and ``tools`` may import all but tests."""


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements in it without their expressions, which are most of a tree."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(child)


def imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the absolute dotted names that a module of ``package`` imports, lazily or not."""
    for node in statements(tree):
        yield from imported(node, package)


def imported(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted names that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else ()
        stem = [*base, *(node.module.split(".") if node.module else [])]
        yield from (".".join([*stem, alias.name]) for alias in node.names)


def imports_of(folder: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        package = ("ringattn", *path.relative_to(ROOT).parent.parts)
        yield from ((path, name) for name in imports(parsed(path), package))


def ours(name: str) -> str | None:
    """Return the first name below ``ringattn``, '' for the root itself, and None for other packages."""
    first, _, rest = name.partition(".")
    return rest.partition(".")[0] if first == "ringattn" else None


def test_imports_of_a_module() -> None:
    expected: dict[str, set[str | None]] = {
        "import ringattn.kernels.bounds as b": {"kernels"},
        "import ringattn": {""},
        "from ringattn import comm": {"comm"},
        "from .. import comm, __version__": {"comm", "__version__"},
        "from . import layout": {"ring"},
        "def late():\n    from ..bench import cli": {"bench"},
        "import torch, os.path": {None},
    }
    imported = {
        source: {ours(name) for name in imports(ast.parse(source), ("ringattn", "ring"))} for source in expected
    }
    assert imported == expected


@pytest.mark.parametrize("folder", sorted(ARROWS))
def test_imports_follow_the_layers(folder: str) -> None:
    allowed = {None, folder, *ARROWS[folder]}
    assert [(str(path), name) for path, name in imports_of(folder) if ours(name) not in allowed] == []


PUBLIC_FOLDERS = ("integrations", "examples")
"""Folders that users copy from, which therefore import only public names."""


@pytest.mark.parametrize("folder", PUBLIC_FOLDERS)
def test_public_folders_import_only_public_names(folder: str) -> None:
    public = {"ringattn": {*ringattn.__all__} - {*FOLDERS} | {"__version__"}}
    public |= {f"ringattn.{name}": {*import_module(f"ringattn.{name}").__all__} for name in ("comm", "kernels")}
    private = {
        (path.relative_to(ROOT).as_posix(), name)
        for path, name in imports_of(folder)
        if name.startswith("ringattn.") and not name.startswith(f"ringattn.{folder}.")
        if name.rpartition(".")[2] not in public.get(name.rpartition(".")[0], set())
        if not re.fullmatch(r"ringattn\.integrations(\.[a-z]\w*)*\.[A-Za-z]\w*", name)
    }
    assert not private


@pytest.mark.parametrize("folder", PUBLIC_FOLDERS)
def test_public_folders_use_no_private_attributes(folder: str) -> None:
    def nodes(folder: str) -> Iterator[tuple[str, ast.AST]]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ((path.name, node) for node in ast.walk(parsed(path)))

    functions = (node for folder in ("ring", "comm") for _, node in nodes(folder) if isinstance(node, ast.FunctionDef))
    private = {node.name for node in functions if node.name.startswith("_") and not node.name.startswith("__")}
    assert {"_call_guard", "_agree"} <= private
    used = {
        (file, node.attr)
        for file, node in nodes(folder)
        if isinstance(node, ast.Attribute) and node.attr in private
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert not used


def test_nobody_imports_the_tests() -> None:
    assert [(str(path), name) for folder in FOLDERS for path, name in imports_of(folder) if ours(name) == "tests"] == []


Graph = dict[str, set[str]]


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``node``, lazy imports included, but not those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield child
            yield from runtime_nodes(child)


def module_graph(root: Path) -> Graph:
    """Return the modules that each module outside the tests imports, without the prefix ``ringattn.``.

    An import of a package alone is no edge: its ``__init__.py`` gathers what is below it.
    """
    paths = [path for folder in FOLDERS for path in (root / folder).rglob("*.py") if path.name != "__init__.py"]
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
    graph: Graph = {}
    for module, path in names.items():
        package, targets = ("ringattn", *module.split(".")[:-1]), set[str]()
        for node in runtime_nodes(parsed(path)):
            for name in imported(node, package):
                full = name.removeprefix("ringattn.")
                targets |= {full, full.rpartition(".")[0]} & names.keys()  # a module, or a name in one
        graph[module] = targets - {module}
    return graph


def folder_graph(modules: Graph) -> Graph:
    """Return which folders the modules directly in each folder import from."""
    graph: Graph = {}
    for module, targets in modules.items():
        folder = module.rpartition(".")[0]
        graph.setdefault(folder, set()).update({target.rpartition(".")[0] for target in targets} - {folder})
    return graph


def import_cycles(graph: Graph) -> set[str]:
    """Return the strongly connected components of two or more nodes, each as its sorted nodes."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = graph.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    beyond = {node: reached(node) for node in graph}
    rings = {frozenset(other for other in beyond[node] if node in beyond[other]) for node in graph}
    return {" ".join(sorted(ring)) for ring in rings if len(ring) > 1}


def test_no_import_cycles() -> None:
    modules = module_graph(ROOT)
    assert not import_cycles(modules)
    assert not import_cycles(folder_graph(modules))


def test_import_cycles_are_found(tmp_path: Path) -> None:
    for name, source in {
        "kernels/a.py": "from .device.b import x",
        "kernels/device/b.py": "def late():\n    from ..c import y",  # a cycle of folders, not of modules
        "kernels/c.py": "from . import d\nif TYPE_CHECKING:\n    from . import a",
        "kernels/d.py": "import ringattn.kernels.c as c",
        "kernels/__init__.py": "from . import a",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    modules = module_graph(tmp_path)
    assert import_cycles(modules) == {"kernels.c kernels.d"}
    assert import_cycles(folder_graph(modules)) == {"kernels kernels.device"}


@pytest.mark.parametrize(("folder", "allowed"), [("kernels", {"torch", "triton"}), ("reference", {"torch"})])
def test_folders_import_only_allowed_packages(folder: str, allowed: set[str]) -> None:
    used = {name.partition(".")[0] for _, name in imports_of(folder)} - {"ringattn"} - sys.stdlib_module_names
    assert used <= allowed


def test_data_from_other_ranks_is_never_unpickled() -> None:
    # Anyone who reaches the port of a store could run commands on every rank. PyTorch's object collectives pickle, too.
    assert [path for path, name in imports_of("comm") if name in ("pickle", "marshal", "shelve")] == []
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    collective = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(")
    assert [path for path in files if collective.search(path.read_text())] == []


UNCLEAR_OPENINGS = re.compile(
    "(What|Of|Who|Whose|Whom|Where|As|That|Which|Nothing|Everything|Whatever|By|From|In|On|With|Until|Why|How|And|Also"
    r"|Its|Their|Those|They|All|One|Every)\b"
)
"""First words of a docstring that do not say what the code does."""
SAME_NAMES = {"register", "attend", "supports", "positions", "version"}
"""Public names that several modules may define, because a framework or a protocol prescribes them."""

Definition = ast.FunctionDef | ast.ClassDef


def unclear_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings that match `UNCLEAR_OPENINGS`.

    A class or module may open with All, One or Every.
    """
    for node in statements(tree):
        text = (ast.get_docstring(node) or "") if isinstance(node, Definition | ast.Module) else ""
        match = UNCLEAR_OPENINGS.match(text.lstrip("`*"))
        if match and (isinstance(node, ast.FunctionDef) or match[1] not in ("All", "One", "Every")):
            yield text.splitlines()[0]


def repeated_names(trees: dict[str, ast.Module]) -> set[str]:
    """Return the public functions and classes that more than one module defines; overloads count once."""
    defined = [
        {node.name for node in tree.body if isinstance(node, Definition) and not node.name.startswith("_")} - {"main"}
        for tree in trees.values()
    ]
    return {name for names in defined for name in names if sum(name in other for other in defined) > 1}


def test_docstrings_say_what_the_code_does() -> None:
    files = [*ROOT.glob("*.py"), *(path for name in (*FOLDERS, "tests") for path in (ROOT / name).rglob("*.py"))]
    assert [(str(path), line) for path in files for line in unclear_docstrings(parsed(path))] == []


def test_public_names_are_unique() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    trees = {str(path): parsed(path) for path in paths}
    functions = (node for tree in trees.values() for node in statements(tree) if isinstance(node, ast.FunctionDef))
    assert sorted({node.name for node in functions if node.name.endswith("_of")}) == []
    assert repeated_names(trees) <= SAME_NAMES


def test_unclear_words_are_found() -> None:
    riddle, verb = 'def f():\n    """Of one loop."""', 'def f():\n    """Return one loop."""'
    assert [*unclear_docstrings(ast.parse(riddle))] == ["Of one loop."] and not [*unclear_docstrings(ast.parse(verb))]
    assert repeated_names({name: ast.parse("def f(): ...\nclass _C: ...") for name in "ab"}) == {"f"}


def test_every_folder_has_an_import_rule() -> None:
    assert {*FOLDERS} <= {*ARROWS, "autotune", "bench", "tools"}


def test_pyproject_lists_every_package() -> None:
    inner = {path.parent.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    expected = {"ringattn"} | {".".join(("ringattn", *path.parts)) for path in inner}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == expected


def test_no_other_module_at_the_root() -> None:
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_every_dependency_is_pinned() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    requirements = [*PYPROJECT["project"]["dependencies"], *(name for extra in extras.values() for name in extra)]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert {re.split(r"[<>=]", name)[0] for name in requirements} <= pinned


def test_ci_runs_the_readmes_test_command() -> None:
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command.endswith(".venv/bin/tox")
    assert command in (ROOT / "README.md").read_text().splitlines()


def test_only_nightly_runs_draw_random_examples() -> None:
    tox = ConfigParser()
    tox.read(ROOT / "tox.ini")
    marks = re.findall(r'pytest .*-m "(.*?)"', tox["testenv:nightly"]["commands"])
    assert [profile(mark) for mark in marks] == ["nightly", "nightly"]
    options = PYPROJECT["tool"]["pytest"]["ini_options"]["addopts"]
    assert profile(options[options.index("-m") + 1]) == profile("") == "default"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "code"), [(["nightly and idle"], 0), (["nightly and idle", "-k", "none_such"], 5), (["idle"], 5)]
)
def test_a_file_without_nightly_tests_passes(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:xdist", "-m", *arguments]
    assert subprocess.run([*command, ROOT / "tests" / "comm" / "test_nvml.py"], capture_output=True).returncode == code


CLONES = ("ringattn", "main", "my-fork", "kernels")
ANOTHER = "main" if ROOT.name == "ringattn" else "ringattn"
NAMES = """
import sys
import ringattn
from .rank_processes import FORKED

def names(_=None):
    return __name__, ringattn.__file__, {beside!r} in sys.path

def test_names():
    with FORKED.Pool(1) as pool:
        assert [names(), *pool.map(names, [0])] == [("tests.support.test_names", {file!r}, False)] * 2
"""


def copy_clone(clone: Path) -> None:
    """Copy this clone without build outputs and measured results."""
    leave = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "mutants", "*.egg-info", "results", "shared")
    shutil.copytree(ROOT, clone, ignore=leave)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CLONES)
def test_tests_run_in_a_clone_of_any_name(name: str, tmp_path: Path) -> None:
    clone = tmp_path / name
    copy_clone(clone)
    (clone / "tests" / "support" / "test_names.py").write_text(
        NAMES.format(file=ringattn.__file__, beside=str(tmp_path))
    )
    workers = "0" if name == ANOTHER else "1"
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-k", "names or bits"]
    files = ["tests/support/test_names.py", "tests/properties/test_processes.py"]
    result = subprocess.run([*command, *files], cwd=clone, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def run(code: str, folder: Path) -> None:
    """Run ``code`` in a fresh interpreter that starts in ``folder``."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_import_is_lazy(tmp_path: Path) -> None:
    heavy = {"torch", "triton", "numpy", "cupy", "typer", "rich", "matplotlib"}
    run(f"import sys, ringattn; assert not {heavy!r} & set(sys.modules), set(sys.modules)", tmp_path)


def test_folders_import_without_extras(tmp_path: Path) -> None:
    extras = {"cupy", "cuda", "typer", "rich", "matplotlib", "jinja2"}
    folders = ", ".join(f"ringattn.{folder}" for folder in ("kernels", "comm", "ring", "reference"))
    run(f"import sys, {folders}; assert not {extras!r} & set(sys.modules)", tmp_path)


def test_kernels_run_when_copied_alone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernels", tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import sys
import torch
from elsewhere import attention_forward
q, k, v = (torch.randn(1, 8, heads, 16) for heads in (2, 1, 1))
out, lse = attention_forward(q, k, v)
scores = torch.einsum("bqhd,bkgd->bhqk", q, k) / 4
assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)
assert torch.allclose(out, torch.einsum("bhqk,bkgd->bqhd", scores.softmax(-1), v), atol=1e-5)
assert "ringattn" not in sys.modules
"""
    run(code, tmp_path)


def test_public_names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(ringattn), "shard", raising=False)  # as before its first use
    assert "shard" in dir(ringattn)
    for name in ringattn.__all__:
        assert getattr(ringattn, name) is not None
    for folder in FOLDERS:
        assert getattr(ringattn, folder).__name__ == f"ringattn.{folder}"
    for function in (ringattn.kernels.attention_forward, ringattn.kernels.attention_backward):
        assert callable(function)
    assert callable(ringattn.reference.attention)
    assert {*FOLDERS} - {"validators"} <= {*ringattn.__all__} <= {*dir(ringattn)}


def test_unknown_name_is_an_attribute_error() -> None:
    misspelt = "ring_atention"
    with pytest.raises(AttributeError, match=misspelt):
        getattr(ringattn, misspelt)


def test_files_beside_the_modules_are_installed() -> None:
    assert (files("ringattn") / "py.typed").is_file()
    assert "MIT License" in (files("ringattn.kernels") / "LICENSE").read_text()
    assert (files("ringattn.kernels") / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.nightly
def test_installs_with_an_old_setuptools(tmp_path: Path) -> None:
    install = "pip install --no-deps --no-build-isolation ."
    assert install in (ROOT / "README.md").read_text().splitlines()
    clone, python = tmp_path / "clone", tmp_path / "venv" / "bin" / "python"
    copy_clone(clone)
    shutil.copy(ROOT / ".gitignore", clone)

    def result(*command: str | Path) -> str:
        return subprocess.run(command, cwd=clone, check=True, capture_output=True, text=True).stdout

    result("git", "init", "--quiet")
    result("git", "add", "--all")
    result(sys.executable, "-m", "venv", python.parents[1])
    # Python 3.11's venv ships this version; later Pythons need 66.1
    setuptools = "65.5.0" if sys.version_info < (3, 12) else "66.1.0"
    result(python, "-m", "pip", "install", "--quiet", f"setuptools=={setuptools}", "wheel")
    result(python, "-m", *install.split(" "))
    assert result("git", "ls-files", "--others", "--modified", "--exclude-standard") == ""
    script = "from importlib.metadata import metadata; print(metadata('ringattn'))"
    assert "License :: OSI Approved :: MIT License" in result(python, "-c", script)
    (package,) = python.parents[1].glob("lib/python3*/site-packages/ringattn")
    assert {path.parent.name for path in package.glob("*/__init__.py")} == {*FOLDERS}
    assert (package.parent / f"ringattn-{ringattn.__version__}.dist-info" / "LICENSE").is_file()
