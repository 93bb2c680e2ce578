"""One response: a chat answer, written or spoken, as the events of the Realtime protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing

from msgspec import UNSET
from starlette.websockets import WebSocketDisconnect

from models.interfaces.errors import InputError
from service.api.chat.detokenizer import TextDelta
from service.api.chat.job import ChatJob, generate, prepare_job
from service.api.chat.schema import ChatRequestBody, Message
from service.api.chat.spoken import SpokenAnswer, prepare_spoken
from service.api.chat.tool_schema import ToolCallDelta
from service.api.context import ServerContext
from service.api.http.errors import ApiError, as_api_error
from service.api.http.record import RequestRecord
from service.api.realtime.conversation import Conversation
from service.api.realtime.events import (
    RealtimeFailure,
    RealtimeResponse,
    RealtimeUsage,
    ResponseCreated,
    ResponseDone,
    ResponseStatus,
    StatusDetails,
    error_event,
    realtime_usage,
)
from service.api.realtime.items import ConversationItem, Status, new_id
from service.api.realtime.outputs import CallOutput, Emit, MessageOutput, Place
from service.api.realtime.session_config import Metadata, RealtimeAudio, RealtimeConfig, RetentionRatio, chat_tools
from service.api.realtime.to_messages import SourcedMessage, renamed, renamed_message
from service.api.realtime.truncation import truncated
from service.api.sockets import StreamClosed

log = logging.getLogger("reprise.access")


class Answer:
    """`task`, which starts at once, makes the answer, sends it and writes it into the conversation. A request that is
    refused before the response begins gets an error event; a later failure is the status of response.done.

    record: of this response; its ticket is released at the end. conversation: None for an answer that is not kept.
    whole: CONVERSATION or INPUT, where the messages are from, which errors name.
    turns: if the messages are the conversation's, the ids of the items that are a user's.
    metadata, event_id, size (bytes): of the client's response.create, which may hold items of its own.
    """

    def __init__(
        self,
        context: ServerContext,
        emit: Emit,
        record: RequestRecord,
        conversation: Conversation | None,
        config: RealtimeConfig,
        messages: Sequence[SourcedMessage],
        *,
        whole: str,
        turns: Sequence[str],
        metadata: Metadata | None,
        event_id: str | None,
        size: int,
    ) -> None:
        self.id = new_id("resp")
        self.ended = False
        """Whether the last event has been handed over, so that the next response may begin."""
        self._context = context
        self._emit = emit
        self._record = record
        self._conversation = conversation
        self._config = config
        self._turns = turns
        self._metadata = metadata
        self._event_id = event_id
        self._size = size
        self._messages = {id(one.message): one for one in messages}
        """By the identity of the message: a request may leave out the oldest."""
        self._whole = whole
        self._body = _request(record.model, config, [one.message for one in messages])
        self._job: ChatJob | None = None
        self._spoken: SpokenAnswer | None = None
        self._begun = False
        self._message: MessageOutput | None = None
        self._calls: list[CallOutput] = []
        self._outputs: list[MessageOutput | CallOutput] = []
        """The message and the calls, in order."""
        self._cancelled = False
        self._ending = False
        self._telling = asyncio.Lock()
        """Held while events that belong together are sent, so that a client that cancels gets all of them or none."""
        self.task = asyncio.create_task(self._run())

    async def cancel(self) -> None:
        """The client cancels. Returns when the last event has been sent; by then nothing is left in the engine."""
        async with self._telling:
            if not self._ending:
                self._cancelled = True
                self.task.cancel()
        await asyncio.wait({self.task})

    async def stop(self) -> None:
        """Nobody listens any more."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            details = await self._generate()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._cancelled or task is None:
                raise
            task.uncancel()
            details = StatusDetails(type="cancelled", reason="client_cancelled")
        except (StreamClosed, WebSocketDisconnect):
            raise
        except Exception as error:
            failure = renamed(as_api_error(error), "response")
            if not self._begun:
                await self._refuse(failure)
                return
            failed = RealtimeFailure(type=failure.type, code=failure.code, message=failure.message)
            details = StatusDetails(type="failed", error=failed)
        finally:
            self._record.ticket.release()
        self._ending = True
        await self._end(details)

    async def _generate(self) -> StatusDetails:
        context = self._context
        async with asyncio.timeout(context.settings.request_timeout):
            job = await self._prepared()
        self._job = job
        async with self._telling:
            await self._begin()
        finish_reason = None
        deltas = generate(context, job, 0)
        spoken = self._spoken
        async with aclosing(deltas if spoken is None else spoken.parts(deltas)) as parts:
            async for part in parts:
                async with self._telling:
                    await self._tell(part)
                if isinstance(part, TextDelta):
                    finish_reason = part.finish_reason or finish_reason
        if finish_reason == "length" or (spoken is not None and (spoken.cut or spoken.truncated)):
            return StatusDetails(type="incomplete", reason="max_output_tokens")
        return StatusDetails(type="completed")

    async def _prepared(self) -> ChatJob:
        """With truncation, keeps only as many of the last turns as the model's context can hold along with an
        answer."""
        truncation = self._config.truncation
        if truncation == "disabled":
            return await self._attempt(self._body)
        ratio = truncation if isinstance(truncation, RetentionRatio) else None
        job, left_out = await truncated(self._body, self._attempt, ratio)
        if ratio is not None and left_out and self._turns and self._conversation is not None:
            self._conversation.leave_out(self._turns[left_out], system=bool(self._config.instructions))
        return job

    async def _attempt(self, body: ChatRequestBody) -> ChatJob:
        self._record.ticket.release()
        self._record.ticket.grow(1, self._size)
        try:
            if self._config.spoken:
                self._spoken = await prepare_spoken(self._context, body, self._record)
            return await prepare_job(self._context, body, self._record)
        except (ApiError, InputError) as error:
            messages = [self._messages.get(id(message)) for message in body.messages]
            raise renamed_message(as_api_error(error), messages, self._whole) from error

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
        await self._emit(ResponseCreated(response=self._response("in_progress", [])))

    async def _begun_message(self) -> MessageOutput:
        """The message, which is announced with its first text or sound."""
        if self._message is None:
            spoken = self._config.format if self._config.spoken else None
            self._message = MessageOutput(self._next_place(), spoken=spoken)
            self._outputs.append(self._message)
            await self._message.begin()
        return self._message

    async def _call(self, delta: ToolCallDelta) -> None:
        if delta.id is not UNSET:
            call = CallOutput(self._next_place(), str(delta.id), str(delta.function.name))
            self._calls.append(call)
            self._outputs.append(call)
            await call.begin()
        if delta.function.arguments:
            await self._calls[delta.index].write(delta.function.arguments)

    def _next_place(self) -> Place:
        return Place(self.id, len(self._outputs), self._emit, self._conversation)

    async def _refuse(self, error: ApiError) -> None:
        self._ending = self.ended = True
        self._observe("refused")
        await self._emit(error_event(error, self._event_id))

    async def _end(self, details: StatusDetails) -> None:
        if not self._begun:
            await self._begin()
        if not self._outputs and details.type in ("completed", "incomplete"):
            await self._begun_message()
        status: Status = "completed" if details.type == "completed" else "incomplete"
        output = [await one.end(status, self._spoken) for one in self._outputs]
        self._observe(details.type)
        self.ended = True
        await self._emit(ResponseDone(response=self._response(details.type, output, details)))

    def _response(
        self, status: ResponseStatus, output: list[ConversationItem], details: StatusDetails | None = None
    ) -> RealtimeResponse:
        return RealtimeResponse(
            id=self.id,
            status=status,
            output=output,
            conversation_id=None if self._conversation is None else self._conversation.id,
            output_modalities=self._config.output_modalities,
            max_output_tokens=self._config.max_output_tokens,
            audio=RealtimeAudio(output=self._config.output),
            metadata=self._metadata,
            status_details=details,
            usage=None if details is None else self._usage(),
        )

    def _usage(self) -> RealtimeUsage | None:
        audio_tokens = 0 if self._spoken is None else self._spoken.patches
        return None if self._job is None else realtime_usage(self._job.usage(audio_tokens))

    def _observe(self, status: str) -> None:
        record = self._record
        self._context.metrics.observe("realtime_responses_total", model=record.model, status=status)
        extra = {"request_id": record.request_id, "model": record.model, **record.notes}
        log.info("realtime response %s", status, extra=extra)


def _request(model: str, config: RealtimeConfig, messages: list[Message]) -> ChatRequestBody:
    return ChatRequestBody(
        model=model,
        messages=messages,
        stream=True,
        max_completion_tokens=None if config.max_output_tokens == "inf" else config.max_output_tokens,
        temperature=config.temperature,
        seed=config.seed,
        modalities=["text", "audio"] if config.spoken else None,
        audio=config.audio if config.spoken else None,
        **chat_tools(config),
    )
