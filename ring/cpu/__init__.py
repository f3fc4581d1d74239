"""The aten backend: PyTorch's own CPU flash-attention operator where it can, a blockwise body where it cannot."""

from . import aten as aten
