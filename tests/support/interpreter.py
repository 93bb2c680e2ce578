"""Triton's interpreter, without the work that it repeats for each operation of a kernel.

It goes through its whole language at every launch, and at every call of a function from a kernel, to replace what is
replaced already, and computes integers a second time to see whether they overflow, which at the sizes of tests would
show in the results. Kernels compute the same without that, in half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

INSIDES = ("_LangPatchScope", "_patch_lang")
"""Of triton.runtime.interpreter, as far as they are replaced or used here."""


@cache
def quicken() -> None:
    """From now on, in this process. A Triton that has other insides is left as it is, and slow."""
    from triton.language import core
    from triton.runtime import interpreter

    if all(hasattr(interpreter, name) for name in INSIDES):
        _replace_language_once(interpreter, core)
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
