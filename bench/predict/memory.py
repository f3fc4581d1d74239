"""How much memory a rank needs: its own tensors, and the slots of a ring, which do not grow with the ranks."""

from __future__ import annotations

from dataclasses import replace

from ..common.attention import AttentionConfig
from ..common.memory_table import RingForm, ring_parts
from .call import Call


def memory(call: Call) -> dict[str, int]:
    """Bytes of a rank by what they are for, at the peak of a forward and backward of one attention alone."""
    return ring_parts(problem_of(call), form_of(call))


def form_of(call: Call) -> RingForm:
    """What its ring takes depends on."""
    return RingForm(call.is_two_level, call.slots, call.wire_dtype, call.grad_wire_dtype)


def problem_of(call: Call) -> AttentionConfig:
    """The call as ``bench ring`` and ``bench memory`` count it."""
    return AttentionConfig(
        call.seqlen, call.world, call.batch, call.heads, call.kv_heads, call.head_dim, call.dtype, call.mask.causal,
        call.layout,
    )  # fmt: skip


def most_tokens(call: Call, capacity: float) -> int:
    """Tokens per rank that fit into so many bytes: what is needed is in proportion to them."""
    needed = sum(memory(replace(call, tokens=1024)).values()) / 1024
    return int(capacity / needed)


def check(call: Call, capacity: float) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: with the tokens that do.
    """
    needed = sum(memory(call).values())
    if needed > capacity:
        fits = most_tokens(call, capacity)
        raise ValueError(
            f"{call.tokens:,} tokens per GPU need {needed / 1e9:.1f} GB for this attention alone, the GPU has "
            f"{capacity / 1e9:.1f}: at most {fits:,} fit"
        )
