"""Events of the Realtime protocol, with the names and fields of OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.chat.schema import Usage
from service.api.chat.spoken_schema import Modality
from service.api.http.errors import ApiError
from service.api.realtime.items import ConversationItem, ShortId, new_id
from service.api.realtime.session_config import (
    Metadata,
    RealtimeAudio,
    RealtimeSession,
    ResponseParams,
    SessionParams,
    Tokens,
    UnsupportedField,
)

# From clients


class Envelope(msgspec.Struct, frozen=True):
    """Fields that every event of a client may have. Errors name the id, even if the rest of the event is invalid."""

    event_id: Any = None
    type: Any = None


class ClientEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    session: SessionParams


class ItemCreate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.create"):
    """previous_item_id: the item to put it after; "root" puts it first. Unset: after the last one."""

    item: ConversationItem
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.retrieve"):
    item_id: ShortId


class ItemDelete(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.delete"):
    item_id: ShortId


class ItemTruncate(ClientEvent, frozen=True, kw_only=True, tag="conversation.item.truncate"):
    """audio_end_ms: how much of the answer's audio was played; the transcript beyond that is dropped."""

    item_id: ShortId
    content_index: int
    audio_end_ms: Annotated[int, Meta(ge=0, le=2**31)]


class ResponseCreate(ClientEvent, frozen=True, kw_only=True, tag="response.create"):
    response: ResponseParams | None = None


class ResponseCancel(ClientEvent, frozen=True, kw_only=True, tag="response.cancel"):
    response_id: str | None = None


