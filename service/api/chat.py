"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from models.media import Prompt
from service.api.context import ServerContext, context_of
from service.api.decoding import parse
from service.api.inputs import build_prompt, is_small, media_tokens, opens_reasoning
from service.api.openapi import JSON, WORK_ERRORS, operation
from service.api.record import CLIENT_CLOSED, RequestRecord, record_of
from service.api.routing import RequestRoute
from service.api.sampling import answers, derived_seed, refuse_unsupported, sampling_params, stop_strings
from service.api.schema import (
    UNSET,
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequestBody,
    Choice,
    ChunkChoice,
    CompletionTokensDetails,
    DeltaMessage,
    Logprobs,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from service.api.streaming import (
    DONE,
    EVENT_STREAM,
    KEEP_ALIVE,
    ClientLeft,
    LiveResponse,
    error_event,
    event,
    unless_disconnected,
)
from service.api.text import FinishReason, TextAssembler, TextDelta, TokenLogprob
from service.catalog import HostedModel
from service.engine.messages import ChatRequest, SamplingParams

router = APIRouter(route_class=RequestRoute)

LARGE_BODY = 1 << 18
"""Bytes above which a body is parsed in a thread."""


@dataclass
class Progress:
    """Counts of one answer."""

    tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0


@dataclass(eq=False)
class ChatJob:
    """A request that is ready for the engine, and what its answers have used so far."""

    id: str
    created: int
    model: HostedModel
    prompt: Prompt
    sampling: tuple[SamplingParams, ...]
    stops: tuple[str, ...]
    record: RequestRecord
    progress: list[Progress] = field(default_factory=list)

    def usage(self) -> Usage:
        prompt_tokens = len(self.prompt.token_ids)
        completion_tokens = sum(answer.tokens for answer in self.progress)
        kinds = media_tokens(self.prompt)
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(
                max(answer.cached_tokens for answer in self.progress), kinds["text"], kinds["image"], kinds["video"]
            ),
            CompletionTokensDetails(sum(answer.reasoning_tokens for answer in self.progress)),
        )


@router.post(
    "/v1/chat/completions",
    openapi_extra=operation(
        "Answer a conversation about images and videos.",
        {JSON: ChatCompletion},
        events=(ChatCompletionChunk,),
        errors=WORK_ERRORS,
        body={JSON: ChatRequestBody},
    ),
)
async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    context.require_ready()
    raw = await request.body()
    await context.turns.mine()
    body = await (context.in_thread(lambda: _parse(raw)) if len(raw) > LARGE_BODY else _parse_here(raw))
    record = record_of(request.scope)
    try:
        async with asyncio.timeout(context.settings.request_timeout):
            preparing = _prepare(context, body, record)
            # What does not wait needs nobody who watches the client meanwhile.
            job = await (preparing if is_small(body.messages) else unless_disconnected(request, preparing))
            if body.stream:
                return _stream(context, job, body.stream_options or StreamOptions())
            completion = await unless_disconnected(request, _complete(context, job))
    except ClientLeft:
        record.outcome = "aborted"
        return Response(status_code=CLIENT_CLOSED)  # nobody reads it
    return Response(msgspec.json.encode(completion), media_type="application/json")


def _parse(raw: bytes) -> ChatRequestBody:
    body: ChatRequestBody = parse(raw, ChatRequestBody)
    return body


async def _parse_here(raw: bytes) -> ChatRequestBody:
    return _parse(raw)


async def _prepare(context: ServerContext, body: ChatRequestBody, record: RequestRecord) -> ChatJob:
    model = context.model(body.model, "chat", record)
    refuse_unsupported(body)
    stops = stop_strings(body)
    count = answers(body, context.settings)
    record.ticket.grow(count - 1)
    prompt = await build_prompt(context, model, body, record.ticket)
    first = sampling_params(body, model.chat_processor, len(prompt.token_ids), context.settings)
    sampling = tuple(msgspec.structs.replace(first, seed=derived_seed(first.seed, index)) for index in range(count))
    record.notes["prompt_tokens"] = len(prompt.token_ids)
    id = f"chatcmpl-{uuid.uuid4().hex}"
    return ChatJob(id, int(time.time()), model, prompt, sampling, stops, record, [Progress() for _ in sampling])


