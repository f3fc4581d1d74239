"""Attention of one query shard against one key shard on one device; the folder needs only torch and triton."""

from .bounds import FULL, BlockSparseIndex, Bounds, tile_range
from .config import KernelConfig, Tile
from .device.tiles import TileRange
from .launch_plan import default_config
from .ops import (
    attend,
    attention_backward,
    attention_delta,
    attention_dkdv,
    attention_dq,
    attention_forward,
    attention_gradients,
    dequantize,
    quantize,
)
from .quantize import SCALE_TOKENS, scale_shape
from .scores import PLAIN, Scores
from .shared_cache import SharedValue

__all__ = [
    "FULL",
    "PLAIN",
    "SCALE_TOKENS",
    "BlockSparseIndex",
    "Bounds",
    "KernelConfig",
    "Scores",
    "SharedValue",
    "Tile",
    "TileRange",
    "attend",
    "attention_backward",
    "attention_delta",
    "attention_dkdv",
    "attention_dq",
    "attention_forward",
    "attention_gradients",
    "default_config",
    "dequantize",
    "quantize",
    "scale_shape",
    "tile_range",
]
