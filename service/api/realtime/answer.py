"""One response: a chat answer, written or spoken, as the events of the Realtime protocol."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from starlette.websockets import WebSocketDisconnect

from service.api.chat import schema as chat
from service.api.chat.detokenizer import TextDelta
from service.api.chat.job import ChatJob, generate, prepare_job
from service.api.chat.schema import ChatRequestBody, Message
from service.api.chat.spoken import SpokenAnswer, prepare_spoken
from service.api.chat.turns import Turn
from service.api.context import ServerContext
from service.api.http.errors import ApiError, ErrorDetail, as_api_error, renamed
from service.api.http.middleware import RequestRecord
from service.api.realtime import schema
from service.api.realtime.conversation import Conversation, Playback, Source, in_conversation, in_response
from service.api.realtime.schema import ConversationItem, ServerEvent, new_id, server_event
from service.api.sockets import StreamClosed

log = logging.getLogger("reprise.access")

Emit = Callable[[ServerEvent], Awaitable[None]]


@dataclass(eq=False)
class Output:
    """An item of a response: a message of one part, written or spoken, or a call. index: among the response's items.
    conversation: where it is added, if anywhere. item: as it begins. format: of the audio, whose transcript the text is
    then."""

    response_id: str
    index: int
    emit: Emit
    conversation: Conversation | None
    item: ConversationItem
    format: schema.RealtimeFormat | None = None
    _previous: str | None = None
    _text: list[str] = field(default_factory=list)
    _sound_bytes: int = 0

    def __post_init__(self) -> None:
        self._place: dict[str, Any] = {"response_id": self.response_id, "output_index": self.index}
        if self._is_call:
            self._where = {**self._place, "item_id": self.item.id, "call_id": self.item.call_id}
            self._event, self._field = "response.function_call_arguments", "arguments"
        else:
            self._where = {**self._place, "item_id": self.item.id, "content_index": 0}
            self._event = "response.output_audio_transcript" if self.format else "response.output_text"
            self._field = "transcript" if self.format else "text"

    @property
    def _is_call(self) -> bool:
        return self.item.type == "function_call"

    async def begin(self) -> None:
        if self.conversation is not None:
            self._previous = self.conversation.put_answer(self.item)
        await self._tell("response.output_item.added", **self._place, item=self.item)
        if self.conversation is not None:
            await self._tell("conversation.item.added", item=self.item, previous_item_id=self._previous)
        if not self._is_call:
            await self._tell("response.content_part.added", **self._where, part=self._part(""))

    async def write(self, text: str) -> None:
        self._text.append(text)
        await self._tell(f"{self._event}.delta", **self._where, delta=text)

    async def sound(self, data: bytes) -> None:
        """data: whole samples."""
        self._sound_bytes += len(data)
        await self._tell("response.output_audio.delta", **self._where, delta=base64.b64encode(data).decode())

    async def end(self, status: schema.Status, speech: SpokenAnswer | None) -> ConversationItem:
        text = "".join(self._text)
        if self.format:
            unspoken = (speech and speech.unspoken) or UNSET
            await self._tell("response.output_audio.done", **self._where, unspoken=unspoken)
        named = {"name": self.item.name} if self._is_call else {}
        await self._tell(f"{self._event}.done", **self._where, **named, **{self._field: text})
        playback = None
        if self._is_call:
            item = msgspec.structs.replace(self.item, status=status, arguments=text)
        else:
            await self._tell("response.content_part.done", **self._where, part=self._part(text))
            kind = "output_audio" if self.format else "output_text"
            content = msgspec.convert({"type": kind, self._field: text}, schema.ItemContent)
            item = msgspec.structs.replace(self.item, status=status, content=[content])
            if speech is not None and self.format:
                heard, texts = speech.delivery, tuple(line.text for line in speech.script.lines)
                seconds = self._sound_bytes / self.format.bytes_per_second
                playback = Playback(texts, tuple(heard.segments), seconds, status == "completed", heard.begun)
        if self.conversation is not None:
            self.conversation.put_answer(item, playback)
            await self._tell("conversation.item.done", item=item, previous_item_id=self._previous)
        await self._tell("response.output_item.done", **self._place, item=item)
        return item

    async def _tell(self, type: str, **fields: Any) -> None:
        await self.emit(server_event(type, **fields))

    def _part(self, text: str) -> schema.OutputPart:
        kind = "audio" if self.format else "text"
        return msgspec.convert({"type": kind, self._field: text}, schema.OutputPart)


@dataclass(eq=False)
class Answer:
    """`task`, which starts at once, makes the answer, sends it and writes it into the conversation. A request that is
    refused before the response begins gets an error event; a later failure is the status of response.done.

    record: of this response; its ticket is released at the end. conversation: None for an answer that is not kept.
    whole: CONVERSATION or INPUT, where the turns are from, which errors name.
    metadata, event_id, size (bytes): of the client's response.create, which may hold items of its own.
    """

    context: ServerContext
    emit: Emit
    record: RequestRecord
    conversation: Conversation | None
    config: schema.RealtimeConfig
    turns: Sequence[Turn[Source]]
    whole: str
    metadata: schema.Metadata | None
    event_id: str | None
    size: int
    id: str = field(default_factory=lambda: new_id("resp"))
    ended: bool = False
    """Whether the last event has been handed over, so that the next response may begin."""
    _job: ChatJob | None = None
    _spoken: SpokenAnswer | None = None
    _begun: bool = False
    _message: Output | None = None
    _calls: list[Output] = field(default_factory=list)
    _outputs: list[Output] = field(default_factory=list)
    _cancelled: Literal["client_cancelled", "turn_detected"] | None = None
    _ending: bool = False
    _telling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while events that belong together are sent, so that a client that cancels gets all of them or none."""

    def __post_init__(self) -> None:
        self._turns = {id(turn.message): turn for turn in self.turns}
        """By the identity of the message: a request may leave out the oldest."""
        self._body = _request(self.record.model, self.config, [turn.message for turn in self.turns])
        self.task = asyncio.create_task(self._run())

    async def cancel(self, reason: Literal["client_cancelled", "turn_detected"] = "client_cancelled") -> None:
        """Return when the last event has been sent; by then nothing is left in the engine."""
        async with self._telling:
            if not self._ending:
                self._cancelled = reason
                self.task.cancel()
        await asyncio.wait({self.task})

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            details = await self._generate()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled is None or task is None:
                raise
            task.uncancel()
            details = schema.StatusDetails(type="cancelled", reason=self._cancelled)
        except (StreamClosed, WebSocketDisconnect):
            raise
        except Exception as error:
            failure = in_response(as_api_error(error))
            if not self._begun:
                await self._refuse(failure)
                return
            failed = ErrorDetail(failure.message, failure.type, failure.param, failure.code)
            details = schema.StatusDetails(type="failed", error=failed)
        finally:
            self.record.ticket.release()
        self._ending = True
        await self._end(details)

    async def _generate(self) -> schema.StatusDetails:
        context = self.context
        async with asyncio.timeout(context.settings.request_timeout):
            if self.config.truncation == "auto":
                self._job = await truncated(self._body, self._attempt)
            else:
                self._job = await self._attempt(self._body)
        async with self._telling:
            await self._begin()
        finish_reason = None
        deltas, spoken = generate(context, self._job, 0), self._spoken
        async with aclosing(deltas if spoken is None else spoken.parts(deltas)) as parts:
            async for part in parts:
                async with self._telling:
                    await self._tell(part)
                if isinstance(part, TextDelta):
                    finish_reason = part.finish_reason or finish_reason
        if finish_reason == "length" or (spoken is not None and (spoken.cut or spoken.truncated)):
            return schema.StatusDetails(type="incomplete", reason="max_output_tokens")
        return schema.StatusDetails(type="completed")

    async def _attempt(self, body: ChatRequestBody) -> ChatJob:
        self.record.ticket.release()
        self.record.ticket.grow(1, self.size)
        turns = [self._turns[id(message)] for message in body.messages]
        with renamed(lambda error: in_conversation(error, turns, self.whole)):
            if self.config.spoken:
                self._spoken = await prepare_spoken(self.context, body, self.record)
            return await prepare_job(self.context, body, self.record)

    async def _tell(self, part: TextDelta | bytes) -> None:
        """part: text and calls, or audio in the format of the session."""
        if isinstance(part, bytes):
            await (await self._begun_message()).sound(part)
            return
        if part.content:
            await (await self._begun_message()).write(part.content)
        for call in part.calls:
            await self._call(call)

    async def _begin(self) -> None:
        self._begun = True
        await self.emit(server_event("response.created", response=self._response("in_progress", [])))

    async def _begun_message(self) -> Output:
        """The message, which is announced with its first text or sound."""
        if self._message is None:
            format = self.config.format if self.config.spoken else None
            self._message = await self._output(format, type="message", role="assistant", content=[])
        return self._message

    async def _call(self, delta: chat.ToolCallDelta) -> None:
        if delta.id is not UNSET:
            named: dict[str, Any] = {"call_id": delta.id, "name": delta.function.name, "arguments": ""}
            self._calls.append(await self._output(type="function_call", **named))
        if delta.function.arguments:
            await self._calls[delta.index].write(delta.function.arguments)

    async def _output(self, format: schema.RealtimeFormat | None = None, **fields: Any) -> Output:
        item = ConversationItem(id=new_id("item"), object="realtime.item", status="in_progress", **fields)
        output = Output(self.id, len(self._outputs), self.emit, self.conversation, item, format)
        self._outputs.append(output)
        await output.begin()
        return output

    async def _refuse(self, error: ApiError) -> None:
        self._ending = self.ended = True
        self._observe("refused")
        await self.emit(error_event(error, self.event_id))

    async def _end(self, details: schema.StatusDetails) -> None:
        if not self._begun:
            await self._begin()
        if not self._outputs and details.type in ("completed", "incomplete"):
            await self._begun_message()
        status: schema.Status = "completed" if details.type == "completed" else "incomplete"
        output = [await one.end(status, self._spoken) for one in self._outputs]
        self._observe(details.type)
        self.ended = True
        await self.emit(server_event("response.done", response=self._response(details.type, output, details)))

    def _response(
        self, status: schema.ResponseStatus, output: list[ConversationItem], details: schema.StatusDetails | None = None
    ) -> schema.RealtimeResponse:
        return schema.RealtimeResponse(
            id=self.id,
            status=status,
            output=output,
            conversation_id=None if self.conversation is None else self.conversation.id,
            output_modalities=self.config.output_modalities,
            max_output_tokens=self.config.max_output_tokens,
            audio=schema.ResponseAudio(output=self.config.output),
            metadata=self.metadata,
            status_details=details,
            usage=None if details is None or self._job is None else _usage(self._job, self._spoken),
        )

    def _observe(self, status: str) -> None:
        record = self.record
        self.context.metrics.observe("realtime_responses_total", model=record.model, status=status)
        extra = {"request_id": record.request_id, "model": record.model, **record.notes}
        log.info("realtime response %s", status, extra=extra)


