"""``ringattn doctor``: well machines pass, and every kind of illness is named with what to do."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from ringattn.bench import cli
from ringattn.bench.common import launching
from ringattn.bench.common.result import read
from ringattn.bench.kernels.accuracy import Results
from ringattn.comm import LocalTransport, TransportError
from ringattn.comm.groups import open_transports
from ringattn.comm.topology.nvml import DeviceInfo
from ringattn.comm.topology.topology import Topology, ring_topology
from ringattn.comm.transports import nccl
from ringattn.comm.transports.nccl import loaded_libraries
from ringattn.ring import ring_attention
from ringattn.tools.doctor import findings
from ringattn.tools.doctor import links as doctor_links
from ringattn.tools.doctor import machine as doctor_machine
from ringattn.tools.doctor import ring as doctor_ring
from ringattn.tools.doctor.findings import FAIL, OK, SKIPPED, Finding
from ringattn.tools.doctor.machine import Facts

from ..support.clusters import DGX1, cpus, hgx, meshed

SMALL = "--seqlen 128 --bytes 4k --heads 4 --kv-heads 2 --head-dim 16"

pytestmark = pytest.mark.usefixtures("alone")
VERSIONS = {"torch": "2.13", "triton": "3.7", "driver": "580", "Python": "3.11"}
WELL = Facts(VERSIONS, (("/x/libnccl.so.2", "2.29.7"),), None, {})

Receive = Callable[[LocalTransport, Any], None]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["doctor", *SMALL.split(), *arguments])


def lines(text: str) -> dict[str, str]:
    """The text of each check that was printed, with its status in front."""
    found = [line for line in text.splitlines() if line.startswith((OK, FAIL, SKIPPED))]
    return {line[9:].split("  ")[0]: f"{line[:9].strip()} {line[9:].partition('  ')[2].strip()}" for line in found}


# -- as a whole


def test_a_well_machine(tmp_path: Path) -> None:
    target, rows = tmp_path / "doctor.json", tmp_path / "doctor.csv"
    result = run("--json", str(target), "--csv", str(rows))
    assert result.exit_code == 0, result.output
    told = lines(result.stdout)
    assert told["transport local"] == "ok patterned bytes over 12 edges"
    assert told["transport auto"] == "ok auto takes local: rank 0 of LocalWorld(4)"
    assert told["ring order"].startswith("ok flat ring of 4 ranks")
    assert told["ring of 128 tokens"].startswith("ok causal, zigzag, float32, transport local: out ")
    added = {}
    for wire in ("K/V as bf16", "K/V as fp8 e4m3", "dK/dV as bf16"):
        assert "128 tokens, 2 query heads of one K/V head, D16 float32, causal" in told[wire]
        numbers = re.findall(r"(out|lse|dq|dk|dv) ([\d.e-]+)", told[wire])
        added[wire] = {name: float(error) for name, error in numbers}
    # what rounding explains
    assert added["dK/dV as bf16"]["out"] == added["dK/dV as bf16"]["dq"] == 0 < added["dK/dV as bf16"]["dk"]
    assert 0 < added["K/V as bf16"]["out"] < 2**-8 < added["K/V as fp8 e4m3"]["out"] < 2**-3
    for edge in ("0->1", "1->2", "2->3", "3->0", "0<->1", "1<->2", "2<->3", "0<->3"):
        assert edge in told["GB/s local"]
    assert (
        'not possible here: transport is "process_group", and torch.distributed is not'
        in told["transport process_group"]
    )
    assert result.stdout.splitlines()[-1].startswith("all well: ")
    read_back(target, world=4)
    with rows.open() as file:
        table = [*csv.DictReader(file)]
    assert [row["check"] for row in table] == [*told]
    assert {row["status"] for row in table} == {OK, SKIPPED}


def read_back(path: Path, *, world: int) -> None:
    """A result that failed in nothing."""
    told = read(path)
    assert told.case == "doctor" and told.failed == [] and told.notes[-1].startswith("all well: ")
    assert sum(map(len, told.provenance["ring"]["nodes"])) == world and told.provenance["device"] == "cpu"


def in_a_launcher(store: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    """What the command does under torchrun's agent; ranks meet in a file."""
    meet = launching.process_group

    def through_a_file(place: launching.Member) -> AbstractContextManager[None]:
        return meet(place, store)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(launching, "process_group", through_a_file)
        result = run(*arguments)
    if launching.member().rank != 0:  # type: ignore[union-attr]
        assert result.stdout == ""
    return result.exit_code, result.stdout


