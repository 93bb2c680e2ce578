"""The wire format of /v1/audio: OpenAI's fields, and vLLM-Omni's names for what it adds. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from service.text.splitting import Granularity

ResponseFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
StreamFormat = Literal["audio", "sse"]
ShortText = Annotated[str, Meta(max_length=4096)]


class VoiceReference(msgspec.Struct, frozen=True):
    id: str


class SpeechOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to speak: the fields that a request and a WebSocket's session.config share.

    voice: id or name of an uploaded voice, "default", or one of OpenAI's names. instructions: a description of the
    voice or the manner. ref_audio: a clip (data: URL, or https: where remote media are on) of the voice to speak in;
    with ref_text, what the clip says, it is continued. prompt_audio, prompt_text: a clip to continue and what it says,
    by itself or in the voice of another (ref_audio, or an uploaded one). seed: of the noise; the same request with the
    same seed gives the same audio. cfg_value: guidance. inference_timesteps: solver steps, of the allowed ones.
    temperature: scale of the noise. min_len, max_len: patches (160 ms) of each segment; max_new_tokens is another name
    of max_len.
    split_granularity: where the text is cut, besides where a segment would get too long.
    """

    model: str | None = None
    voice: str | VoiceReference | None = None
    instructions: ShortText | None = None
    response_format: ResponseFormat | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    sample_rate: Annotated[int, Meta(ge=1, le=192_000)] | None = None
    ref_audio: str | None = None
    ref_text: ShortText | None = None
    prompt_audio: str | None = None
    prompt_text: ShortText | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cfg_value: Annotated[float, Meta(ge=0, le=10)] | None = None
    inference_timesteps: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    min_len: Annotated[int, Meta(ge=0, le=65536)] | None = None
    max_len: Annotated[int, Meta(ge=1, le=65536)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=65536)] | None = None
    split_granularity: Granularity | None = None


class SpeechRequestBody(SpeechOptions, frozen=True, kw_only=True):
    """stream: false waits for the whole file, and lets streams go first."""

    input: str
    stream_format: StreamFormat | None = None
    stream: bool | None = None


class SpeechUsage(msgspec.Struct, frozen=True):
    """input_tokens: of the text. output_tokens: patches of 160 ms."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechAudioDelta(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.delta"):
    """audio: base64 of the next bytes of the file."""

    audio: str
    response_format: str


class SpeechAudioDone(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.done"):
    usage: SpeechUsage


class VoiceObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """type: "builtin" (of the model, with a description of OpenAI's names) or "uploaded"."""

    id: str
    name: str
    object: Literal["audio.voice"]
    type: Literal["builtin", "uploaded"]
    created_at: int | None = None
    seconds: float | None = None
    ref_text: str | None = None
    description: str | None = None
    consent: str | None = None


class VoiceList(msgspec.Struct, frozen=True):
    """Under both names that clients look for."""

    voices: list[VoiceObject]
    data: list[VoiceObject]
    object: str = "list"


class VoiceUpload(msgspec.Struct, frozen=True):
    """The form fields of an upload, for the API's description: audio_sample is a file. consent: a statement that the
    speaker agrees, or true."""

    audio_sample: str
    name: str
    consent: str
    ref_text: str | None = None
    speaker_description: str | None = None
    model: str | None = None


class VoiceDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "audio.voice.deleted"
