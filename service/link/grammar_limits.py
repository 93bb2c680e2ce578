"""Budgets of a grammar, in the API process that checks it and in the engine that runs it. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_GRAMMAR_BYTES = 64 << 10
"""Bytes of a grammar in its JSON form, with which the cost of building it and of computing a mask grows."""
WHITESPACE = r"(?: |\n {0,16})?"
"""White space between JSON's tokens: a blank, or an indented new line. A model that could choose blanks for ever might
not end."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
"""llguidance.LLParserLimits. A lexer's state takes 1 to 2 kB; fuel is burnt at about 14,000 units a millisecond."""
SLOW_SECONDS = 0.1
"""A grammar whose check takes more processor time than this is slow: the engine builds it apart from the others. Usual
schemas take a few milliseconds."""
_STACK_BYTES = 64 << 20
"""Stack of a thread that builds grammars or computes masks: the library descends into references by recursion."""
CHECK_STACK_BYTES = 6 << 20
"""Stack of a thread that checks a grammar: a grammar that does not overflow it is far from overflowing a thread of the
engine. The deepest grammars that the rules of service/api/structured/grammar.py let through take less than 4 MiB."""
CHECK_LIMITS: dict[str, Any] = {name: value // 2 if type(value) is int else value for name, value in LIMITS.items()}
"""Budgets of a check: half of the engine's budgets for the same work."""


def deep_executor(name: str) -> ThreadPoolExecutor:
    """One thread with a large stack. It is started at once, since the size is set when a thread starts."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _deep_stacks():
        executor.submit(int)
    return executor


def deep_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A started thread with a large stack. The interpreter does not wait for its end."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _deep_stacks():
        thread.start()
    return thread


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Sets the stack size of threads that start inside the context."""
    usual = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(usual)
