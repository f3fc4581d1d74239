"""What is asked of the NCCL library itself: the configuration of a communicator, and CuPy's calls again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.comm import Limits, TransportError
from ringattn.comm.transports import nccl
from ringattn.comm.transports.nccl import (
    ConfiguredCommunicator,
    cta_bounds,
    loaded_libraries,
    overridden,
    several_loaded,
)

UNDEFINED = -(2**31)
UNIQUE_ID = bytes(range(128, 256))


class Library:
    """libnccl: notes its calls, and answers with `status`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.status = 0
        self.asynchronous = 0
        self.config: dict[str, Any] = {}
        self.unique_id = b""

    def ncclCommInitRankConfig(self, comm: Any, size: int, unique_id: Any, rank: int, config: Any) -> int:
        comm._obj.value = 77
        self.unique_id = bytes(unique_id)
        self.config = {name: getattr(config._obj, name) for name, _ in config._obj._fields_}
        self.calls.append(("init", (size, rank)))
        return self.status

    def ncclCommRegister(self, comm: Any, pointer: int, nbytes: int, handle: Any) -> int:
        handle._obj.value = 99
        self.calls.append(("ncclCommRegister", (comm.value, pointer, nbytes)))
        return self.status

    def ncclCommGetAsyncError(self, comm: Any, error: Any) -> int:
        error._obj.value = self.asynchronous
        return 0

    def ncclGetErrorString(self, status: int) -> bytes:
        return f"error {status}".encode()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            plain = tuple(one.value if isinstance(one, ctypes.c_void_p) else one for one in arguments)
            self.calls.append((name, plain))
            return self.status

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(nccl, "_library", lambda: library)
    return library


@pytest.mark.parametrize(
    ("limits", "bounds"),
    [
        (Limits(), (UNDEFINED, 8)),
        (Limits(cga_cluster_size=4), (UNDEFINED, 8)),
        (Limits(ctas=16), (UNDEFINED, 16)),
        (Limits(channels=4), (4, 4)),
        (Limits(channels=4, ctas=8), (4, 4)),  # no more and no fewer than four, which are at most eight
    ],
)
def test_limits_become_bounds(limits: Limits, bounds: tuple[int, int]) -> None:
    assert cta_bounds(limits, {"NCCL_MAX_CTAS": ""}) == bounds


@pytest.mark.parametrize("name", ["NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MAX_P2P_NCHANNELS"])
def test_the_environment_in_place_of_the_default(name: str) -> None:
    """Refused beside an explicit limit alone; a default would cut the fewest that a user asks for."""
    assert cta_bounds(Limits(), {name: "16"}) == (UNDEFINED, UNDEFINED)
    assert cta_bounds(Limits(ctas=4), {name: "16"}) == (UNDEFINED, 4)
    assert overridden(Limits(), {name: "16"}) is overridden(Limits(cga_cluster_size=1), {name: "16"}) is None
    assert f"{name}=16 in the environment" in str(overridden(Limits(channels=4), {name: "16"}))


def test_calls_that_do_not_block_are_refused() -> None:
    assert "NCCL_COMM_BLOCKING=0 in the environment" in str(overridden(Limits(), {"NCCL_COMM_BLOCKING": "0"}))
    assert overridden(Limits(), {"NCCL_COMM_BLOCKING": "1"}) is None


def test_the_environment_overrides() -> None:
    assert overridden(Limits(ctas=4), {"NCCL_DEBUG": "INFO", "NCCL_MIN_CTAS": ""}) is None
    clusters = {"NCCL_CGA_CLUSTER_SIZE": "4"}
    assert overridden(Limits(), clusters) is overridden(Limits(ctas=4), clusters) is None
    assert "NCCL_CGA_CLUSTER_SIZE=4 in the environment" in str(overridden(Limits(cga_cluster_size=2), clusters))
    told = overridden(Limits(ctas=4), {"NCCL_MAX_P2P_NCHANNELS": "8", "NCCL_MIN_CTAS": "2"})
    assert told is not None
    assert "NCCL_MIN_CTAS=2, NCCL_MAX_P2P_NCHANNELS=8 in the environment overrides it" in told


