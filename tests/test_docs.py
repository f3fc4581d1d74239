"""Tests of the pages: links and files exist, snippets and commands run, and the README stays short."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from ringattn import LocalWorld, ring_attention, shard
from ringattn.bench import cli
from ringattn.bench.suite.device_cases import CASES
from ringattn.bench.suite.suite_parts import gpu_parts
from ringattn.comm import GroupLike, LocalGroup
from ringattn.examples import train
from ringattn.examples.model import Decoder
from ringattn.kernels.gpu import assumed_gpu
from ringattn.kernels.tables import find_tables

from .support.rank_processes import group_results
from .support.snippets import (
    DATED_PAGES,
    LANGUAGES,
    PAGES,
    ROOT,
    SETUPS,
    Command,
    anchor,
    commands,
    execute,
    own_arguments,
    parse,
    python_sections,
    snippets,
)

MOST_LINES, MOST_COLUMNS = 150, 100
# files that commands or users write
WRITTEN_FILES = {"launcher.c", "manifest.json", "config.json"}
PAGES_WITH_C = {
    "kernels/VENDORING.md": "C with cuda.h: tests/tools/test_export_launch.py compiles and runs such a program"
}
"""Pages with C snippets, and the test that covers them."""


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and pictures inside this repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "://" not in target:
            yield target


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {anchor(heading) for heading in headings}


def named_files(text: str) -> set[str]:
    """Return the paths between backquotes, except under a placeholder folder in capitals."""
    names = re.findall(r"`([\w./-]+\.(?:py|md|json|svg|toml))`", text)
    return {name for name in names if "/" in name and not any(part.isupper() for part in name.split("/")[:-1])}


def test_links_anchors_and_files_of_a_page() -> None:
    page = "# A page, `x`\n[a](b.md#c) ![d](e.svg) <https://f>\n```\n# no heading [x](y)\n```\n[g](https://h)"
    page += " `i/j.py` `DIR/k.json`"
    assert list(links(page)) == ["b.md#c", "e.svg"]
    assert anchors(page) == {"a-page-x"}
    assert named_files(page) == {"i/j.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    wrong = []
    for target in links(page.read_text()):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in DATED_PAGES], ids=lambda path: str(path.relative_to(ROOT))
)
def test_named_files_exist(page: Path) -> None:
    named = {name for name in named_files(page.read_text()) if Path(name).name not in WRITTEN_FILES}
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
    assert long == []  # tables and commands may be longer


def test_snippets_of_a_page() -> None:
    page = "# A\n```python\nx\n```\n## B `c`\n ````py  \n```\n````\n`ringattn show\n--world 2`, `x`"
    found, _ = parse("p.md", page)
    assert [snippet[1:] for snippet in found] == [("a", 2, "python", "x\n"), ("b-c", 6, "py", "```\n")]
    with pytest.raises(ValueError, match=r"p\.md:2: this fence is never closed"):
        parse("p.md", "a\n```sh\nb")
    assert own_arguments("torchrun … -m x && y") is None
    assert own_arguments("srun -N 2 .venv/bin/ringattn show --out FILE …  # c") == ["show", "--out", "file.json"]


def test_every_snippet_is_tested() -> None:
    unknown = {f"{x.page}:{x.line}": x.language for x in snippets() if x.language not in LANGUAGES}
    assert unknown == {}
    assert {snippet.page for snippet in snippets() if snippet.language == "c"} == {*PAGES_WITH_C}
    assert SETUPS.keys() <= python_sections().keys()


def sections(kind: str) -> list[Any]:
    """Return the sections that run on this kind of ranks; slow ones are marked nightly."""
    parameters = []
    for key in python_sections():
        setup = SETUPS.get(key)
        ranks = "virtual" if setup and setup.virtual else "processes" if setup and setup.processes else "here"
        if ranks == kind:
            parameters.append(pytest.param(key, marks=[pytest.mark.nightly] * bool(setup and setup.nightly)))
    return parameters


THIRD_PARTY_WARNINGS = pytest.mark.filterwarnings(  # other packages warn on import
    "ignore::UserWarning:megatron", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@THIRD_PARTY_WARNINGS
@pytest.mark.parametrize("key", sections("here"))
def test_python_runs(key: str) -> None:
    names = execute(key)
    if key in CHECKS:
        CHECKS[key](names)


@THIRD_PARTY_WARNINGS
@pytest.mark.parametrize("key", sections("virtual"))
def test_python_runs_on_virtual_ranks(key: str) -> None:
    with LocalWorld(SETUPS[key].virtual) as world:
        world.run(partial(execute, key))


@pytest.mark.parametrize("key", sections("processes"))
def test_python_runs_on_processes(key: str) -> None:
    group_results(SETUPS[key].processes, partial(execute_quietly, key))


def execute_quietly(key: str, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from other packages
        execute(key)


def check_training(names: dict[str, Any]) -> None:
    """Check that losses and gradients of four virtual ranks sum to those of one device."""
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(0))

    def train_step(group: GroupLike) -> list[Tensor]:
        model = Decoder(layers=1, heads=2, kv_heads=1, head_dim=8)
        model.initialize(0)
        loss = names["backward"](model, tokens, group)
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]

    with LocalWorld(4) as world:
        parts = world.run(train_step)
    for whole, *ranks in zip(train_step(None), *parts, strict=True):
        torch.testing.assert_close(sum(ranks), whole)


def check_rollouts(names: dict[str, Any]) -> None:
    """Check that losses and gradients of four virtual ranks sum to those of the rollouts one by one."""
    parts, parents = [*torch.arange(17).split([6, 4, 3, 4])], [-1, 0, 0, 2]

    def train_step(group: GroupLike) -> list[Tensor]:
        model = Decoder(layers=1, heads=2, kv_heads=1, head_dim=8)
        model.initialize(0)
        if group is not None:
            loss = names["rollout_loss"](model, parts, parents, 4, group)
            return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        paths = [torch.cat([parts[node] for node in path])[None] for path in ((0, 1), (0, 2, 3))]
        losses = [
            torch.nn.functional.cross_entropy(
                model(path, torch.arange(path.shape[1]), partial(ring_attention, causal=True))[0, :-1],
                path[0, 1:],
                reduction="sum",
            )
            for path in paths
        ]
        loss = torch.stack(losses).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    with LocalWorld(4) as world:
        ranks = world.run(train_step)
    for whole, *own in zip(train_step(None), *ranks, strict=True):
        torch.testing.assert_close(sum(own), whole)


def check_trainer(names: dict[str, Any]) -> None:
    """Check that the section's trainer trains the model for a step."""
    from transformers import TrainingArguments

    with TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder, max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[],
            average_tokens_across_devices=False, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in names["batch"]["input_ids"]]
        before = [x.detach().clone() for x in names["model"].parameters()]
        trained = names["RingTrainer"](names["model"], options, train_dataset=rows).train()
    assert 0 < trained.training_loss < 10
    assert any((x != y).any() for x, y in zip(before, names["model"].parameters(), strict=True))


