"""The WebSocket /v1/realtime: OpenAI's Realtime protocol. A connection has one session, one conversation and at most
one response at a time, which runs beside the client's events."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, WebSocket
from msgspec import UNSET

from models.interfaces.errors import InputError
from service.api.chat.schema import Message
from service.api.chat.turns import Turn
from service.api.context import LARGE_BODY, ServerContext
from service.api.engines.request_stream import EngineError
from service.api.http.errors import ApiError, as_api_error, bad_request, invalid
from service.api.http.json_body import parse
from service.api.http.middleware import RequestRecord
from service.api.realtime import schema
from service.api.realtime.answer import Answer, error_event
from service.api.realtime.conversation import (
    CONVERSATION,
    INPUT,
    Conversation,
    Source,
    as_turns,
    check_counts,
    check_pictures,
    created_item,
)
from service.api.realtime.listening import Ears
from service.api.sockets import NOT_JSON, POLICY, Inbox, StreamClosed, run_session, send
from service.hub.catalog import HostedModel, Task
from service.media.voice_activity import Boundary

router = APIRouter()

PATH = "/v1/realtime"
PROTOCOL = "realtime"
"""The subprotocol that clients in browsers offer along with the key, and insist on."""
IDLE = 600.0
"""Seconds of silence after which a client is disconnected."""
MAX_UPDATE = 1 << 18
"""Limit in bytes of a session.update, since its values are kept."""


@router.websocket(PATH)
async def realtime(socket: WebSocket) -> None:
    await run_session(socket, Session, PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", ()) else None)


class Session:
    """One connection. Goes on reading events while a response is being made."""

    def __init__(self, context: ServerContext, socket: WebSocket, record: RequestRecord) -> None:
        self._context = context
        self._socket = socket
        self._record = record
        self._id = schema.new_id("sess")
        self._conversation = Conversation(context.settings, record.ticket)
        self._answer: Answer | None = None
        hosted = context.catalog.of_task("transcription")
        self._ears = None if hosted is None else Ears(context, record, hosted, self._tell)
        self._config = schema.RealtimeConfig(
            output_modalities=["audio" if _speaks(context) else "text"],
            audio=schema.ResponseAudio(output=schema.RealtimeOutput(format=schema.PCM)),
        )
        self._turn: asyncio.Task[None] | None = None
        """Writes down what was said in the last turn, and answers it."""
        self._speech_id: str | None = None
        """Id of the item that what somebody is saying will be, as was detected."""
        self._unanswered = False
        """Whether a detected turn has text that no response was made for."""
        self._heard_last: str | None = None
        """Id of the last item of a session that transcribes and keeps no conversation."""
        self._told_deaf = False
        """Whether the client was told that its audio is not heard. It sends dozens of chunks a second."""
        self._events = Inbox(socket, record.ticket)

    async def run(self) -> None:
        self._context.require_ready()
        self._model = self._requested_model()
        if self._ears is not None and self._transcribes:
            self._ears.model = self._model
        await self._tell("session.created", session=self._shown)
        while True:
            answer, turn = self._answer, self._turn
            task = turn or (None if answer is None else answer.task)
            idle = IDLE if task is None else None
            busy = turn is not None or (answer is not None and not answer.ended)
            event = await self._events.next_during(self._context, task, idle, busy=busy)
            if event is not None:
                await self._take(event)
            elif task is None:
                raise StreamClosed(POLICY, "idle")
            else:
                if task is turn:
                    self._turn = None
                else:
                    self._answer = None
                await task  # raises if its last event could not be sent

    @property
    def _shown(self) -> schema.RealtimeSession:
        fields = {name: getattr(self._config, name) for name in self._config.__struct_fields__}
        heard = schema.DEAF if self._ears is None else self._ears.configuration
        fields["audio"] = schema.RealtimeAudio(input=heard, output=self._config.output)
        kind: Literal["realtime", "transcription"] = "transcription" if self._transcribes else "realtime"
        return schema.RealtimeSession(id=self._id, model=self._model.name, type=kind, **fields)

    @property
    def _transcribes(self) -> bool:
        return self._model.task == "transcription"

    def _requested_model(self) -> HostedModel:
        query = self._socket.query_params
        task: Task = "transcription" if query.get("intent") == "transcription" else "chat"
        if task == "transcription" and self._ears is None:
            raise invalid("intent", f"not supported: {schema.NO_RECOGNITION}", "unsupported_parameter")
        if "model" in query:
            return self._context.model(query["model"], task, self._record)
        if task == "transcription":
            return self._hearing.model
        raise invalid("model", "required in the query, as in /v1/realtime?model=NAME")

    async def _take(self, raw: str | bytes) -> None:
        """Handle one event. Errors are reported to the client, and the session goes on."""
        event_id = None
        try:
            envelope = await self._envelope(raw)
            event_id = envelope.event_id[:512] if isinstance(envelope.event_id, str) else None
            if envelope.type == "session.update":
                await self._update(raw)
            elif envelope.type == schema.AUDIO_CHUNK and self._told_deaf:
                return
            elif isinstance(envelope.type, str) and envelope.type in self._refused_events:
                self._told_deaf = self._told_deaf or envelope.type == schema.AUDIO_CHUNK
                message = f"{envelope.type}: not supported: {self._refused_events[envelope.type]}."
                raise bad_request(message, "type", "unsupported_event")
            else:
                await self._obey(envelope.type, await self._decoded(raw, schema.AnyClientEvent), len(raw))
        except (ApiError, EngineError, InputError, msgspec.MsgspecError, RecursionError) as error:
            await self.send_error(as_api_error(error), event_id)

    @property
    def _refused_events(self) -> dict[str, str]:
        """Events of OpenAI's clients, and why they are refused."""
        deaf = dict.fromkeys(schema.AUDIO_EVENTS, schema.NO_RECOGNITION) if self._ears is None else {}
        return schema.UNSUPPORTED_EVENTS | deaf

    async def _envelope(self, raw: str | bytes) -> schema.Envelope:
        """StreamClosed for anything but a JSON object: the client speaks another protocol."""
        try:
            # Fields that an event does not have are skipped without a look at their bytes.
            text = raw if isinstance(raw, str) else raw.decode()
            envelope: schema.Envelope = await self._decoded(text, schema.Envelope)
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

    async def _obey(self, type: str, event: Any, size: int) -> None:
        """event: of CLIENT_EVENTS. size: its bytes."""
        conversation = self._conversation
        match type:
            case "conversation.item.create":
                await self._create_item(event.item, event.previous_item_id, size)
            case "conversation.item.retrieve":
                item = conversation.item(event.item_id)
                await self._tell("conversation.item.retrieved", conversation.size(event.item_id), item=item)
            case "conversation.item.delete":
                conversation.delete(event.item_id)
                await self._tell("conversation.item.deleted", item_id=event.item_id)
            case "conversation.item.truncate":
                place: dict[str, Any] = {"item_id": event.item_id, "content_index": event.content_index}
                conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
                await self._tell("conversation.item.truncated", **place, audio_end_ms=event.audio_end_ms)
            case "response.create":
                await self._settle()
                await self._respond(event.response or schema.ResponseParams(), event.event_id, size)
            case "response.cancel":
                await self._cancel(event.response_id)
            case schema.AUDIO_CHUNK:
                for boundary in await self._hearing.append(event.audio):
                    await self._hear(boundary, event.event_id)
            case "input_audio_buffer.clear":
                self._hearing.take()
                self._speech_id = None
                await self._tell("input_audio_buffer.cleared")
            case "input_audio_buffer.commit":
                if self._hearing.empty:
                    raise bad_request("The input audio buffer is empty.", code="input_audio_buffer_commit_empty")
                await self._commit()

    @property
    def _hearing(self) -> Ears:
        assert self._ears is not None  # events of audio are refused otherwise
        return self._ears

    async def _hear(self, boundary: Boundary, event_id: str | None) -> None:
        """A turn begins, which ends the response in progress, or ends, and becomes an item."""
        ears, ms = self._hearing, round(boundary.ms)
        if boundary.starts:
            ears.drop_until(boundary.ms)
            self._speech_id = schema.new_id("item")
            await self._tell("input_audio_buffer.speech_started", item_id=self._speech_id, audio_start_ms=ms)
            answer, interrupts = self._answer, ears.detection is not None and ears.detection.interrupt_response
            if interrupts and answer is not None and answer.conversation is not None and not answer.ended:
                await answer.cancel("turn_detected")
            return
        await self._tell("input_audio_buffer.speech_stopped", item_id=self._speech_id, audio_end_ms=ms)
        try:
            await self._commit(boundary.ms)
        except ApiError as error:  # the boundaries behind this one are still handled
            self._speech_id = None
            await self.send_error(error, event_id)

    async def _commit(self, end_ms: float | None = None) -> None:
        """Make an item of the buffer, up to the end of a turn that was detected, and have it written down."""
        await self._settle()
        id = self._speech_id or schema.new_id("item")
        content = [schema.ItemContent(type="input_audio")]
        settled: dict[str, Any] = {"id": id, "object": "realtime.item", "status": "completed"}
        item = schema.ConversationItem(type="message", role="user", content=content, **settled)
        if self._transcribes:
            previous, self._heard_last = self._heard_last, item.id
        else:
            previous = self._conversation.add(item)
        self._speech_id = None
        placed: dict[str, Any] = {"previous_item_id": previous}
        await self._tell("input_audio_buffer.committed", item_id=item.id, **placed)
        for type in ("conversation.item.added", "conversation.item.done"):
            await self._tell(type, item=item, **placed)
        detection = None if end_ms is None else self._hearing.detection
        self._turn = asyncio.create_task(self._write_down(item, self._hearing.take(end_ms), detection))

    async def _write_down(self, item: schema.ConversationItem, data: bytes, detection: schema.Detection | None) -> None:
        """A turn that was detected is answered, unless nothing was said in it, or somebody speaks again. detection: as
        it was at the end of the turn; None: the client ended it."""
        id, detected = str(item.id), detection is not None
        told = self._transcribes or self._hearing.options is not None
        text = await self._hearing.transcribe(id, data, told=told, live=self._transcribes and not detected)
        if self._transcribes or id not in self._conversation:
            return
        if detected and not text:
            self._conversation.delete(id)
            await self._tell("conversation.item.deleted", item_id=id)
        else:
            said = [schema.ItemContent(type="input_audio", transcript=text)]
            self._conversation.put_answer(msgspec.structs.replace(item, content=said))
            self._unanswered = self._unanswered or detected
        if not self._unanswered or detection is None or not detection.create_response:
            return
        if self._speech_id is None or not detection.interrupt_response:
            try:
                await self._respond(schema.ResponseParams(), None, 0)
            except (ApiError, EngineError, InputError) as error:
                await self.send_error(as_api_error(error))

    async def _settle(self) -> None:
        if self._turn is not None:
            await self._events.wait(self._turn)
            self._turn.result()  # raises if an event could not be sent

    async def _update(self, raw: str | bytes) -> None:
        """raw: a session.update, of which everything that is supported takes effect."""
        if len(raw) > MAX_UPDATE:
            raise invalid("session", f"too long: {len(raw)} bytes given, at most {MAX_UPDATE} allowed")
        fields = parse(raw, dict[str, Any])
        session, hears = fields.get("session"), self._ears is not None
        unsupported = take_unsupported(session, hears=hears) if isinstance(session, dict) else []
        given = parse(msgspec.json.encode(fields), schema.SessionUpdate).session
        if given.type == "transcription" and not self._transcribes:
            problem = "cannot be changed; connect with ?intent=transcription"
            raise invalid("session.type", problem if hears else f"must be realtime: {schema.NO_RECOGNITION}")
        if given.model is not None and self._context.catalog.get(given.model) is not self._model:
            raise invalid("session.model", "cannot be changed; open another connection")
        config = updated(self._config, given, "session")
        if config.spoken and not self._context.catalog.of_kind("speech"):
            unsupported.append(_unsupported("session.output_modalities", "no speech model is served"))
            config = msgspec.structs.replace(config, output_modalities=["text"])
        # Last, since it takes effect at once.
        if self._ears is not None and given.audio is not None and given.audio.input is not None:
            self._ears.configure(given.audio.input)
            self._speech_id = self._speech_id if self._ears.speaking else None
        self._config = config
        self._context.field_warnings.warn("session.update", (field.param for field in unsupported))
        await self._tell("session.updated", session=self._shown, unsupported=unsupported or UNSET)

    async def _create_item(self, given: schema.ConversationItem, previous_id: str | None, size: int) -> None:
        check_counts([given], "item")
        item = created_item(given, "item")
        self._conversation.check_room(item)
        await check_pictures(self._context, self._model.chat_processor, item, self._record.client)
        previous = self._conversation.add(item, previous_id)
        for type in ("conversation.item.added", "conversation.item.done"):
            await self._tell(type, size, item=item, previous_item_id=previous)

    async def _respond(self, given: schema.ResponseParams, event_id: str | None, size: int) -> None:
        context, conversation = self._context, self._conversation
        if self._transcribes:
            raise bad_request("A session of the type transcription has no responses.", code="unsupported_event")
        if self._answer is not None:
            if not self._answer.ended:
                message = "A response is in progress; wait for response.done or send response.cancel."
                raise bad_request(message, code="conversation_already_has_active_response")
            await asyncio.wait({self._answer.task})
            self._answer.task.result()  # raises if its last event could not be sent
        context.require_ready()
        self._unanswered = False
        config = updated(self._config, given, "response")
        kept = given.conversation != "none"
        if kept and conversation.full:
            raise bad_request("The conversation is full; delete some items.", code="conversation_full")
        turns = self._turns(config, given)
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
            turns,
            whole=CONVERSATION if given.input is None else INPUT,
            metadata=given.metadata,
            event_id=event_id,
            size=size,
        )

    def _turns(self, config: schema.RealtimeConfig, given: schema.ResponseParams) -> list[Turn[Source]]:
        if given.input is None:
            turns = self._conversation.turns()
        else:
            check_counts(given.input, INPUT)
            named = [item.id for item in given.input if item.type == "item_reference"]
            if len(set(named)) < len(named):
                # A large item that is named a thousand times would otherwise be copied a thousand times.
                raise invalid(INPUT, "an item can be referred to once")
            turns = as_turns(self._input(item, place) for place, item in enumerate(given.input))
        if config.instructions:
            turns = [Turn(Message("system", config.instructions)), *turns]
        if not turns:
            raise bad_request("There is nothing to respond to; send conversation.item.create first.")
        return turns

    def _input(self, item: schema.ConversationItem, place: int) -> Source:
        field = f"{INPUT}[{place}]"
        if item.type != "item_reference":
            return Source(created_item(item, field), field, given=True)
        if item.id is None:
            raise invalid(f"{field}.id", "this field is required")
        return Source(self._conversation.item(item.id, f"{field}.id"), field)

    async def _cancel(self, response_id: str | None) -> None:
        answer = self._answer
        if answer is None or answer.ended or response_id not in (None, answer.id):
            # LiveKit's plugin ignores an error that begins like OpenAI's.
            message = "Cancellation failed: there is no such response in progress."
            raise bad_request(message, code="response_cancel_not_active")
        await answer.cancel()

    async def _emit(self, event: schema.ServerEvent, size: int = 0) -> None:
        """size: bytes of what the event shows of a client's, about."""
        await send(self._context, self._socket, event, size)

    async def _tell(self, type: str, size: int = 0, **fields: Any) -> None:
        await self._emit(schema.server_event(type, **fields), size)

    async def send_error(self, error: ApiError, event_id: str | None = None) -> None:
        """event_id: of the client's event that is the cause."""
        await self._emit(error_event(error, event_id))

    async def stop(self) -> None:
        await self._events.close()
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.gather(self._turn, return_exceptions=True)
        if self._answer is not None:
            await self._answer.stop()


