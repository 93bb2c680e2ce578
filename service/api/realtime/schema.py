"""Events, items and configuration of the Realtime protocol, with the names and fields of OpenAI's API."""

from __future__ import annotations

import re
import secrets
from types import NoneType
from typing import Annotated, Any, Literal, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.chat.schema import AudioParams, FlatToolChoice, FunctionTool, Int64, Modality, PromptTokensDetails
from service.api.chat.transcriptions import TokenUsage, TranscribedLanguage
from service.api.http.errors import ErrorDetail, invalid
from service.api.speech.schema import VoiceOptions
from service.hub.catalog import OPENAI_PCM_RATE
from service.media.audio_formats import CHAT_FORMATS, FORMATS, G711_RATE, REALTIME_FORMATS, RealtimeType

NO_RECOGNITION = "this server has no speech recognition; send text as input_text"
ShortId = Annotated[str, Meta(min_length=1, max_length=128)]


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


# Items

ItemType = Literal["message", "item_reference", "function_call", "function_call_output", "mcp_approval_response"]
ContentType = Literal["input_text", "input_image", "input_audio", "output_text", "output_audio"]
Role = Literal["user", "system", "assistant"]
Status = Literal["completed", "incomplete", "in_progress"]


class ItemContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a message. image_url: a data: URL. transcript: of an output_audio or input_audio part, whose audio is
    not kept."""

    type: ContentType
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    audio: str | None = None
    transcript: str | None = None


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """role, content: of a message. call_id, name, arguments: of a function_call. call_id, output: of a
    function_call_output. All of them are required."""

    type: ItemType
    id: ShortId | None = None
    object: Literal["realtime.item"] | None = None
    status: Status | None = None
    role: Role | None = None
    content: list[ItemContent] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


# Configuration of a session and of a response

Modalities = Annotated[list[Modality], Meta(min_length=1, max_length=2)]
Tokens = Annotated[int, Meta(ge=1)] | Literal["inf"]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Instructions = Annotated[str, Meta(max_length=65_536)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class RealtimeFormat(msgspec.Struct, frozen=True, kw_only=True):
    """audio/pcm: 16-bit mono samples, little-endian, at 24 kHz. audio/pcmu, audio/pcma: G.711 at 8 kHz."""

    type: RealtimeType = "audio/pcm"
    rate: Annotated[int, Meta(ge=1, le=192_000)] | None = None

    @property
    def sample_rate(self) -> int:
        return OPENAI_PCM_RATE if self.type == "audio/pcm" else G711_RATE

    def settled(self, field: str) -> RealtimeFormat:
        """The format with its rate. ApiError 400 for another rate, which is named below `field`."""
        if self.rate not in (None, self.sample_rate):
            raise invalid(f"{field}.rate", f"{self.rate} given, must be {self.sample_rate} for {self.type}")
        return RealtimeFormat(type=self.type, rate=self.sample_rate)

    @property
    def bytes_per_second(self) -> int:
        return self.sample_rate * FORMATS[CHAT_FORMATS[REALTIME_FORMATS[self.type]]].bits // 8


PCM = RealtimeFormat(rate=OPENAI_PCM_RATE)


class RealtimeOutput(VoiceOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """format, voice and speed are OpenAI's."""

    format: RealtimeFormat | None = None


class RealtimeTranscription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """model: one that hears; other names mean the one that is hosted. prompt, keywords: as of a transcription. delay:
    changes nothing."""

    model: str | None = None
    language: str | None = None
    prompt: Annotated[str, Meta(max_length=4096)] | None = None
    keywords: Annotated[list[str], Meta(max_length=256)] | None = None
    delay: str | None = None


