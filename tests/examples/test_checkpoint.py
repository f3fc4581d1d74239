"""Checkpoints: refusal of planted, damaged and foreign ones, and the one from which a run continues."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from ringattn.bench.demo.compare import prepare_whole
from ringattn.examples import checkpoint, train
from ringattn.examples.checkpoint import MAX_JOB_BYTES, METADATA, find_latest, load_state, read_job, save_state
from ringattn.examples.train import MUTABLE_SETTINGS, Job, JobError, Run, read_text, train_on_mesh, train_virtual_ranks

from ..support.rank_processes import CallOutcome, call_outcome, group_results

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CPU = torch.device("cpu")
TINY = Job(seqlen=31, steps=2, layers=1, heads=2, kv_heads=1, head_dim=8, block=0, lr=1e-3, batch=2, every=1)
LR = "optimizer.param_groups.0.lr"

Damage = Callable[[Path], object]


class Command:
    """An object that runs a command when it is unpickled. The command creates the file ``mark``."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.check_call, (["touch", str(self.mark)],)


def written(folder: Path, **changed: Any) -> Job:
    """Return a job that has written checkpoints of steps 1 and 2 to ``folder``."""
    job = replace(TINY, checkpoint=str(folder), **changed)
    train_virtual_ranks(job, read_text(), 1)
    return job


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return written(tmp_path_factory.mktemp("runs"))


def resumed(job: Job) -> Run:
    """Return the run with which training starts, in one process."""
    return prepare_whole(job, read_text(), CPU)[0].run


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Ways to damage the checkpoint in a folder. The file ``mark`` must not appear.


def mark(path: Path) -> Path:
    return path.parents[1] / "mark"


def plant(path: Path) -> None:
    (path / METADATA).write_bytes(pickle.dumps(Command(mark(path))))


def torchs_metadata(path: Path) -> Any:
    """Return the metadata as torch's own objects, so that a test can change and write them."""
    return pickle.loads((path / METADATA).read_bytes())


def plant_within(path: Path) -> None:
    """Put a command into otherwise valid metadata."""
    metadata = torchs_metadata(path)
    metadata.planner_data = Command(mark(path))
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def plant_for_a_rank(path: Path) -> None:
    """Put a command into the per-rank files that torch reads if the main one is unreadable."""
    (path / METADATA).write_bytes(b"")
    for rank in range(2):
        (path / f"__{rank}{METADATA}").write_bytes(pickle.dumps(Command(mark(path))))


def plant_entry(path: Path, name: str = LR) -> None:
    """Put a command in place of a number or a tensor, because torch unpickles such entries."""
    metadata, planted = torchs_metadata(path), io.BytesIO()
    torch.save(Command(mark(path)), planted)
    number = next(index for index in metadata.storage_data if index.fqn == LR)
    data = path / metadata.storage_data[number].relative_path
    entry = replace(metadata.storage_data[number], offset=data.stat().st_size, length=len(planted.getvalue()))
    data.write_bytes(data.read_bytes() + planted.getvalue())
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata[LR]
    metadata.storage_data[replace(number, fqn=name)] = entry
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def name_a_class(path: Path) -> None:
    (path / METADATA).write_bytes(pickle.dumps([io.StringIO]))


def change(target: bytes, path: Path) -> None:
    """Put opcodes before valid metadata that set an attribute of a shared object."""
    attribute = b"N}X\4\0\0\0markK\1s\x86b0"
    (path / METADATA).write_bytes(b"\x80\2" + target + attribute + pickle.dumps(torchs_metadata(path), 2)[2:])


def name_a_file_outside(path: Path) -> None:
    metadata = torchs_metadata(path)
    next(iter(metadata.storage_data.values())).relative_path = f"../{path.name}/__0_0.distcp"
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def truncate(name: str, path: Path) -> None:
    file = path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def pipe(name: str, path: Path) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


