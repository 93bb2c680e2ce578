"""Earlier spoken answers that a request sends back: the model reads their transcripts."""

from __future__ import annotations

from collections.abc import Mapping

from service.api.chat.schema import ChatRequestBody
from service.api.chat.spoken_schema import PastAudio
from service.api.context import ServerContext
from service.api.http.errors import bad_request

NamedTranscripts = Mapping[str, str | None]
"""Looks up the transcript of an answer by its id; None if none is kept."""


async def named_transcripts(body: ChatRequestBody, context: ServerContext) -> NamedTranscripts:
    """Transcripts of the answers that messages name only by their id, each looked up once."""
    if len(body.messages) > context.settings.max_messages:  # it is refused
        return {}
    spoken = [message.audio for message in body.messages if message.audio is not None]
    named = dict.fromkeys(audio.id for audio in spoken if audio.transcript is None and audio.id is not None)
    return {id: await context.transcript_of(id) for id in named}


def transcript_of(audio: PastAudio, field: str, named: NamedTranscripts) -> str:
    """ApiError 400 if neither the message nor the server has the transcript."""
    if audio.transcript is not None:
        return audio.transcript
    if audio.id is None:
        raise bad_request(f"{field}.transcript: required, or the id of a spoken answer.", f"{field}.transcript")
    text = named.get(audio.id)
    if text is None:
        message = f"{field}.id: no spoken answer of this id is kept here, or no longer; send its transcript instead."
        raise bad_request(message, f"{field}.id", "audio_not_found")
    return text
