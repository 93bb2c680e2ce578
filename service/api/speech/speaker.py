"""The voice of a speech request: built in, described, uploaded, an adapter, or that of audio in the request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.http.decoding import Decoding
from service.api.http.errors import ApiError, bad_request
from service.api.http.record import RequestRecord
from service.api.speech.named_voices import named_reference
from service.api.speech.references import check_text, encode, encode_reference, encoder_of
from service.api.speech.schema import SpeechOptions
from service.api.spoken_text.markup import clean_text
from service.api.tracing import phase
from service.hub.catalog import HostedModel
from service.media.reference_level import level_reference
from service.voices.store import LONGEST_NAME, Voice, VoiceStoreError, name_key

DEFAULT_VOICE = "default"
OPENAI_VOICES = {
    "alloy": "A neutral, balanced adult voice",
    "ash": "A calm, warm male voice",
    "ballad": "A gentle, expressive male voice",
    "cedar": "A warm, natural male voice",
    "coral": "A bright, friendly female voice",
    "echo": "A clear, steady male voice",
    "fable": "A lively storyteller with a British accent",
    "marin": "A clear, natural female voice",
    "nova": "An energetic young female voice",
    "onyx": "A deep, confident male voice",
    "sage": "A soft, thoughtful female voice",
    "shimmer": "A light, cheerful female voice",
    "verse": "A versatile, expressive male voice",
}
"""OpenAI's voice names, each as a description that the model follows."""
PARENTHESES = str.maketrans("", "", "()（）")
"""Removed from instructions: the model takes text in parentheses as the description."""


@dataclass(frozen=True, eq=False)
class Speaker:
    """A voice. reference, prompt: encoded audio, float32 [patches, frames, channels]. transcript: of the prompt.
    design: description of the voice or manner, put in front of each text. adapter: of the model, by its folder's
    name."""

    reference: np.ndarray | None = None
    prompt: np.ndarray | None = None
    transcript: str = ""
    design: str = ""
    adapter: str = ""


@dataclass(frozen=True)
class Adapter:
    """A voice that is an adapter of the model, by its folder's name."""

    folder: str


def as_design(text: str) -> str:
    """A description of a voice or manner as it is put in front of a text; empty if nothing is left of it."""
    return clean_text(text.translate(PARENTHESES)).strip()


async def resolve_speaker(
    context: ServerContext, options: SpeechOptions, model: HostedModel, record: RequestRecord
) -> Speaker:
    """The voice that the fields ask for. ApiError or InputError names the invalid field."""
    design = as_design(options.instructions or "")
    if options.instructions:
        check_text(model, options.instructions, "instructions")
    if options.ref_text and not options.ref_audio:
        raise bad_request("ref_text: requires ref_audio, whose transcript it is.", "ref_text")
    if bool(options.prompt_audio) != bool(options.prompt_text):
        missing = "prompt_text" if options.prompt_audio else "prompt_audio"
        raise bad_request(
            f"{missing}: required: prompt_audio and prompt_text, its transcript, are used together.", missing
        )
    if options.prompt_audio and options.ref_text:
        raise bad_request(
            "ref_text: cannot be combined with prompt_audio: only one audio can be continued.", "ref_text"
        )
    if design and (options.ref_text or options.prompt_audio):
        message = "instructions: cannot be combined with ref_text or prompt_text: continued audio keeps its own manner."
        raise bad_request(message, "instructions")
    if options.ref_audio:
        speaker = await _reference_speaker(context, options.ref_audio, options.ref_text or None, model, design, record)
        adapter = context.lora_voices.get(name_key(_voice_name(options)[:LONGEST_NAME]), "")
        speaker = replace(speaker, adapter=adapter)
    else:
        speaker = await _named_speaker(context, options, model, design, context.owner(record.client))
    if not options.prompt_audio or not options.prompt_text:
        return speaker
    check_text(model, options.prompt_text, "prompt_text")
    wave = await _load_audio(context, options.prompt_audio, model, "prompt_audio", record)
    prompt = await encode(context, model, wave, "left")
    return Speaker(speaker.reference, prompt, options.prompt_text, adapter=speaker.adapter)


