"""The aten backend: PyTorch's CPU flash-attention operator, with a blockwise fallback in plain torch."""

from . import aten as aten
