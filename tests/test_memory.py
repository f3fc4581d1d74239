"""The peak memory of a stretch of code, whatever the process did before it."""

from __future__ import annotations

import subprocess
import sys

import torch

from ringattn.bench.memory import PeakMemory

# blocks that the heap gives out and takes back, each between two small ones that keep it apart from its neighbours
HOLES = """
import ctypes
import torch
from ringattn.bench.heap import KEPT_BYTES, M_MMAP_THRESHOLD, freed_at_once
from ringattn.bench.memory import PeakMemory

CPU, MIB = torch.device("cpu"), 1 << 20
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
pairs = [(torch.ones(2 * MIB, dtype=torch.uint8), torch.ones(MIB >> 5, dtype=torch.uint8)) for _ in range(32)]
small = [pair[1] for pair in pairs]
del pairs


def peak():
    measured = PeakMemory(CPU)
    many = [torch.ones(MIB, dtype=torch.uint8) for _ in range(24)]
    del many
    torch.ones(32 * MIB, dtype=torch.uint8)
    return measured.bytes / MIB


for _ in range(2):
    with freed_at_once(CPU):
        print(peak())
    print(peak())
"""


def test_peak_memory_counts_what_was_given_back() -> None:
    first = PeakMemory(torch.device("cpu"))
    torch.ones(50_000_000, dtype=torch.uint8)
    assert 49e6 < first.bytes < 70e6
    assert PeakMemory(torch.device("cpu")).bytes < 20e6


def test_what_earlier_work_left_of_the_heap_hides_nothing() -> None:
    """24 MiB in the holes, freed before 32 MiB are asked for: in the holes they would stay, and count as 56."""
    ran = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    inside, outside, again, once_more = map(float, ran.stdout.split())
    assert 31.5 < inside < 33 and 31.5 < again < 33
    assert 55 < outside < 60 and 55 < once_more < 60  # there glibc keeps what is freed, as it did before