DAMAGES: dict[str, Damage] = {
    "command": plant,
    "command within": plant_within,
    "command for a rank": plant_for_a_rank,
    "command as a number": plant_entry,
    "command as a tensor": partial(plant_entry, name="model.embed.weight"),
    "class": name_a_class,
    "changed class": partial(change, b"cpathlib\nPosixPath\n"),
    "changed enum": partial(change, b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R"),
    "file outside": name_a_file_outside,
    "no metadata but a list": lambda path: (path / METADATA).write_bytes(pickle.dumps([])),
    "truncated metadata": partial(truncate, METADATA),
    "truncated job": partial(truncate, "job.json"),
    "long job": lambda path: (path / "job.json").write_text(json.dumps({"layout": "z" * MAX_JOB_BYTES})),
    "an unknown setting": lambda path: (path / "job.json").write_text(json.dumps(read_job(path) | {"experts": 8})),
    "no object": lambda path: (path / "job.json").write_text("[]"),
    "job in a pipe": partial(pipe, "job.json"),
    "metadata in a pipe": partial(pipe, METADATA),
    "deep job": lambda path: (path / "job.json").write_text("[" * 30_000),
    "no job": lambda path: (path / "job.json").unlink(),
    "truncated tensors": partial(truncate, "__0_0.distcp"),
    "no tensors": lambda path: (path / "__0_0.distcp").unlink(),
}


REASONS = {
    **dict.fromkeys(("command", "command within", "command as a number", "command as a tensor"), "check_call"),
    "class": "_io.StringIO", "changed class": "it changes <class", "changed enum": "it changes <_MEM_FORMAT",
    "file outside": "not a file in this folder", "no tensors": "not a file in this folder",
}  # fmt: skip
"""Reasons in the error. Damages that are not listed are found by the first step that reads them."""


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused(name: str, finished: Job, tmp_path: Path) -> None:
    shutil.copytree(str(finished.checkpoint), tmp_path / "runs")
    DAMAGES[name](tmp_path / "runs" / "00000002")
    before = contents(tmp_path)
    with pytest.raises(JobError, match=f"--checkpoint {tmp_path / 'runs'}") as refused:
        resumed(replace(finished, steps=3, checkpoint=str(tmp_path / "runs")))
    assert REASONS.get(name, "") in str(refused.value)
    if name in REASONS and " as a " not in name:  # found in the metadata, which each loader checks again
        with pytest.raises(ValueError, match=f"--checkpoint {tmp_path / 'runs'}"):
            load_state(tmp_path / "runs" / "00000002", {})
    assert contents(tmp_path) == before  # no mark, and the older checkpoint is untouched


def go_on(rank: int, job: Job, places: list[list[Path]]) -> tuple[list[CallOutcome], list[dict[int, float]]]:
    """Continue training where ranks 0 and 1 each see their own folder ``runs``, as on machines that share none.

    Also return the losses of training from the start, with one ring of both ranks and with a ring for each.
    """
    ends = []
    for place in places[rank]:
        os.chdir(place)
        ends.append(call_outcome(lambda: train_on_mesh(job, read_text(), CPU)))
    fresh = (replace(job, checkpoint=None, steps=2, data=data) for data in (1, 2))
    return ends, [train_on_mesh(each, read_text(), CPU).losses for each in fresh]


def test_two_ranks_refuse_alike_and_continue_from_the_last(finished: Job, tmp_path: Path) -> None:
    """Damage folders, or give the ranks different ones. Both ranks get an error, and neither hangs."""
    good, job = tmp_path / "good", replace(finished, steps=3, checkpoint="runs")
    shutil.copytree(str(finished.checkpoint), good / "runs")
    others: dict[str, dict[str, Any]] = {"none": {}, "older": {"steps": 1}, "other": {"lr": 1.0}, "same steps": {}}
    for name, changed in others.items():
        (tmp_path / name).mkdir()
        if name != "none":
            written(tmp_path / name / "runs", **changed)
    places = [[good, tmp_path / name] for name in others]
    for name in ("command", "command for a rank", "command as a number", "truncated metadata", "truncated tensors"):
        shutil.copytree(good, tmp_path / name)
        DAMAGES[name](tmp_path / name / "runs" / "00000002")
        places.append([good if name == "truncated tensors" else tmp_path / name, tmp_path / name])
    places.append([good, good])
    before = contents(tmp_path)
    results = group_results(2, partial(go_on, job=job, places=[[*column] for column in zip(*places, strict=True)]))
    ends, losses = zip(*results, strict=True)
    whole = train_virtual_ranks(replace(job, checkpoint=None, steps=2), read_text(), 1).losses
    assert all(run == pytest.approx(whole, rel=1e-6) for runs in losses for run in runs)
    *refused, last = zip(*ends, strict=True)
    for pair, both in zip(places[:-1], refused, strict=True):
        assert [kind for kind, *_ in both] == ["JobError"] * 2, (pair, both)
        assert all("--checkpoint runs" in text for _, text, _ in both), (pair, both)
    assert "failed on rank 1" in refused[-1][0][1]  # only rank 1 has truncated tensors
    assert [text for _, text, _ in last] == ["", ""]
    after = contents(tmp_path)  # no mark, and no checkpoint was lost or rewritten
    assert before.items() <= after.items() and {path.parent for path in {*after} - {*before}} == {
        good / "runs" / "00000003"
    }


def test_a_refused_checkpoint_ends_the_command(finished: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(str(finished.checkpoint), tmp_path / "runs")
    DAMAGES["truncated tensors"](tmp_path / "runs" / "00000002")
    flags = [f"--{name.replace('_', '-')}={getattr(finished, name)}" for name in OTHERS]
    flags += ["--world=1", "--steps=3", f"--checkpoint={tmp_path / 'runs'}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    with pytest.raises(SystemExit, match=f"--checkpoint {tmp_path / 'runs'}"):
        train.main()


OTHERS: dict[str, Any] = {
    "seqlen": 32, "layers": 2, "heads": 1, "kv_heads": 2, "head_dim": 4, "layout": "contiguous", "dtype": "bfloat16",
    "lr": 2e-3, "seed": 1, "batch": 4,
}  # fmt: skip


def test_every_field_of_a_job_is_changeable_or_tested_as_fixed() -> None:
    assert {field.name for field in fields(Job)} == MUTABLE_SETTINGS | {*OTHERS}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_job_is_refused(name: str, finished: Job) -> None:
    other = replace(finished, **{name: OTHERS[name]})
    with pytest.raises(JobError, match=f"another job: {name} {getattr(finished, name)!r}, here {OTHERS[name]!r}"):
        resumed(other)


def test_changes_of_changeable_fields_are_accepted(finished: Job) -> None:
    changes: list[dict[str, Any]] = [{"steps": 9}, {"data": 2}, {"block": 7}, {"every": 5}]
    for changed in changes:
        other = replace(finished, **changed)
        assert len(resumed(other).losses) == finished.steps


def test_the_last_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "none") is find_latest(tmp_path) is None
    for name in ("00000002", "00000010", "99999999", "100000000", "200", "old", "00000300", "200000000.old"):
        (tmp_path / name).mkdir()
        if name != "00000300":  # 300 is not finished
            (tmp_path / name / METADATA).touch()
    assert find_latest(tmp_path) == tmp_path / "100000000"


@pytest.mark.parametrize(("text", "line"), [("a\nreason \n\nCheck the documentation", "reason"), ("", "ValueError")])
def test_the_last_line_of_torch_s_errors_is_shown(text: str, line: str) -> None:
    assert checkpoint._last_line(ValueError(text)) == line


def test_settings_of_the_longest_allowed_length_are_read(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"layout": ""}).replace('""', f'"{"z" * (MAX_JOB_BYTES - 14)}"'))
    assert (tmp_path / "job.json").stat().st_size == MAX_JOB_BYTES
    assert read_job(tmp_path).keys() == {"layout"}


@pytest.mark.parametrize("name", ["pathlib PosixPath", "pathlib WindowsPath", "pathlib._local PosixPath"])
def test_paths_of_any_system_and_python_version_are_allowed(name: str) -> None:
    pickled = b"c" + name.replace(" ", "\n").encode() + b"\n."
    assert checkpoint._Unpickler(io.BytesIO(pickled)).load() is PurePath


def test_a_checkpoint_is_complete_only_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the writer before the settings are in place."""
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("full")))
    with pytest.raises(CheckpointException, match="full"):
        save_state(tmp_path / "00000001", {"step": torch.tensor(1)}, {}, no_dist=True)
    assert find_latest(tmp_path) is None


def test_entries_other_than_tensors_are_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {"betas": (0.9, 0.95), "name": "Adam", "step": torch.tensor(3.0), "groups": [{"lr": 0.1}]}
    save_state(tmp_path / "a", state, {}, no_dist=True)
    restored: dict[str, Any] = {"betas": (0.0, 0.0), "name": "", "step": torch.zeros(()), "groups": [{"lr": 0.0}]}
    load_state(tmp_path / "a", restored)
    assert restored == state
