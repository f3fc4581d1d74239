"""Triton's interpreter without redundant work, as the tests run it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Remove three quarters of the time of an interpreted kernel.

    At every call between jit functions, the interpreter searches and patches all of Triton's language again. Here such
    a call reuses the patch of the launch, which also undoes it.

    The interpreter also checks integer sums and products for overflow. These checks only feed assertions that are off
    (``debug`` is off), so they are switched off, too.

    The shape, name and NumPy dtype of a tensor type are computed once per type instead of once per operation.
    """
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()

    @cache
    def languages(fn: Callable[..., Any]) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patched(fn: Callable[..., Any]) -> Any:
        return patch(fn) if any(tl.core.is_builtin(language.load) for language in languages(fn)) else nothing

    interpreter._patch_lang = patched
    interpreter._patch_attr = patch_attr
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    cache_types()


def patch_attr(language: Any, name: str, member: Callable[..., Any], _builder: Any, scope: Any) -> None:
    """Replace a builtin of Triton's language by the interpreter's, without the builtin's own check of its caller."""
    function = inspect.unwrap(member)

    def interpreted(*arguments: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*arguments, **options, _semantic=interpreter.interpreter_semantic)

    scope.set_attr(language, name, interpreted)


def cache_types() -> None:
    """Compute the fields of a block type, the shape of a tensor and the NumPy dtype of a type once each."""
    init_block, numpy_dtype = tl.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
    dtypes: dict[str, Any] = {}

    def init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    @cache
    def tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensor_shape(tuple(type.shape.values) if type.is_block() else ())

    def numpy_dtype_once(type: Any) -> Any:
        element = type.scalar
        if element.name not in dtypes:
            dtypes[element.name] = numpy_dtype(element)
        return dtypes[element.name]

    tl.block_type.__init__, tl.tensor.__init__ = init_block_once, init_tensor
    interpreter._get_np_dtype = numpy_dtype_once