def _speaks(context: ServerContext) -> bool:
    """Whether answers can be spoken without naming a model."""
    hosted = context.catalog.of_kind("speech")
    return len(hosted) == 1 or bool(hosted and context.settings.spoken_answer_model)


AUDIO_INPUT = "session.audio.input"
DETECTION, TRANSCRIPTION = f"{AUDIO_INPUT}.turn_detection", f"{AUDIO_INPUT}.transcription"
OF_HEARING = (DETECTION, TRANSCRIPTION)
"""Objects that are in force where a model that hears is hosted."""
FIELDS = {
    "session": schema.SessionParams.__struct_fields__,
    "session.audio": schema.RealtimeAudio.__struct_fields__,
    AUDIO_INPUT: schema.RealtimeInput.__struct_fields__,
    "session.audio.output": schema.RealtimeOutput.__struct_fields__,
    DETECTION: ("type", *schema.ServerVad.__struct_fields__, *schema.SemanticVad.__struct_fields__),
    TRANSCRIPTION: schema.RealtimeTranscription.__struct_fields__,
}
"""Of the objects of a session.update, by path."""
SAYS_NOTHING: tuple[Any, ...] = (None, False, {}, [])
"""Values with which unsupported fields are ignored silently."""
OTHER_TOOLS = ("mcp", "web_search", "file_search", "code_interpreter")
MAX_NAME = 100

