"""Limits of sampling parameters, and which of them need the sampler with penalties and filters. Torch-free."""

from __future__ import annotations

from service.link.messages import SamplingParams

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
