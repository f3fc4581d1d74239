"""Bounds of the default kernels, which ``ringattn predict`` takes as the rate of a GPU that was not measured.

``python -m tests.support.kernel_bounds`` from the root compiles the kernels and records their bounds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from itertools import product
from typing import Any

import triton

from ringattn.bench.predict.speed import BOUNDS, GPUS
from ringattn.kernels.gpu import GPU_MODELS
from ringattn.kernels.tables import KERNELS

SPEC = "{}:bf16:{}:middle:bounded:mha:{}"  # most hops of a causal ring; fp16 has as many instructions
HEAD_DIMS = (64, 128, 256)


def compiled_bounds() -> dict[str, Any]:
    """Return the content of the table: the bounds of forward, dQ and dK/dV by architecture and head dim."""
    archs = sorted({GPU_MODELS[key].arch for key in GPUS})
    specs = [SPEC.format(*words) for words in product(archs, HEAD_DIMS, KERNELS)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "ringattn", "inspect", "--json", "-", *specs]
    report = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    percent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in json.loads(report)["rows"]:
        percent[row["arch"].removeprefix("sm_")][str(row["head_dim"])].append(round(row["bound"], 1))
    return {"command": f"ringattn inspect {SPEC.format('ARCH', 'D', 'KERNEL')}", "triton": triton.__version__} | {
        "percent": percent
    }


if __name__ == "__main__":
    text = json.dumps(compiled_bounds(), indent=1)
    BOUNDS.write_text(re.sub(r"\n +(?=[\d\]])", " ", text) + "\n")  # one line per head dim
