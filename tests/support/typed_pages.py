"""mypy over the Python of the README and of docs/, with the package installed (tox does it)."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from mypy import api

ROOT = Path(__file__).parents[2]
GIVEN = """from typing import Any

import torch
from ringattn import ring_attention
from ringattn.integrations.transformers import register, shard_batch, sharded
from transformers import AutoModelForCausalLM

q = k = v = torch.empty(1, 8, 2, 16)
accelerator: Any
batch: Any
cu_seqlens: Any
group: Any
model: Any
name: Any
tokens: Any
"""
"""What a block of a page may take for granted."""


def main() -> int:
    """1 where mypy finds an error, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
            for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1):
                (Path(folder) / f"{page.stem}_{number}.py").write_text(GIVEN + block)
        output, trouble, code = api.run(["--config-file", str(ROOT / "pyproject.toml"), folder])
    print(output, trouble, end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
