"""What Triton's own launcher passes to an exported kernel: its types in order, printed as JSON. Not interpreted."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.nvidia import driver

from ringattn.bench.export.kernels import KERNELS, Wish, signature_of

SCRATCH = ["*u8", "*u8"]
TYPES = {"CUdeviceptr": "*", "uint32_t": "fp32", "int32_t": "i32", "int64_t": "i64"}


def passed(signature: dict[str, Any]) -> list[str]:
    """Flat types of the parameters, by Triton's code for it, and its two last ones."""
    if hasattr(driver, "make_launcher"):  # up to 3.6: C source, with the types in it
        source = driver.make_launcher({}, signature, None)
        declared = re.search(r"static void _launch\((.*?)\) \{", source)[1].split(", ")[12:]  # type: ignore[index]
        names = re.search(r"void \*params\[\] = \{ (.*?) \}", source)[1].split(", ")  # type: ignore[index]
        assert [one.split()[-1] for one in declared] == [one.removeprefix("&") for one in names[:-2]]
        assert names[-2:] == ["&global_scratch", "&profile_scratch"]
        return [TYPES[one.split()[0]] for one in declared]
    triton.runtime.driver.set_active(SimpleNamespace(utils=SimpleNamespace(build_signature_metadata=list)))
    return list(driver.make_kernel_signature(signature.values()))


def main() -> None:
    wish = Wish(**json.loads(sys.argv[1]))
    print(json.dumps({name: [*passed(signature_of(wish, name)), *SCRATCH] for name in KERNELS}))


if __name__ == "__main__":
    main()
