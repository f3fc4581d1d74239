"""Tests of launchers: ranks, rendezvous, errors of ranks, and commands under mpirun, srun and torchrun."""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import typer
from torch._C._distributed_c10d import HashStore, PrefixStore
from typer.testing import CliRunner

from ringattn.bench import cli
from ringattn.bench.common import flags, launching, process_group
from ringattn.bench.common.launching import launch_processes, run_process_group
from ringattn.bench.common.output import is_printing_rank
from ringattn.bench.common.process_group import PORTS, delay_secondary_errors
from ringattn.bench.common.ranks import JOB, LAUNCHERS, LaunchedRank, launched_rank
from ringattn.bench.common.timing import StepTimer

from ..support.nightly import rest_nightly
from ..support.rank_ends import leave

ROOT = Path(__file__).parents[2]
GROUPS = 5
CPU = torch.device("cpu")


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, None),
    ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, LaunchedRank(3, 8, 1, 2)),
    ({"RANK": "4", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, LaunchedRank(4, 8, 0, 4)),
    ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, LaunchedRank(0, 1, 0, 1)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, LaunchedRank(1, 2, 1, 2)),
    ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, LaunchedRank(5, 8, 1, 4)),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, LaunchedRank(5, 8, 1, 4)),
    ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
     LaunchedRank(5, 8, 1, 4)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script without srun
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
])  # fmt: skip
def test_rank_is_read_from_launcher_variables(
    variables: dict[str, str], expected: LaunchedRank | None, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == expected
    assert is_printing_rank() is (expected is None or expected.rank == 0)


def test_ranks_of_a_machine_share_cores(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "cores", lambda: 16)
    assert flags.rank_threads(8) == 2 and flags.rank_threads(17) == 1
    for name, value in zip(LAUNCHERS[0], ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert flags.rank_threads(8) == 4 and flags.rank_threads(2) == 8  # a ring of the first two ranks


@pytest.mark.parametrize(
    ("ranks", "gpus", "ctas"),
    [(1, 1, None), (2, 0, None), (4, 4, None), (2, 1, ""), (4, 2, ""), (3, 1, "4"), (5, 2, "4")],
)
def test_ranks_that_share_a_gpu_limit_ctas(
    ranks: int, gpus: int, ctas: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)
    bound = {"NCCL_MAX_CTAS": ctas} if ctas else {}
    assert launching.gpu_sharing_environment(ranks, gpus) == (
        {} if ctas is None else {"NCCL_MULTI_RANK_GPU_ENABLE": "1", **bound}
    )
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    assert launching.gpu_sharing_environment(ranks, gpus).get("NCCL_MAX_CTAS") == ("2" if ctas else None)


def test_address_of_rank_0(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    here, place = LaunchedRank(1, 4, 1, 4), LaunchedRank(2, 4, 0, 2)
    assert process_group._address(here) == "127.0.0.1"
    monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, and only 2 of 4 ranks"):
        process_group._address(place)
    for nodes, first in (
        ("gpu1,gpu2", "gpu1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[3,5]", "gpu3"),
        ("rack[1-2]node[3-4]-ib", "rack1node3-ib"),
    ):
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert process_group._address(place) == first
    monkeypatch.setenv("MASTER_ADDR", "head")
    assert process_group._address(place) == "head"


@pytest.mark.parametrize(("names", "address"), [(LAUNCHERS[0], None), (LAUNCHERS[1], "localhost")])
def test_ranks_of_one_machine_use_the_loopback_interface(
    names: tuple[str, ...], address: str | None, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth1")  # so that monkeypatch restores the variable
        if address is None or name.startswith("GLOO"):
            monkeypatch.delenv(name)
    for name, value in zip(names, ("0", "1", "0", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    if address is not None:
        monkeypatch.setenv("MASTER_ADDR", address)
    before, place = listening(), LaunchedRank(0, 1, 0, 1)
    process_group._store.cache_clear()
    prefixes: Any = []
    monkeypatch.setattr(
        process_group, "PrefixStore", lambda prefix, store: prefixes.append(prefix) or PrefixStore(prefix, store)
    )
    for _ in range(2):
        with process_group.process_group(place, CPU):
            used = {name: os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
            opened = Counter(listening()) - Counter(before)
            store: Any = process_group._store(place)
            assert store.timeout == process_group.TIMEOUT
        assert not dist.is_initialized()
    process_group._store.cache_clear()
    assert opened and {*opened} == {"0100007F"}
    assert [*used.values()] == ["lo", "lo" if address is None else "eth1"]  # the user's choice stays
    assert len({*prefixes}) == 2  # a group reads no keys of an earlier one


@pytest.mark.parametrize(
    ("device", "backend", "here"), [("cpu", "gloo", 4), ("cpu", "gloo", 2), ("cuda:1", "cpu:gloo,cuda:nccl", 2)]
)
def test_a_group_on_a_gpu_has_two_backends(
    device: str, backend: str, here: int, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(str(device)))
    monkeypatch.setattr(process_group, "_store", lambda place: HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append((*given, named)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroyed"))
    place = LaunchedRank(3, 4, 1, here)
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun may name the machine
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "eth1")  # so that monkeypatch restores the variable
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="within"), process_group.process_group(place, torch.device(device)):
        # PyTorch chooses the interfaces between two machines.
        assert ({"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= {*os.environ}) == (here == 4)
        raise ValueError("within")
    assert device == "cpu" or calls.pop(0) == device
    (given, named), ended = calls
    assert given == backend and ended == "destroyed"
    assert (named["rank"], named["world_size"], named["timeout"]) == (3, 4, process_group.TIMEOUT)


@pytest.mark.parametrize(("torchrun", "gpus", "local_rank", "device"), [
    (False, 0, 5, "cpu"), (False, 1, 5, "cuda:0"), (True, 4, 3, "cuda:3"), (True, 1, 1, None), (False, 4, 4, None),
])  # fmt: skip
def test_every_rank_has_a_gpu_of_its_own(
    torchrun: bool, gpus: int, local_rank: int, device: str | None, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # srun may show a rank only its own GPU.
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place = LaunchedRank(local_rank + 8, 16, local_rank, 8)
    if device is None:
        with pytest.raises(ValueError, match=f"rank {local_rank + 8} has no GPU: start at most {gpus} ranks"):
            _ = place.device
    else:
        assert str(place.device) == device
    assert str(place.shared_device("cuda" if gpus else "cpu")) == (f"cuda:{local_rank % gpus}" if gpus else "cpu")


def free_port() -> int:
    """Return a free port below the ephemeral range; the search starts at a different port in each process."""
    ports: list[int] = [*PORTS]
    first = os.getpid() % len(ports)
    for port in ports[first:] + ports[:first]:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


def test_every_job_has_its_own_port(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {process_group._port()}
    for name, values in {"PMIX_NAMESPACE": ("1961558017", "1961623553"), "SLURM_STEP_ID": ("0", "1")}.items():
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        for value in values:
            monkeypatch.setenv(name, value)
            ports.add(process_group._port())
    assert len(ports) == 5 and all(1024 < port < 32768 for port in ports)
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert process_group._port() == 29715  # the same in every process


def groups_and_listeners() -> tuple[list[float], list[str], list[str]]:
    """Sum over several successive groups.

    Return the sums, the addresses (hexadecimal) on which the last group listens, and its network interfaces.
    """
    place = launched_rank()
    assert place is not None
    sums: list[float] = []
    while len(sums) < GROUPS:
        with process_group.process_group(place, CPU):
            ones = torch.ones(1)
            dist.all_reduce(ones)
            sums.append(ones.item())
            addresses = listening()
    return sums, addresses, [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]


def listening() -> list[str]:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another thread closed the file
            links.append(os.readlink(path))
    own_sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    return [fields[1].partition(":")[0] for fields in sockets if fields[3] == "0A" and fields[9] in own_sockets]


@pytest.mark.nightly
def test_successive_groups_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # NCCL_SOCKET_IFNAME is set by the user and stays.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    sums, addresses, interfaces = launch_processes(2, groups_and_listeners)
    assert sums == [2.0] * GROUPS and {*addresses} == {"0100007F"}  # 127.0.0.1
    assert interfaces == ["lo", "eth1"]


def rank_one_raises(place: LaunchedRank, device: torch.device) -> None:
    """Raise on rank 1.

    An error of another rank could have caused this kind of error, so rank 1 reports late; rank 0 reports later.
    """
    if place.rank == 1:
        raise RuntimeError("rank 1 has had enough")
    dist.barrier()


@pytest.mark.nightly
def test_the_failing_ranks_error_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        run_process_group(2, rank_one_raises)
    printed = capfd.readouterr().err
    # in the message and in the traceback
    assert ended.value.exit_code == 1 and printed.count("rank 1 has had enough") == 2
    assert printed.count("Traceback") == 1


ENDS = [("killed", "killed by SIGKILL"), ("exits", "exit code 7")]


@pytest.mark.parametrize(("how", "message"), rest_nightly(ENDS, ENDS[0]))
def test_a_rank_that_exits_ends_the_others(how: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=f"rank 1: {message}"):
        launch_processes(2, leave, how, str(tmp_path))
    assert not any(Path("/proc", (tmp_path / rank).read_text()).exists() for rank in "01")


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "from ringattn.bench.common.launching import launch_processes; from tests.support.rank_ends import leave; "
        f"launch_processes(2, leave, '', {str(tmp_path)!r})"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while starter.poll() is None and not all((tmp_path / rank).exists() for rank in "01"):
        time.sleep(0.01)
    time.sleep(0.1)  # until the pids are written
    starter.kill()
    starter.wait()
    pids = [(tmp_path / rank).read_text() for rank in "01"]
    while any(Path("/proc", pid, "exe").exists() for pid in pids):  # the test's timeout ends the loop
        time.sleep(0.01)


def test_errors_without_a_peer_are_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    for error in (NotImplementedError("no"), torch.OutOfMemoryError("full"), typer.Exit(1), ValueError("wrong")):
        with pytest.raises(type(error)), delay_secondary_errors():
            raise error
    delays: list[float] = []
    monkeypatch.setattr(time, "sleep", delays.append)
    with pytest.raises(RuntimeError, match="connection closed"), delay_secondary_errors():
        raise RuntimeError("connection closed")
    assert delays == [process_group.CONSEQUENCE_DELAY]


def two_ranks(launcher: str) -> list[str]:
    """Return the launcher's words that run a command on two ranks, or skip the test."""
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    if shutil.which(launcher) is None:
        pytest.skip(f"there is no {launcher} on the PATH")
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=60).stdout
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
    return [launcher, *flags, "-n", "2"]


def launched(launcher: str, *arguments: str) -> str:
    """Return the output of ``python -m ringattn ARGUMENTS`` on two ranks."""
    names = {name for names in (*LAUNCHERS, JOB) for name in names} - {
        "SLURM_JOB_ID"
    }  # keep the job id of an allocation
    env = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("MASTER_")}
    command = [*two_ranks(launcher), sys.executable, "-m", "ringattn", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LAUNCHED = {
    "bench ring --seqlen 512 --heads 1 --repeats 1 --by ringattn": "best: ringattn zigzag",
    "bench links -b 1k -e 1k -n 1 -w 0": "best between processes: process_group",
    "bench overlap --tokens 128 --heads 2 --repeats 1": "together ms",
    "bench kernels --seqlen 128 --heads 1 --head-dim 32 --seconds 0.01": "matrix product in the same runs",
    "bench host --tokens 1k": "Triton's part us",
    "bench timeline --seqlen 512 --heads 1 --repeats 1": "clocks of the ranks",
    "bench suite --only ceilings --budget 300 --out {folder}/suite": "ceilings  done",
    "demo --seqlen 64 --steps 1 --layers 1": "AGREE",
    "doctor --seqlen 256 --bytes 1k": "no problems found",
    "tune --ring --heads 1 --head-dim 16 --seqlen 128,256 --budget 60 --save-dir {folder}": "256 tokens: best",
    "tune --heads 1 --head-dim 64 --seqlen 1k --tiles 1 --kernels dq --compile-only --save-dir {folder}": "written",
    "show --seqlen 16 --world 2 --causal": "dK/dV: N holds dK/dV of shard N",
    "bench memory --tokens 2k --heads 4": "variation with the number of ranks",
}
"""Text that each command prints exactly once."""


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
@pytest.mark.parametrize("command", LAUNCHED)
def test_every_command_under_every_launcher(command: str, launcher: str, tmp_path: Path) -> None:
    out = launched(launcher, *command.format(folder=tmp_path).split())
    assert out.count(LAUNCHED[command]) == 1, out


TOGETHER = (
    "bench ring",
    "bench links",
    "bench overlap",
    "bench timeline",
    "bench memory",
    "demo",
    "doctor",
    "tune --ring",
)
ALONE = [
    "predict --seqlen 8k --world 4 --heads 4",
    "predict --sweep tokens=1k..2k,gpus=2..4 --heads 4",
    "inspect 90:fp16:64:delta",
    "export --arch 90 --head-dim 16 --out-dir {folder}/export",
    "report {folder}/..",
]
RESULT_FILES = ("--json", "one.json", "--csv", "one.csv")
FILES = {
    **dict.fromkeys(("bench", "tune", "doctor", "inspect"), RESULT_FILES),
    "show": (*RESULT_FILES, "--out", "one.svg"),
    "demo": (*RESULT_FILES, "--plot", "one.svg"),
    "bench timeline": (*RESULT_FILES, "--trace", "trace.json", "--out", "one.svg"),
    "predict": (*RESULT_FILES, "--trace", "trace.json"),
    "predict --sweep": (*RESULT_FILES, "--picture", "one.svg"),
    "export": ("--json", "one.json"),
    "report": ("--out", "page.html"),
    "bench suite": (),
}
"""Flags that name files, by the start of a command; the longest start counts."""


def files_of(command: str) -> tuple[str, ...]:
    return FILES[max((start for start in FILES if command.startswith(start)), key=len)]


def run_on_rank(commands: list[str], folder: str) -> list[tuple[str, int, str, list[str]]]:
    """Run commands on this rank; return exit code, output and new files of each."""
    results = []
    for number, command in enumerate(commands):
        if os.environ["RANK"] == "0" and not command.startswith(TOGETHER):
            continue
        own = Path(folder, os.environ["RANK"], str(number))
        own.mkdir(parents=True)
        words = command.format(folder=own).split()
        words += [name if name.startswith("-") else f"{own / name}" for name in files_of(command)]
        is_together = command.startswith(TOGETHER)
        timed_alone = patch.object(StepTimer, "__call__", side_effect=AssertionError("every rank measures"))
        with nullcontext() if is_together else timed_alone:
            done = CliRunner().invoke(cli.app, words)
        made = [str(path.relative_to(own)) for path in sorted(own.rglob("*"))]
        results.append((command, done.exit_code, done.output, made))
    Path(folder, os.environ["RANK"], "results").write_bytes(pickle.dumps(results))
    return results


@pytest.mark.nightly
def test_only_rank_0_prints_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # inspect and export compile
    commands = [*LAUNCHED, *ALONE]
    first = launch_processes(2, run_on_rank, commands, str(tmp_path))
    assert len(first) == len(TOGETHER)
    for command, code, output, files in first:
        assert code == 0 and output.count(LAUNCHED[command]) == 1, (command, output)
        assert {*files_of(command)[1::2]} <= {*files}, (command, files)
    assert pickle.loads((tmp_path / "1" / "results").read_bytes()) == [(command, 0, "", []) for command in commands]


@pytest.mark.parametrize("bench", ["ring", "overlap", "links", "timeline"])
def test_world_must_match_the_launcher(bench: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHERS[0], ("0", "3", "0", "3"), strict=True):
        monkeypatch.setenv(name, value)
    ran: list[int] = []

    def in_group(*_: object) -> Any:
        ran.append(launched_rank().world)  # type: ignore[union-attr]
        raise typer.Exit(3)

    monkeypatch.setattr(launching, "_in_group", in_group)
    flags = ["bench", bench, "--device", "cpu"]
    assert CliRunner().invoke(cli.app, flags).exit_code == 3 and ran == [3]
    done = CliRunner().invoke(cli.app, [*flags, "--world", "2"])
    assert done.exit_code == 2 and ran == [3], done.output
    assert "--world is 2: the launcher started 3 ranks; leave it out" in done.output


def test_a_rank_returns_its_result_and_an_error_ends_the_command(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails: Any = Mock(side_effect=ChildProcessError("rank 1: exit code 7"))
    monkeypatch.setattr(launching, "launch_processes", fails)
    with pytest.raises(typer.Exit) as ended:
        run_process_group(2, leave, "how")
    assert ended.value.exit_code == 1 and capsys.readouterr() == ("", "a rank failed: rank 1: exit code 7\n")
    fails.assert_called_once_with(2, launching._in_group, "cpu", leave, ("how",))
    for name, value in zip(LAUNCHERS[0], ("3", "8", "1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "process_group", lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result: Any = run_process_group(8, lambda *given: given, "how", device="cuda")
    assert result == (LaunchedRank(3, 8, 1, 2), torch.device("cuda", 1), "how")


@pytest.mark.parametrize(("codes", "message"), [
    ([0, 0], ""), ([0, 1], "rank 1: its traceback"), ([7, None], "rank 0: exit code 7"),
    ([None, -11], "rank 1: killed by SIGSEGV"),
])  # fmt: skip
def test_the_first_failing_rank_is_named(
    codes: list[int | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    monkeypatch.setattr(launching, "start_processes", lambda *given: nullcontext((tmp_path, ranks)))
    (tmp_path / "result").write_bytes(pickle.dumps("of rank 0"))
    if codes[1] == 1:
        (tmp_path / "1.error").write_text("its traceback")
    with pytest.raises(ChildProcessError, match=message) if message else nullcontext():
        assert launch_processes(2, leave) == "of rank 0"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_leaves_its_result_or_its_traceback(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(prctl=print))
    monkeypatch.setattr(sys, "argv", sys.argv)  # to be restored
    monkeypatch.setenv("RANK", str(rank))
    for entry, arguments in ((divmod, (7, 2)), (divmod, (7, 0))):
        (tmp_path / "call").write_bytes(pickle.dumps((["ringattn", "bench"], entry, arguments)))
        with pytest.raises(SystemExit) if arguments[1] == 0 else nullcontext():
            launching.run_rank(str(tmp_path), os.getppid())
    assert sys.argv == ["ringattn", "bench"] and "ZeroDivisionError" in (tmp_path / f"{rank}.error").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"call", f"{rank}.error", *(["result"] if rank == 0 else [])}
    assert rank or pickle.loads((tmp_path / "result").read_bytes()) == (3, 1)


def test_a_rank_whose_starter_has_died_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # It may die before this process asks to be killed with it.
    options: list[tuple[int, ...]] = []
    library = SimpleNamespace(prctl=lambda *option: options.append(option))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with pytest.raises(SystemExit) as ended:
        launching.run_rank(str(tmp_path), os.getppid() + 1)
    assert ended.value.code == 1 and options == [(1, signal.SIGKILL)] and not [*tmp_path.iterdir()]


def test_ranks_get_their_environment_and_a_session_of_their_own(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a session of its own, a rank is not interrupted by Ctrl-C before this process can end it.
    started: list[Any] = []

    def popen(command: list[str], *, env: dict[str, str], start_new_session: bool) -> Any:
        started.append((command, env, start_new_session))
        return SimpleNamespace(poll=lambda: None, kill=lambda: ended.append("kill"), wait=lambda: ended.append("wait"))

    ended: list[str] = []
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(launching, "gpu_sharing_environment", lambda ranks, gpus: {"SHARED": str(ranks)})
    with launching.start_processes(2, leave, "how") as (folder, _):
        call = pickle.loads((folder / "call").read_bytes())
    assert call == (sys.argv, leave, ("how",)) and not folder.exists() and ended == ["kill", "wait"] * 2
    for rank, (_, env, own_session) in enumerate(started):
        assert own_session and env["SHARED"] == "2" and env["PYTHONPATH"].split(os.pathsep) == sys.path
        assert [env[name] for name in LAUNCHERS[0]] == [str(rank), "2", str(rank), "2"]
        assert (env["MASTER_ADDR"], env["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "True")
    assert len({env["MASTER_PORT"] for _, env, _ in started}) == 1


def test_a_rank_that_starts_after_its_command_has_ended_is_silent(tmp_path: Path) -> None:
    # Ctrl-C can come while a process is being started; its folder is then gone before it reads its call.
    code = f"from ringattn.bench.common.launching import run_rank; run_rank({str(tmp_path / 'gone')!r}, {os.getpid()})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"RANK": "1"}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
