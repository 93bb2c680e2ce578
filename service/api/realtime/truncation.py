"""`truncation`: leaves out the oldest turns of a request that does not fit the context, or a smaller KV cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from service.api.chat.job import ChatJob
from service.api.chat.schema import ChatRequestBody, Message
from service.api.http.errors import ApiError
from service.api.realtime.session_config import RetentionRatio

ANSWER_SHARE, LARGEST_SHARE = 8, 2
"""These fractions (1 / n) of the context are kept free for an answer without max_output_tokens, and at most for one
with."""
Attempt = Callable[[ChatRequestBody], Awaitable[ChatJob]]


@dataclass(frozen=True)
class _Room:
    """Limits of a prompt. beside: its tokens that do not belong to the conversation. most: limit of the conversation's
    tokens, if it is lower than what the context can hold with an answer."""

    beside: int = 0
    most: int | None = None

    def holds(self, job: ChatJob, body: ChatRequestBody, share: float = 1.0) -> bool:
        """share: fraction of the allowed tokens."""
        context = job.max_model_len
        answer = min(body.max_completion_tokens or context // ANSWER_SHARE, context // LARGEST_SHARE)
        allowed = context - answer - self.beside
        allowed = allowed if self.most is None else min(allowed, self.most)
        return len(job.prompt.token_ids) - self.beside <= share * allowed


async def truncated(body: ChatRequestBody, attempt: Attempt, ratio: RetentionRatio | None) -> tuple[ChatJob, int]:
    """The job with as many of the last turns as fit, and how many turns were left out. ratio: the share of the allowed
    tokens that is kept of a conversation that does not fit. ApiError if even the last turn does not fit."""
    limits = None if ratio is None else ratio.token_limits
    room = _Room(most=None if limits is None else limits.post_instructions)
    job = await _fitting(body, attempt, room)
    if job is not None:
        return job, 0
    messages = body.messages
    instructions = 1 if messages[0].role == "system" else 0
    share = 1.0
    if ratio is not None:
        share, room = ratio.retention_ratio, _Room(await _beside(body, instructions, attempt), room.most)
        if room.most is not None and (job := await _fitting(body, attempt, room)) is not None:
            return job, 0
    starts = turn_starts(messages)
    turns = [n for n in starts if n > instructions]
    if not turns:
        return await attempt(body), 0
    first, last = 0, len(turns) - 1
    while first < last:
        middle = (first + last) // 2
        if await _fitting(_from(body, instructions, turns[middle]), attempt, room, share) is None:
            first = middle + 1
        else:
            last = middle
    # With only the last turn, the answer may be short, or the error says what does not fit.
    return await attempt(_from(body, instructions, turns[first])), starts.index(turns[first])


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """Places where the conversation may begin: at the user's messages. Calls and their results stay together."""
    return [n for n, message in enumerate(messages) if message.role == "user"]


def _from(body: ChatRequestBody, instructions: int, start: int) -> ChatRequestBody:
    messages = [*body.messages[:instructions], *body.messages[start:]]
    return msgspec.structs.replace(body, messages=messages)


async def _beside(body: ChatRequestBody, instructions: int, attempt: Attempt) -> int:
    """Tokens of the instructions, the tools and what the template puts around an empty message."""
    nothing = [*body.messages[:instructions], Message("user", "")]
    job = await attempt(msgspec.structs.replace(body, messages=nothing))
    return len(job.prompt.token_ids)


async def _fitting(body: ChatRequestBody, attempt: Attempt, room: _Room, share: float = 1.0) -> ChatJob | None:
    """None if there is no room for the prompt and an answer."""
    try:
        job = await attempt(body)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    return job if room.holds(job, body, share) else None