def test_processes(tmp_path: Path) -> None:
    target = tmp_path / "doctor.json"
    code, output = launching.launch(2, in_a_launcher, ("--json", str(target)))
    assert code == 0, output
    told = lines(output)
    assert told["transport process_group"] == "ok patterned bytes over 2 edges"
    assert "0<->1" in told["GB/s process_group"]
    assert told["transport local"].startswith("skipped not possible here")
    assert "transport process_group: out" in told["ring of 128 tokens"]
    read_back(target, world=2)


def test_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tuple(cpus("a", 2) + cpus("b", 2))
    monkeypatch.setattr("ringattn.tools.doctor.ring.device_infos", lambda control, device: devices)
    result = run()
    assert result.exit_code == 0, result.output
    told = lines(result.stdout)
    assert told["ring order"].startswith("ok two-level ring of 4 ranks, 2 nodes of 2")
    for edge in ("0->1", "2->3", "0->2", "1->3"):
        assert edge in told["GB/s local"]


def test_one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its JSON is all there is on standard output."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    target = tmp_path / "x.json"
    target.write_text(run("--world", "1", "--json", "-").stdout)
    read_back(target, world=1)
    told = {row["check"]: f"{row['status']} {row['found']}" for row in read(target).rows}
    assert told["transport local"] == "ok patterned bytes over 1 edge"
    assert told["wire dtypes"] == "skipped one rank sends nothing"
    off = "ok NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 (NVLink and PCIe peers are not used)"
    assert told["NCCL_* settings"] == off


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seqlen 2", "--seqlen is 2: 4 ranks need a token each"),
        ("--bytes 0", "'0' is too small"),
        ("--kv-heads 3", "--kv-heads is 3: --heads, 4, must be a multiple of it"),
        ("--json /nowhere/at/all.json", "there is no folder /nowhere/at"),
    ],
)
def test_refusals(flags: str, message: str) -> None:
    result = run(*flags.split())
    assert result.exit_code == 2 and message in result.output and len(result.output.splitlines()) == 1


# -- illnesses of the links


def corrupting(source: int, destination: int, *, least: int = 0) -> Receive:
    """A transport on which one edge flips a byte of messages that are large enough."""
    sound = LocalTransport._receive

    def receive(self: LocalTransport, message: Any) -> None:
        sound(self, message)
        if (message.peer, self.rank) == (source, destination) and message.tensor.nbytes >= least:
            message.tensor.view(-1).view(torch.uint8)[7] ^= 0x40

    return receive


@pytest.mark.parametrize("edge", [(2, 3), (3, 1)])  # of the ring, and one that only sums on their way home take
def test_an_edge_that_corrupts_bytes_is_named(
    edge: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LocalTransport, "_receive", corrupting(*edge))
    target = tmp_path / "doctor.json"
    result = run("--json", str(target))
    assert result.exit_code == 1
    assert f"rank {edge[1]} got 1 wrong bytes of 4096 from rank {edge[0]}" in lines(result.stdout)["transport local"]
    assert "GB/s local" not in lines(result.stdout)
    *_, first, todo = result.stdout.splitlines()
    assert first.startswith("first failure: transport local: ")
    assert todo.startswith("what to do: look at what joins the ranks")
    assert read(target).failed[0].startswith("transport local: ")


