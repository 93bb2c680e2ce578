"""POST /v1/responses: OpenAI's Responses API without stored state, answered by a chat job."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from service.api.chat import schema as chat
from service.api.chat.detokenizer import TextDelta
from service.api.chat.job import ChatJob, generate, prepare_job
from service.api.chat.schema import ChatRequestBody, FunctionTool, Message, Refused, TokenLogprob, refuse
from service.api.chat.tools import NO_RESULT
from service.api.chat.turns import Turn, joined, located, translated
from service.api.context import ServerContext, post
from service.api.engines.request_stream import StepReport
from service.api.http.errors import ApiError, ErrorDetail, invalid, renamed
from service.api.http.middleware import record_of
from service.api.http.streaming import event, event_stream, unless_disconnected
from service.link.sampling import MAX_LOGPROBS

router = APIRouter()

# Requests

_ALL = "send the whole conversation as input"
STATEFUL = {
    "previous_response_id": Refused(instead=_ALL),
    "conversation": Refused(instead=_ALL),
    "prompt": Refused(instead="use instructions"),
    "background": Refused(False),
    "truncation": Refused("disabled"),
    "context_management": Refused([]),
}
"""Fields that need a server that keeps responses, or that drops parts of the input."""
NotKept = Annotated[Any, Meta(description="not supported: nothing is stored here")]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """image_url: of an input_image, a data: or https: URL. annotations: an empty list, in answers."""

    type: Literal["input_text", "input_image", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: Annotated[Any, Meta(description="not supported: use image_url")] = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


ItemType = Literal["message", "reasoning", "function_call", "function_call_output"]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of an answer, or of the input, where a message needs no type. role, content: of a message. content or
    summary: of reasoning. call_id, name, arguments: of a function_call. call_id, output: of a function_call_output."""

    type: ItemType | None = None
    id: str | None = None
    status: Status | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """schema: required with type json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat | None = TextFormat("text")


class Repeated(chat.SamplingFields, frozen=True, kw_only=True):
    """Fields of a request that its response repeats."""

    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool | None = True
    reasoning: chat.ReasoningOptions | None = chat.ReasoningOptions()
    text: TextOptions | None = TextOptions()
    tool_choice: chat.FlatToolChoice | None = "auto"
    tools: list[FunctionTool] | None = msgspec.field(default_factory=list)


class ResponsesBody(Repeated, frozen=True, kw_only=True):
    """Fields of OpenAI's API, and sampling fields that vLLM adds. Nothing is stored, whatever `store` says."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1)]
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    previous_response_id: NotKept = None
    conversation: NotKept = None
    prompt: NotKept = None
    background: NotKept = None
    truncation: NotKept = None
    context_management: NotKept = None


NOT_AS_IN_CHAT = {"tools", "tool_choice", "max_output_tokens"}
AS_IN_CHAT = {*ResponsesBody.__struct_fields__} & {*ChatRequestBody.__struct_fields__} - NOT_AS_IN_CHAT
EXTENSIONS = {*chat.SamplingFields.__struct_fields__} - {"temperature", "top_p"}
"""Repeated fields that OpenAI's response does not have: left out where the request does not set them."""
LOGPROBS = "message.output_text.logprobs"


def turns_of(body: ResponsesBody) -> list[Turn[str]]:
    """Read the items as messages. The source of each is its path."""
    instructions = [Turn(Message("system", body.instructions), "instructions")] if body.instructions else []
    if isinstance(body.input, str):
        return [*instructions, Turn(Message("user", body.input), "input")]
    return joined([*instructions, *(_turn(item, f"input[{index}]") for index, item in enumerate(body.input))])


def _turn(item: Item, path: str) -> Turn[str]:
    match item.type:
        case "reasoning":
            parts = item.summary if isinstance(item.content, str) else item.content or item.summary
            thoughts = "".join(part.text or "" for part in parts or ())
            return Turn(Message("assistant", reasoning_content=thoughts), path)
        case "function_call":
            function = chat.CalledFunction(_required(item, "name", path), item.arguments or "")
            call = chat.ToolCallEntry(_required(item, "call_id", path), function)
            return Turn(Message("assistant", tool_calls=[call]), path, [path])
        case "function_call_output":
            return Turn(Message("tool", _content(item.output, f"{path}.output"), tool_call_id=item.call_id), path)
        case _:
            return Turn(Message(_required(item, "role", path), _content(item.content, f"{path}.content")), path)