def check_moves(names: dict[str, Any]) -> None:
    """Check that convolution, recurrence and later labels on four virtual ranks equal those of the whole."""
    whole, weight, labels = torch.randn(1, 32, 3), torch.randn(3, 1, 4), torch.arange(32)[None]
    padded = torch.nn.functional.pad(whole.transpose(1, 2), (3, 0))
    conv = torch.nn.functional.conv1d(padded, weight, groups=3).transpose(1, 2)
    later = torch.nn.functional.pad(labels[:, 2:], (0, 2), value=-100)

    def on_rank(group: LocalGroup) -> None:
        x, own, expected, tokens = (shard(t, layout="zigzag", group=group) for t in (whole, labels, conv, later))
        torch.testing.assert_close(names["causal_conv"](x, weight, "zigzag", group), expected)
        assert names["later_labels"](own, 2, 32, "zigzag", group).equal(tokens)
        run = whole[:, 8 * group.rank() : 8 * group.rank() + 8]
        assert names["recur"](x, lambda y: y + (y == run), group).equal(x + 1)

    with LocalWorld(4) as world:
        world.run(on_rank)


def check_qk_clip(names: dict[str, Any]) -> None:
    """Check that the largest score of two virtual ranks is the threshold after the step, and small heads are kept."""
    wq, wk = (torch.nn.Linear(8, heads * 4, bias=False) for heads in (4, 2))
    with torch.no_grad():
        wk.weight[4:] *= 1e-3  # the second key head has small scores
    x, before = torch.randn(1, 12, 8), [wq.weight.detach().clone(), wk.weight.detach().clone()]

    def largest(group: LocalGroup) -> Tensor:
        own = shard(x, layout="zigzag", group=group)
        q, k = wq(own).unflatten(2, (4, 4)), wk(own).unflatten(2, (2, 4))
        return ring_attention(q, k, k, layout="zigzag", group=group, causal=True, return_max_logits=True)[1]

    with LocalWorld(2) as world:
        first, same = world.run(largest)
        assert first.equal(same)
        names["clip_qk"](wq, wk, first, 2, threshold=0.05)
        torch.testing.assert_close(world.run(largest)[0].max(), torch.tensor(0.05))
    kept = [x[len(x) // 2 :] for x in (wq.weight, wk.weight)], [x[len(x) // 2 :] for x in before]
    assert all(x.equal(y) for x, y in zip(*kept, strict=True))


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/training.md#train-your-model": check_training,
    "docs/training.md#convolutions-recurrence-and-multi-token-prediction": check_moves,
    "docs/training.md#rollouts": check_rollouts,
    "docs/training.md#qk-clip": check_qk_clip,
    "docs/integrations.md#trainer": check_trainer,
}
"""Extra checks of the names that a section defined."""


def test_the_json_table_of_the_pages_is_valid(tmp_path: Path) -> None:
    (table,) = [snippet for snippet in snippets() if snippet.language == "json"]
    (tmp_path / "nvidia-h200_triton-3.7.json").write_text(table.text)
    assert find_tables(assumed_gpu(90, "NVIDIA H200"), str(tmp_path))


OTHER_PROGRAMS = {"git", "python3", "python", "pip", "tox", "pytest", "ruff", "torchrun", "srun", "mpirun"}
"""Other programs; only the files, modules and tox environments of their arguments are checked."""


def command_id(command: Command) -> str:
    return f"{command.page}:{command.line} {command.text}"


def check_flags(name: str, arguments: list[str], *, fenced: bool) -> None:
    """Check that a command parses; for an inline span, which may be cut, check only that its flags exist."""
    command = typer.main.get_command(import_module(f"ringattn.{cli.COMMANDS[name][0]}").app)
    if fenced:
        command.make_context(name, arguments, **cli.HELP)
        return
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in arguments if re.match(r"--?[a-z]", word)} <= known