def test_the_configuration_is_that_of_nccl_h(library: Library) -> None:
    ConfiguredCommunicator(3, UNIQUE_ID, 2, Limits(ctas=4, cga_cluster_size=2))
    assert library.calls == [("init", (3, 2))]
    assert library.unique_id == UNIQUE_ID
    assert library.config == {
        "size": 48,
        "magic": 0xCAFEBEEF,
        "version": 21800,
        "blocking": 1,
        "cgaClusterSize": 2,
        "minCTAs": UNDEFINED,
        "maxCTAs": 4,
        "netName": None,
        "splitShare": UNDEFINED,
    }
    ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits())
    assert (library.config["cgaClusterSize"], library.config["maxCTAs"]) == (1, 8)


def test_the_signed_characters_of_cupy_13(library: Library) -> None:
    ConfiguredCommunicator(1, [byte - 256 for byte in UNIQUE_ID], 0, Limits(channels=1))
    assert library.unique_id == UNIQUE_ID


def test_calls_go_to_the_library(library: Library) -> None:
    communicator = ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits(channels=1))
    assert communicator.comm == 77
    library.calls.clear()
    communicator.send(1000, 5, 1, 3, 9)
    communicator.recv(2000, 6, 1, 4, 9)
    communicator.check_async_error()
    communicator.abort()
    communicator.abort()
    communicator.destroy()
    assert communicator.comm == 0
    assert library.calls == [
        ("ncclSend", (1000, 5, 1, 3, 77, 9)),
        ("ncclRecv", (2000, 6, 1, 4, 77, 9)),
        ("ncclCommAbort", (77,)),
    ]


def test_registration(library: Library) -> None:
    communicator = ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits())
    library.calls.clear()
    assert communicator.register(4096, 64) == 99
    communicator.deregister(99)
    assert library.calls == [("ncclCommRegister", (77, 4096, 64)), ("ncclCommDeregister", (77, 99))]
    library.status = 5
    with pytest.raises(TransportError, match="NCCL: error 5"):
        communicator.register(4096, 64)
    communicator._library = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(TransportError, match=r"libnccl.so.2 registers no buffers: NCCL 2.19 and later do"):
        communicator.register(4096, 64)


def test_destroy_gives_it_back_once(library: Library) -> None:
    communicator = ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits(channels=1))
    communicator.destroy()
    communicator.destroy()
    assert [name for name, _ in library.calls] == ["init", "ncclCommDestroy"]


def test_errors_say_what_nccl_says(library: Library) -> None:
    communicator = ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits(channels=1))
    library.asynchronous = 6
    with pytest.raises(TransportError, match=r"NCCL: error 6 \(status 6\)"):
        communicator.check_async_error()
    library.status = 5
    for call in (communicator.send, communicator.recv):
        with pytest.raises(TransportError, match="NCCL: error 5"):
            call(0, 0, 1, 0, 0)
    with pytest.raises(TransportError, match="NCCL: error 5"):
        ConfiguredCommunicator(1, UNIQUE_ID, 0, Limits(channels=1))


def test_the_loaded_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = """7f0 r-xp 0 08:01 7 /usr/lib/libm.so.6
7f1 r-xp 0 08:01 8                            /opt/a b/nccl/lib/libnccl.so.2
7f2 r-xp 0 08:01 8                            /opt/a b/nccl/lib/libnccl.so.2
7f3 rw-p 0 00:00 0
"""
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    assert loaded_libraries() == [Path("/opt/a b/nccl/lib/libnccl.so.2")]
    assert several_loaded() is None
    two = f"{maps}7f4 r-xp 0 08:01 9 /usr/lib/libnccl.so.2.30.7\n"
    monkeypatch.setattr(Path, "read_text", lambda path: two)
    both = r"2 NCCL libraries are loaded, /opt/a b/nccl/lib/libnccl\.so\.2 and /usr/lib/libnccl\.so\.2\.30\.7"
    nccl._library.cache_clear()
    with pytest.raises(TransportError, match=both):
        nccl._library()
    monkeypatch.setattr(Path, "read_text", lambda path: "7f0 r-xp 0 08:01 7 /usr/lib/libm.so.6\n7f3 rw-p 0 00:00 0\n")
    assert loaded_libraries() == []
    nccl._library.cache_clear()
    with pytest.raises(TransportError, match=r"libnccl\.so\.2 is not loaded"):
        nccl._library()
