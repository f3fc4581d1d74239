"""Compile a variant of any kernel and ask its gate: what ``inspect`` and ``tune`` have in common."""

from __future__ import annotations

from typing import Any

from .compiled import Compiled, compile_variant, problems
from .variant import Variant


def compile_and_ask(variant: Variant, source: Any = None) -> tuple[Compiled, list[str]]:
    """What the compiler made of a variant, and what keeps it from being launched or fast; none where it passes.

    Args:
        source: specialised otherwise than by :func:`arguments.ast_source` (of Gluon: ``gluon_source`` of its module).

    Raises:
        ValueError: the kernel is not written for this variant.
        RuntimeError: Triton or ptxas refuses it.
    """
    if dict(variant.options).get("forward_kernel") == "hopper":
        from . import hopper as compiled_hopper  # Gluon takes a while to import, and only this kernel needs it

        compiled, ptx = compiled_hopper.compile_hopper(variant, source)
        return compiled, compiled_hopper.faults(variant, compiled, ptx)
    if dict(variant.options).get("backward") == "hopper":
        from . import hopper_backward

        compiled, ptx = hopper_backward.compile_hopper_backward(variant, source)
        return compiled, hopper_backward.faults(variant, compiled, ptx)
    compiled = compile_variant(variant, source)
    return compiled, problems(variant, compiled)