class TurnDetection(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """create_response: answer at the end of a turn. interrupt_response: end an answer at the beginning of one."""

    create_response: bool = True
    interrupt_response: bool = True


class ServerVad(TurnDetection, frozen=True, kw_only=True, tag="server_vad"):
    """threshold: probability of speech. prefix_padding_ms: audio before a turn that belongs to it. silence_duration_ms:
    silence that ends a turn."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=10_000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500


class SemanticVad(TurnDetection, frozen=True, kw_only=True, tag="semantic_vad"):
    """Stands for a ServerVad whose silence depends on eagerness."""

    eagerness: Literal["low", "medium", "high", "auto"] = "auto"

    @property
    def stands_for(self) -> ServerVad:
        return ServerVad(silence_duration_ms=SEMANTIC_SILENCE[self.eagerness])


SEMANTIC_SILENCE = {"low": 1200, "medium": 700, "high": 400, "auto": 700}
"""Milliseconds by eagerness."""


Detection = ServerVad | SemanticVad


class RealtimeInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Audio that clients send. transcription: null where transcripts are not told. turn_detection: null where the
    client commits. Both are null where no model hears."""

    format: RealtimeFormat | None = None
    turn_detection: Detection | UnsetType | None = UNSET
    transcription: RealtimeTranscription | UnsetType | None = UNSET


DEAF = RealtimeInput(format=PCM, turn_detection=None, transcription=None)


class ResponseAudio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    output: RealtimeOutput | None = None


class RealtimeAudio(ResponseAudio, frozen=True, kw_only=True):
    input: RealtimeInput | None = None


Truncation = Literal["auto", "disabled"]


class Overrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both a session and a response may set. modalities: the older name of output_modalities. temperature,
    seed: of the chat model."""

    output_modalities: Modalities | None = None
    modalities: Modalities | None = None
    instructions: Instructions | None = None
    max_output_tokens: Tokens | None = None
    audio: ResponseAudio | None = None
    temperature: Temperature | None = None
    seed: Int64 | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None


class SessionParams(Overrides, frozen=True, kw_only=True):
    """A session.update: fields that are left out, or null, stay as they are. Unsupported ones are left out of it, and
    named by session.updated."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str | None = None
    audio: RealtimeAudio | None = None
    truncation: Truncation | None = None


class ResponseParams(Overrides, frozen=True, kw_only=True):
    """The configuration of one response. conversation "none": the answer is not added to the conversation. input: items
    to answer instead of the conversation's, new ones or references to those. prompt, reasoning: not supported."""

    conversation: Literal["auto", "none"] | None = None
    input: list[ConversationItem] | None = None
    metadata: Metadata | None = None
    prompt: None = None
    reasoning: None = None


class RealtimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in force. output_modalities has one entry: audio comes with its transcript."""

    output_modalities: list[Modality]
    instructions: str = ""
    max_output_tokens: Tokens = "inf"
    audio: ResponseAudio
    truncation: Truncation = "disabled"
    temperature: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    tools: list[FunctionTool] = []
    tool_choice: FlatToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def spoken(self) -> bool:
        return "audio" in self.output_modalities

    @property
    def output(self) -> RealtimeOutput:
        return self.audio.output or RealtimeOutput()

    @property
    def format(self) -> RealtimeFormat:
        return self.output.format or PCM

    @property
    def speech(self) -> AudioParams:
        """As a chat request names it."""
        given = {name: getattr(self.output, name) for name in VoiceOptions.__struct_fields__}
        return AudioParams(format=REALTIME_FORMATS[self.format.type], sample_rate=self.format.sample_rate, **given)


class RealtimeSession(RealtimeConfig, frozen=True, kw_only=True):
    """A session as clients see it."""

    id: str
    model: str
    audio: RealtimeAudio
    type: Literal["realtime", "transcription"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"


class UnsupportedField(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a session.update that is not in force. param: its path."""

    param: str
    message: str


# Events of clients


class Envelope(msgspec.Struct, frozen=True):
    """Fields that every event of a client may have. Errors name the id, even if the rest of the event is invalid."""

    event_id: Any = None
    type: Any = None


class ClientEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


AUDIO_CHUNK = "input_audio_buffer.append"
AUDIO_EVENTS = (AUDIO_CHUNK, "input_audio_buffer.commit", "input_audio_buffer.clear")
CLIENT_EVENTS: dict[str, dict[str, Any]] = {
    "session.update": {"session": SessionParams},
    # previous_item_id: the item to put it after; "root" puts it first. Unset: after the last one.
    "conversation.item.create": {"item": ConversationItem, "previous_item_id": str | None},
    "conversation.item.retrieve": {"item_id": ShortId},
    "conversation.item.delete": {"item_id": ShortId},
    # audio_end_ms: how much of the answer's audio was played; the transcript beyond that is dropped.
    "conversation.item.truncate": {
        "item_id": ShortId,
        "content_index": int,
        "audio_end_ms": Annotated[int, Meta(ge=0, le=2**31)],
    },
    "response.create": {"response": ResponseParams | None},
    "response.cancel": {"response_id": str | None},
    # audio: base64 of the next samples, in the session's format.
    AUDIO_CHUNK: {"audio": str},
    # What was appended becomes an item, and is transcribed.
    "input_audio_buffer.commit": {},
    "input_audio_buffer.clear": {},
}
"""Fields of each event beside its type and event_id."""
UNSUPPORTED_EVENTS = {
    "output_audio_buffer.clear": "only WebRTC has this buffer",
    "transcription_session.update": "send session.update with the type transcription",
}
"""Events of OpenAI's clients, and why they are refused."""

# Events of the server


class RealtimeErrorDetail(ErrorDetail, frozen=True, kw_only=True):
    """event_id: of the client's event that is invalid. param: its field. retry_after: seconds."""

    event_id: str | None = None
    retry_after: float | None = None


class RealtimeOutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int


class RealtimeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """audio_tokens: patches of audio."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: PromptTokensDetails
    output_token_details: RealtimeOutputDetails


ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


class StatusDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: ResponseStatus
    reason: Literal["client_cancelled", "turn_detected", "max_output_tokens"] | None = None
    error: ErrorDetail | None = None


class RealtimeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """conversation_id: null where the answer is not added to the conversation. usage: once the response has ended."""

    id: str
    status: ResponseStatus
    output: list[ConversationItem]
    conversation_id: str | None
    output_modalities: list[Modality]
    max_output_tokens: Tokens
    audio: ResponseAudio
    metadata: Metadata | None = None
    status_details: StatusDetails | None = None
    usage: RealtimeUsage | None = None
    object: Literal["realtime.response"] = "realtime.response"


class OutputPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """text: of a text. transcript: of audio."""

    type: Literal["text", "audio"]
    text: str | None = None
    transcript: str | None = None


ITEM = {"item": ConversationItem}
PLACED = ITEM | {"previous_item_id": str | None}
RESPONSE = {"response": RealtimeResponse}
OUTPUT = {"response_id": str, "output_index": int}
PART = OUTPUT | {"item_id": str, "content_index": int}
CALL = OUTPUT | {"item_id": str, "call_id": str}
HEARD = {"item_id": str, "content_index": int}
SERVER_EVENTS: dict[str, dict[str, Any]] = {
    "error": {"error": RealtimeErrorDetail},
    "session.created": {"session": RealtimeSession},
    # unsupported: parts of the client's that were left out. No error event names them, since clients take one for the
    # end of the session.
    "session.updated": {"session": RealtimeSession, "unsupported": list[UnsupportedField] | UnsetType},
    "conversation.item.added": PLACED,
    "conversation.item.done": PLACED,
    "conversation.item.retrieved": ITEM,
    "conversation.item.deleted": {"item_id": str},
    "conversation.item.truncated": {"item_id": str, "content_index": int, "audio_end_ms": int},
    "input_audio_buffer.committed": {"item_id": str, "previous_item_id": str | None},
    "input_audio_buffer.cleared": {},
    "input_audio_buffer.speech_started": {"item_id": str, "audio_start_ms": int},
    "input_audio_buffer.speech_stopped": {"item_id": str, "audio_end_ms": int},
    "conversation.item.input_audio_transcription.delta": HEARD | {"delta": str},
    "conversation.item.input_audio_transcription.completed": HEARD
    | {"transcript": str, "languages": list[TranscribedLanguage], "usage": TokenUsage},
    "conversation.item.input_audio_transcription.failed": HEARD | {"error": ErrorDetail},
    "response.created": RESPONSE,
    "response.output_item.added": OUTPUT | ITEM,
    "response.content_part.added": PART | {"part": OutputPart},
    "response.output_text.delta": PART | {"delta": str},
    "response.output_text.done": PART | {"text": str},
    "response.output_audio_transcript.delta": PART | {"delta": str},
    "response.output_audio_transcript.done": PART | {"transcript": str},
    "response.output_audio.delta": PART | {"delta": str},
    # unspoken: letters, digits and signs that the speech model cannot speak, each once, if any.
    "response.output_audio.done": PART | {"unspoken": str | UnsetType},
    "response.function_call_arguments.delta": CALL | {"delta": str},
    "response.function_call_arguments.done": CALL | {"name": str, "arguments": str},
    "response.content_part.done": PART | {"part": OutputPart},
    "response.output_item.done": OUTPUT | ITEM,
    "response.done": RESPONSE,
}
"""Fields of each event beside its type and event_id."""


class ServerEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: str = msgspec.field(default_factory=lambda: new_id("event"))


def _defined(events: dict[str, dict[str, Any]], base: type[msgspec.Struct]) -> dict[str, Any]:
    """The struct of each event. Fields that may be null or unset are optional."""

    def struct(type: str, fields: dict[str, Any]) -> Any:
        name = "".join(word.capitalize() for word in re.split(r"[._]", type)) + "Event"
        left_out = {UnsetType: UNSET, NoneType: None}
        listed: list[Any] = []
        for key, kind in fields.items():
            default = [left_out[one] for one in getattr(kind, "__args__", ()) if one in left_out]
            listed.append((key, kind, *default[:1]))
        return msgspec.defstruct(name, listed, bases=(base,), module=__name__, tag=type, frozen=True, kw_only=True)

    return {type: struct(type, fields) for type, fields in events.items()}


_CLIENT, _SERVER = _defined(CLIENT_EVENTS, ClientEvent), _defined(SERVER_EVENTS, ServerEvent)
SessionUpdate = _CLIENT["session.update"]
AnyClientEvent: Any = Union[tuple(_CLIENT.values())]  # noqa: UP007 - made at runtime


def server_event(type: str, **fields: Any) -> ServerEvent:
    """Make an event of SERVER_EVENTS."""
    event: ServerEvent = _SERVER[type](**fields)
    return event