class InputAudioAppend(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Not supported: there is no speech recognition."""


class InputAudioCommit(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """Not supported: there is no speech recognition."""


class InputAudioClear(ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    """Not supported: there is no speech recognition."""


class OutputAudioClear(ClientEvent, frozen=True, kw_only=True, tag="output_audio_buffer.clear"):
    """Not supported: only WebRTC has such a buffer."""


class TranscriptionUpdate(ClientEvent, frozen=True, kw_only=True, tag="transcription_session.update"):
    """Not supported: there is no speech recognition."""


Unsupported = InputAudioAppend | InputAudioCommit | InputAudioClear | OutputAudioClear | TranscriptionUpdate
ConversationEvent = (
    ItemCreate | ItemRetrieve | ItemDelete | ItemTruncate | ResponseCreate | ResponseCancel | Unsupported
)
AnyClientEvent = SessionUpdate | ConversationEvent

# From the server


class ServerEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    event_id: str = msgspec.field(default_factory=lambda: new_id("event"))


class RealtimeErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """event_id: of the client's event that is invalid. param: its field. retry_after: seconds."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None
    event_id: str | None = None
    retry_after: float | None = None


class ErrorEvent(ServerEvent, frozen=True, kw_only=True, tag="error"):
    error: RealtimeErrorDetail


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    session: RealtimeSession


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    """session: the configuration in force. unsupported: parts of the client's that were left out. No error event names
    them, since clients take one for the end of the session."""

    session: RealtimeSession
    unsupported: list[UnsupportedField] | UnsetType = UNSET


class _ItemEvent(ServerEvent, frozen=True, kw_only=True):
    item: ConversationItem
    previous_item_id: str | None


class ItemAdded(_ItemEvent, frozen=True, kw_only=True, tag="conversation.item.added"):
    pass


class ItemDone(_ItemEvent, frozen=True, kw_only=True, tag="conversation.item.done"):
    pass


class ItemRetrieved(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.retrieved"):
    item: ConversationItem


class ItemDeleted(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.deleted"):
    item_id: str


class ItemTruncated(ServerEvent, frozen=True, kw_only=True, tag="conversation.item.truncated"):
    item_id: str
    content_index: int
    audio_end_ms: int


class RealtimeInputDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    text_tokens: int
    image_tokens: int
    audio_tokens: int = 0


class RealtimeOutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    text_tokens: int
    audio_tokens: int


class RealtimeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """audio_tokens: patches of audio."""

    total_tokens: int
    input_tokens: int
    output_tokens: int
    input_token_details: RealtimeInputDetails
    output_token_details: RealtimeOutputDetails


class RealtimeFailure(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    code: str | None
    message: str


ResponseStatus = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


class StatusDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: ResponseStatus
    reason: Literal["client_cancelled", "max_output_tokens"] | None = None
    error: RealtimeFailure | None = None


class RealtimeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """conversation_id: null where the answer is not added to the conversation. usage: once the response has ended."""

    id: str
    status: ResponseStatus
    output: list[ConversationItem]
    conversation_id: str | None
    output_modalities: list[Modality]
    max_output_tokens: Tokens
    audio: RealtimeAudio
    metadata: Metadata | None = None
    status_details: StatusDetails | None = None
    usage: RealtimeUsage | None = None
    object: Literal["realtime.response"] = "realtime.response"


class ResponseCreated(ServerEvent, frozen=True, kw_only=True, tag="response.created"):
    response: RealtimeResponse


class ResponseDone(ServerEvent, frozen=True, kw_only=True, tag="response.done"):
    response: RealtimeResponse


class _OutputEvent(ServerEvent, frozen=True, kw_only=True):
    response_id: str
    output_index: int = 0


class OutputItemAdded(_OutputEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: ConversationItem


class OutputItemDone(_OutputEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: ConversationItem


class _PartEvent(_OutputEvent, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0


class OutputPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """text: of a text. transcript: of audio."""

    type: Literal["text", "audio"]
    text: str | None = None
    transcript: str | None = None


class ContentPartAdded(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputPart


class ContentPartDone(_PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputPart


class OutputTextDelta(_PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str


class OutputTextDone(_PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str


class OutputTranscriptDelta(_PartEvent, frozen=True, kw_only=True, tag="response.output_audio_transcript.delta"):
    delta: str


class OutputTranscriptDone(_PartEvent, frozen=True, kw_only=True, tag="response.output_audio_transcript.done"):
    transcript: str


class OutputAudioDelta(_PartEvent, frozen=True, kw_only=True, tag="response.output_audio.delta"):
    """delta: base64 of the next samples."""

    delta: str


class OutputAudioDone(_PartEvent, frozen=True, kw_only=True, tag="response.output_audio.done"):
    """unspoken: letters and digits that the speech model cannot speak, each once, if any."""

    unspoken: str | UnsetType = UNSET


class _CallEvent(_OutputEvent, frozen=True, kw_only=True):
    item_id: str
    call_id: str


class CallArgumentsDelta(_CallEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """delta: the next characters of the JSON."""

    delta: str


class CallArgumentsDone(_CallEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


AnyServerEvent = (
    ErrorEvent
    | SessionCreated
    | SessionUpdated
    | ItemAdded
    | ItemDone
    | ItemRetrieved
    | ItemDeleted
    | ItemTruncated
    | ResponseCreated
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | OutputTranscriptDelta
    | OutputTranscriptDone
    | OutputAudioDelta
    | OutputAudioDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | ContentPartDone
    | OutputItemDone
    | ResponseDone
)


def error_event(error: ApiError, event_id: str | None) -> ErrorEvent:
    """event_id: of the client's event that caused it."""
    return ErrorEvent(
        error=RealtimeErrorDetail(
            message=error.message,
            type=error.type,
            code=error.code,
            param=error.param,
            event_id=event_id,
            retry_after=error.retry_after,
        )
    )


def realtime_usage(usage: Usage) -> RealtimeUsage:
    prompt, audio_tokens = usage.prompt_tokens_details, usage.completion_tokens_details.audio_tokens
    return RealtimeUsage(
        total_tokens=usage.total_tokens,
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        input_token_details=RealtimeInputDetails(
            cached_tokens=prompt.cached_tokens, text_tokens=prompt.text_tokens, image_tokens=prompt.image_tokens
        ),
        output_token_details=RealtimeOutputDetails(
            text_tokens=usage.completion_tokens - audio_tokens, audio_tokens=audio_tokens
        ),
    )
