"""The pages: links and named files exist, every command is told, and the README stays short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import LocalWorld
from ringattn.bench import cli
from ringattn.comm import GroupLike
from ringattn.examples.model import Decoder

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".tox", "build", "node_modules"} & {*path.relative_to(ROOT).parts}
)
MOST_LINES, MOST_COLUMNS = 150, 100
# written by commands, or into the user's folders
MADE = {"launcher.c", "manifest.json", "config.json"}
DATED = {"NOTES.md", "CHANGELOG.md"}  # they tell of files as they were called then


def links(text: str) -> Iterator[str]:
    """Targets within this repository, of links and pictures."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" not in target:
            yield target


def anchors(text: str) -> set[str]:
    """What a heading is called behind a ``#``: lower case, spaces as dashes, without signs."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_files(text: str) -> set[str]:
    """Paths between backquotes; a folder in capitals stands for any."""
    names = re.findall(r"`([\w./-]+\.(?:py|md|json|svg|toml))`", text)
    return {name for name in names if "/" in name and not any(part.isupper() for part in name.split("/")[:-1])}


def test_the_reader_of_pages() -> None:
    page = "# A page, `x`\n[a](b.md#c) ![d](e.svg) <https://f>\n```\n# no heading [x](y)\n```\n[g](https://h)"
    page += " `i/j.py` `DIR/k.json`"
    assert list(links(page)) == ["b.md#c", "e.svg"]
    assert anchors(page) == {"a-page-x"}
    assert named_files(page) == {"i/j.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in links(page.read_text()):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in DATED], ids=lambda path: str(path.relative_to(ROOT))
)
def test_named_files_are_there(page: Path) -> None:
    """From the root, or from the page's own folder."""
    named = {name for name in named_files(page.read_text()) if Path(name).name not in MADE}
    assert {name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()} == set()


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    names = [f"ringattn {command.name}" for command in cli.app.registered_commands]
    names += [f"ringattn bench {command.name}" for command in cli.bench.registered_commands]
    assert [name for name in names if f"`{name}" not in page] == []


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MOST_LINES
    long = [line for line in lines if len(line) > MOST_COLUMNS and not line.startswith(("|", "python3"))]
    assert long == []  # but for tables, and commands that are copied whole


def test_the_page_on_training_does_what_it_says() -> None:
    """Its function on four virtual ranks: losses and gradients sum to those of the whole."""
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, "docs/training.md", "exec"), names)
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(0))

    def trained(group: GroupLike) -> list[Tensor]:
        model = Decoder(layers=1, heads=2, kv_heads=1, head_dim=8)
        model.initialize(0)
        loss = names["backward"](model, tokens, group)
        return [loss, *(parameter.grad for parameter in model.parameters())]

    with LocalWorld(4) as world:
        parts = world.run(trained)
    for whole, *ranks in zip(trained(None), *parts, strict=True):
        torch.testing.assert_close(sum(ranks), whole)


@pytest.mark.parametrize("folder", ["", "ring", "kernels", "comm", "reference"])
def test_every_public_name_is_on_the_page_of_the_api(folder: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    module = import_module(".".join(["ringattn", *filter(None, [folder])]))
    names = {name for name in module.__all__ if callable(getattr(module, name))}
    assert {name for name in names if f".{name}\n" not in page} == set()
