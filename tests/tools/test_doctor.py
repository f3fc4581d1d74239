"""Tests of ``ringattn doctor``: healthy machines pass, and every fault is reported with what to do."""

from __future__ import annotations

import csv
import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from typer.testing import CliRunner, Result

from ringattn.bench import cli
from ringattn.bench.common.launching import launch_processes
from ringattn.bench.common.ranks import launched_rank
from ringattn.bench.common.result import read_result
from ringattn.bench.links.measure import RankTransfers
from ringattn.comm import LocalTransport, LocalWorld, TransportError, open_transports
from ringattn.comm.topology import nvml
from ringattn.comm.topology.nvml import DeviceInfo, Nic
from ringattn.comm.topology.topology import Topology, ring_topology
from ringattn.comm.transports import nccl
from ringattn.comm.transports.nccl import loaded_libraries
from ringattn.ring import ring_attention
from ringattn.ring.adopted import KernelVerdict
from ringattn.tools.doctor import findings, machine
from ringattn.tools.doctor import ring as doctor_ring
from ringattn.tools.doctor.adoption import UNITS as ADOPTION_UNITS
from ringattn.tools.doctor.adoption import describe_record, table_row
from ringattn.tools.doctor.findings import FAIL, OK, SKIPPED, Finding

from ..support.clusters import cpus, hgx

pytestmark = pytest.mark.usefixtures("alone")
HEALTHY = {
    "versions": {"torch": "2.13", "triton": "3.7", "driver": "580", "Python": "3.11"},
    "libraries": [["/x/libnccl.so.2", "2.29.7"]],
    "no_nccl": "",
    "settings": {},
    "assembler": [90, [12, 8, 93]],
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "doctor.json"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["doctor", "--seqlen", "128", "--bytes", "4k", *arguments])


def checks(target: Path) -> dict[str, str]:
    """Return the status and text of every check in the JSON."""
    return {row["check"]: f"{row['status']} {row['found']}" for row in read_result(target).rows}


def failing(target: Path, *arguments: str) -> dict[str, str]:
    """Return the checks of a run that fails."""
    assert run("--json", str(target), *arguments).exit_code == 1
    return checks(target)


def test_a_healthy_machine_passes(target: Path) -> None:
    table = target.with_suffix(".csv")
    result = run("--json", str(target), "--csv", str(table))
    assert result.exit_code == 0, result.output
    rows, (*lines, _, last) = checks(target), result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines) and last.startswith("no problems found: ")
    assert "ok       transport local: patterned bytes over 12 edges" in lines
    assert [*rows][:11] == [
        "versions", "assembler", "libnccl", "CuPy", "C compiler", "GPUs", "NVLink, PCIe", "NICs", "NCCL_* settings",
        "ring order", "adopted kernels",
    ]  # fmt: skip
    assert "None" not in rows["versions"] and " for sm_90" in rows["assembler"]
    assert rows["libnccl"] == "skipped none is loaded: nothing on a CPU loads it"
    assert rows["C compiler"].startswith("skipped needed only") and rows["GPUs"].startswith("skipped the ranks use the")
    assert rows["transport auto"] == "ok auto selected local"
    assert rows["ring order"].startswith("ok flat ring of 4 ranks")
    assert rows["ring of 128 tokens"].startswith("ok causal, zigzag, float32, transport local: out ")
    assert all(edge in rows["GB/s local"] for edge in ("0->1", "1->2", "2->3", "3->0"))
    assert rows["transport process_group"].startswith('skipped not possible here: transport is "process_group", which')
    with table.open() as file:
        assert [row["check"] for row in csv.DictReader(file)] == [*rows]
    assert read_back(target) == 4


def read_back(path: Path) -> int:
    """Return the number of ranks in a result without failures."""
    result = read_result(path)
    assert result.case == "doctor" and result.failed == [] and result.notes[-1].startswith("no problems found: ")
    assert result.provenance["device"] == "cpu"
    return sum(map(len, result.provenance["ring"]["nodes"]))