def _required(item: Item, name: str, path: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise invalid(f"{path}.{name}", "this field is required")
    return str(value)


def _content(given: str | list[Part] | None, path: str) -> str | list[chat.ContentPart] | None:
    if given is None or isinstance(given, str):
        return given
    return [_part(part, f"{path}[{index}]") for index, part in enumerate(given)]


def _part(part: Part, path: str) -> chat.ContentPart:
    if part.file_id is not None:
        raise invalid(f"{path}.file_id", "not supported; use image_url", "unsupported_parameter")
    if part.type == "input_image":
        return chat.ContentPart(
            type="image_url", image_url=part.image_url and chat.MediaUrl(part.image_url, part.detail)
        )
    if part.type == "refusal":
        return chat.ContentPart(type="refusal", refusal=part.refusal)
    return chat.ContentPart(type="text", text=part.text)


def chat_body(body: ResponsesBody, messages: list[Message]) -> ChatRequestBody:
    given = body.text.format if body.text else None
    schema = None if given is None or given.schema is None else chat.JsonSchemaFormat(given.schema, given.name)
    return ChatRequestBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()) or body.top_logprobs is not None,
        response_format=None if given is None else chat.ResponseFormat(given.type, schema),
        tools=[chat.ToolDefinition("function", tool) for tool in body.tools or ()],
        tool_choice=chat.nested(body.tool_choice),
        **{name: getattr(body, name) for name in AS_IN_CHAT},
    )


# Paths of the chat request, and what they are called here

