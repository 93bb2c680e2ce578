"""Fields of a chat request -> SamplingParams. What a client omits follows the checkpoint's generation_config.json."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from models.processor import ChatProcessor
from service.api.errors import bad_request
from service.api.schema import REFUSED, ChatRequestBody
from service.engine.messages import SamplingParams
from service.settings import Settings

MAX_STOP_LENGTH = 1000


def refuse_unsupported(body: ChatRequestBody) -> None:
    """400 that names the first field that would change the answer and is not honoured."""
    for field, neutral in REFUSED.items():
        value = getattr(body, field)
        if value is not None and not any(value == harmless for harmless in neutral):
            raise bad_request(f"{field}: not supported by this server.", field, "unsupported_parameter")


def stop_strings(body: ChatRequestBody) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if any(not stop or len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise bad_request(f"stop: each string needs 1 to {MAX_STOP_LENGTH} characters.", "stop")
    return stops


def answers(body: ChatRequestBody, settings: Settings) -> int:
    """How many answers the request wants."""
    count = body.n or 1
    if count > settings.max_n:
        raise bad_request(f"n: at most {settings.max_n} answers can be asked for.", "n")
    return count


def sampling_params(
    body: ChatRequestBody, processor: ChatProcessor, prompt_tokens: int, settings: Settings
) -> SamplingParams:
    """Parameters of the first answer; ApiError 400 names the field that does not fit the model or the prompt.

    The answer ends at the context's end, also when max_tokens lies behind it.
    """
    room = processor.context_length - prompt_tokens
    if room < 1:
        raise bad_request(
            f"messages: the prompt has {prompt_tokens} tokens, media included; the model's context has "
            f"{processor.context_length}, and an answer needs at least one.",
            "messages",
            "context_length_exceeded",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs: needs logprobs: true.", "top_logprobs")
    asked = body.max_completion_tokens or body.max_tokens or settings.default_output_tokens or room
    max_tokens = min(asked, room, settings.max_output_tokens or room)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"min_tokens: more than the {max_tokens} tokens that the answer may have.", "min_tokens")
    for field, ids in (("logit_bias", body.logit_bias or {}), ("stop_token_ids", body.stop_token_ids or ())):
        if any(token >= processor.vocab_size for token in ids):
            raise bad_request(f"{field}: token ids end at {processor.vocab_size - 1}.", field)
    own_stops = frozenset() if body.ignore_eos else processor.stop_token_ids

    def pick(field: str, default: Any) -> Any:
        value = getattr(body, field)
        return processor.generation_defaults.get(field, default) if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=float(pick("temperature", 1.0)),
        top_p=float(pick("top_p", 1.0)),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=float(pick("min_p", 0.0)),
        repetition_penalty=float(pick("repetition_penalty", 1.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted(own_stops | set(body.stop_token_ids or ()))),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def derived_seed(seed: int, index: int) -> int:
    """Seed of answer `index`: the request's own for the first, independent ones for the others."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