def in_a_launcher(*arguments: str) -> tuple[int, str]:
    """Run the command on one of a launcher's ranks and return its exit code and output."""
    result = run(*arguments)
    if launched_rank().rank != 0:  # type: ignore[union-attr]
        assert result.stdout == ""
    return result.exit_code, result.stdout


@pytest.mark.nightly
def test_doctor_on_two_processes(target: Path) -> None:
    code, output = launch_processes(2, in_a_launcher, "--json", str(target))
    assert code == 0, output
    rows = checks(target)
    assert rows["transport process_group"] == "ok patterned bytes over 2 edges"
    assert "0->1" in rows["GB/s process_group"]
    assert rows["transport local"].startswith("skipped not possible here")
    assert "transport process_group: out" in rows["ring of 128 tokens"]
    assert read_back(target) == 2


def test_doctor_on_two_nodes(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    ring = ring_topology([*cpus("a", 2), *cpus("b", 2)])
    monkeypatch.setattr(doctor_ring, "discover_topology", lambda control, device: ring)
    assert run("--json", str(target), "--dtype", "bf16").exit_code == 0
    rows = checks(target)
    text = rows["ring of 128 tokens"]
    assert "zigzag, bfloat16, " in text and float(text.partition("out ")[2].split()[0]) > 1e-4, "rounded to 16 bit"
    assert rows["ring order"].startswith("ok two-level ring of 4 ranks, 2 nodes of 2")
    assert all(edge in rows["GB/s local"] for edge in ("0->1", "2->3", "0->2", "1->3"))


def test_doctor_on_one_rank(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    target.write_text(run("--world", "1", "--json", "-").stdout)
    assert read_back(target) == 1
    rows = checks(target)
    assert rows["transport local"] == "ok patterned bytes over 1 edge" and "GB/s local" not in rows
    assert rows["NCCL_* settings"] == "ok NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 (NVLink and PCIe peers are not used)"


@pytest.mark.parametrize(("flags", "message"), [
    ("--seqlen 2", "--seqlen is 2: it must be between 4, one token per rank, and 4096"),
    ("--seqlen 8k", "--seqlen is 8192: it must be between 4"),
    ("--json /nowhere/at/all.json", "there is no folder /nowhere/at"),
])  # fmt: skip
def test_refusals(flags: str, message: str) -> None:
    result = run(*flags.split())
    assert result.exit_code == 2 and message in result.output and len(result.output.splitlines()) == 1


def corrupting(source: int, destination: int, *, least: int = 0) -> Callable[[LocalTransport, Any], None]:
    """Return a `LocalTransport._receive` that flips a bit of every large enough message on one edge."""
    original = LocalTransport._receive

    def receive(self: LocalTransport, message: Any) -> None:
        original(self, message)
        if (message.peer, self.rank) == (source, destination) and message.tensor.nbytes >= least:
            message.tensor.view(-1).view(torch.uint8)[7] ^= 0x40

    return receive


@pytest.mark.parametrize("edge", [(2, 3), (3, 1)])  # an edge of the ring, and one that only returning dK/dV use
def test_a_corrupting_edge_is_named(edge: tuple[int, int], monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(LocalTransport, "_receive", corrupting(*edge))
    rows = failing(target)
    assert f"rank {edge[1]} got 1 wrong bytes of 4096 from rank {edge[0]}" in rows["transport local"]
    assert "GB/s local" not in rows
    *_, first, todo = read_result(target).notes
    assert first.startswith("first failure: transport local: ")
    assert todo.startswith("what to do: check the link between the ranks")
    assert read_result(target).failed[0].startswith("transport local: ")


def test_an_edge_that_corrupts_only_large_messages_is_named(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr(LocalTransport, "_receive", corrupting(1, 2, least=1 << 16))
    rows = failing(target, "--bytes", "64k")
    assert rows["transport local"].startswith("ok") and rows["ring of 128 tokens"].startswith("ok")
    assert rows["GB/s local"] == "FAIL rank 2: 1->2: 1 wrong bytes of 65536"


@pytest.mark.parametrize(("share", "status"), [(0.2, "FAIL 0->1 76 of 380 expected"), (0.3, "ok 0->1 114")])
def test_the_slower_end_of_an_edge_counts(
    share: float, status: str, monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    # An edge fails below a quarter of its link's nominal rate.
    ring, clock = ring_topology([replace(place, unknown=None) for place in hgx("a")[:2]]), threading.local()

    def run_ends(ends: Any, count: int) -> None:
        speed = 380e9 * (share if ends._transport.rank else 1.0)
        clock.now = getattr(clock, "now", 0.0) + count * 4096 / speed

    monkeypatch.setattr(doctor_ring, "discover_topology", lambda control, device: ring)
    monkeypatch.setattr(doctor_ring, "time", SimpleNamespace(perf_counter=lambda: getattr(clock, "now", 0.0)))
    monkeypatch.setattr(RankTransfers, "run", run_ends)
    assert run("--json", str(target), "--world", "2").exit_code == (share < 0.25)
    assert checks(target)["GB/s local"].startswith(status)


@pytest.mark.parametrize("lacking", [False, True])
def test_a_transport_that_does_not_open_fails(lacking: bool, monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    # A rank that lacks the transport's requirements (`lacking`) is no failure by itself.

    def opens(group: Any, *, transport: str, **rest: Any) -> Any:
        opened = open_transports(group, transport=transport, **rest)
        if transport == "local" and group.rank() == 1:
            raise TransportError("no memory")
        if lacking and transport == "local" and group.rank() == 0:
            raise ValueError("no GPU")
        return opened

    monkeypatch.setattr(doctor_ring, "open_transports", opens)
    assert failing(target)["transport local"] == "FAIL rank 1: TransportError: no memory"


def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    def wrong(*arguments: Any, **rest: Any) -> Any:
        out, lse = ring_attention(*arguments, **rest)
        return out * (1.001 if rest["ring"].rank == 3 else 1), lse

    monkeypatch.setattr(doctor_ring, "ring_attention", wrong)
    assert failing(target)["ring of 128 tokens"].startswith("FAIL wrong in out, dq, dk, dv; causal")


MAPS = """\
7f0-7f1 r-xp 00000000 08:01 11 /venv/nvidia/nccl/lib/libnccl.so.2
7f1-7f2 r--p 00001000 08:01 11 /venv/nvidia/nccl/lib/libnccl.so.2
7f2-7f3 r-xp 00000000 08:01 11 /other/name/of/the/same/libnccl.so.2.29.7
7f3-7f4 r-xp 00000000 08:01 12 /opt/hpcx/lib/libnccl-net.so
7f4-7f5 r-xp 00000000 08:01 13 /opt/hpcx/lib/libnccl_sharp.so
7f5-7f6 rw-p 00000000 00:00 0
7f6-7f7 rw-p 00000000 00:00 0 [heap]
"""


def test_two_libraries_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path) -> None:
    # A library mapped under two names counts once.
    assert [*map(str, loaded_libraries(MAPS))] == ["/venv/nvidia/nccl/lib/libnccl.so.2"]
    maps = tmp_path / "maps"
    maps.write_text(MAPS + "7f8-7f9 r-xp 00000000 08:01 14 /usr/lib/my folder/libnccl.so.2.27.3 (deleted)\n")
    monkeypatch.setattr(nccl, "MAPS_FILE", maps)
    row = failing(target, "--world", "2")["libnccl"]
    assert row.startswith("FAIL rank 0 has 2 loaded: /venv/nvidia/nccl/lib/libnccl.so.2 (unknown version")
    assert "/usr/lib/my folder/libnccl.so.2.27.3 (deleted)" in row
    assert read_result(target).notes[-1].startswith("what to do: keep one")


TORCH_14 = {**HEALTHY, "versions": {**HEALTHY["versions"], "torch": "2.14", "driver": "570"}}  # type: ignore[dict-item]
TRITON_38 = {**HEALTHY, "versions": {**HEALTHY["versions"], "triton": "3.8"}}  # type: ignore[dict-item]
OLD_DRIVER = {**HEALTHY, "versions": {**HEALTHY["versions"], "driver": "570", "Python": "3.12"}}  # type: ignore[dict-item]
OTHER_NCCL = {**HEALTHY, "libraries": [["/y/libnccl.so.2", "2.27.3"]]}
TWO_NCCL = {**HEALTHY, "libraries": [*HEALTHY["libraries"], *OTHER_NCCL["libraries"]]}  # type: ignore[misc]
NO_NCCL = {**HEALTHY, "libraries": []}
UNKNOWN = "NVML does not know GPU-7, which torch calls cuda:0 (NVMLError)"


def unknown_gpu(unknown: str) -> list[DeviceInfo]:
    return [*hgx("a")[:1], DeviceInfo("a", "GPU-7", unknown=unknown)]


@pytest.mark.parametrize(("finding", "status", "text"), [
    (machine.check_versions([HEALTHY, HEALTHY]), OK, "torch 2.13, triton 3.7, driver 580, Python 3.11"),
    (machine.check_versions([HEALTHY, HEALTHY, TORCH_14]), FAIL, "torch ranks 0 and 1: 2.13; rank 2: 2.14"),
    (machine.check_versions([HEALTHY, OLD_DRIVER]), OK, "driver rank 0: 580; rank 1: 570, Python rank 0: 3.11; "),
    (machine.check_versions([HEALTHY, TRITON_38]), FAIL, "rank 1: 3.8"),
    (machine.check_assembler([HEALTHY]), OK, "ptxas 12.8.93 for sm_90; before 13.1 it may generate wrong code"),
    (machine.check_assembler([{**HEALTHY, "assembler": [90, [13, 1, 80]]}]), OK, "ptxas 13.1.80 for sm_90"),
    (machine.check_assembler([{**HEALTHY, "assembler": [0x942, []]}]), OK, "LLVM for gfx942"),
    (machine.check_libraries([HEALTHY, OTHER_NCCL], on_gpu=True), FAIL, "rank 0: 2.29.7; rank 1: 2.27.3"),
    (machine.check_libraries([HEALTHY, TWO_NCCL], on_gpu=True), FAIL, "rank 1 has 2 loaded: /x/libnccl.so.2"),
    (machine.check_libraries([NO_NCCL], on_gpu=False), SKIPPED, "none is loaded: nothing on a CPU loads it"),
    (machine.check_cupy([HEALTHY, {**HEALTHY, "no_nccl": "no CuPy"}]), SKIPPED, "cannot use NCCL: rank 1: no CuPy"),
    (machine.check_c_compiler([{**HEALTHY, "c_compiler": "/bin/gcc"}], on_gpu=True), OK, "/bin/gcc"),
    (machine.check_c_compiler([{**HEALTHY, "c_compiler": ""}], on_gpu=False), SKIPPED, "on a GPU"),
    (machine.check_c_compiler([{**HEALTHY, "c_compiler": name} for name in ("/bin/gcc", "")], on_gpu=True), FAIL,
     "rank 0: /bin/gcc; rank 1: none"),
    (machine.check_gpus(hgx("a"), on_gpu=True), OK, "8 x H100, matched with NVML by UUID"),
    (machine.check_gpus([hgx("a")[0]] * 2 + hgx("a")[1:2], on_gpu=True), OK, "; ranks 0 and 1 share one"),
    (machine.check_gpus(unknown_gpu(UNKNOWN), on_gpu=True), FAIL, f"rank 1: {UNKNOWN}"),
    (machine.check_gpus(unknown_gpu("no pynvml"), on_gpu=True), SKIPPED, "rank 1: no pynvml"),
    (machine.check_links(hgx("a") + hgx("b")), OK, "56 pairs over NVLink 4 x18 switch; PCIe slots of 64 GB/s nominal"),
    (machine.check_libraries([NO_NCCL], on_gpu=True), SKIPPED, "none is loaded: torch links it statically"),
    (machine.check_libraries([HEALTHY] * 2, on_gpu=True), OK, "2.29.7, /x/libnccl.so.2"),
    (machine.check_cupy([HEALTHY]), OK, "can use NCCL"),
    (machine.check_assembler([{**HEALTHY, "assembler": [90, [13, 0, 88]]}]), OK, "13.0.88 for sm_90; before 13.1"),
    (machine.check_gpus([replace(hgx("a")[0], host=host) for host in "ab"], on_gpu=True), OK, "2 x H100, matched"),
    (machine.check_links(hgx("a")[:1]), OK, "PCIe slots of 64 GB/s nominal"),
    (machine.check_links(cpus("a", 2)), SKIPPED, "cpu is not a GPU"),
    (machine.check_nics([replace(hgx("a")[0], nics=(Nic("a", 400, ()), Nic("b", 0, ())))]), OK,
     "a 400 Gbit/s, b of unknown rate"),
    (machine.check_settings([{**HEALTHY, "settings": {machine.IMPLICIT_ORDER: ""}}]), OK, machine.ORDER_HINT),
    (machine.check_settings([NO_NCCL]), OK, "none set"),
    (machine.check_nics(cpus("a", 2)), SKIPPED, "/sys shows none"),
    (machine.check_nics(hgx("a") + hgx("b", adapters=2)), OK, "; hosts have 2 different sets of NICs"),
    (machine.check_settings([HEALTHY, {**HEALTHY, "settings": {"NCCL_ALGO": "Ring"}}, HEALTHY]), OK,
     "NCCL_ALGO=ranks 0 and 2: unset; rank 1: Ring; " + machine.ORDER_HINT),
    (machine.check_settings([{**HEALTHY, "settings": {"NCCL_P2P_DISABLE": "0"}}]), OK, "NCCL_P2P_DISABLE=0; "),
    (machine.check_settings([{**HEALTHY, "settings": {machine.IMPLICIT_ORDER: "1"}}]), OK, "ORDER_IMPLICIT=1"),
])  # fmt: skip
def test_machine_checks_report_status_and_advice(finding: Finding, status: str, text: str) -> None:
    assert finding.status == status and text in finding.text, finding
    assert bool(finding.todo) == (status == FAIL)
    assert (machine.ASSEMBLER_HINT in finding.text) == ("before 13.1" in text)
    assert machine.ORDER_HINT not in finding.text or ("libnccl" not in str(NO_NCCL) and text != "none set")
    assert f"{machine.IMPLICIT_ORDER}=1; " not in finding.text


def test_c_compiler_is_the_one_that_triton_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("gcc", "clang", "mycc"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert machine.find_c_compiler() == str(tmp_path / "gcc")
    (tmp_path / "gcc").unlink()
    assert machine.find_c_compiler() == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "mycc")
    assert machine.find_c_compiler() == str(tmp_path / "mycc")
    monkeypatch.setenv("CC", "absent")
    assert machine.find_c_compiler() == ""
    monkeypatch.setattr(triton.knobs.build, "impl", lambda *_: "")
    assert machine.find_c_compiler() == "triton.knobs.build.impl"


def test_the_version_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(number: Any) -> int:
        number._obj.value = 22907
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(ncclGetVersion=read))
    assert machine._library_version(Path("x")) == "2.29.7"


def test_every_rank_of_a_launcher_takes_part(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    steps, devices, adopted = list[Any](), list[Any](), list[Any]()

    def silent(control: object, device: object) -> Topology:
        raise TransportError("gone")

    monkeypatch.setattr(doctor_ring, "discover_topology", silent)
    for is_alone in (False, True):
        ranks: Any = SimpleNamespace(
            control=None, device=None, alone=is_alone, merge_on_rank_0=lambda key, work: steps.append((key, work()))
        )
        (finding,) = doctor_ring.check_job(ranks, 128, "float32", 1)
        assert finding[:3] == ("all ranks answer", FAIL, "TransportError: gone") and finding.todo
        assert steps == [("the end of the checks", None)]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    @contextmanager
    def no_group(place: Any, device: torch.device) -> Iterator[None]:
        devices.append((place, device))
        raise ConnectionError("refused")
        yield

    monkeypatch.setattr("ringattn.bench.common.process_group.process_group", no_group)
    monkeypatch.setattr("ringattn.tools.doctor.adoption.adopt_kernels", adopted.append)
    assert run("--adopt").stdout == "" and not adopted
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        result = run("--json", str(target))
        assert result.exit_code == 1 and ("rendezvous: ConnectionError: refused" in result.stdout) is (rank == "0")
    assert checks(target) == {"rendezvous": "FAIL ConnectionError: refused"}
    assert "FAIL  " in run().stdout and "FAIL  " not in run("--csv", "-").stdout
    assert [(place.rank, place.world, device.type) for place, device in devices[:2]] == [(1, 2, "cpu"), (0, 2, "cpu")]
    CliRunner().invoke(cli.app, ["doctor", "--adopt"])
    assert adopted == [torch.device("cpu")]


def test_the_best_kernel_of_each_kind_is_listed() -> None:
    def verdict(name: str, seconds: float | None, **changes: Any) -> KernelVerdict:
        fields = {"phase": "forward", "dtype": "bf16", "head_dim": 64, "passed": True, "reason": "", "repeatable": True}
        times = {"seconds": seconds, "portable_seconds": seconds and 6e-3, "spread": seconds and 1e-4}
        return KernelVerdict(name, {}, **{"adopted": True, **fields, **times, **changes})

    verdicts = [
        verdict("a", 3e-3), verdict("b", 2e-3), verdict("c", 4e-3), verdict("b", 3e-3, phase="training"),
        verdict("a", 5e-3, head_dim=128), verdict("d", 1e-3, adopted=False, reason="bits " * 30),
        verdict("e", None, adopted=False, passed=False, repeatable=False, reason="wrong"),
        verdict("d", 7e-3, adopted=False, reason="another", head_dim=128),
    ]  # fmt: skip
    record: Any = SimpleNamespace(verdicts=verdicts)
    assert describe_record(record) == [
        "adopted: forward bf16 D64 b (3.00x), training bf16 D64 b (2.00x), forward bf16 D128 a (1.20x)",
        f"not adopted for every call: d ({('bits ' * 30)[:70]}); e (wrong)",
    ]
    assert describe_record(SimpleNamespace(verdicts=[])) == ["adopted: none"]  # type: ignore[arg-type]
    assert [[*table_row(verdicts[at]).values()] for at in (1, 5, 6)] == [
        ["b", "forward", "bf16", 64, "adopted", 2.0, 6.0, True, ""],
        ["d", "forward", "bf16", 64, "passed", 1.0, 6.0, True, "bits " * 30],
        ["e", "forward", "bf16", 64, "failed", None, None, None, "wrong"],
    ]
    assert [*table_row(verdicts[0])] == [*ADOPTION_UNITS]


def test_edges_between_nodes_are_timed_on_their_own_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, used, seconds = Topology.grid(2, 2), dict[Any, Any](), [1e-6, 4e-6, 2e-6, 1e-6]

    def merge_on_rank_0(what: str, work: Any, merge: Any = lambda values: None) -> Any:
        return merge(seconds if isinstance(work(), float) else [])

    class Transfers:
        def __init__(self, transport: str, way: Any, nbytes: int, device: Any) -> None:
            used[way.edge] = transport
            assert nbytes == 640

        def count_wrong_bytes(self, number: int) -> int:
            return 0

        def run(self, count: int) -> None:
            assert count == doctor_ring.REPEATS

    monkeypatch.setattr(doctor_ring, "RankTransfers", Transfers)
    for transports in (["inside", "between"], ["only"]):
        used.clear()
        for rank in range(4):
            ranks: Any = SimpleNamespace(rank=rank, device=None, merge_on_rank_0=merge_on_rank_0)
            text = doctor_ring._edge_speeds(ranks, ring, transports, 640)  # type: ignore[arg-type]
            assert text.endswith(" 3->1 0.16; slowest 0->1 0.16 (640 B, at the slower end)"), "all eight edges"
        assert len(used) == len({edge[:2] for edge in ring.edges})
        for edge in ring.edges:
            (name,) = (name for way, name in used.items() if str(way) == f"{edge.source}->{edge.destination}")
            assert name == transports[min(edge.level, len(transports) - 1)]


def test_edges_of_a_round_share_no_node() -> None:
    ring = ring_topology([place for host in range(16) for place in hgx(f"h{host}")])
    turns, edges = [*doctor_ring.timing_rounds(ring)], []
    for turn in turns:
        hosts = [{ring.devices[rank].host for rank in edge[:2]} for edge in turn]
        assert sum(map(len, hosts)) == len(set().union(*hosts))
        edges += turn
    assert sorted(edges) == sorted(ring.edges) and len(turns) < 32


def test_number_of_warmed_edges() -> None:
    counts = {1: 1, 16: 16 * 15, 17: 17 * 2}
    assert {world: len(doctor_ring.warm_up_edges(Topology.flat(world), None)) for world in counts} == counts
    rails = set(doctor_ring.warm_up_edges(Topology.grid(2, 3), 1))
    assert rails == {(a, b) for a in range(6) for b in range(6) if abs(a - b) == 3}


def test_one_token_per_rank_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: Any = []
    monkeypatch.setattr(doctor_ring, "check_job", lambda *how: dtypes.append(how[2]) or [Finding("a check", OK)])
    assert [run("--world", "3", "--seqlen", tokens).exit_code for tokens in ("2", "3", "4k")] == [2, 0, 0]
    assert {*dtypes} == {"float32"}
    run("--world", "3", "--seqlen", "3", "--dtype", "fp16")
    monkeypatch.setattr("ringattn.comm.LocalWorld", partial(LocalWorld, device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run("--world", "3", "--seqlen", "3")
    assert dtypes == ["float32"] * 6 + ["float16"] * 3 + ["bfloat16"] * 3


def test_each_level_warms_its_own_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: Any = []
    ring, levels = Topology.grid(2, 3), [SimpleNamespace(reason=name, warm_up=warmed.append) for name in "ab"]
    monkeypatch.setattr(doctor_ring, "open_transports", lambda *_, **how: warmed.append(how) or levels)
    ranks: Any = SimpleNamespace(
        group=None, device=None, merge_on_rank_0=lambda what, do, merge=lambda values: None: merge([do()])
    )
    assert doctor_ring._check_transport_opens(ranks, ring, "auto", []) == "a; b"
    opened = {"transport": "auto", "device": None, "topology": ring}
    assert warmed == [opened, *(doctor_ring.warm_up_edges(ring, level) for level in (0, 1))]


def test_every_transport_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def opens(ranks: object, ring: object, name: str, opened: list[Any]) -> str:
        opened += [SimpleNamespace(close=partial(closed.append, f"{name} {level}")) for level in range(2)]
        return ""

    monkeypatch.setattr(doctor_ring, "_check_transport_opens", opens)
    monkeypatch.setattr(doctor_ring, "_edge_speeds", lambda *_: "")
    monkeypatch.setattr(doctor_ring, "transport_names", lambda: ("local",))
    assert len([*doctor_ring.check_transports(None, Topology.flat(2), 1)]) == 3  # type: ignore[arg-type]
    assert closed == ["local 0", "local 1", "auto 0", "auto 1"]


def test_versions_of_cuda_and_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.1")
    versions = machine.collect_facts()["versions"]
    assert (versions["torch's CUDA"], versions["driver"]) == ("13.0", "580.1")


def test_texts_of_findings() -> None:
    finding = Finding("a check", FAIL, "broken", "mend it")
    assert str(finding) == "FAIL     a check: broken"
    long = Finding("a check", SKIPPED, "word " * 20 + "\n  second line")
    assert str(long).splitlines() == [
        f"skipped  a check: {'word ' * 12}".rstrip(), f"         {'word ' * 8}".rstrip(), "           second line",
    ]  # fmt: skip
    rest = [Finding("b", OK), long]
    assert findings.closing_lines([*rest, finding, Finding("c", FAIL, "later", "wait")]) == [
        "2 of 4 checks failed, 1 skipped", "first failure: a check: broken", "what to do: mend it",
    ]  # fmt: skip
    assert findings.closing_lines(rest) == ["no problems found: 1 checks ok, 1 skipped"]
    assert findings.text_by_rank(["", "x", "y", "x"]) == "ranks 1 and 3: x; rank 2: y"
    assert findings.list_ranks(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 93 more"
    assert findings.list_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