def test_an_edge_that_corrupts_large_messages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransport, "_receive", corrupting(1, 2, least=1 << 16))
    result = run("--bytes", "64k")
    assert result.exit_code == 1
    assert lines(result.stdout)["transport local"].startswith("ok")
    assert lines(result.stdout)["GB/s local"] == "FAIL rank 2: 1->2: 1 wrong bytes of 65536"
    assert "a GPU, cable or NIC that corrupts bytes out of use" in result.stdout.splitlines()[-1]


def test_a_transport_that_breaks_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: object, turn: int) -> int:
        raise TransportError("the cable is out")

    monkeypatch.setattr("ringattn.bench.links.runs.Ends.wrong", breaks)
    result = run()
    assert result.exit_code == 1
    assert lines(result.stdout)["GB/s local"].startswith("FAIL ranks 0 and 1: TransportError: the cable is out")
    assert lines(result.stdout)["ring of 128 tokens"].startswith("ok")  # what follows is examined all the same


def test_a_slow_edge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine carries is far less than NVLink: every edge is slow."""
    devices = tuple(replace(place, unknown=None) for place in hgx("a")[:2])
    monkeypatch.setattr("ringattn.tools.doctor.ring.device_infos", lambda control, device: devices)
    result = run("--world", "2")
    assert result.exit_code == 1
    told = lines(result.stdout)["GB/s local"]
    assert told.startswith("FAIL 0->1 ")
    assert " of 380 expected" in told


def test_a_transport_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = open_transports

    def opens(group: Any, *, transport: str, **rest: Any) -> Any:
        if transport == "local" and group.rank() == 1:
            sound(group, transport=transport, **rest)
            raise TransportError("no room")
        return sound(group, transport=transport, **rest)

    monkeypatch.setattr(doctor_links, "open_transports", opens)
    result = run()
    assert result.exit_code == 1
    assert lines(result.stdout)["transport local"] == "FAIL rank 1: TransportError: no room"


# -- illnesses of the arithmetic


def test_a_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **rest: Any) -> Any:
        out, lse = ring_attention(*arguments, **rest)
        return out * (1.001 if rest["ring"].rank == 3 else 1), lse

    monkeypatch.setattr(doctor_ring, "ring_attention", wrong)
    result = run()
    assert result.exit_code == 1
    assert lines(result.stdout)["ring of 128 tokens"].startswith("FAIL wrong in out, dq, dk, dv; causal")
    assert result.stdout.splitlines()[-2].startswith("first failure: ring of 128 tokens: ")


def test_a_ring_that_raises_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, ring: Any, **__: Any) -> Any:
        raise ZeroDivisionError(f"on {ring.rank}")

    monkeypatch.setattr(doctor_ring, "ring_attention", raises)
    result = run("--world", "2")
    assert result.exit_code == 1
    told = lines(result.stdout)
    assert told["ring of 128 tokens"] == "FAIL rank 0: ZeroDivisionError: on 0; rank 1: ZeroDivisionError: on 1"
    assert told["K/V as they are"].startswith("FAIL")


def test_a_wire_dtype_that_ruins_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = doctor_ring.run

    def ruined(ranks: Any, layout: Any, shards: Any, **wire: Any) -> Any:
        if wire.get("wire_dtype") is torch.float8_e4m3fn:
            raise NotImplementedError("no fp8 here")
        results, transport = sound(ranks, layout, shards)
        return Results(*(x * (2 if wire else 1) for x in results)), transport

    monkeypatch.setattr(doctor_ring, "run", ruined)
    told = lines(run("--world", "2").stdout)
    assert told["K/V as bf16"].startswith("FAIL adds, relative: out 1, lse 1, dq 1, dk 1, dv 1")
    assert told["K/V as fp8 e4m3"] == "skipped no fp8 here"


# -- the machine


@pytest.mark.parametrize(
    ("library", "settings", "told"),
    [
        ("2.26.2", {}, True),
        ("2.28.9", {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, True),
        ("2.28.9", {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, False),
        ("2.25.1", {}, False),
        ("unknown version (OSError)", {}, False),
    ],
)
def test_the_order_of_several_communicators(library: str, settings: dict[str, str], told: bool) -> None:
    found = doctor_machine.settings([replace(WELL, libraries=(("/x", library),), settings=settings)])
    assert found.more == (doctor_machine.ORDERED,) * told
    assert doctor_machine.settings([replace(WELL, libraries=())]).more == ()  # no NCCL is loaded


MAPS = """\
7f0-7f1 r-xp 00000000 08:01 11 /venv/nvidia/nccl/lib/libnccl.so.2
7f1-7f2 r--p 00001000 08:01 11 /venv/nvidia/nccl/lib/libnccl.so.2
7f2-7f3 r-xp 00000000 08:01 11 /other/name/of/the/same/libnccl.so.2.29.7
7f3-7f4 r-xp 00000000 08:01 12 /opt/hpcx/lib/libnccl-net.so
7f4-7f5 r-xp 00000000 08:01 13 /opt/hpcx/lib/libnccl_sharp.so
7f5-7f6 rw-p 00000000 00:00 0
7f6-7f7 rw-p 00000000 00:00 0 [heap]
"""


def test_two_libraries_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with two names is one."""
    assert [*map(str, loaded_libraries(MAPS))] == ["/venv/nvidia/nccl/lib/libnccl.so.2"]
    maps = tmp_path / "maps"
    maps.write_text(MAPS + "7f8-7f9 r-xp 00000000 08:01 14 /usr/lib/my folder/libnccl.so.2.27.3 (deleted)\n")
    monkeypatch.setattr(nccl, "MAPS", maps)
    result = run("--world", "2")
    assert result.exit_code == 1
    told = lines(result.stdout)["libnccl"]
    assert told.startswith("FAIL rank 0 has 2 loaded: /venv/nvidia/nccl/lib/libnccl.so.2 (unknown version")
    assert "/usr/lib/my folder/libnccl.so.2.27.3 (deleted)" in told
    assert result.stdout.splitlines()[-1].startswith("what to do: keep one")


