"""POST /v1/completions: text that continues a raw prompt, without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from service.api.chat import schema as chat
from service.api.chat.job import ChatJob, generate, prepare_job, tried_again
from service.api.chat.schema import ChatRequestBody, FinishReason, Refused, SamplingFields, TokenId, Usage, refuse
from service.api.context import ServerContext, post
from service.api.http.errors import ApiError, invalid, renamed
from service.api.http.middleware import record_of
from service.api.http.streaming import DONE, error_event, event, event_stream, unless_disconnected
from service.system.concurrency import all_results, merged

router = APIRouter()

REFUSED = {"echo": Refused(False), "suffix": Refused(""), "best_of": Refused(1), "logprobs": Refused()}
DEFAULT_TOKENS = 16
"""max_tokens of OpenAI's API."""
NotServed = Annotated[Any, Meta(description="not supported: only a value that changes nothing is accepted")]


class CompletionBody(SamplingFields, frozen=True, kw_only=True):
    """Fields of OpenAI's API and those that vLLM adds. prompt: one text, whose special tokens are read as such, or its
    token ids, also as the only entry of a list."""

    model: str
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: chat.StreamOptions | None = None
    response_format: chat.ResponseFormat | None = None
    structured_outputs: chat.StructuredOutputs | None = None
    echo: NotServed = None
    suffix: NotServed = None
    best_of: NotServed = None
    logprobs: NotServed = None


AS_IN_CHAT = {*CompletionBody.__struct_fields__} & {*ChatRequestBody.__struct_fields__} - {"max_tokens", *REFUSED}


class CompletionChoice(msgspec.Struct, frozen=True):
    """finish_reason: null in all events of a choice but its last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    """usage: in a stream, of its last event if stream_options.include_usage is set."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
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
    refuse(body, REFUSED, "by this server")
    settings, record = context.settings, record_of(request.scope)
    asked = ChatRequestBody(
        messages=[], max_tokens=body.max_tokens or DEFAULT_TOKENS, **{name: getattr(body, name) for name in AS_IN_CHAT}
    )
    raw = prompt_of(body, context.model(body.model, "chat", record).chat_processor.vocab_size)
    with renamed(_named):
        async with asyncio.timeout(settings.request_timeout):
            job = await unless_disconnected(request, prepare_job(context, asked, record, raw))
        if not body.stream:
            indices = range(len(job.sampling))
            choices = all_results([tried_again(context, job, at, partial(_choice, context, job, at)) for at in indices])
            return _completion(job, await unless_disconnected(request, choices), usage=job.usage())
    events = _events(context, job, bool(body.stream_options and body.stream_options.include_usage))
    return event_stream(events, settings, lambda error: error_event(_named(error)))


def _named(error: ApiError) -> ApiError:
    """The error of a chat request, under the name that its prompt has here."""
    return error.at("prompt") if error.param == "messages" else error


def _completion(job: ChatJob, choices: list[CompletionChoice], usage: Usage | UnsetType = UNSET) -> Completion:
    return Completion(job.id.replace("chatcmpl", "cmpl"), job.created, job.model.name, choices, usage)


async def _choice(context: ServerContext, job: ChatJob, index: int) -> CompletionChoice:
    async with aclosing(generate(context, job, index)) as deltas:
        parts = [delta async for delta in deltas]
    return CompletionChoice(index, "".join(part.content for part in parts), parts[-1].finish_reason)


async def _events(context: ServerContext, job: ChatJob, include_usage: bool) -> AsyncGenerator[bytes]:
    choices = [generate(context, job, index) for index in range(len(job.sampling))]
    async with aclosing(merged(choices)) as deltas:
        async for index, delta in deltas:
            if delta.content or delta.finish_reason is not None:
                yield event(_completion(job, [CompletionChoice(index, delta.content, delta.finish_reason)]))
    yield (event(_completion(job, [], job.usage())) if include_usage else b"") + DONE