async def _answer(context: ServerContext, job: ChatJob, index: int) -> AsyncGenerator[TextDelta]:
    """One answer, piece by piece; the last piece has a finish_reason. Closing it aborts the work."""
    processor, sampling, progress = job.model.chat_processor, job.sampling[index], job.progress[index]
    assembler = TextAssembler(
        processor.detokenize,
        job.stops,
        min_tokens=sampling.min_tokens,
        reasoning_markers=processor.reasoning_markers,
        reasoning_opened=opens_reasoning(processor, job.prompt),
    )
    request = ChatRequest(f"{job.id}-{index}", job.model.name, job.prompt, sampling, job.record.arrival)
    async with aclosing(context.engine.submit(request)) as deltas:
        async for delta in deltas:
            piece = assembler.feed(delta)
            progress.tokens = assembler.tokens
            progress.cached_tokens = max(progress.cached_tokens, delta.cached_tokens)
            progress.reasoning_tokens = assembler.reasoning_tokens
            yield piece
            if piece.finish_reason is not None:
                break
    _finish(context, job, index)


def _finish(context: ServerContext, job: ChatJob, index: int) -> None:
    context.metrics.observe("request_output_tokens", job.progress[index].tokens, model=job.model.name)
    job.record.notes["tokens"] = sum(answer.tokens for answer in job.progress)


async def _complete(context: ServerContext, job: ChatJob) -> ChatCompletion:
    tasks = [asyncio.ensure_future(_choice(context, job, index)) for index in range(len(job.sampling))]
    try:
        choices = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ChatCompletion(job.id, job.created, job.model.name, choices, job.usage())


async def _choice(context: ServerContext, job: ChatJob, index: int) -> Choice:
    content: list[str] = []
    reasoning: list[str] = []
    logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    async with aclosing(_answer(context, job, index)) as pieces:
        async for piece in pieces:
            content.append(piece.content)
            reasoning.append(piece.reasoning)
            logprobs += piece.logprobs
            finish_reason = piece.finish_reason
    assert finish_reason is not None
    thoughts = "".join(reasoning)
    message = AnswerMessage("".join(content), reasoning_content=thoughts or UNSET)
    return Choice(index, message, _logprobs(job, logprobs), finish_reason)


def _logprobs(job: ChatJob, entries: Sequence[TokenLogprob]) -> Logprobs | None:
    return None if job.sampling[0].logprobs is None else Logprobs(list(entries))


def _stream(context: ServerContext, job: ChatJob, options: StreamOptions) -> Response:
    settings = context.settings
    return LiveResponse(
        _events(context, job, options),
        media_type=EVENT_STREAM,
        timeout=settings.request_timeout,
        write_timeout=settings.write_timeout,
        keep_alive=(settings.keep_alive, KEEP_ALIVE),
        on_error=error_event,
    )


async def _events(context: ServerContext, job: ChatJob, options: StreamOptions) -> AsyncGenerator[bytes]:
    usage = None if options.include_usage else UNSET
    template = ChatCompletionChunk(job.id, job.created, job.model.name, [], usage)

    def chunk(choice: ChunkChoice) -> bytes:
        current = job.usage() if options.continuous_usage_stats else usage
        return event(msgspec.structs.replace(template, choices=[choice], usage=current))

    begun = [False] * len(job.sampling)
    async with aclosing(_merged(context, job)) as pieces:
        async for index, piece in pieces:
            events: list[bytes] = []
            if not begun[index]:
                begun[index] = True
                events.append(chunk(ChunkChoice(index, DeltaMessage(role="assistant", content=""))))
            if piece.content or piece.reasoning or piece.logprobs:
                delta = DeltaMessage(content=piece.content or UNSET, reasoning_content=piece.reasoning or UNSET)
                events.append(chunk(ChunkChoice(index, delta, _logprobs(job, piece.logprobs))))
            if piece.finish_reason is not None:
                events.append(chunk(ChunkChoice(index, DeltaMessage(), finish_reason=piece.finish_reason)))
            if events:  # those of one piece go out together: a packet, not two or three
                yield b"".join(events)
    if options.include_usage:
        yield event(msgspec.structs.replace(template, usage=job.usage())) + DONE
    else:
        yield DONE


async def _merged(context: ServerContext, job: ChatJob) -> AsyncGenerator[tuple[int, TextDelta]]:
    """The pieces of all answers as they come."""
    if len(job.sampling) == 1:
        async with aclosing(_answer(context, job, 0)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, TextDelta] | Exception | None] = asyncio.Queue()

    async def collect(index: int) -> None:
        try:
            async with aclosing(_answer(context, job, index)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((index, piece))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(collect(index)) for index in range(len(job.sampling))]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
