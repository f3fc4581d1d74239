"""Local kernels: their protocol, their registry, and a helper for kernels that know full and causal rectangles."""

from . import fused as fused
from . import gpu_operators as gpu_operators
