"""Limits of sampling parameters, and which of them need the sampler with penalties and filters. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from service.link.messages import SamplingParams

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
engine."""
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


LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Of float32, the slots' table's type (slot_state.py)."""
MAX_STOP_IDS = 32
MAX_BIASES = 320
"""Columns of the slots' tables (slot_state.py). OpenAI's clients may bias 300 tokens."""
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: by far smaller ones they would become infinite."""
MIN_TEMPERATURE = 1e-5
"""Below it, as without any, the best token is drawn: logits are divided by it, too."""


def needs_penalties_or_filters(s: SamplingParams) -> bool:
    """Anything but greedy and plain temperature."""
    filtered = s.temperature > 0 and s.top_k != 1 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
    penalised = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    return filtered or penalised or bool(s.logit_bias) or s.min_tokens > 0 or s.logprobs is not None


def sampling_problem(sampling: SamplingParams, vocab_size: int) -> tuple[str, str] | None:
    """Field and message of the first value that is out of range or does not fit the slot state's tables."""
    if sampling.max_tokens < 1:
        return "max_tokens", f"max_tokens is {sampling.max_tokens}, expected at least 1"
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        return "stop_token_ids", _too_many("stop token ids", len(sampling.stop_token_ids), MAX_STOP_IDS)
    if len(sampling.logit_bias) > MAX_BIASES:
        return "logit_bias", _too_many("biased tokens", len(sampling.logit_bias), MAX_BIASES)
    if any(not 0 <= token < vocab_size for token in sampling.logit_bias):
        return "logit_bias", f"a token id is outside the vocabulary of {vocab_size}"
    if not all(abs(bias) <= LARGEST_FLOAT for bias in sampling.logit_bias.values()):
        return "logit_bias", f"a bias is not a number from {-LARGEST_FLOAT} to {LARGEST_FLOAT}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return "top_logprobs", f"top_logprobs is {sampling.logprobs}, expected 0 to {MAX_LOGPROBS}"
    ranges = {
        "temperature": (0.0, LARGEST_FLOAT),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "top_k": (0, LARGEST_INT),
        "min_tokens": (0, LARGEST_INT),
        "presence_penalty": (-LARGEST_FLOAT, LARGEST_FLOAT),
        "frequency_penalty": (-LARGEST_FLOAT, LARGEST_FLOAT),
        "repetition_penalty": (MIN_REPETITION_PENALTY, LARGEST_FLOAT),
    }
    for name, (low, high) in ranges.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            return name, f"{name} is {value}, expected {low} to {high}"
    return None


def _too_many(what: str, given: int, most: int) -> str:
    return f"too many {what}: {given} given, at most {most} allowed"
