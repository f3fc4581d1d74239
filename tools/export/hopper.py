"""The Hopper kernels in an export: which there are, and what of theirs a launcher passes as tensor maps."""

from __future__ import annotations

from typing import Any

from ...autotune.inspect.gluon import layout_of
from ...kernels.config import Tile
from ...kernels.experimental.hopper import hopper_kernel
from ...kernels.experimental.hopper_backward import hopper_backward_kernel
from ...kernels.experimental.steps import ROWS
from .arguments import Described
from .wish import Wish

KERNELS = {"forward": hopper_kernel, "gradients": hopper_backward_kernel}


def arguments(wish: Wish, name: str, tile: Tile, portable: dict[str, Any]) -> dict[str, Any]:
    """By parameter, as ``kernels.launch_arguments`` has them; ``portable`` is what the portable kernel takes."""
    dim = wish.head_dim
    changed: dict[str, Any] = {"SLOTS": tile.num_stages}
    # of each tensor: its dtype, length and heads, and rows and columns of a tile
    maps: dict[str, tuple[str, str, str, int, int]]
    if name == "forward":
        keys = (wish.dtype, "columns", "heads / group" if wish.grouped else "heads", tile.block_k, dim)
        maps = {"q": (wish.dtype, "rows", "heads", ROWS, dim), "k": keys, "v": keys}
    else:  # its programs are tiles of keys
        queries, keys = (
            (wish.dtype, "columns", "heads * group", tile.block_q, dim),
            (wish.dtype, "rows", "heads", ROWS, dim),
        )
        maps = {
            "dout": queries,
            "q": queries,
            "k": keys,
            "v": keys,
            "dq": ("fp32", "columns", "heads * group", ROWS, ROWS),
        }
        # a number of its own, which is not specialised
        changed |= {"shape": portable["shape"]._replace(group=None), "group": "i32"}
    described = {
        tensor: Described(
            tensor,
            dtype,
            ("batch", length, heads, dim),
            rows,
            portable[tensor],
            layout_of(dtype, rows, columns),
            columns,
        )
        for tensor, (dtype, length, heads, rows, columns) in maps.items()
    }
    return portable | changed | described