TORCH_14 = replace(WELL, versions={**VERSIONS, "torch": "2.14", "driver": "570"})
OTHER_NCCL = replace(WELL, libraries=(("/y/libnccl.so.2", "2.27.3"),))
NO_NCCL = replace(WELL, libraries=())
UNKNOWN = "NVML knows no GPU-7, which torch calls cuda:0 (NVMLError)"


def stranger(unknown: str) -> list[DeviceInfo]:
    return [*hgx("a")[:1], DeviceInfo("a", "GPU-7", unknown=unknown)]


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (doctor_machine.versions([WELL, WELL]), OK, "torch 2.13, triton 3.7, driver 580, Python 3.11"),
        (doctor_machine.versions([WELL, WELL, TORCH_14]), FAIL, "torch is 2.13 on ranks 0 and 1, 2.14 on rank 2"),
        (doctor_machine.libraries([WELL, WELL], on_gpu=True), OK, "2.29.7, /x/libnccl.so.2"),
        (doctor_machine.libraries([WELL, OTHER_NCCL], on_gpu=True), FAIL, "2.29.7 on rank 0, 2.27.3 on rank 1"),
        (doctor_machine.libraries([NO_NCCL], on_gpu=False), SKIPPED, "none is loaded: nothing on a CPU loads it"),
        (doctor_machine.cupy([WELL, WELL]), OK, "finds NCCL"),
        (
            doctor_machine.cupy([WELL, replace(WELL, no_nccl="no CuPy")]), SKIPPED,
            "no transport nccl: rank 1: no CuPy",
        ),
        (
            doctor_machine.gpus(hgx("a"), on_gpu=True), OK,
            "8 x H100, matched with NVML by UUID (rank 0 is NVML's 0, rank 1 is NVML's 1, …)",
        ),
        (doctor_machine.gpus([hgx("a")[0]] * 2 + hgx("a")[1:2], on_gpu=True), OK, "; ranks 0 and 1 share one"),
        (doctor_machine.gpus(stranger(UNKNOWN), on_gpu=True), FAIL, f"rank 1: {UNKNOWN}"),
        (doctor_machine.gpus(stranger("no pynvml"), on_gpu=True), SKIPPED, "rank 1: no pynvml"),
        (
            doctor_machine.links(hgx("a") + hgx("b")), OK,
            "56 pairs by NVLink 4 x18 switch; PCIe slots of 64 GB/s nominal",
        ),
        (doctor_machine.links(meshed("a", DGX1, 8)), OK, "8 pairs by NVLink 2 x2"),
        (
            doctor_machine.nics(hgx("a", adapters=2)), OK,
            "mlx5_0 400 Gbit/s, mlx5_1 400 Gbit/s, eno1 25 Gbit/s",
        ),
        (doctor_machine.nics(cpus("a", 2)), SKIPPED, "/sys shows none"),
        (doctor_machine.nics(hgx("a") + hgx("b", adapters=2)), OK, ", one of 2 kinds of hosts"),
        (
            doctor_machine.settings([WELL, replace(WELL, settings={"NCCL_ALGO": "Ring"}), WELL]), OK,
            "NCCL_ALGO=None on ranks 0 and 2, Ring on rank 1",
        ),
    ],
)  # fmt: skip
def test_the_machine(found: Finding, status: str, text: str) -> None:
    assert found.status == status and text in found.text, found
    assert bool(found.todo) == (status == FAIL)


