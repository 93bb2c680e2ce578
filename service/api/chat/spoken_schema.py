"""Fields of /v1/chat/completions for answers that are spoken, as in OpenAI's API, and extensions."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from service.api.chat.refused_fields import UnspokenFields
from service.api.engines.request_stream import StepReport
from service.api.speech.schema import SampleRate
from service.media.audio_formats import SpokenFormat

Modality = Literal["text", "audio"]


class AudioParams(UnspokenFields, frozen=True, kw_only=True):
    """voice and format are OpenAI's.

    pcm16 has 24 kHz unless sample_rate says otherwise, ulaw and alaw (G.711) have 8 kHz.
    """

    format: SpokenFormat
    sample_rate: SampleRate | None = None


class PastAudio(msgspec.Struct, frozen=True):
    """Reference to a past spoken answer: the model reads its transcript, found by its id while it is kept."""

    id: str | None = None
    transcript: str | None = None


class AnswerAudio(msgspec.Struct, frozen=True):
    """data: base64 of the file. expires_at: Unix time until which the id stands for the transcript; audio is not kept.
    finish_reason: "length" if a segment of the speech ended at its cap, or the speech ended before the text. steps:
    those of the speech model. unspoken: letters and digits that the speech model cannot speak, each once, if any."""

    id: str
    data: str
    expires_at: int
    transcript: str
    finish_reason: Literal["stop", "length"] = "stop"
    steps: StepReport | UnsetType = UNSET
    unspoken: str | UnsetType = UNSET


class DeltaAudio(msgspec.Struct, frozen=True):
    """id: in the first one. transcript, data: the next pieces; each data is valid base64, and all joined are the base64
    of the whole. expires_at, finish_reason, steps and unspoken: in the last one, as in AnswerAudio."""

    id: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    finish_reason: Literal["stop", "length"] | UnsetType = UNSET
    steps: StepReport | UnsetType = UNSET
    unspoken: str | UnsetType = UNSET
