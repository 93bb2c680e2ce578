"""`truncation: auto`: the oldest turns are left out of a request that the model's context does not hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from service.api.chat.route import ChatJob
from service.api.chat.schema import ChatRequestBody, Message
from service.api.http.errors import ApiError

ANSWER_SHARE = 8
"""One in so many positions of the context is kept free for an answer without max_output_tokens."""
Attempt = Callable[[ChatRequestBody], Awaitable[ChatJob]]


async def truncated(body: ChatRequestBody, attempt: Attempt) -> ChatJob:
    """The job with as many of the last turns as fit. ApiError when the last one alone does not."""
    job = await _fitting(body, attempt)
    if job is not None:
        return job
    messages = body.messages
    instructions = 1 if messages[0].role == "system" else 0
    turns = [n for n in turn_starts(messages) if n > instructions]
    first, last = 0, len(turns) - 1
    while first < last:
        middle = (first + last) // 2
        if await _fitting(_from(body, instructions, turns[middle]), attempt) is None:
            first = middle + 1
        else:
            last = middle
    # With the last turn alone the answer may be short, or the error say what does not fit.
    return await attempt(_from(body, instructions, turns[first]) if turns else body)


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Places where the conversation may begin: with what a user says. Calls and their results stay together."""
    return [n for n, message in enumerate(messages) if message.role == "user"]


def _from(body: ChatRequestBody, instructions: int, start: int) -> ChatRequestBody:
    messages = [*body.messages[:instructions], *body.messages[start:]]
    return msgspec.structs.replace(body, messages=messages)


async def _fitting(body: ChatRequestBody, attempt: Attempt) -> ChatJob | None:
    """None when the context does not hold the prompt and an answer."""
    try:
        job = await attempt(body)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    context = job.model.chat_processor.context_length
    answer = min(body.max_completion_tokens or context, context // ANSWER_SHARE)
    return job if len(job.prompt.token_ids) + answer <= context else None
