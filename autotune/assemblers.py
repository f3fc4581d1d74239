"""Assemblers of PTX (``ptxas``): Triton's own, and the newest that is installed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def triton_assembler(arch: int) -> Path:
    """Return the ptxas that Triton uses for a compute capability."""
    from triton.backends.nvidia.compiler import get_ptxas  # Triton for AMD may lack it

    return Path(get_ptxas(arch).path)


def newest_assembler() -> Path:
    """Return the newest ptxas of Triton's two and of the package ``nvidia-cuda-nvcc``.

    ``TRITON_PTXAS_PATH`` and ``TRITON_PTXAS_BLACKWELL_PATH`` replace Triton's.
    """
    nvidia = find_spec("nvidia")
    folders = [] if nvidia is None else nvidia.submodule_search_locations or []
    wheels = [path for folder in folders for path in Path(folder).glob("cu*/bin/ptxas")]
    return max([*map(triton_assembler, (80, 100)), *wheels], key=assembler_version)


@cache
def assembler_version(path: Path) -> tuple[int, ...]:
    """Return the version of a ptxas, such as ``(12, 8, 93)``."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def assemble(ptx: str, assembler: Path) -> bytes | None:
    """Return the binary of a kernel, with Triton's options, or None if its PTX is too new for the assembler.

    Raises:
        RuntimeError: The assembler rejects the kernel.
    """
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(assembler), "--regAllocOptLevel=2", f"--gpu-name={target[1]}", str(source), "-o", str(binary)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode == 0:
            return binary.read_bytes()
    if "Unsupported .version" in process.stderr:
        return None
    raise RuntimeError(f"{assembler} rejects the kernel: {process.stderr[-400:]}")
