"""The WebSocket /v1/realtime: OpenAI's Realtime protocol, without speech recognition.

A connection has one session, one conversation and at most one response at a time. Events of the client are handled one
after another; a response runs beside them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from models.interfaces.errors import InputError
from service.api.chat.schema import Message
from service.api.context import LARGE_BODY, ServerContext, context_of
from service.api.engines.request_stream import EngineError
from service.api.http.errors import ApiError, as_api_error, bad_request
from service.api.http.json_body import parse
from service.api.http.openapi import websocket
from service.api.http.record import RequestRecord, record_of
from service.api.realtime.answer import Answer
from service.api.realtime.conversation import Conversation, check_counts, max_items
from service.api.realtime.events import (
    AnyClientEvent,
    AnyServerEvent,
    ConversationEvent,
    Envelope,
    ItemAdded,
    ItemCreate,
    ItemDelete,
    ItemDeleted,
    ItemDone,
    ItemRetrieve,
    ItemRetrieved,
    ItemTruncate,
    ItemTruncated,
    OutputAudioClear,
    ResponseCancel,
    ResponseCreate,
    SessionCreated,
    SessionUpdate,
    SessionUpdated,
    Unsupported,
    error_event,
)
from service.api.realtime.items import (
    NO_RECOGNITION,
    ConversationItem,
    check_pictures,
    created_item,
    new_id,
)
from service.api.realtime.session_config import (
    RealtimeConfig,
    ResponseParams,
    RetentionRatio,
    UnsupportedField,
    check_update,
    shown,
    take_unsupported,
    updated,
)
from service.api.realtime.to_messages import CONVERSATION, INPUT, Source, SourcedMessage, as_messages
from service.api.sockets import GOING_AWAY, NOT_JSON, POLICY, Inbox, StreamClosed, run_session, send
from service.hub.catalog import HostedModel

router = APIRouter()

PATH = "/v1/realtime"
PROTOCOL = "realtime"
"""The subprotocol that clients in browsers offer along with the key, and insist on."""
IDLE = 600.0
"""Seconds of silence after which a client is disconnected."""
QUEUED_EVENTS = 2
"""Each may have a picture."""
MAX_UPDATE = 1 << 18
"""Limit in bytes of a session.update, since its values are kept."""

websocket(
    PATH, "Converse in text and pictures; answers are written or spoken.", client=AnyClientEvent, server=AnyServerEvent
)


@router.websocket(PATH)
async def realtime(socket: WebSocket) -> None:
    context = context_of(socket)
    record = record_of(socket.scope)
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", ()) else None)
    await run_session(context, socket, record, Session(context, socket, record))


class Session:
    """One connection. Goes on reading events while a response is being made."""

    def __init__(self, context: ServerContext, socket: WebSocket, record: RequestRecord) -> None:
        self._context = context
        self._socket = socket
        self._record = record
        self._id = new_id("sess")
        self._conversation = Conversation(context.settings, record.ticket)
        self._config = RealtimeConfig(output_modalities=["audio" if _speaks(context) else "text"])
        self._answer: Answer | None = None
        self._events = Inbox(socket, record.ticket, QUEUED_EVENTS)

    async def run(self) -> None:
        self._context.require_ready()
        self._model = self._requested_model()
        await self._emit(SessionCreated(session=shown(self._config, self._id, self._model.name)))
        while True:
            await self._take(await self._next())

    def _requested_model(self) -> HostedModel:
        query = self._socket.query_params
        if query.get("intent") == "transcription" or "call_id" in query:
            field = "call_id" if "call_id" in query else "intent"
            raise bad_request(f"{field}: not supported: {NO_RECOGNITION}.", field, "unsupported_parameter")
        if "model" not in query:
            raise bad_request("model: required in the query, as in /v1/realtime?model=NAME.", "model")
        return self._context.model(query["model"], "chat", self._record)

    async def _next(self) -> str | bytes:
        """The next event. The session ends when a response cannot be sent, when the client is silent while nothing is
        being answered, and at a shutdown between two responses."""
        waiting = asyncio.create_task(self._events.next())
        draining = asyncio.create_task(self._context.drain_begun.wait())
        try:
            while not waiting.done():
                other = draining if self._answer is None else self._answer.task
                idle = IDLE if self._answer is None else None
                done, _ = await asyncio.wait({waiting, other}, timeout=idle, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise StreamClosed(POLICY, "idle")
                if draining in done:
                    raise StreamClosed(GOING_AWAY, "shutting down")
                if other in done:
                    self._answer = None
                    await other
            event = waiting.result()
        finally:
            waiting.cancel()
            draining.cancel()
        if event is None:
            if self._events.goodbye and (self._answer is None or self._answer.ended):
                raise StreamClosed
            raise WebSocketDisconnect
        return event

    async def _take(self, raw: str | bytes) -> None:
        """Handles one event. Errors are reported to the client, and the session goes on."""
        event_id = None
        try:
            envelope = await self._envelope(raw)
            event_id = envelope.event_id[:512] if isinstance(envelope.event_id, str) else None
            if envelope.type == "session.update":
                await self._update(raw)
            else:
                await self._obey(await self._decoded(raw, AnyClientEvent), len(raw))
        except (ApiError, EngineError, InputError, msgspec.MsgspecError, RecursionError) as error:
            await self.send_error(as_api_error(error), event_id)

    async def _envelope(self, raw: str | bytes) -> Envelope:
        """StreamClosed for anything but a JSON object: the client speaks another protocol."""
        try:
            # Fields that an event does not have are skipped without a look at their bytes.
            text = raw if isinstance(raw, str) else raw.decode()
            envelope: Envelope = await self._decoded(text, Envelope)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            deep = isinstance(error, RecursionError)
            message = "The event is nested too deeply." if deep else "An event must be a JSON object, in UTF-8."
            await self.send_error(bad_request(message, code="invalid_json"))
            raise StreamClosed(NOT_JSON, "not a JSON object") from None
        return envelope

    async def _decoded(self, raw: str | bytes, kind: Any) -> Any:
        if len(raw) > LARGE_BODY:
            return await self._context.in_thread(lambda: parse(raw, kind))
        return parse(raw, kind)

    async def _obey(self, event: ConversationEvent, size: int) -> None:
        """size: bytes of the event."""
        match event:
            case ItemCreate():
                await self._create_item(event, size)
            case ItemRetrieve():
                item = self._conversation.item(event.item_id)
                await self._emit(ItemRetrieved(item=item), self._conversation.size(event.item_id))
            case ItemDelete():
                self._conversation.delete(event.item_id)
                await self._emit(ItemDeleted(item_id=event.item_id))
            case ItemTruncate():
                await self._truncate(event)
            case ResponseCreate():
                await self._respond(event.response or ResponseParams(), event.event_id, size)
            case ResponseCancel():
                await self._cancel(event.response_id)
            case _:
                raise _unsupported(event)

    async def _update(self, raw: str | bytes) -> None:
        """raw: a session.update, of which everything that is supported takes effect."""
        if len(raw) > MAX_UPDATE:
            message = f"session: too long: {len(raw)} bytes given, at most {MAX_UPDATE} allowed."
            raise bad_request(message, "session")
        fields = parse(raw, dict[str, Any])
        session = fields.get("session")
        unsupported = take_unsupported(session, "session") if isinstance(session, dict) else []
        given = parse(msgspec.json.encode(fields), SessionUpdate).session
        if given.type != "realtime":
            message = f"session.type: must be realtime: {NO_RECOGNITION}."
            raise bad_request(message, "session.type", "unsupported_parameter")
        if given.model is not None and self._context.catalog.get(given.model) is not self._model:
            raise bad_request("session.model: cannot be changed; open another connection.", "session.model")
        config = updated(self._config, given, "session")
        if config.spoken and not self._context.catalog.of_kind("speech"):
            field = "session.output_modalities"
            unsupported.append(UnsupportedField(param=field, message=f"{field}: no speech model is served."))
            config = msgspec.structs.replace(config, output_modalities=["text"])
        await check_update(self._context, given, config, self._record.client)
        self._config = config
        shown_session = shown(self._config, self._id, self._model.name)
        self._context.field_warnings.warn("session.update", (field.param for field in unsupported))
        await self._emit(SessionUpdated(session=shown_session, unsupported=unsupported or msgspec.UNSET))

    async def _create_item(self, event: ItemCreate, size: int) -> None:
        check_counts([event.item], "item")
        item = created_item(event.item, "item")
        self._conversation.check_room(item)
        await check_pictures(self._context, self._model.chat_processor, item, "item", self._record.client)
        previous = self._conversation.add(item, event.previous_item_id)
        await self._emit(ItemAdded(item=item, previous_item_id=previous), size)
        await self._emit(ItemDone(item=item, previous_item_id=previous), size)

    async def _truncate(self, event: ItemTruncate) -> None:
        self._conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
        truncated = ItemTruncated(
            item_id=event.item_id, content_index=event.content_index, audio_end_ms=event.audio_end_ms
        )
        await self._emit(truncated)

    async def _respond(self, given: ResponseParams, event_id: str | None, size: int) -> None:
        context, conversation = self._context, self._conversation
        if self._answer is not None:
            if not self._answer.ended:
                message = "A response is in progress; wait for response.done or send response.cancel."
                raise bad_request(message, code="conversation_already_has_active_response")
            await asyncio.wait({self._answer.task})
            self._answer.task.result()  # raises if its last event could not be sent
        context.require_ready()
        config = updated(self._config, given, "response")
        kept = given.conversation != "none"
        if kept and len(conversation) >= max_items():
            message = f"The conversation is full: at most {max_items()} items allowed. Delete some."
            raise bad_request(message, code="conversation_full")
        messages = self._messages(config, given)
        shortened = isinstance(config.truncation, RetentionRatio)
        turns = conversation.turns(shortened=shortened) if given.input is None else ()
        record = RequestRecord(
            self._record.request_id, "realtime", context.admission.ticket("realtime"), self._record.client
        )
        record.model = self._model.name
        self._answer = Answer(
            context,
            self._emit,
            record,
            conversation if kept else None,
            config,
            messages,
            whole=CONVERSATION if given.input is None else INPUT,
            turns=turns,
            metadata=given.metadata,
            event_id=event_id,
            size=size,
        )

    def _messages(self, config: RealtimeConfig, given: ResponseParams) -> list[SourcedMessage]:
        if given.input is None:
            shortened = isinstance(config.truncation, RetentionRatio)
            messages = self._conversation.messages(shortened=shortened)
        else:
            check_counts(given.input, INPUT)
            named = [item.id for item in given.input if item.type == "item_reference"]
            if len(set(named)) < len(named):
                # A large item that is named a thousand times would otherwise be copied a thousand times.
                raise bad_request(f"{INPUT}: an item can be referred to once.", INPUT)
            messages = as_messages(self._input(item, place) for place, item in enumerate(given.input))
        if config.instructions:
            messages = [SourcedMessage(Message("system", config.instructions)), *messages]
        if not messages:
            raise bad_request("There is nothing to respond to; send conversation.item.create first.")
        return messages

    def _input(self, item: ConversationItem, place: int) -> Source:
        field = f"{INPUT}[{place}]"
        if item.type != "item_reference":
            return Source(created_item(item, field), field, given=True)
        if item.id is None:
            raise bad_request(f"{field}.id: this field is required.", f"{field}.id")
        return Source(self._conversation.item(item.id, f"{field}.id"), field)

    async def _cancel(self, response_id: str | None) -> None:
        answer = self._answer
        if answer is None or answer.ended or response_id not in (None, answer.id):
            raise bad_request("There is no such response in progress.", code="response_cancel_not_active")
        await answer.cancel()

    async def _emit(self, event: AnyServerEvent, size: int = 0) -> None:
        """size: bytes of what the event shows of a client's, about."""
        await send(self._context, self._socket, event, size)

    async def send_error(self, error: ApiError, event_id: str | None = None) -> None:
        """event_id: of the client's event that is the cause."""
        await self._emit(error_event(error, event_id))

    async def stop(self) -> None:
        await self._events.close()
        if self._answer is not None:
            await self._answer.stop()


def _speaks(context: ServerContext) -> bool:
    """Whether answers can be spoken without naming a model."""
    hosted = context.catalog.of_kind("speech")
    return len(hosted) == 1 or bool(hosted and context.settings.spoken_answer_model)


def _unsupported(event: Unsupported) -> ApiError:
    name = event.__struct_config__.tag
    reason = "only WebRTC has this buffer" if isinstance(event, OutputAudioClear) else NO_RECOGNITION
    return bad_request(f"{name}: not supported: {reason}.", "type", "unsupported_event")