RENAMED = (
    (r"messages", "input"),
    (r"max_completion_tokens", "max_output_tokens"),
    (r"response_format(?:\.json_schema)?(.*)", r"text.format\1"),
    (r"tools\[(\d+)\]\.function(.*)", r"tools[\1]\2"),
    (r"tool_choice\.function(.*)", r"tool_choice\1"),
    (r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function(.*)", r"tool_choice.tools[\1]\2"),
)


def named(path: str, turns: list[Turn[str]]) -> str:
    """The name that a path of the chat request has here."""
    if (place := located(path, turns)) is None:
        return translated(path, RENAMED)
    source, rest = place
    return source if source in ("instructions", "input") else f"{source}{rest}"


def in_own_words(error: ApiError, turns: list[Turn[str]]) -> ApiError:
    """The error of a chat request, under the path that the field has here."""
    if error.param is None:
        return error
    moved = error.at(named(error.param, turns))
    moved.message = moved.message.replace(NO_RESULT, "must be followed by its function_call_output")
    return moved


# Answers


class ResponsesUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: chat.PromptTokensDetails
    output_tokens: int
    output_tokens_details: chat.CompletionTokensDetails
    total_tokens: int


class ResponseObject(Repeated, frozen=True):  # Without kw_only its fields, id first, come before those of Repeated.
    """incomplete_details: the reason max_output_tokens if a limit of tokens, the context or request_timeout ended the
    answer. steps: as a chat completion has them."""

    id: str
    created_at: int
    completed_at: int | None
    model: str
    status: Status
    output: list[Item]
    incomplete_details: dict[str, str] | None
    usage: ResponsesUsage | None
    object: Literal["response"] = "response"
    error: None = None
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    steps: StepReport | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream, with the names and fields of OpenAI's API. error, code, message, param: of the event
    `error`, which ends a stream that failed."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: Part | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: ErrorDetail | UnsetType = UNSET


TEXT: dict[ItemType, str] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
"""What the events of an item's text are about."""


@dataclass(eq=False)
class Output:
    """An item of an answer that grows. call: the first delta of a function_call."""

    type: ItemType
    index: int
    call: chat.ToolCallDelta | None = None
    id: str = field(default_factory=lambda: f"item_{secrets.token_hex(12)}")
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def part(self) -> Part:
        if self.type == "reasoning":
            return Part(type="reasoning_text", text=self.text)
        return Part(type="output_text", text=self.text, annotations=[], logprobs=[*self.logprobs])

    def item(self, status: Status) -> Item:
        item = Item(type=self.type, id=self.id, status=status)
        if self.call is not None:
            called = str(self.call.function.name)
            return msgspec.structs.replace(item, call_id=str(self.call.id), name=called, arguments=self.text)
        content = [] if status == "in_progress" else [self.part]
        if self.type == "reasoning":
            return msgspec.structs.replace(item, content=content, summary=[])
        return msgspec.structs.replace(item, role="assistant", content=content)


class Answer:
    """Turns text deltas into items and their events."""

    def __init__(self, job: ChatJob, body: ResponsesBody, turns: list[Turn[str]]) -> None:
        self._job, self._body, self._turns = job, body, turns
        self._id = f"resp_{secrets.token_hex(12)}"
        self._outputs: list[Output] = []
        self._sequence = 0
        self._events: list[ResponseEvent] = []
        """Those that `feed` has not returned yet."""

    def feed(self, delta: TextDelta) -> list[ResponseEvent]:
        """Return the events of the next delta; those of the first and of the last one begin and end the response."""
        if self._sequence == 0:
            self._emit("response.created", response=self._response("in_progress"))
            self._emit("response.in_progress", response=self._response("in_progress"))
        if delta.reasoning:
            self._write("reasoning", delta.reasoning)
        if delta.content:
            self._write("message", delta.content, delta.logprobs)
        for call in delta.calls:
            if call.id is not UNSET:
                self._begin("function_call", call)
            if call.function.arguments:
                self._write("function_call", call.function.arguments)
        if delta.finish_reason is not None:
            status: Status = "incomplete" if delta.finish_reason == "length" else "completed"
            if all(output.type == "reasoning" for output in self._outputs):
                self._begin("message")
            self._end_item(status)
            self._emit(f"response.{status}", response=self._response(status))
        events, self._events = self._events, []
        return events

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed: its `error` is what OpenAI's clients raise, the fields beside it are
        those that its API documents."""
        error = in_own_words(error, self._turns)
        detail = ErrorDetail(error.message, error.type, error.param, error.code)
        self._emit("error", code=error.code, message=error.message, param=error.param, error=detail)
        return encoded(self._events[-1:])

    def _response(self, status: Status) -> ResponseObject:
        job, body, ended = self._job, self._body, status != "in_progress"
        unset = {name: UNSET for name in EXTENSIONS if getattr(body, name) is None}
        return ResponseObject(
            id=self._id,
            created_at=job.created,
            completed_at=int(time.time()) if status == "completed" else None,
            model=job.model.name,
            status=status,
            output=[one.item(status if one is self._outputs[-1] else "completed") for one in self._outputs],
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=_usage(job) if ended else None,
            steps=job.steps() if ended else UNSET,
            **{name: getattr(body, name) for name in Repeated.__struct_fields__} | unset,
        )

    def _begin(self, type: ItemType, call: chat.ToolCallDelta | None = None) -> None:
        if self._outputs:
            self._end_item("completed")
        output = Output(type, len(self._outputs), call)
        self._outputs.append(output)
        self._emit("response.output_item.added", output_index=output.index, item=output.item("in_progress"))
        if call is None:
            self._emit_in_item("response.content_part.added", part=output.part)

    def _write(self, type: ItemType, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if not self._outputs or self._outputs[-1].type != type:
            self._begin(type)
        self._outputs[-1].texts.append(text)
        self._outputs[-1].logprobs += logprobs
        self._emit_in_item(f"response.{TEXT[type]}.delta", delta=text, **_with_logprobs(type, logprobs))

    def _end_item(self, status: Status) -> None:
        output = self._outputs[-1]
        done = f"response.{TEXT[output.type]}.done"
        if output.call is not None:
            self._emit_in_item(done, name=output.call.function.name, arguments=output.text)
        else:
            self._emit_in_item(done, text=output.text, **_with_logprobs(output.type, output.logprobs))
            self._emit_in_item("response.content_part.done", part=output.part)
        self._emit("response.output_item.done", output_index=output.index, item=output.item(status))

    def _emit_in_item(self, type: str, **fields: Any) -> None:
        output = self._outputs[-1]
        content = {"content_index": 0} if output.call is None else {}
        self._emit(type, output_index=output.index, item_id=output.id, **content, **fields)

    def _emit(self, type: str, **fields: Any) -> None:
        self._events.append(ResponseEvent(type=type, sequence_number=self._sequence, **fields))
        self._sequence += 1


def _with_logprobs(type: ItemType, logprobs: Sequence[TokenLogprob]) -> dict[str, list[TokenLogprob]]:
    """The field of an event, which only text of messages has."""
    return {"logprobs": [*logprobs]} if type == "message" else {}


def _usage(job: ChatJob) -> ResponsesUsage:
    used = job.usage()
    prompt, completion = used.prompt_tokens_details, used.completion_tokens_details
    return ResponsesUsage(used.prompt_tokens, prompt, used.completion_tokens, completion, used.total_tokens)


def encoded(events: Sequence[ResponseEvent]) -> bytes:
    """Server-sent events, which clients tell apart by name or by `type`."""
    return b"".join(event(one, one.type) for one in events)


SUMMARY = "Create a response; messages and outputs of tools may have images. Nothing is stored."


@post(router, "/v1/responses", SUMMARY, ResponsesBody, ResponseObject, events=(ResponseEvent,))
async def create_response(request: Request, context: ServerContext, body: ResponsesBody) -> Response | ResponseObject:
    refuse(body, STATEFUL, "by this server")
    turns = turns_of(body)
    asked = chat_body(body, [turn.message for turn in turns])
    settings, record = context.settings, record_of(request.scope)
    with renamed(lambda error: in_own_words(error, turns)):
        job = await unless_disconnected(request, prepare_job(context, asked, record), settings.request_timeout)
        answer = Answer(job, body, turns)
        if not body.stream:
            return await unless_disconnected(request, _completed(context, job, answer))
    return event_stream(_streamed(context, job, answer), settings, answer.failed)


async def _completed(context: ServerContext, job: ChatJob, answer: Answer) -> ResponseObject:
    events: list[ResponseEvent] = []
    async with aclosing(generate(context, job, 0)) as deltas:
        async for delta in deltas:
            events = answer.feed(delta)
    completed = events[-1].response
    assert completed is not UNSET
    return completed


async def _streamed(context: ServerContext, job: ChatJob, answer: Answer) -> AsyncGenerator[bytes]:
    async with aclosing(generate(context, job, 0)) as deltas:
        async for delta in deltas:
            if events := answer.feed(delta):
                yield encoded(events)
