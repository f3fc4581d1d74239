"""How K/V and dK/dV travel: as they are, rounded to bfloat16, or as fp8 with scales.

K/V are encoded once by their owner, passed on byte for byte, decoded by everyone who computes with them: however many
hops, one rounding. dK/dV change at every hop, and are rounded at every hop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.slots import TensorSpec
from ..kernels import SCALE_TOKENS, scale_shape
from ..kernels.quantize import dequantize, quantize
from ..kinds import shown

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


class Rounded:
    """``[B, S, H, D]`` as one tensor of another dtype, rounded to nearest; what is too large for it becomes infinite.

    By way of bfloat16 that is ``|x| >= 65,408`` of fp16, and ``|x| >= (2 - 2^-8) * 2^127`` of fp32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = dtype_name(dtype)  # as torch spells it: "bfloat16"

    def specs(self, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Shapes and dtypes of the contiguous tensors that travel in the place of one of ``shape``."""
        return [(shape, self.dtype)]

    def encode(self, x: Tensor, into: tuple[Tensor, ...]) -> None:
        """Write ``x``, any strides with a unit last one, into tensors of :meth:`specs`, on the current stream."""
        into[0].copy_(x)

    def decode(self, wire: tuple[Tensor, ...], into: Tensor) -> None:
        """Write what arrived into ``into``, in its dtype."""
        into.copy_(wire[0])


class Scaled:
    """As e4m3 with a fp32 scale per (batch, head, 128 tokens): :func:`ringattn.kernels.quantize`.

    On the CPU in torch, bit for bit what the kernels do, one scale's tokens at a time: its temporaries do not grow with
    the shard.
    """

    name = "float8_e4m3fn"

    def specs(self, shape: tuple[int, ...]) -> list[TensorSpec]:
        return [(shape, torch.float8_e4m3fn), (scale_shape(shape), torch.float32)]

    def encode(self, x: Tensor, into: tuple[Tensor, ...]) -> None:
        codes, scales = into
        if x.device.type != "cpu":
            quantize(x, codes, scales)
            return
        for tile, tokens in enumerate(tiles(x.shape[1])):
            encode_tile(x[:, tokens], codes[:, tokens], scales[:, tile])

    def decode(self, wire: tuple[Tensor, ...], into: Tensor) -> None:
        codes, scales = wire
        if into.device.type != "cpu":
            dequantize(codes, scales, into)
            return
        for tile, tokens in enumerate(tiles(into.shape[1])):
            into[:, tokens] = codes[:, tokens].to(torch.float32) * scales[:, tile, None, :, None]


def tiles(tokens: int) -> list[slice]:
    """The tokens of each scale."""
    return [slice(start, start + SCALE_TOKENS) for start in range(0, tokens, SCALE_TOKENS)]


def encode_tile(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """``x [B, tokens, H, D]`` to e4m3 ``codes`` of its shape and fp32 ``scale [B, H]``, as the kernel does it."""
    values = x.to(torch.float32)
    # to torch infinity is 448 in e4m3, and a sum that should have been infinite would be finite
    values = values.masked_fill(~values.isfinite(), torch.nan)
    amax = values.abs().nan_to_num_(nan=0.0).amax((1, 3))
    scale.copy_((amax / E4M3_MAX).clamp_(min=SMALLEST_SCALE))
    codes.copy_(values.mul_(scale.reciprocal()[:, None, :, None]))


Wire = Rounded | Scaled
_BFLOAT16 = Rounded(torch.bfloat16)
_WIRES: dict[torch.dtype, Wire] = {torch.bfloat16: _BFLOAT16, torch.float8_e4m3fn: Scaled()}
_GRAD_WIRES: dict[torch.dtype, Wire | None] = {torch.float32: None, torch.bfloat16: _BFLOAT16}


def wire_of(wire_dtype: torch.dtype | str | None, dtype: torch.dtype) -> Wire | None:
    """How keys and values of ``dtype`` travel as ``wire_dtype``; None where they travel as they are.

    Args:
        wire_dtype: None, ``torch.bfloat16`` or ``torch.float8_e4m3fn``, or the name of one, as ``"bfloat16"``.
        dtype: float16, bfloat16 or float32.

    Raises:
        ValueError: another dtype or name.
    """
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype is {dtype}: keys and values are float16, bfloat16 or float32")
    name = dtype_of("wire_dtype", wire_dtype, tuple(_WIRES))
    return None if name is None or name == dtype else _WIRES[name]


def grad_wire_of(grad_wire_dtype: torch.dtype | str | None) -> Wire | None:
    """How partial dK and dV, fp32, travel; None where they travel as they are.

    Args:
        grad_wire_dtype: None, ``torch.float32`` (the same) or ``torch.bfloat16``, or the name of one.

    Raises:
        ValueError: another dtype or name.
    """
    name = dtype_of("grad_wire_dtype", grad_wire_dtype, tuple(_GRAD_WIRES))
    return None if name is None else _GRAD_WIRES[name]


def dtype_of(argument: str, given: torch.dtype | str | None, known: tuple[torch.dtype, ...]) -> torch.dtype | None:
    """The dtype that an argument names: ValueError where it is not among ``known``."""
    if given is None:
        return None
    for dtype in known:
        if isinstance(given, torch.dtype | str) and given in (dtype, dtype_name(dtype)):
            return dtype
    takes = ", ".join(["None", *(f'{dtype} ("{dtype_name(dtype)}")' for dtype in known)])
    raise ValueError(f"{argument} is {shown(given)}: it must be one of {takes}")