async def _named_speaker(
    context: ServerContext, options: SpeechOptions, model: HostedModel, design: str, owner: str
) -> Speaker:
    voice = find_voice(context, _voice_name(options) or DEFAULT_VOICE, model, owner)
    if isinstance(voice, Adapter):
        return Speaker(design=design, adapter=voice.folder)
    if isinstance(voice, Voice):
        return await _stored_speaker(context, voice, design)
    if voice == DEFAULT_VOICE and (design or options.prompt_audio):
        return Speaker(design=design)  # a voice as described, or that of the audio
    description = OPENAI_VOICES.get(voice, "")
    if not context.settings.fixed_voices:
        return Speaker(design=design or description)
    return Speaker(await named_reference(context, model, voice, description), design=design)


def _voice_name(options: SpeechOptions) -> str:
    voice = options.voice
    return voice if isinstance(voice, str) else "" if voice is None else voice.id


def find_voice(context: ServerContext, name: str, model: HostedModel | None, owner: str) -> Voice | Adapter | str:
    """An uploaded voice, an adapter, or the name of a built-in one. model: the one that will speak, if it is known.
    owner: as VoiceStore.find. ApiError 404 for an unknown voice, 400 for one of another model."""
    key = name_key(name) if len(name) <= LONGEST_NAME else ""
    if key == DEFAULT_VOICE or key in OPENAI_VOICES:
        return key
    if key in context.lora_voices:
        return Adapter(context.lora_voices[key])
    voice = context.voices.find(name, owner)
    if voice is None:
        raise _no_voice()
    if model is not None and voice.encoder != encoder_of(model):
        message = "voice: this voice was uploaded for another model; upload it again for this one."
        raise bad_request(message, "voice", "voice_of_other_model")
    return voice


def _no_voice() -> ApiError:
    message = "voice: no voice has this id or name; GET /v1/audio/voices lists them."
    return ApiError(404, message, param="voice", code="voice_not_found")


async def _reference_speaker(
    context: ServerContext, url: str, text: str | None, model: HostedModel, design: str, record: RequestRecord
) -> Speaker:
    wave = await _load_audio(context, url, model, "ref_audio", record)
    latents = await encode_reference(context, model, wave, text)
    return Speaker(latents["reference"], latents.get("prompt"), text or "", design)


async def _load_audio(
    context: ServerContext, url: str, model: HostedModel, field: str, record: RequestRecord
) -> np.ndarray:
    try:
        rate = model.speech_processor.reference_sample_rate
        with phase("media", kind="audio"), Decoding(record.ticket) as decoding:
            wave = await context.media.audio(
                url,
                sample_rate=rate,
                field=field,
                client=record.client,
                reserve=decoding.reserve,
                fetched=decoding.fetched,
            )
        # Audio to continue is not trimmed: the speech goes on at its end.
        return await context.in_thread(lambda: level_reference(wave, rate, field)) if field == "ref_audio" else wave
    except InputError:
        context.metrics.observe("media_rejections_total", kind="audio", reason="refused")
        raise


async def _stored_speaker(context: ServerContext, voice: Voice, design: str) -> Speaker:
    try:
        latents = context.voices.cached(voice)
        if latents is None:
            latents = await context.in_thread(lambda: context.voices.latents(voice))
    except VoiceStoreError as error:
        if error.reason == "gone":
            raise _no_voice() from error
        if error.reason == "damaged":
            raise bad_request(f"voice: {error}; upload the voice again.", "voice", "voice_unreadable") from error
        raise ApiError(500, f"voice: {error}.", param="voice", code="voice_unreadable") from error
    if design or voice.ref_text is None:
        return Speaker(latents["reference"], design=design)
    return Speaker(latents["reference"], latents.get("prompt"), voice.ref_text)
