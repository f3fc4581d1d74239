"""Validators for arguments of transports, topologies and limits."""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import Any

import torch

from ..kinds import RANK, Kind, listed, narrowed, number, optional, whole
from .cuda_threads import indexed

LONGEST_SECONDS = 1e9  # about 30 years; every waiting function accepts that
MOST_CLUSTER = 8  # thread blocks; NCCL's NCCL_MAX_CGA_CLUSTER_SIZE
MOST_CHANNELS = 64  # NCCL's MAXCHANNELS; more would leave no multiprocessors for attention
SECONDS = number("a positive number of seconds, 1e9 at most", lambda value: 0 < value <= LONGEST_SECONDS)
_LIST = listed("a list")


def _nodes(value: Any) -> tuple[tuple[int, ...], ...]:
    nodes = tuple(tuple(map(RANK.read, _LIST.read(node))) for node in _LIST.read(value))
    ranks = sorted(chain(*nodes))
    if not ranks or not all(nodes) or ranks != [*range(len(ranks))]:
        raise ValueError
    return nodes


def _device(value: Any) -> torch.device:
    if not isinstance(value, str | torch.device) or torch.device(value).type not in ("cpu", "cuda"):
        raise ValueError
    return indexed(value)


NODES = Kind("lists of ranks, one per node: every rank from 0 on exactly once, and no empty node", _nodes)
DEVICE = Kind("cpu or a CUDA device that torch sees", _device)


def _power(most: int) -> Kind:
    return narrowed(whole(1, most), f"a power of two from 1 to {most}", lambda value: value & (value - 1) == 0)


LIMITS = {
    "channels": optional(_power(MOST_CHANNELS)),
    "ctas": optional(_power(MOST_CHANNELS)),
    "cga_cluster_size": optional(_power(MOST_CLUSTER)),
    "bytes_per_second": optional(number("a positive finite number", lambda value: 0 < value < inf)),
}
