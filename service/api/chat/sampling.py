"""Fields of a chat request -> SamplingParams. Defaults come from the checkpoint's generation_config.json."""

from __future__ import annotations

import hashlib
import secrets

from models.interfaces.processor import ChatProcessor
from service.api.chat.schema import ChatRequestBody
from service.api.http.errors import bad_request
from service.link.messages import SamplingParams
from service.link.sampling_limits import MIN_TEMPERATURE
from service.settings.settings import Settings

MAX_STOP_LENGTH = 1000


def stop_strings(body: ChatRequestBody) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    for stop in stops:
        if not stop or len(stop) > MAX_STOP_LENGTH:
            message = f"stop: a string of {len(stop)} characters given, 1 to {MAX_STOP_LENGTH} characters allowed."
            raise bad_request(message, "stop")
    return stops


def choice_count(body: ChatRequestBody, most: int) -> int:
    """`n`, at most `most`."""
    count = body.n or 1
    if count > most:
        raise bad_request(f"n: too many choices: {count} given, at most {most} allowed.", "n")
    return count


def sampling_params(
    body: ChatRequestBody, processor: ChatProcessor, prompt_tokens: int, max_model_len: int, settings: Settings
) -> SamplingParams:
    """Parameters of the first choice. ApiError 400 names the field that does not fit the model or the prompt.

    max_model_len: tokens that prompt and answer may have together; max_tokens is reduced to what the prompt leaves.
    """
    room = _room(processor, prompt_tokens, max_model_len)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: requires logprobs: true.", "top_logprobs")
    min_tokens = body.min_tokens or 0
    default = max(room, min_tokens)
    max_tokens = min(body.max_completion_tokens or body.max_tokens or default, room, settings.max_output_tokens or room)
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens: too high: {min_tokens} given, the completion can have at most {max_tokens} tokens.",
            "min_tokens",
        )
    _check_token_ids(body, processor)
    own_stops = frozenset() if body.ignore_eos else processor.stop_token_ids

    def pick(field: str, default: float) -> float:
        """The request's value, else the checkpoint's, else `default`."""
        value = getattr(body, field)
        return float(processor.generation_defaults.get(field, default) if value is None else value)

    temperature = pick("temperature", 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=pick("top_p", 1.0),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=pick("min_p", 0.0),
        repetition_penalty=pick("repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted(own_stops | set(body.stop_token_ids or ()))),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _room(processor: ChatProcessor, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that are left for the completion. ApiError 400 if there is none."""
    room = max_model_len - prompt_tokens
    if room < 1:
        because = ", which is what the KV cache holds" if max_model_len < processor.context_length else ""
        raise bad_request(
            f"messages: the prompt is too long: this model's maximum context length is {max_model_len} tokens"
            f"{because}; the prompt takes {prompt_tokens} tokens, media included, and the answer needs at least one.",
            "messages",
            "context_length_exceeded",
        )
    return room


def _check_token_ids(body: ChatRequestBody, processor: ChatProcessor) -> None:
    for field, ids in (("logit_bias", body.logit_bias or {}), ("stop_token_ids", body.stop_token_ids or ())):
        if ids and max(ids) >= processor.vocab_size:
            largest = processor.vocab_size - 1
            raise bad_request(f"{field}: token id out of range: {max(ids)} given, at most {largest} allowed.", field)


def derived_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, independent ones for the others."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
