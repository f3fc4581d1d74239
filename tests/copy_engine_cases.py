"""The conformance suite through copy engines, between real processes: `python copy_engine_cases.py PROCESSES FOLDER`.

One process per rank, each on the next of this machine's CUDA devices and on the first again after the last, so that one
device is enough. Every process leaves one JSON file in the folder, like those of transport_cases.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transport_cases import CASES, traceback_of  # type: ignore[import-not-found]  # beside this script

from ringattn.comm import open_transport

PATIENCE = timedelta(seconds=60)


def run_case(name: str, device: torch.device) -> None:
    transport = open_transport(transport="copy_engine", device=device)
    try:
        CASES[name](transport, device)
    finally:
        transport.close()


def run_cases(rank: int, processes: int, folder: Path) -> None:
    """Run every case, up to the first that fails: the peers are out of step from there on."""
    results: dict[str, str] = {}
    try:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes, timeout=PATIENCE
        )
        for name in CASES:
            results[name] = traceback_of(run_case, name, device)
            if results[name]:
                break
    except BaseException:
        results["start"] = traceback.format_exc()
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        os._exit(0)  # at once: the peers of a rank that failed are to notice it


def main(processes: int, folder: Path) -> int:
    # Forked before anything touches CUDA: torch is imported once.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_cases, args=(rank, processes, folder)) for rank in range(processes)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
