"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from service.api.chat.detokenizer import joined
from service.api.chat.job import ChatJob, generate, prepare_job, tried_again
from service.api.chat.schema import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequestBody,
    Choice,
    ChunkChoice,
    DeltaMessage,
    FinishReason,
    Logprobs,
    StreamOptions,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    reasoned,
)
from service.api.chat.spoken import SpokenAnswer, prepare_spoken
from service.api.context import ServerContext, post
from service.api.http.middleware import RequestRecord, record_of
from service.api.http.streaming import DONE, event, event_stream, unless_disconnected
from service.system.concurrency import all_results, merged

router = APIRouter()


SUMMARY = "Create a chat completion; messages may have images and videos."


@post(router, "/v1/chat/completions", SUMMARY, ChatRequestBody, ChatCompletion, events=(ChatCompletionChunk,))
async def chat_completions(
    request: Request, context: ServerContext, body: ChatRequestBody
) -> Response | ChatCompletion:
    record = record_of(request.scope)
    async with asyncio.timeout(context.settings.request_timeout):
        job, spoken = await unless_disconnected(request, _prepared(context, body, record))
    if body.stream:
        events = _events(context, job, spoken, body.stream_options or StreamOptions())
        return event_stream(events, context.settings)
    return await unless_disconnected(request, _complete(context, job, spoken))


async def _prepared(
    context: ServerContext, body: ChatRequestBody, record: RequestRecord
) -> tuple[ChatJob, SpokenAnswer | None]:
    spoken = await prepare_spoken(context, body, record) if body.asks_for_speech else None
    return await prepare_job(context, body, record), spoken


async def _complete(context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None) -> ChatCompletion:
    choices = await all_results([_choice(context, job, spoken, index) for index in range(len(job.sampling))])
    return ChatCompletion(
        job.id,
        job.created,
        job.model.name,
        choices,
        _usage(job, spoken),
        steps=job.steps(),
        unenforced=job.unenforced,
    )


def _usage(job: ChatJob, spoken: SpokenAnswer | None) -> Usage:
    return job.usage(0 if spoken is None else spoken.patches)


async def _choice(context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None, index: int) -> Choice:
    collect = partial(_collected, context, job, spoken, index)
    return await (collect() if spoken is not None else tried_again(context, job, index, collect))


async def _collected(context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None, index: int) -> Choice:
    content: list[str] = []
    reasoning: list[str] = []
    logprobs: list[TokenLogprob] = []
    calls: list[ToolCallDelta] = []
    finish_reason: FinishReason | None = None
    generated = generate(context, job, index)
    async with aclosing(generated if spoken is None else spoken.heard(generated)) as deltas:
        async for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            logprobs += delta.logprobs
            calls += delta.calls
            finish_reason = delta.finish_reason or finish_reason
    assert finish_reason is not None
    thoughts, text = "".join(reasoning), "".join(content)
    silent = bool(calls) or (job.tools is not None and job.tools.forced)
    message = AnswerMessage(
        text or None if silent else text, tool_calls=joined(calls) if calls else UNSET, **reasoned(thoughts)
    )
    if spoken is not None:
        audio = await spoken.audio(text) if text or not calls else UNSET
        message = msgspec.structs.replace(message, content=None, audio=audio)
        finish_reason = "length" if spoken.cut else finish_reason
    return Choice(index, message, _logprobs(job, logprobs), finish_reason)


def _logprobs(job: ChatJob, entries: Sequence[TokenLogprob]) -> Logprobs | None:
    return None if job.sampling[0].logprobs is None else Logprobs(list(entries))


async def _events(
    context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None, options: StreamOptions
) -> AsyncGenerator[bytes]:
    usage = None if options.include_usage else UNSET
    template = ChatCompletionChunk(job.id, job.created, job.model.name, [], usage)

    def chunk(choice: ChunkChoice) -> bytes:
        current = _usage(job, spoken) if options.continuous_usage_stats else usage
        return event(msgspec.structs.replace(template, choices=[choice], usage=current))

    answer = _text_events(context, job, chunk) if spoken is None else spoken.events(generate(context, job, 0), chunk)
    async with aclosing(answer) as events:
        async for data in events:
            yield data
    if options.include_usage:
        report = msgspec.structs.replace(
            template, usage=_usage(job, spoken), steps=job.steps(), unenforced=job.unenforced
        )
        yield event(report) + DONE
    else:
        yield DONE


async def _text_events(
    context: ServerContext, job: ChatJob, chunk: Callable[[ChunkChoice], bytes]
) -> AsyncGenerator[bytes]:
    """Events of all choices, in the order of their deltas. chunk: writes an event."""
    begun = [False] * len(job.sampling)
    first = DeltaMessage(role="assistant", content=None if job.tools and job.tools.forced else "")
    choices = [generate(context, job, index) for index in range(len(job.sampling))]
    async with aclosing(merged(choices)) as deltas:
        async for index, text in deltas:
            events: list[bytes] = []
            if not begun[index]:
                begun[index] = True
                events.append(chunk(ChunkChoice(index, first)))
            if text.content or text.reasoning or text.logprobs:
                delta = DeltaMessage(content=text.content or UNSET, **reasoned(text.reasoning))
                events.append(chunk(ChunkChoice(index, delta, _logprobs(job, text.logprobs))))
            events += [chunk(ChunkChoice(index, DeltaMessage(tool_calls=[call]))) for call in text.calls]
            if text.finish_reason is not None:
                events.append(chunk(ChunkChoice(index, DeltaMessage(), finish_reason=text.finish_reason)))
            if events:  # sent together: one packet, not two or three
                yield b"".join(events)
