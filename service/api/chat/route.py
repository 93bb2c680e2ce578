"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from service.api.chat import schema
from service.api.chat.detokenizer import TextDelta, joined
from service.api.chat.job import ChatJob, generate, prepare_job
from service.api.chat.schema import ChatRequestBody, Refused, TokenId, refuse
from service.api.chat.spoken import SpokenAnswer, prepare_spoken
from service.api.context import ServerContext, post
from service.api.http.errors import ApiError, invalid, renamed
from service.api.http.middleware import RequestRecord, record_of
from service.api.http.streaming import DONE, error_event, event, event_stream, unless_disconnected
from service.system.concurrency import all_results, merged

router = APIRouter()


SUMMARY = "Create a chat completion; messages may have images and videos."


@post(
    router,
    "/v1/chat/completions",
    SUMMARY,
    schema.ChatRequestBody,
    schema.ChatCompletion,
    events=(schema.ChatCompletionChunk,),
)
async def chat_completions(
    request: Request, context: ServerContext, body: schema.ChatRequestBody
) -> Response | schema.ChatCompletion:
    record = record_of(request.scope)
    job, spoken = await unless_disconnected(request, _prepared(context, body, record), context.settings.request_timeout)
    if body.stream:
        events = _events(context, job, spoken, body.stream_options or schema.StreamOptions())
        return event_stream(events, context.settings)
    return await unless_disconnected(request, _complete(context, job, spoken))


async def _prepared(
    context: ServerContext, body: schema.ChatRequestBody, record: RequestRecord
) -> tuple[ChatJob, SpokenAnswer | None]:
    spoken = await prepare_spoken(context, body, record) if body.asks_for_speech else None
    return await prepare_job(context, body, record), spoken


async def _complete(context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None) -> schema.ChatCompletion:
    choices = await all_results([_collected(context, job, spoken, index) for index in range(len(job.sampling))])
    return schema.ChatCompletion(job.id, job.created, job.model.name, choices, _usage(job, spoken), steps=job.steps())


def _usage(job: ChatJob, spoken: SpokenAnswer | None) -> schema.Usage:
    return job.usage(0 if spoken is None else spoken.patches)


def _parts(
    context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None, index: int
) -> AsyncGenerator[TextDelta | bytes]:
    """The text of a choice, and where it is spoken, audio."""
    text = generate(context, job, index)
    return text if spoken is None else spoken.parts(text)


async def _collected(context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None, index: int) -> schema.Choice:
    deltas: list[TextDelta] = []
    async with aclosing(_parts(context, job, spoken, index)) as parts:
        async for part in parts:
            if isinstance(part, TextDelta):
                deltas.append(part)
            elif spoken is not None:
                spoken.file += part
    text, finish_reason = "".join(delta.content for delta in deltas), deltas[-1].finish_reason
    assert finish_reason is not None
    calls = joined([call for delta in deltas for call in delta.calls])
    silent = bool(calls) or (job.tools is not None and job.tools.forced)
    thoughts = schema.reasoned("".join(delta.reasoning for delta in deltas))
    message = schema.AnswerMessage(text or None if silent else text, tool_calls=calls or UNSET, **thoughts)
    if spoken is not None:
        audio = spoken.audio(text) if text or not calls else UNSET
        message = msgspec.structs.replace(message, content=None, audio=audio)
        finish_reason = "length" if spoken.cut else finish_reason
    logprobs = _logprobs(job, [entry for delta in deltas for entry in delta.logprobs])
    return schema.Choice(index, message, logprobs, finish_reason)


def _logprobs(job: ChatJob, entries: Sequence[schema.TokenLogprob]) -> schema.Logprobs | None:
    return None if job.sampling[0].logprobs is None else schema.Logprobs(list(entries))


async def _events(
    context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None, options: schema.StreamOptions
) -> AsyncGenerator[bytes]:
    usage = None if options.include_usage else UNSET
    template = schema.ChatCompletionChunk(job.id, job.created, job.model.name, [], usage)

    def chunk(choice: schema.ChunkChoice) -> bytes:
        current = _usage(job, spoken) if options.continuous_usage_stats else usage
        return event(msgspec.structs.replace(template, choices=[choice], usage=current))

    async with aclosing(_changes(context, job, spoken)) as changes:
        async for choices in changes:  # sent together: one packet, not two or three
            yield b"".join(map(chunk, choices))
    if options.include_usage:
        report = msgspec.structs.replace(template, usage=_usage(job, spoken), steps=job.steps())
        yield event(report) + DONE
    else:
        yield DONE


async def _changes(
    context: ServerContext, job: ChatJob, spoken: SpokenAnswer | None
) -> AsyncGenerator[list[schema.ChunkChoice]]:
    """Yield what changes in the choices, in the order of their deltas. A spoken answer is its transcript as it is
    written, audio as it is spoken, calls, and at the end the rest of it."""
    begun = set[int]()
    written = None if job.tools and job.tools.forced else ""
    first = schema.DeltaMessage(role="assistant", content=written if spoken is None else UNSET)
    answers = [_parts(context, job, spoken, index) for index in range(len(job.sampling))]
    async with aclosing(merged(answers)) as parts:
        async for index, part in parts:
            choices = [] if index in begun else [schema.ChunkChoice(index, first)]
            begun.add(index)
            if not isinstance(part, bytes):
                choices += _written(job, spoken, index, part)
            elif spoken is not None:
                choices += spoken.sound(part)
            if choices:
                yield choices
    if spoken is not None:
        yield spoken.ending()