@pytest.mark.parametrize("command", [*commands()], ids=command_id)
def test_commands_have_the_flags_that_pages_use(
    command: Command, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = own_arguments(command.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # completion is installed there
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "bash"))
    if arguments is None:
        check_others(shlex.split(command.text, comments=True))
    elif (name := " ".join(arguments[: (depth := 1 + (arguments[:1] == ["bench"]))])) in cli.COMMANDS:
        check_flags(name, arguments[depth:], fenced=command.fenced)
    else:  # `ringattn COMMAND --help`, `ringattn --version`
        assert CliRunner().invoke(cli.app, [word for word in arguments if word != "COMMAND"]).exit_code == 0


def check_others(words: list[str]) -> None:
    """Check that the modules, files and environments that another program's command names exist."""
    words = [word for word in words if "=" not in word or word.startswith("-")]  # without leading variables
    assert words[0].rpartition("/")[2] in OTHER_PROGRAMS
    for flag, value in pairwise(words):
        if flag == "-m" and value.startswith("ringattn"):
            assert find_spec(value)
        if flag == "-m" and value == train.__name__:
            train.parse_command_line([word for word in words[words.index(value) + 1 :] if word != "…"])
        if flag == "-m" and value.startswith("tests."):  # tests are not installed
            assert (ROOT / f"{value.replace('.', '/')}.py").exists()
        if flag == "-e" and words[0].endswith("tox"):
            assert re.search(rf"\[testenv:{value}\]", (ROOT / "tox.ini").read_text())
        if value.startswith("tests/"):
            assert (ROOT / value).exists()


STATUS = ROOT / "bench" / "results" / "STATUS.md"


def status_commands() -> list[str]:
    """Return the code spans of STATUS.md that name tests or parts of the suite."""
    return [span for span in re.findall(r"`([^`]+)`", STATUS.read_text()) if "pytest" in span or "--only" in span]


def missing_target(span: str, parts: Collection[str]) -> str:
    """Return the test files, tests and suite parts of a code span that do not exist."""
    words = shlex.split(span)
    files = [ROOT / word for word in words if word.startswith("tests/")]
    missing = [str(path) for path in files if not path.exists()]
    if "--only" in words:
        name = words[words.index("--only") + 1]
        missing += [name] * (not any(name in part for part in parts))
    if "-k" in words and not missing:
        word = words[words.index("-k") + 1]
        missing += [word] * (not re.search(rf"def test_\w*{word}|[\"']{word}", files[0].read_text()))
    return " ".join(missing)


def test_tests_and_parts_named_in_status_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    parts = [part.name for part in gpu_parts()]
    assert len(status_commands()) > 30
    assert {span: missing for span in status_commands() if (missing := missing_target(span, parts))} == {}
    for wrong in (
        "pytest tests/ring/test_none.py",
        "pytest tests/test_docs.py -k nothing_of_that",
        "… --only nonsense",
    ):
        assert missing_target(wrong, parts)
    cases = re.findall(r"device_cases ([\w-]+) FILE", STATUS.read_text())
    assert cases and {*cases} <= CASES["cuda"].keys()


RUNNABLE = ("show", "predict")
"""Commands that run here: they need no GPU, no ranks and no other files."""


def runnable() -> list[Any]:
    parameters = []
    for command in commands():
        arguments = own_arguments(command.text) if command.fenced else None
        if arguments and arguments[0] in RUNNABLE and "kernels.json" not in arguments:
            parameters.append(
                pytest.param(arguments, id=command_id(command), marks=[pytest.mark.nightly] * ("predict" in arguments))
            )
    return parameters


@pytest.mark.parametrize("arguments", runnable())
def test_commands_run(arguments: list[str], alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli.app, arguments, prog_name="ringattn")
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("snippet", [x for x in snippets() if x.language == "console"], ids=lambda x: x.page)
def test_commands_print_what_pages_show(snippet: Any, alone: None) -> None:
    command, _, shown = snippet.text.partition("\n")
    ran = CliRunner().invoke(cli.app, own_arguments(command), prog_name="ringattn")
    assert ran.exit_code == 0 and shown.strip() in ran.output, ran.output


@pytest.mark.parametrize("folder", ["", "ring", "kernels", "comm", "reference"])
def test_api_page_has_every_public_name(folder: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    module = import_module(".".join(["ringattn", *filter(None, [folder])]))
    names = {name for name in module.__all__ if callable(getattr(module, name))}
    assert {name for name in names if f".{name}\n" not in page} == set()
