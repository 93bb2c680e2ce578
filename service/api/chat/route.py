"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from models.interfaces.media import Prompt
from service.api.chat.detokenizer import FinishReason, TextAssembler, TextDelta, TokenLogprob
from service.api.chat.prompt import build_prompt, media_tokens, opens_reasoning
from service.api.chat.sampling import choice_count, derived_seed, refuse_unsupported, sampling_params, stop_strings
from service.api.chat.schema import (
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
    reasoned,
)
from service.api.chat.spoken import SpokenAnswer, prepare_spoken
from service.api.chat.structured import answer_grammar
from service.api.chat.tool_calls import ToolCallParser, joined
from service.api.chat.tool_grammar import Reasoning, checked_tool_grammar, reasoned_grammar
from service.api.chat.tool_schema import ToolCallDelta
from service.api.chat.tools import ToolUse, tool_use
from service.api.context import ServerContext, context_of
from service.api.engines.request_stream import EngineLost, RequestGroup
from service.api.engines.step_report import StepReport, step_report
from service.api.http.openapi import JSON, WORK_ERRORS, operation
from service.api.http.record import RequestRecord, record_of
from service.api.http.routing import RequestRoute
from service.api.http.streaming import (
    DONE,
    EVENT_STREAM,
    KEEP_ALIVE,
    LiveResponse,
    error_event,
    event,
    unless_disconnected,
)
from service.hub.catalog import HostedModel
from service.link.messages import ChatDelta, ChatRequest, SamplingParams, StepCounts
from service.system.concurrency import all_results, merged

router = APIRouter(route_class=RequestRoute)


@dataclass
class ChoiceCounts:
    """What one choice has so far."""

    tokens: int = 0
    """Generated tokens, those of the reasoning included."""
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    """Prompt positions found in the prefix cache."""
    calls: int = 0
    """Tool calls."""
    steps: StepCounts | None = None
    """Set once the engine has ended the choice."""


@dataclass(eq=False)
class ChatJob:
    """A request that is ready for the engine, and the counts of its choices so far."""

    id: str
    created: int
    """Unix time in seconds."""
    model: HostedModel
    prompt: Prompt
    max_model_len: int
    """Tokens that prompt and answer may have together."""
    sampling: tuple[SamplingParams, ...]
    """One for each choice."""
    stops: tuple[str, ...]
    """Stop strings."""
    tools: ToolUse | None
    grammar: str
    """ChatRequest.grammar."""
    formatted: bool
    """Whether an answer that calls nothing has to match a format."""
    unenforced: list[str] | UnsetType
    """Paths of what the grammar does not enforce of the request's schemas."""
    record: RequestRecord
    counts: list[ChoiceCounts] = field(default_factory=list)
    """One for each choice."""
    group: RequestGroup = field(default_factory=RequestGroup)
    """That of the requests to the engine, one for each choice."""
    spoken: SpokenAnswer | None = None
    """Set if the answer is to be spoken."""
    timed_out: bool = False
    """Whether the request has reached request_timeout: its choices then end with the text that they have."""

    def usage(self) -> Usage:
        prompt_tokens = len(self.prompt.token_ids)
        audio_tokens = 0 if self.spoken is None else self.spoken.patches
        completion_tokens = sum(choice.tokens for choice in self.counts) + audio_tokens
        kinds = media_tokens(self.prompt)
        return Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            PromptTokensDetails(
                min(choice.cached_tokens for choice in self.counts), kinds["text"], kinds["image"], kinds["video"]
            ),
            CompletionTokensDetails(sum(choice.reasoning_tokens for choice in self.counts), audio_tokens),
        )

    def steps(self) -> StepReport | UnsetType:
        return step_report([choice.steps for choice in self.counts if choice.steps is not None])


@router.post(
    "/v1/chat/completions",
    openapi_extra=operation(
        "Create a chat completion; messages may have images and videos.",
        {JSON: ChatCompletion},
        events=(ChatCompletionChunk,),
        errors=WORK_ERRORS,
        body={JSON: ChatRequestBody},
    ),
)
async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    context.require_ready()
    body = await context.read_json(request, ChatRequestBody)
    record = record_of(request.scope)
    async with asyncio.timeout(context.settings.request_timeout):
        job = await unless_disconnected(request, prepare_job(context, body, record))
    if body.stream:
        return _stream(context, job, body.stream_options or StreamOptions())
    completion = await unless_disconnected(request, _complete(context, job))
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def prepare_job(context: ServerContext, body: ChatRequestBody, record: RequestRecord) -> ChatJob:
    """Validates a request, loads its media and builds its prompt.

    Raises ApiError or InputError that names the field that does not fit.
    """
    model = context.model(body.model, "chat", record)
    refuse_unsupported(body)
    stops = stop_strings(body)
    settings = context.settings
    count = choice_count(body, min(settings.max_n, settings.max_waiting, context.admission.max_requests("chat")))
    tools = await context.in_thread(partial(tool_use, body)) if body.tools else tool_use(body)
    record.ticket.grow(count - 1)
    answer, unenforced = await answer_grammar(context.grammars, body, record.client)
    spoken = await prepare_spoken(context, body, record)
    prompt = await build_prompt(context, model, body, tools.tools if tools else (), record)
    grammar, left_out = await _grammar(context, model, prompt, tools, answer, record.client)
    max_model_len = context.max_model_len(model)
    first = sampling_params(body, model.chat_processor, len(prompt.token_ids), max_model_len, settings)
    sampling = tuple(msgspec.structs.replace(first, seed=derived_seed(first.seed, index)) for index in range(count))
    record.notes["prompt_tokens"] = len(prompt.token_ids)
    return ChatJob(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        prompt=prompt,
        max_model_len=max_model_len,
        sampling=sampling,
        stops=stops,
        tools=tools,
        grammar=grammar,
        formatted=bool(answer),
        unenforced=[*unenforced, *left_out] or UNSET,
        record=record,
        counts=[ChoiceCounts() for _ in sampling],
        spoken=spoken,
    )


