"""mypy over the Python of README and docs/, with the package installed (run by tox)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from mypy import api

from .snippets import ROOT, snippets

PAGE_PRELUDE = """# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-subclassing-any
from typing import Any

import torch
from ringattn import ring_attention
from ringattn.integrations.transformers import register, shard_batch, sharded
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer

q = k = v = torch.empty(1, 8, 2, 16)
accelerator: Any
batch: Any
cu_seqlens: Any
group: Any
layout: Any
model: Any
name: Any
tokens: Any
"""
"""Names that a block of a page may assume, and what strict mode allows in readers' own functions and classes.

The options stand in each file, because other options for the whole run would discard mypy's cache of the run before.
"""


def main() -> int:
    """Return 1 if mypy finds an error, else 0."""
    with tempfile.TemporaryDirectory() as folder:
        for snippet in snippets():
            if snippet.language == "python" and (snippet.page == "README.md" or snippet.page.startswith("docs/")):
                (Path(folder) / f"{Path(snippet.page).stem}_{snippet.line}.py").write_text(PAGE_PRELUDE + snippet.text)
        output, trouble, code = api.run(["--config-file", str(ROOT / "pyproject.toml"), folder])
    print(output, trouble, end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