# -- parts


def test_rounds_share_no_host() -> None:
    ring = ring_topology([place for host in range(16) for place in hgx(f"h{host}")])
    seen: dict[str, list[tuple[int, int]]] = {}
    count = 0
    for turn in doctor_links.rounds(ring):
        hosts = [{ring.devices[rank].host for rank in pair.way.pairs[0]} for pair in turn]
        assert sum(map(len, hosts)) == len(set().union(*hosts))
        for pair in turn:
            seen.setdefault(pair.way.name, []).append(pair.way.pairs[0])
        count += 1
    assert sorted(seen["one way"]) == sorted(edge[:2] for edge in ring.edges)
    assert {frozenset(pair) for pair in seen["both ways"]} == {frozenset(edge[:2]) for edge in ring.edges}
    assert count < 64


def test_warmed_edges() -> None:
    assert doctor_links.warmed(Topology.flat(1), None) == [(0, 0)]
    assert len(doctor_links.warmed(Topology.flat(16), None)) == 16 * 15
    assert len(doctor_links.warmed(Topology.flat(17), None)) == 17 * 2
    grid = Topology.grid(2, 3)
    assert set(doctor_links.warmed(grid, 1)) == {(a, b) for a in range(6) for b in range(6) if abs(a - b) == 3}


def test_no_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(control: object, device: object) -> Mapping[str, object]:
        raise TransportError("the devices of the ranks: no answer from rank 1 within 300 s")

    monkeypatch.setattr("ringattn.tools.doctor.ring.device_infos", silent)
    result = run("--world", "2")
    assert result.exit_code == 1
    assert "no answer from rank 1" in lines(result.stdout)["all ranks answer"]


def test_texts() -> None:
    found = Finding("a check", FAIL, "broken", "mend it", ("more",))
    assert str(found) == "FAIL     a check                  broken\n         more"
    assert findings.closing([found, Finding("b", OK, "")])[-1] == "what to do: mend it"
    assert findings.by_rank(["x", "x"]) == "x"
    assert findings.by_rank(["", "x", "y", "x"]) == "ranks 1 and 3: x; rank 2: y"
    assert findings.ranks_text(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 93 more"