def error_event(error: ApiError, event_id: str | None) -> ServerEvent:
    fields = {name: getattr(error, name) for name in ("message", "type", "code", "param", "retry_after")}
    return server_event("error", error=schema.RealtimeErrorDetail(event_id=event_id, **fields))


def _usage(job: ChatJob, spoken: SpokenAnswer | None) -> schema.RealtimeUsage:
    usage: chat.Usage = job.usage(0 if spoken is None else spoken.patches)
    audio_tokens = usage.completion_tokens_details.audio_tokens
    return schema.RealtimeUsage(
        total_tokens=usage.total_tokens,
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        input_token_details=usage.prompt_tokens_details,
        output_token_details=schema.RealtimeOutputDetails(
            text_tokens=usage.completion_tokens - audio_tokens, audio_tokens=audio_tokens
        ),
    )


def _request(model: str, config: schema.RealtimeConfig, messages: list[Message]) -> ChatRequestBody:
    return ChatRequestBody(
        model=model,
        messages=messages,
        stream=True,
        max_completion_tokens=None if config.max_output_tokens == "inf" else config.max_output_tokens,
        temperature=None if config.temperature is UNSET else config.temperature,
        seed=None if config.seed is UNSET else config.seed,
        modalities=["text", "audio"] if config.spoken else None,
        audio=config.speech if config.spoken else None,
        tools=[chat.ToolDefinition("function", tool) for tool in config.tools],
        tool_choice=chat.nested(config.tool_choice),
        parallel_tool_calls=config.parallel_tool_calls,
    )