async def _grammar(
    context: ServerContext, model: HostedModel, prompt: Prompt, tools: ToolUse | None, answer: str, client: str
) -> tuple[str, list[str]]:
    """(the grammar that the answers must match, paths of what it does not enforce of the tools). answer: the one for
    answers that call nothing."""
    markers, opened = model.chat_processor.reasoning_markers, opens_reasoning(model.chat_processor, prompt)
    reasoning = None if markers is None else Reasoning(*markers, opened)
    if tools is not None:
        return await checked_tool_grammar(context.grammars, tools, client, answer=answer, reasoning=reasoning)
    if answer and reasoning is not None and opened:
        make = partial(reasoned_grammar, answer, reasoning)
        return await context.grammars.checked(make, "response_format", client), []
    return answer, []


async def generate(context: ServerContext, job: ChatJob, index: int) -> AsyncGenerator[TextDelta]:
    """The text of one choice as it is generated; the last delta has a finish_reason. Closing it aborts the request.

    At request_timeout the choice ends with finish_reason "length", or with TimeoutError if no choice of the request has
    a token by then.
    """
    processor, sampling, counts = job.model.chat_processor, job.sampling[index], job.counts[index]
    assembler = TextAssembler(
        processor.detokenize,
        job.stops,
        min_tokens=sampling.min_tokens,
        reasoning_markers=processor.reasoning_markers,
        reasoning_opened=opens_reasoning(processor, job.prompt),
        calls=ToolCallParser(forced=job.tools.forced, either=job.formatted) if job.tools else None,
    )
    slow = bool(job.grammar) and context.grammars.is_slow(job.grammar)
    request_id, arrival = f"{job.id}-{index}", job.record.arrival
    request = ChatRequest(request_id, job.model.name, job.prompt, sampling, arrival, job.grammar, slow)
    async with aclosing(context.engine.submit(request, job.group)) as stream:

        def end() -> None:
            if not stream.ended:
                job.timed_out = True
                stream.cut(ChatDelta(request_id, (), finish_reason="length"))

        limit = asyncio.get_running_loop().call_later(
            arrival + context.settings.request_timeout - time.monotonic(), end
        )
        try:
            async for delta in stream:
                text = assembler.feed(delta)
                counts.tokens = assembler.tokens
                counts.cached_tokens = max(counts.cached_tokens, delta.cached_tokens)
                counts.reasoning_tokens = assembler.reasoning_tokens
                counts.calls += sum(call.id is not UNSET for call in text.calls)
                counts.steps = delta.steps
                if job.timed_out and not any(choice.tokens for choice in job.counts):
                    raise TimeoutError
                yield text
                if text.finish_reason is not None:
                    break
        finally:
            limit.cancel()
            job.record.notes["tokens"] = sum(choice.tokens for choice in job.counts)
    _finish(context, job, index)


def _finish(context: ServerContext, job: ChatJob, index: int) -> None:
    context.metrics.observe("request_output_tokens", job.counts[index].tokens, model=job.model.name)
    if calls := job.counts[index].calls:
        context.metrics.observe("tool_calls_total", calls, model=job.model.name)
        job.record.notes["tool_calls"] = sum(choice.calls for choice in job.counts)
    if job.timed_out:
        job.record.notes["truncated"] = True


async def _complete(context: ServerContext, job: ChatJob) -> ChatCompletion:
    choices = await all_results([_choice(context, job, index) for index in range(len(job.sampling))])
    return ChatCompletion(
        job.id, job.created, job.model.name, choices, job.usage(), steps=job.steps(), unenforced=job.unenforced
    )


async def _choice(context: ServerContext, job: ChatJob, index: int) -> Choice:
    """One choice. Starts again on another engine if the first one ends: the client has received nothing yet. The
    choices of a chat do so after one end at most, moves to another engine before a first token (Engines) included."""
    try:
        return await _collected(context, job, index)
    except EngineLost:
        if job.spoken is not None or not context.engine.ready:
            raise
        job.counts[index] = ChoiceCounts()
        return await _collected(context, job, index)


async def _collected(context: ServerContext, job: ChatJob, index: int) -> Choice:
    """The whole choice, once its last delta has come."""
    content: list[str] = []
    reasoning: list[str] = []
    logprobs: list[TokenLogprob] = []
    calls: list[ToolCallDelta] = []
    finish_reason: FinishReason | None = None
    spoken, generated = job.spoken, generate(context, job, index)
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


def _stream(context: ServerContext, job: ChatJob, options: StreamOptions) -> Response:
    settings = context.settings
    return LiveResponse(
        _events(context, job, options),
        media_type=EVENT_STREAM,
        timeout=settings.request_timeout + settings.write_timeout,  # choices end by themselves at request_timeout
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

    spoken = job.spoken
    answer = _text_events(context, job, chunk) if spoken is None else spoken.events(generate(context, job, 0), chunk)
    async with aclosing(answer) as events:
        async for data in events:
            yield data
    if options.include_usage:
        report = msgspec.structs.replace(template, usage=job.usage(), steps=job.steps(), unenforced=job.unenforced)
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