T = TypeVar("T", bound=msgspec.Struct)


def updated(config: schema.RealtimeConfig, given: schema.Overrides, field: str) -> schema.RealtimeConfig:
    """The configuration with the fields that `given` sets, but those of the audio that is heard. ApiError names the
    format that is not supported below `field`."""
    output = config.output
    if given.audio is not None and given.audio.output is not None:
        output = _overlaid(output, given.audio.output)
        if output.format is not None:
            settled = output.format.settled(f"{field}.audio.output.format")
            output = msgspec.structs.replace(output, format=settled)
    modalities = given.output_modalities or given.modalities or config.output_modalities
    return msgspec.structs.replace(
        _overlaid(config, given),
        audio=schema.ResponseAudio(output=output),
        output_modalities=["audio" if "audio" in modalities else "text"],
    )


def _overlaid(base: T, given: msgspec.Struct) -> T:
    values = {name: getattr(given, name, None) for name in base.__struct_fields__}
    return msgspec.structs.replace(base, **{name: value for name, value in values.items() if value is not None})


def take_unsupported(values: dict[str, Any], *, hears: bool, path: str = "session") -> list[schema.UnsupportedField]:
    """Remove what this server does not support from the JSON of the object at `path`. hears: a model that hears is
    hosted."""
    taken = []
    for name, value in list(values.items()):
        at = f"{path}.{name[:MAX_NAME]}"
        reason = "not supported by this server"
        if at in OF_HEARING and not hears:
            reason = f"must be null: {schema.NO_RECOGNITION}"
        elif at == DETECTION and value is False:  # as Pipecat writes it
            values[name] = None
            continue
        elif at in FIELDS and isinstance(value, dict):
            taken += take_unsupported(value, hears=hears, path=at)
            continue
        elif at == "session.tools" and isinstance(value, list):
            values[name] = []
            for number, tool in enumerate(value):
                if isinstance(tool, dict) and tool.get("type") in OTHER_TOOLS:
                    taken.append(_unsupported(f"{at}[{number}]", "only functions are supported"))
                else:
                    values[name].append(tool)
            continue
        elif at == "session.truncation" and isinstance(value, dict):
            reason = "must be auto or disabled; a retention ratio is not supported"
        elif name in FIELDS[path]:
            continue
        del values[name]
        if value not in SAYS_NOTHING:
            taken.append(_unsupported(at, reason))
    return taken


def _unsupported(param: str, reason: str) -> schema.UnsupportedField:
    return schema.UnsupportedField(param=param, message=f"{param}: {reason}.")
