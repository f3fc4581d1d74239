"""Validators for arguments of transports, topologies and limits."""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import Any

import torch

from ..validators import RANK, Validator, integer_between, list_like, narrow, optional, real_number
from .cuda_threads import with_device_index

MAX_SECONDS = 1e9  # about 30 years; every waiting function accepts that
MAX_CLUSTER_SIZE = 8  # thread blocks; NCCL's NCCL_MAX_CGA_CLUSTER_SIZE
MAX_CHANNELS = 64  # NCCL's MAXCHANNELS; more would leave no multiprocessors for attention
SECONDS = real_number("a positive number of seconds, at most 1e9", lambda value: 0 < value <= MAX_SECONDS)
_LIST = list_like("a list")


def _nodes(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node as tuples. Raise ValueError unless every rank from 0 on occurs exactly once."""
    nodes = tuple(tuple(map(RANK.convert, _LIST.convert(node))) for node in _LIST.convert(value))
    ranks = sorted(chain(*nodes))
    if not ranks or not all(nodes) or ranks != [*range(len(ranks))]:
        raise ValueError
    return nodes


def _device(value: Any) -> torch.device:
    """Return a CPU or CUDA device with its index. Raise ValueError for any other value."""
    if not isinstance(value, str | torch.device) or torch.device(value).type not in ("cpu", "cuda"):
        raise ValueError
    return with_device_index(value)


NODES = Validator("a list of nodes, each a list of at least one rank, with every rank from 0 on exactly once", _nodes)
DEVICE = Validator("cpu or a CUDA device that torch sees", _device)


def _power_of_two(most: int) -> Validator:
    """Return the validator of the powers of two from 1 to `most`."""
    return narrow(integer_between(1, most), f"a power of two from 1 to {most}", lambda value: value & (value - 1) == 0)


LIMITS = {
    "channels": optional(_power_of_two(MAX_CHANNELS)),
    "ctas": optional(_power_of_two(MAX_CHANNELS)),
    "cga_cluster_size": optional(_power_of_two(MAX_CLUSTER_SIZE)),
    "bytes_per_second": optional(real_number("a positive finite number", lambda value: 0 < value < inf)),
}
