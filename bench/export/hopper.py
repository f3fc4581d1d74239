"""The Hopper kernels in an export: which there are, and what of theirs a launcher passes as tensor maps."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from ...kernels.config import Tile
from ...kernels.hopper import hopper_kernel
from ...kernels.hopper_backward import hopper_backward_kernel
from ...kernels.steps import ROWS
from ...kernels.tiles import Strided
from ..inspect.gluon import GLUON_DTYPES
from .arguments import Described
from .wish import Wish

KERNELS = {"forward": hopper_kernel, "gradients": hopper_backward_kernel}


def arguments(wish: Wish, name: str, tile: Tile, portable: dict[str, Any]) -> dict[str, Any]:
    """By parameter, as ``kernels.launch_arguments`` has them; ``portable`` is what the portable kernel takes."""
    if name == "forward":
        heads, key_heads = "heads", "heads / group" if wish.grouped else "heads"
        maps = {
            "q": ("rows", heads, ROWS),
            "k": ("columns", key_heads, tile.block_k),
            "v": ("columns", key_heads, tile.block_k),
        }
        described = {one: of(one, wish.dtype, wish.head_dim, *told, portable[one]) for one, told in maps.items()}
        return portable | described | {"SLOTS": tile.num_stages}
    heads, key_heads = "heads * group", "heads"  # its programs are tiles of keys
    maps = {
        "dout": ("columns", heads, tile.block_q),
        "q": ("columns", heads, tile.block_q),
        "k": ("rows", key_heads, ROWS),
        "v": ("rows", key_heads, ROWS),
    }
    described = {one: of(one, wish.dtype, wish.head_dim, *told, portable[one]) for one, told in maps.items()}
    described["dq"] = of("dq", "fp32", wish.head_dim, "columns", heads, ROWS, portable["dq"], ROWS)
    shape = portable["shape"]._replace(group=None)  # a number of its own, which is not specialised
    return portable | described | {"shape": shape, "group": "i32", "SLOTS": tile.num_stages}


def of(
    tensor: str, dtype: str, head_dim: int, length: str, heads: str, rows: int, asked: Strided, columns: int = 0
) -> Described:
    """A tensor by a map of tiles of ``rows`` rows, whole or of so many columns."""
    block = [1, rows, 1, columns or head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, (GLUON_DTYPES | {"fp32": gl.float32})[dtype])
    return Described(tensor, dtype, ("batch", length, heads, head_dim), block[1], asked, repr(layout), block[3])
