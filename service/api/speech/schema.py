"""Request and response types of /v1/audio: OpenAI's fields and vLLM-Omni's extensions. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.engines.request_stream import StepReport
from service.api.spoken_text.lexicon import MAX_SPOKEN, MAX_WORD
from service.api.spoken_text.text_splitting import Granularity
from service.media.audio_formats import ResponseFormat

StreamFormat = Literal["audio", "sse"]
ShortText = Annotated[str, Meta(max_length=4096)]
SolverSteps = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A server offers a few small numbers; the bounds keep long ones out of messages."""
SampleRate = Annotated[int, Meta(ge=1, le=192_000)]
Granularities = list[Literal["segment", "word"]]
MAX_ENTRIES = 100
LexiconEntries = Annotated[
    dict[
        Annotated[str, Meta(min_length=1, max_length=MAX_WORD)],
        Annotated[str, Meta(min_length=1, max_length=MAX_SPOKEN)],
    ],
    Meta(max_length=MAX_ENTRIES),
]


class VoiceReference(msgspec.Struct, frozen=True):
    id: str


class VoiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a text is spoken, in speech requests, spoken answers and Realtime.

    model: a speech model. voice: id or name of an uploaded voice, "default", or one of OpenAI's names. instructions:
    description of the voice or manner. seed: of the noise; the same request with the same seed gives the same audio.
    cfg_value: guidance. inference_timesteps: solver steps. temperature: scale of the noise. max_len: patches (160 ms)
    of each segment. normalize: numbers, dates, money, units and abbreviations are turned into words first, in English
    and Chinese (default true). lexicon: what is said for whole words, before the server's own.
    """

    model: str | None = None
    voice: str | VoiceReference | None = None
    instructions: ShortText | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cfg_value: Annotated[float, Meta(ge=0, le=10)] | None = None
    inference_timesteps: SolverSteps | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    max_len: Annotated[int, Meta(ge=1, le=65536)] | None = None
    normalize: bool | None = None
    lexicon: LexiconEntries | None = None


class SpeechOptions(VoiceOptions, frozen=True, kw_only=True):
    """Fields that a speech request and a WebSocket's session.config share.

    ref_audio: reference audio of the voice (data: URL, or https: if remote media are enabled); with ref_text, its
    transcript, the audio is continued. prompt_audio, prompt_text: audio to continue and its transcript, alone or
    together with another voice (ref_audio or an uploaded one). min_len: patches of each segment; max_new_tokens is an
    alias of max_len. split_granularity: where the text is split, besides where a segment would become too long.
    """

    response_format: ResponseFormat | None = None
    sample_rate: SampleRate | None = None
    ref_audio: str | None = None
    ref_text: ShortText | None = None
    prompt_audio: str | None = None
    prompt_text: ShortText | None = None
    min_len: Annotated[int, Meta(ge=0, le=65536)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=65536)] | None = None
    split_granularity: Granularity | None = None


class SpeechRequestBody(SpeechOptions, frozen=True, kw_only=True):
    """input: text, with pauses written as [pause:1.5s], or SSML that begins with <speak>. stream: false returns the
    complete file, at a lower priority than streams. timestamp_granularities: with stream_format: sse, an event for each
    segment, with its words if "word" is among them. verify: with stream: false, compare what a hosted recogniser hears
    with the text, and, unless seed is given, speak again what it hears otherwise."""

    input: str
    timestamp_granularities: Granularities | None = None
    stream_format: StreamFormat | None = None
    stream: bool | None = None
    verify: bool | None = None


class SpeechUsage(msgspec.Struct, frozen=True):
    """input_tokens: of the text. output_tokens: patches of 160 ms."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechAudioDelta(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.delta"):
    """audio: base64 of the next bytes of the file."""

    audio: str
    response_format: str


class CaptionWord(msgspec.Struct, frozen=True):
    """estimated: from the length of each word within the sound of the segment; false where an aligner found them."""

    word: str
    start: float
    end: float
    estimated: bool = True


class SpeechAudioSegment(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag="speech.audio.segment"):
    """A segment whose audio is complete. start, end: seconds of the audio, exact to the sample. text: as it is spoken.
    words: where timestamp_granularities names them."""

    index: int
    start: float
    end: float
    text: str
    words: tuple[CaptionWord, ...] | None = None


class SpeechAudioDone(msgspec.Struct, frozen=True, tag_field="type", tag="speech.audio.done"):
    """finish_reason: "length" where a segment ended at its cap, not by itself. unspoken: letters, digits and signs of
    the text that the model cannot speak and left out, each once, if there are any."""

    usage: SpeechUsage
    finish_reason: Literal["stop", "length"]
    steps: StepReport | UnsetType = UNSET
    unspoken: str | UnsetType = UNSET


class VoiceObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """type: "builtin" (default and OpenAI's names), "lora" (an adapter of the server) or "uploaded". model: the speech
    model that an adapter or an uploaded voice speaks through; null where none that is served can."""

    id: str
    name: str
    object: Literal["audio.voice"]
    type: Literal["builtin", "lora", "uploaded"]
    created_at: int | None = None
    seconds: float | None = None
    ref_text: str | None = None
    description: str | None = None
    consent: str | None = None
    model: str | None = None


class VoiceList(msgspec.Struct, frozen=True):
    """voices and data are the same list, since clients expect either name."""

    voices: list[VoiceObject]
    data: list[VoiceObject]
    object: str = "list"


class VoiceUpload(msgspec.Struct, frozen=True):
    """Form fields of an upload. audio_sample: a file; without one, speaker_description says
    what the voice is like and seed draws it. consent: with a file, a statement that the speaker agrees, or true."""

    name: str
    audio_sample: str | None = None
    consent: str | None = None
    ref_text: str | None = None
    speaker_description: str | None = None
    seed: Annotated[int, Meta(ge=0, lt=10**18)] | None = None
    model: str | None = None


class VoiceDeleted(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "audio.voice.deleted"
