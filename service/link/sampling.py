"""Sampling fields: what a request may give, what the engine gets, and the columns of its slots' tables. Torch-free.

To add a filter: a field of SamplingOptions and of SamplingParams, a term of needs_penalties_or_filters, a FloatColumn
(or an IntColumn of service/engine/chat/slot_state.py) of the same name, and what it does:
service/engine/chat/sampler.py and its kernel in step_kernels.py.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, get_args, get_type_hints

import msgspec
from msgspec import Meta

MAX_STOP_IDS = 32
MAX_BIASES = 320
"""Columns of the slots' tables (slot_state.py). OpenAI's clients may bias 300 tokens."""
MAX_BIAS = 100
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5
"""Below it, as without any, the best token is drawn: logits are divided by it."""
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: by far smaller ones they would become infinite."""

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters. Those left out are as the checkpoint's generation_config.json says, or else neutral."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class SamplingParams(msgspec.Struct, frozen=True):
    """How the engine chooses tokens. Neutral values switch a filter off: temperature 0 is greedy, top_p 1, top_k below
    1, min_p 0."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of top alternatives to report for each token; 0 reports the chosen token alone."""
    hidden: bool = False
    """Whether the first delta has the hidden vector of the prompt's last position."""

    @property
    def needs_penalties_or_filters(self) -> bool:
        """Whether this is anything but greedy and plain temperature."""
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        biased = bool(self.logit_bias) or self.min_tokens > 0
        return (filtered and not self.greedy) or penalised or biased or self.logprobs is not None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def floats(self) -> list[float]:
        """A row of the slots' float32 table: the values of the FloatColumns."""
        row = [getattr(self, column.name.lower()) for column in FloatColumn]
        row[FloatColumn.TEMPERATURE] = 0.0 if self.greedy else self.temperature
        return row


class FloatColumn(IntEnum):
    """Columns of the slots' float32 table, each named as its field of SamplingParams."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION_PENALTY = 3
    PRESENCE_PENALTY = 4
    FREQUENCY_PENALTY = 5


BOUNDS: dict[str, tuple[float, float]] = {
    name: (meta.ge, meta.le)
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items()
    for meta in get_args(get_args(hint)[0])[1:]
}


def sampling_problem(sampling: SamplingParams, vocab_size: int) -> tuple[str, str] | None:
    """Field and message of the first value that is out of range or does not fit the slots' tables."""
    if sampling.max_tokens < 1:
        return "max_tokens", f"max_tokens is {sampling.max_tokens}, expected at least 1"
    for name, given, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_IDS),
        ("logit_bias", len(sampling.logit_bias), MAX_BIASES),
    ):
        if given > most:
            return name, f"{name}: {given} tokens given, at most {most} allowed"
    if any(not 0 <= token < vocab_size for token in sampling.logit_bias):
        return "logit_bias", f"a token id is outside the vocabulary of {vocab_size}"
    if not all(abs(bias) <= MAX_BIAS for bias in sampling.logit_bias.values()):
        return "logit_bias", f"a bias is not a number from {-MAX_BIAS} to {MAX_BIAS}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        return "top_logprobs", f"top_logprobs is {sampling.logprobs}, expected 0 to {MAX_LOGPROBS}"
    for name, (low, high) in BOUNDS.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            return name, f"{name} is {value}, expected {low} to {high}"
    return None
