"""Triton's interpreter, without the work that it repeats for each operation of a kernel.

It goes through its whole language at every launch, and at every call of a function from a kernel, to replace what is
replaced already, wraps the shape of every value and spells the name of its type anew, and computes integers a second
time to see whether they overflow, which at the sizes of tests would show in the results. Kernels compute the same
without that, in little more than half of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

INSIDES = ("interpreter_semantic", "_LangPatchScope", "_patch_attr", "_patch_lang")
"""Of triton.runtime.interpreter, as far as they are replaced or used here."""


@cache
def quicken() -> None:
    """From now on, in this process. A Triton that has other insides is left as it is, and slow."""
    from triton.language import core
    from triton.runtime import interpreter

    if all(hasattr(interpreter, name) for name in INSIDES):
        _call_straight(interpreter, core)
        _replace_language_once(interpreter, core)
        _wrap_shapes_once(core)
        if options := getattr(interpreter.interpreter_builder, "options", None):
            object.__setattr__(options, "sanitize_overflow", False)


def _replace_language_once(interpreter: Any, core: Any) -> None:
    """Functions of the language are replaced for good, by the first call of a kernel that sees them: each launch would
    replace all of them and put them back, and so would each call of a function from a kernel, those of `core`."""
    replace = interpreter._patch_lang
    replaced: set[bool] = set()

    @cache
    def seen_by(function: Callable[..., Any]) -> frozenset[bool]:
        return frozenset(one is core for one in function.__globals__.values() if one is core or one is interpreter.tl)

    def replace_once(function: Callable[..., Any]) -> Any:
        if not seen_by(function) <= replaced:
            replace(function)
            replaced.update(seen_by(function))
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


def _wrap_shapes_once(core: Any) -> None:
    """Types of one shape share it, and with it what tensors of the type show as theirs."""
    make_type = core.block_type.__init__

    @cache
    def checked(shape: tuple[int, ...]) -> Any:
        of_type = core.block_type.__new__(core.block_type)
        make_type(of_type, core.int32, list(shape))
        of_type.shape.wrapped = core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))
        return of_type.shape, of_type.numel

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if all(type(size) is int for size in shape):
            self.shape, self.numel = checked(tuple(shape))
            self.element_ty = element_ty
        else:
            make_type(self, element_ty, shape)

    def with_element_type(self: Any, element_ty: Any) -> Any:
        made = core.block_type.__new__(core.block_type)
        made.shape, made.numel, made.element_ty = self.shape, self.numel, element_ty
        return made

    # What a type is called is asked for in messages alone.
    name = cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(core.block_type, "name")

    def make(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar
        elif "wrapped" in vars(type.shape):
            self.shape, self.numel = type.shape.wrapped
        else:
            make_tensor(self, handle, type)

    make_tensor, scalar = core.tensor.__init__, (core.tuple([]), core.constexpr(1))
    core.tensor.__init__, core.block_type.__init__ = make, make_block_type
    core.block_type.with_element_ty, core.block_type.name = with_element_type, name


def _call_straight(interpreter: Any, core: Any) -> None:
    """Functions of the language get their semantic in one step, without a look at whether they got it."""
    wrapper = core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch
