"""Triton's interpreter as the tests run it: as it is, but patched once per launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Let a launch patch Triton's language once.

    The interpreter patches it again at every call of one jit function from another, for which it looks through all of
    the language: half of the time of our kernels there. Here such a call finds it patched. A launch still restores what
    it has patched.
    """
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patched(fn: Callable[..., Any]) -> Any:
        return patch(fn) if any(tl.core.is_builtin(language.load) for language in languages(fn)) else nothing

    interpreter._patch_lang = patched
