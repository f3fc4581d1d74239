"""Encodings in which K/V and dK/dV are sent: unchanged, rounded to bfloat16, or fp8 with scales.

The owner encodes K/V once. Every rank passes them on byte for byte and decodes them for its own compute, so they are
rounded once. dK/dV change at every hop and are rounded at every hop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.slots import TensorSpec
from ..kernels import SCALE_TOKENS, scale_shape
from ..kernels.quantize import dequantize, quantize
from ..validators import short_repr

E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # smallest normal fp32 number

MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


class RoundedWire:
    """Encoding of ``[B, S, H, D]`` as one tensor of another dtype, rounded to nearest.

    Values too large for the dtype become infinite. With bfloat16 these are ``|x| >= (2 - 2^-8) * 2^127`` in fp32. An
    fp16 model receives infinity for ``|x| >= 65,408``, which bfloat16 rounds above the fp16 range.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = dtype_name(dtype)

    def specs(self, shape: tuple[int, ...]) -> list[TensorSpec]:
        """Return shapes and dtypes of the contiguous tensors that encode a tensor of ``shape``."""
        return [(shape, self.dtype)]

    def encode(self, x: Tensor, into: tuple[Tensor, ...]) -> None:
        """Write ``x``, any strides with a unit last one, into tensors of :meth:`specs`, on the current stream."""
        into[0].copy_(x)

    def decode(self, wire: tuple[Tensor, ...], into: Tensor) -> None:
        """Write the received tensors into ``into``, in its dtype."""
        into.copy_(wire[0])


class ScaledWire:
    """Encoding as e4m3 with one fp32 scale per (batch, head, 128 tokens), see :func:`ringattn.kernels.quantize`.

    The CPU version uses torch and equals the kernels bit for bit. It works on the tokens of one scale at a time, so
    that its temporaries do not grow with the shard.
    """

    name = "float8_e4m3fn"

    def specs(self, shape: tuple[int, ...]) -> list[TensorSpec]:
        return [(shape, torch.float8_e4m3fn), (scale_shape(shape), torch.float32)]

    def encode(self, x: Tensor, into: tuple[Tensor, ...]) -> None:
        codes, scales = into
        if x.device.type != "cpu":
            quantize(x, codes, scales)
            return
        for tile, tokens in enumerate(scale_tiles(x.shape[1])):
            encode_tile(x[:, tokens], codes[:, tokens], scales[:, tile])

    def decode(self, wire: tuple[Tensor, ...], into: Tensor) -> None:
        codes, scales = wire
        if into.device.type != "cpu":
            dequantize(codes, scales, into)
            return
        for tile, tokens in enumerate(scale_tiles(into.shape[1])):
            into[:, tokens] = codes[:, tokens].to(torch.float32) * scales[:, tile, None, :, None]


def scale_tiles(tokens: int) -> list[slice]:
    """Return the ranges of tokens that share a scale."""
    return [slice(start, start + SCALE_TOKENS) for start in range(0, tokens, SCALE_TOKENS)]


def encode_tile(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Encode ``x [B, tokens, H, D]`` as e4m3 ``codes`` of its shape and fp32 ``scale [B, H]``, as the kernel does."""
    values = x.to(torch.float32)
    # torch converts infinity to 448 in e4m3, which would make infinite sums finite. Send NaN instead.
    values = values.masked_fill(~values.isfinite(), torch.nan)
    amax = values.abs().nan_to_num_(nan=0.0).amax((1, 3))
    scale.copy_((amax / E4M3_MAX).clamp_(min=SMALLEST_SCALE))
    codes.copy_(values.mul_(scale.reciprocal()[:, None, :, None]))


Wire = RoundedWire | ScaledWire
_BFLOAT16 = RoundedWire(torch.bfloat16)
_WIRES: dict[torch.dtype, Wire] = {torch.bfloat16: _BFLOAT16, torch.float8_e4m3fn: ScaledWire()}
_GRAD_WIRES: dict[torch.dtype, Wire | None] = {torch.float32: None, torch.bfloat16: _BFLOAT16}


def resolve_wire(wire_dtype: torch.dtype | str | None, dtype: torch.dtype) -> Wire | None:
    """Return the encoding of keys and values of ``dtype`` for ``wire_dtype``; None if they are sent unchanged.

    Args:
        wire_dtype: None, ``torch.bfloat16`` or ``torch.float8_e4m3fn``, or its name, such as ``"bfloat16"``.
        dtype: float16, bfloat16 or float32.

    Raises:
        ValueError: another dtype or name.
    """
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype is {dtype}: keys and values must be float16, bfloat16 or float32")
    name = resolve_dtype("wire_dtype", wire_dtype, tuple(_WIRES))
    return None if name is None or name == dtype else _WIRES[name]


def resolve_grad_wire(grad_wire_dtype: torch.dtype | str | None) -> Wire | None:
    """Return the encoding of partial dK and dV, which are fp32; None if they are sent unchanged.

    Args:
        grad_wire_dtype: None, ``torch.float32`` (unchanged) or ``torch.bfloat16``, or its name.

    Raises:
        ValueError: another dtype or name.
    """
    name = resolve_dtype("grad_wire_dtype", grad_wire_dtype, tuple(_GRAD_WIRES))
    return None if name is None else _GRAD_WIRES[name]


def resolve_dtype(
    argument: str, value: torch.dtype | str | None, allowed: tuple[torch.dtype, ...]
) -> torch.dtype | None:
    """Return the dtype that an argument names, or raise ValueError if it is not in ``allowed``."""
    if value is None:
        return None
    for dtype in allowed:
        if isinstance(value, torch.dtype | str) and value in (dtype, dtype_name(dtype)):
            return dtype
    takes = ", ".join(["None", *(f'{dtype} ("{dtype_name(dtype)}")' for dtype in allowed)])
    raise ValueError(f"{argument} is {short_repr(value)}: it must be one of {takes}")
