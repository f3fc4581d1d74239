"""The door for local kernels: the protocol, the registry, and a helper for kernels of full and causal rectangles."""

from . import fused as fused
