"""Add this project's provenance to the JSON file of a pytest-benchmark run."""

from __future__ import annotations

from typing import Any

import torch

from ringattn.bench.common.provenance import provenance


def pytest_benchmark_update_json(config: object, benchmarks: object, output_json: dict[str, Any]) -> None:
    """Record the command, the versions, the CPU and the GPU under ``provenance``."""
    output_json["provenance"] = provenance(
        torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    )
