"""The NCCL library that is loaded, for what CuPy does not wrap: communicators with a configuration of their own."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..limits import CGA_CLUSTER_SIZE, CLUSTER_VARIABLE, CTA_VARIABLES, CTAS, Limits, environment_ctas
from ..transport import TransportError

# `ncclConfig_t` of NCCL 2.18: every later library reads it as such and takes its own defaults for newer fields.
CONFIG_VERSION = 21800
CONFIG_MAGIC = 0xCAFEBEEF
UNDEFINED_INT = -(2**31)
UNIQUE_ID_BYTES = 128
LIBRARY = "libnccl.so.2"
# a library of NCCL, not one of its plugins (libnccl-net.so, libnccl-tuner.so …)
LIBRARY_FILE = re.compile(r"libnccl(-[0-9a-f]{8})?\.so[.\d]*")
MAPS = Path("/proc/self/maps")

OVERRIDES = {"channels": CTA_VARIABLES, "ctas": CTA_VARIABLES, "cga_cluster_size": (CLUSTER_VARIABLE,)}
NOT_BLOCKING = "NCCL_COMM_BLOCKING"


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


def cta_bounds(limits: Limits, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The fewest and the most thread blocks of a communicator, -2**31 where that is NCCL's choice.

    NCCL runs one thread block per channel, and takes both bounds for the channels of point-to-point transfers.
    """
    if limits.channels is not None:
        return limits.channels, limits.channels
    if limits.ctas is None and environment_ctas(environment) is not None:
        return UNDEFINED_INT, UNDEFINED_INT  # beside our most, NCCL would cut what the user makes the fewest
    return UNDEFINED_INT, limits.ctas or CTAS


def overridden(limits: Limits, environment: Mapping[str, str] = os.environ) -> str | None:
    """Which environment variable keeps these limits, or any communicator of ours, from being; None where none does."""
    if environment.get(NOT_BLOCKING) == "0":
        return f"{NOT_BLOCKING}=0 in the environment makes NCCL's calls return before they are done: unset it"
    given = [name for name in OVERRIDES if getattr(limits, name) is not None]
    names = dict.fromkeys(variable for name in given for variable in OVERRIDES[name])
    found = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    if not found:
        return None
    return f"limits is {limits}, and {', '.join(found)} in the environment overrides it for the whole process: unset it"


def loaded_libraries(maps: str | None = None) -> list[Path]:
    """Every libnccl of a process by its ``/proc/self/maps``, None: of this one; a file that is mapped twice is one.

    More than one is one too many, see `several_loaded`.
    """
    files: dict[tuple[str, str], Path] = {}
    for line in (MAPS.read_text() if maps is None else maps).splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and LIBRARY_FILE.fullmatch(Path(parts[5].removesuffix(" (deleted)")).name):
            files.setdefault((parts[3], parts[4]), Path(parts[5]))  # device and inode: one file has many names
    return [*files.values()]


def several_loaded() -> str | None:
    """Why communicators of this process could not be trusted: torch's NCCL may not be CuPy's; None where it is one."""
    found = loaded_libraries()
    if len(found) < 2:
        return None
    return f"{len(found)} NCCL libraries are loaded, {' and '.join(map(str, found))}: uninstall or unload all but one"


class ConfiguredCommunicator:
    """What CuPy's `NcclCommunicator` offers and we use, with limits on thread blocks and clusters.

    CuPy (14.2) fills the configuration itself and opens none of these fields, so this calls the very library that it
    uses.

    Raises:
        TransportError: NCCL refuses.
    """

    def __init__(self, size: int, unique_id: Sequence[int], rank: int, limits: Limits) -> None:
        least, most = cta_bounds(limits)
        self._library = _library()
        self._comm = ctypes.c_void_p()
        # CuPy 13 gives signed characters, 14 bytes
        shared = _UniqueId.from_buffer_copy(bytes(character % 256 for character in unique_id))
        config = _Config(
            ctypes.sizeof(_Config),
            CONFIG_MAGIC,
            CONFIG_VERSION,
            blocking=1,  # the calls of a communicator that does not block need polling of their own
            cgaClusterSize=limits.cga_cluster_size or CGA_CLUSTER_SIZE,
            minCTAs=least,
            maxCTAs=most,
            netName=None,
            splitShare=UNDEFINED_INT,
        )
        self._check(
            self._library.ncclCommInitRankConfig(ctypes.byref(self._comm), size, shared, rank, ctypes.byref(config))
        )

    @property
    def comm(self) -> int:
        """The address of the communicator, 0 once it is given back."""
        return self._comm.value or 0

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """`ncclSend`."""
        self._check(self._library.ncclSend(pointer, count, dtype, peer, self._comm, stream))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """`ncclRecv`."""
        self._check(self._library.ncclRecv(pointer, count, dtype, peer, self._comm, stream))

    def register(self, pointer: int, nbytes: int) -> int:
        """`ncclCommRegister`: a handle for `deregister`."""
        handle = ctypes.c_void_p()
        if not hasattr(self._library, "ncclCommRegister"):
            raise TransportError(f"{LIBRARY} registers no buffers: NCCL 2.19 and later do")
        self._check(self._library.ncclCommRegister(self._comm, pointer, nbytes, ctypes.byref(handle)))
        return handle.value or 0

    def deregister(self, handle: int) -> None:
        """`ncclCommDeregister`."""
        self._check(self._library.ncclCommDeregister(self._comm, handle))

    def check_async_error(self) -> None:
        """Raise what has gone wrong since."""
        error = ctypes.c_int()
        self._check(self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(error)))
        self._check(error.value)

    def abort(self) -> None:
        """`ncclCommAbort`."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommAbort(comm)

    def destroy(self) -> None:
        """`ncclCommDestroy`."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            self._library.ncclCommDestroy(comm)

    def _check(self, status: int) -> None:
        if status:
            raise TransportError(f"NCCL: {self._library.ncclGetErrorString(status).decode()} (status {status})")


@functools.cache
def _library() -> ctypes.CDLL:
    found = loaded_libraries()
    if len(found) != 1:
        raise TransportError(several_loaded() or f"{LIBRARY} is not loaded in this process")
    # The same file is the same library: nothing is loaded a second time.
    library = ctypes.CDLL(str(found[0]))
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    library.ncclCommInitRankConfig.argtypes = (pointer, integer, _UniqueId, integer, pointer)
    for name in ("ncclSend", "ncclRecv"):
        getattr(library, name).argtypes = (pointer, size, integer, integer, pointer, pointer)
    library.ncclCommGetAsyncError.argtypes = (pointer, pointer)
    for name in ("ncclCommAbort", "ncclCommDestroy"):
        getattr(library, name).argtypes = (pointer,)
    for name, arguments in (("Register", (pointer, pointer, size, pointer)), ("Deregister", (pointer, pointer))):
        if hasattr(library, f"ncclComm{name}"):  # since 2.19
            getattr(library, f"ncclComm{name}").argtypes = arguments
    library.ncclGetErrorString.argtypes = (integer,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