# truncation: leaves out the oldest turns of a request that does not fit the context, or a smaller KV cache

ANSWER_SHARE, LARGEST_SHARE = 8, 2
"""These fractions (1 / n) of the context are kept free for an answer without max_output_tokens, and at most for one
with."""
Attempt = Callable[[ChatRequestBody], Awaitable[ChatJob]]


async def truncated(body: ChatRequestBody, attempt: Attempt) -> ChatJob:
    """The job with as many of the last turns as fit. ApiError if even the last turn does not fit."""
    if (job := await _fitting(body, attempt)) is not None:
        return job
    instructions = 1 if body.messages[0].role == "system" else 0
    # A conversation begins with a user's message, so that calls and their results stay together.
    turns = [n for n, message in enumerate(body.messages) if message.role == "user" and n > instructions]
    if not turns:
        return await attempt(body)
    first, last = 0, len(turns) - 1
    while first < last:
        middle = (first + last) // 2
        if await _fitting(_from(body, instructions, turns[middle]), attempt) is None:
            first = middle + 1
        else:
            last = middle
    # With only the last turn, the answer may be short, or the error says what does not fit.
    return await attempt(_from(body, instructions, turns[first]))


def _from(body: ChatRequestBody, instructions: int, start: int) -> ChatRequestBody:
    messages = [*body.messages[:instructions], *body.messages[start:]]
    return msgspec.structs.replace(body, messages=messages)


async def _fitting(body: ChatRequestBody, attempt: Attempt) -> ChatJob | None:
    """None if there is no room for the prompt and an answer."""
    try:
        job = await attempt(body)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    context = job.max_model_len
    answer = min(body.max_completion_tokens or context // ANSWER_SHARE, context // LARGEST_SHARE)
    return job if len(job.prompt.token_ids) <= context - answer else None