def _written(job: ChatJob, spoken: SpokenAnswer | None, index: int, text: TextDelta) -> list[schema.ChunkChoice]:
    choices = []
    if text.content or text.reasoning or text.logprobs:
        delta = schema.DeltaMessage(content=text.content or UNSET, **schema.reasoned(text.reasoning))
        if spoken is not None:
            delta = schema.DeltaMessage(audio=spoken.transcribed(text.content), **schema.reasoned(text.reasoning))
        choices.append(schema.ChunkChoice(index, delta, _logprobs(job, text.logprobs)))
    choices += [schema.ChunkChoice(index, schema.DeltaMessage(tool_calls=[call])) for call in text.calls]
    if text.finish_reason is not None and spoken is None:
        choices.append(schema.ChunkChoice(index, schema.DeltaMessage(), finish_reason=text.finish_reason))
    return choices


# /v1/completions: text that continues a raw prompt, without a chat template

RAW_REFUSED = {"echo": Refused(False), "suffix": Refused(""), "best_of": Refused(1), "logprobs": Refused()}
DEFAULT_TOKENS = 16
"""max_tokens of OpenAI's API."""
NotServed = Annotated[Any, Meta(description="not supported: only a value that changes nothing is accepted")]


class CompletionBody(schema.SamplingFields, frozen=True, kw_only=True):
    """Fields of OpenAI's API and those that vLLM adds. prompt: one text, whose special tokens are read as such, or its
    token ids, also as the only entry of a list."""

    model: str
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: schema.StreamOptions | None = None
    response_format: schema.ResponseFormat | None = None
    structured_outputs: schema.StructuredOutputs | None = None
    echo: NotServed = None
    suffix: NotServed = None
    best_of: NotServed = None
    logprobs: NotServed = None


AS_IN_CHAT = {*CompletionBody.__struct_fields__} & {*ChatRequestBody.__struct_fields__} - {"max_tokens", *RAW_REFUSED}


class CompletionChoice(msgspec.Struct, frozen=True):
    """finish_reason: null in all events of a choice but its last."""

    index: int
    text: str
    finish_reason: schema.FinishReason | None = None
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    """usage: in a stream, of its last event if stream_options.include_usage is set."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: schema.Usage | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


def prompt_of(body: CompletionBody, vocab_size: int) -> str | list[int]:
    """ApiError 400 for more than one prompt, or one that cannot be read."""
    given: Any = body.prompt
    if isinstance(given, list) and not isinstance(given[0], int):
        if len(given) > 1:
            raise invalid("prompt", "one prompt at a time; send a request for each", "unsupported_parameter")
        given = given[0]
    if not given or (isinstance(given, list) and not all(isinstance(one, int) and one < vocab_size for one in given)):
        raise invalid("prompt", f"must be a text, or token ids below {vocab_size}, and not be empty")
    return given


@post(
    router,
    "/v1/completions",
    "Continue a raw prompt, without a chat template.",
    CompletionBody,
    Completion,
    events=(Completion,),
)
async def create_completion(request: Request, context: ServerContext, body: CompletionBody) -> Response | Completion:
    refuse(body, RAW_REFUSED, "by this server")
    settings, record = context.settings, record_of(request.scope)
    asked = ChatRequestBody(
        messages=[], max_tokens=body.max_tokens or DEFAULT_TOKENS, **{name: getattr(body, name) for name in AS_IN_CHAT}
    )
    raw = prompt_of(body, context.model(body.model, "chat", record).chat_processor.vocab_size)
    with renamed(_named):
        job = await unless_disconnected(request, prepare_job(context, asked, record, raw), settings.request_timeout)
        if not body.stream:
            answers = (await unless_disconnected(request, _complete(context, job, None))).choices
            choices = [CompletionChoice(one.index, one.message.content or "", one.finish_reason) for one in answers]
            return _completion(job, choices, usage=job.usage())
    events = _raw_events(context, job, bool(body.stream_options and body.stream_options.include_usage))
    return event_stream(events, settings, lambda error: error_event(_named(error)))


def _named(error: ApiError) -> ApiError:
    """The error of a chat request, under the name that its prompt has here."""
    return error.at("prompt") if error.param == "messages" else error


def _completion(job: ChatJob, choices: list[CompletionChoice], usage: schema.Usage | UnsetType = UNSET) -> Completion:
    return Completion(job.id.replace("chatcmpl", "cmpl"), job.created, job.model.name, choices, usage)


async def _raw_events(context: ServerContext, job: ChatJob, include_usage: bool) -> AsyncGenerator[bytes]:
    choices = [generate(context, job, index) for index in range(len(job.sampling))]
    async with aclosing(merged(choices)) as deltas:
        async for index, delta in deltas:
            if delta.content or delta.finish_reason is not None:
                yield event(_completion(job, [CompletionChoice(index, delta.content, delta.finish_reason)]))
    yield (event(_completion(job, [], job.usage())) if include_usage else b"") + DONE
