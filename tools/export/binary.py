"""What a binary says of its parameters."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

PARAMETER = re.compile(
    r"EIATTR_KPARAM_INFO.*?Ordinal\s*:\s*0x([0-9a-f]+)\s+Offset\s*:\s*0x([0-9a-f]+)\s+Size\s*:\s*0x([0-9a-f]+)",
    re.DOTALL,
)
BANK = re.compile(r"EIATTR_PARAM_CBANK.*?Value:\s*0x[0-9a-f]+ 0x([0-9a-f]+)", re.DOTALL)


class Layout(NamedTuple):
    """Of the parameters of a binary."""

    base: int  # where they begin in their constant bank
    parameters: list[tuple[int, int]]  # (offset, bytes), in their order


def parameter_layout(cubin: bytes) -> Layout:
    """What a binary says that it takes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-elf", file.name], capture_output=True, text=True, check=True).stdout
    bank = BANK.search(text)
    assert bank is not None
    found = sorted(tuple(int(number, 16) for number in one) for one in PARAMETER.findall(text))
    # of that word the low half is where they begin, the high half how many bytes they take
    return Layout(int(bank[1], 16) & 0xFFFF, [(offset, size) for _, offset, size in found])
