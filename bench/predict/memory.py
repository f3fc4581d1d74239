"""How much memory a rank needs: its own tensors, and the slots of a ring, which do not grow with the ranks."""

from __future__ import annotations

from dataclasses import replace

from ...ring.schedule import BASE_SLOTS, RAIL_SLOTS, SUMS_SLOTS
from .call import DTYPES, Call

FP32 = 4


def memory(call: Call, *, training: bool = True) -> dict[str, float]:
    """Bytes of a rank by what they are for; of the activations of one attention alone."""
    size, tokens = DTYPES[call.dtype].itemsize, call.batch * call.tokens
    row, kv_row = call.heads * call.head_dim, 2 * call.kv_heads * call.head_dim
    levels = 2 if call.is_two_level else 1
    slots = call.slots + (BASE_SLOTS if levels == 2 else 0)
    wire = call.form.wire
    shape = (call.batch, call.tokens, call.kv_heads, call.head_dim)
    specs = [((), DTYPES[call.dtype])] if wire is None else wire.specs(shape)
    travelling = tokens * kv_row * size if wire is None else 2 * sum(_nbytes(spec) for spec in specs)
    found = {
        "q, k, v and out": tokens * (2 * row + kv_row) * size + tokens * call.heads * FP32,
        "state, fp32": float(tokens * row * FP32),
        "K/V slots": (slots if call.world > 1 else 0) * travelling,
    }
    if training:
        sums = SUMS_SLOTS + (RAIL_SLOTS if levels == 2 else 0)
        found["gradients"] = tokens * (2 * row + kv_row) * size
        found["slots of sums, fp32"] = (sums if call.world > 1 else 0) * tokens * kv_row * FP32
    return {name: float(nbytes) for name, nbytes in found.items()}


def _nbytes(spec: object) -> int:
    shape, dtype = spec  # type: ignore[misc]
    count = dtype.itemsize  # type: ignore[has-type]
    for length in shape:  # type: ignore[has-type]
        count *= length
    return int(count)


def most_tokens(call: Call, capacity: float, *, training: bool = True) -> int:
    """Tokens per rank that fit into so many bytes: what is needed is in proportion to them."""
    needed = sum(memory(replace(call, tokens=1024), training=training).values()) / 1024
    return int(capacity / needed)


def check(call: Call, capacity: float, *, training: bool = True) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: with the tokens that do.
    """
    needed = sum(memory(call, training=training).values())
    if needed > capacity:
        fits = most_tokens(call, capacity, training=training)
        raise ValueError(
            f"{call.tokens:,} tokens per GPU need {needed / 1e9:.1f} GB for this attention alone, the GPU has "
            f"{capacity / 1e9:.1f}: at most {fits:,} fit"
        )
