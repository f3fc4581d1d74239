"""Triton's interpreter as the tests run it: as it is, less what it does again and what it throws away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Take what two thirds of the time of an interpreted kernel of ours go to out of it.

    The interpreter patches Triton's language again at every call of one jit function from another, for which it looks
    through all of it; here such a call finds it patched by the launch, which restores it as ever. And it computes
    whether each sum and product of integers overflows, for assertions that it does not make (``debug`` is off).
    """
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patched(fn: Callable[..., Any]) -> Any:
        return patch(fn) if any(tl.core.is_builtin(language.load) for language in languages(fn)) else nothing

    interpreter._patch_lang = patched
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
