"""The voice of a speech request: built in, described, uploaded, an adapter, or that of audio in the request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Literal

import numpy as np

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.engines.request_stream import answered
from service.api.http.admission import Decoding
from service.api.http.errors import ApiError, invalid
from service.api.http.middleware import RequestRecord
from service.api.speech.schema import SpeechOptions
from service.api.spoken_text.markup import clean_text
from service.api.tracing import phase
from service.hub.catalog import HostedModel
from service.link.messages import EncodeReference, SpeechRequest, SpeechSegment
from service.media.reference_audio import level_reference, resample
from service.system.concurrency import shielded
from service.voices import LONGEST_NAME, Voice, VoiceStoreError, load_named, name_key, save_named, voice_key, weights_of

log = logging.getLogger(__name__)

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


def solver_steps(context: ServerContext, model: HostedModel, given: int | None = None) -> int:
    """The number of solver steps that is given, or else the first that the server offers. ApiError for any other."""
    served = context.settings.solver_steps or model.speech_processor.solver_steps
    steps = served[0] if given is None else given
    if steps not in served:
        allowed = ", ".join(map(str, sorted(served)))
        raise invalid("inference_timesteps", f"{steps} given, must be one of {allowed}")
    return steps


def as_design(text: str) -> str:
    """A description of a voice or manner as it is put in front of a text; empty if nothing is left of it."""
    return clean_text(text.translate(PARENTHESES)).strip()


async def resolve_speaker(
    context: ServerContext, options: SpeechOptions, model: HostedModel, record: RequestRecord
) -> Speaker:
    """The voice that the fields ask for. ApiError or InputError names the invalid field."""
    design = as_design(options.instructions or "")
    if options.instructions:
        check_room(model, options.instructions, "instructions")
    if options.ref_text and not options.ref_audio:
        raise invalid("ref_text", "requires ref_audio, whose transcript it is")
    if bool(options.prompt_audio) != bool(options.prompt_text):
        missing = "prompt_text" if options.prompt_audio else "prompt_audio"
        raise invalid(missing, "required: prompt_audio and prompt_text, its transcript, are used together")
    if options.prompt_audio and options.ref_text:
        raise invalid("ref_text", "cannot be combined with prompt_audio: only one audio can be continued")
    if design and (options.ref_text or options.prompt_audio):
        problem = "cannot be combined with ref_text or prompt_text: continued audio keeps its own manner"
        raise invalid("instructions", problem)
    if options.ref_audio:
        wave = await _load_audio(context, options.ref_audio, model, "ref_audio", record)
        latents = await encode_reference(context, model, wave, options.ref_text or None)
        adapter = context.lora_voices.get(name_key(_voice_name(options)[:LONGEST_NAME]), "")
        speaker = Speaker(latents["reference"], latents.get("prompt"), options.ref_text or "", design, adapter)
    else:
        speaker = await _named_speaker(context, options, model, design, context.owner(record.client))
    if not options.prompt_audio or not options.prompt_text:
        return speaker
    check_room(model, options.prompt_text, "prompt_text")
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
    if context.settings.fixed_voices == "off":
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
        raise no_voice()
    if model is not None and voice.encoder != encoder_of(model):
        problem = "this voice was uploaded for another model; upload it again for this one"
        raise invalid("voice", problem, "voice_of_other_model")
    return voice


def no_voice(which: str = "voice: no voice") -> ApiError:
    message = f"{which} has this id or name; GET /v1/audio/voices lists them."
    return ApiError(404, message, param="voice", code="voice_not_found")


async def _load_audio(
    context: ServerContext, url: str, model: HostedModel, field: str, record: RequestRecord
) -> np.ndarray:
    try:
        rate = model.speech_processor.reference_sample_rate
        with phase("media", kind="audio"), Decoding(record.ticket) as decoding:
            wave = await context.media.audio(url, sample_rate=rate, field=field, client=record.client, room=decoding)
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
            raise no_voice() from error
        if error.reason == "damaged":
            raise invalid("voice", f"{error}; upload the voice again", "voice_unreadable") from error
        raise ApiError(500, f"voice: {error}.", param="voice", code="voice_unreadable") from error
    if design or voice.ref_text is None:
        return Speaker(latents["reference"], design=design)
    return Speaker(latents["reference"], latents.get("prompt"), voice.ref_text)


# Reference audio, encoded by the model that is to speak with its voice


def encoder_of(model: HostedModel) -> str:
    """Identifies the checkpoint whose codec encodes a voice."""
    checkpoint = model.checkpoint
    return f"{checkpoint.source}@{checkpoint.revision}" if checkpoint.revision else checkpoint.directory.name


async def encode_reference(
    context: ServerContext, model: HostedModel, wave: np.ndarray, text: str | None
) -> dict[str, np.ndarray]:
    """Patches of reference audio: "reference" and, if `text` (its transcript) is given, "prompt". wave: float32
    [samples]."""
    if text is not None:
        check_room(model, text, "ref_text")
    latents = {"reference": await encode(context, model, wave, "right")}
    if text is not None:
        # Padded on the left: the last patch of a prompt must end where the audio ends.
        latents["prompt"] = await encode(context, model, wave, "left")
        check_room(model, text, "ref_text", **{f"{name}_patches": len(latents[name]) for name in latents})
    return latents


async def encode(
    context: ServerContext, model: HostedModel, wave: np.ndarray, pad: Literal["left", "right"]
) -> np.ndarray:
    """wave float32 [samples] -> patches float32 [n, frames, channels], from the cache or by the engine. pad: see
    EncodeReference."""
    digest = hashlib.blake2b(f"{model.name}/{pad}/".encode())
    digest.update(wave.tobytes())
    key = digest.digest()
    cached = context.references.get(key)
    if cached is not None:
        return cached
    request = EncodeReference(f"reference-{uuid.uuid4().hex}", model.name, wave, pad, time.monotonic())
    (encoded,) = await answered(context.engine.submit(request))
    context.references.put(key, encoded.patches)
    return encoded.patches


def check_room(model: HostedModel, text: str, field: str, **patches: int) -> None:
    """InputError for a text that cannot be tokenized, or that leaves with patches (those of SpeechProcessor.layout) no
    position of the context to speak in: nobody could ever use it."""
    processor = model.speech_processor
    try:
        processor.layout(processor.tokenize(text), **patches)
    except InputError as error:
        raise InputError(field, str(error)) from error


# Built-in voices: a sentence is spoken once with the description and a fixed seed, and kept as the reference

TEXT = "Hello there. This is how I sound when I read something to you."
SEED = 20_260_101
MAX_PATCHES = 32
"""About five seconds: enough for a voice, and short in front of every text."""
ATTEMPTS = 3
"""Number of seeds that are tried, since the sentence may come out too short or too quiet."""
VERSION = "1"
"""Must be changed with everything above, and with `cfg_value` and `min_patches` of a processor, so that new references
are made."""


async def named_reference(context: ServerContext, model: HostedModel, name: str, description: str) -> np.ndarray:
    """Patches float32 [n, frames, channels] of the built-in voice `name`: those on disk or of the checkpoint, or made
    now and kept. Requests at the same time wait for the same result, which is finished even if they leave."""
    voice = model.name, name
    making = context.named_voices.get(voice)
    if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
        making = asyncio.ensure_future(_named(context, model, name, description))
        context.named_voices[voice] = making
        context.keep_task(making)
    return making.result() if making.done() else await shielded(making)


def _key(model: HostedModel, steps: int, name: str, description: str) -> str:
    """File of a voice on disk. Weights are identified by their revision, or for a folder by its contents."""
    checkpoint = model.checkpoint
    weights = "" if checkpoint.revision else weights_of(checkpoint.directory)
    published = model.speech_processor.solver_steps[0]
    version = VERSION if steps == published else f"{VERSION}, {steps} solver steps"
    return voice_key(version, encoder_of(model), weights, name, description)


async def _named(context: ServerContext, model: HostedModel, name: str, description: str) -> np.ndarray:
    directory = context.settings.voices_dir.expanduser()
    key = await context.in_thread(lambda: _key(model, solver_steps(context, model), name, description))
    kept = await context.in_thread(lambda: load_named(directory, key, model.checkpoint.directory))
    if kept is not None:
        return kept
    began = time.monotonic()
    reference, _ = await described_reference(context, model, description, SEED)
    context.metrics.observe("built_in_voices_made_total", model=model.name)
    log.info("the built-in voice %s of %s was made in %.1f s", name, model.name, time.monotonic() - began)
    await context.in_thread(lambda: save_named(directory, key, reference))
    # Servers that share the directory all speak with the reference that is there now.
    stored = await context.in_thread(lambda: load_named(directory, key))
    return reference if stored is None else stored


async def described_reference(
    context: ServerContext, model: HostedModel, description: str, seed: int
) -> tuple[np.ndarray, float]:
    """(patches, seconds) of a described voice. ApiError 500 if no take is good enough."""
    processor = model.speech_processor
    for attempt in range(ATTEMPTS):
        wave = await _spoken(context, model, description, (seed + attempt) & (2**63 - 1))

        def prepared(wave: np.ndarray = wave) -> np.ndarray:
            resampled = resample(wave, processor.sample_rate, processor.reference_sample_rate)
            return level_reference(resampled, processor.reference_sample_rate, "voice")

        try:
            level = await context.in_thread(prepared)
        except InputError:
            continue
        return await encode(context, model, level, "right"), len(level) / processor.reference_sample_rate
    raise ApiError(500, "voice: no take of this voice was loud and long enough.", param="voice", code="voice_not_made")


def spoken_text(description: str) -> str:
    """The sentence that is spoken for a description."""
    return f"({description}){TEXT}" if description else TEXT


async def _spoken(context: ServerContext, model: HostedModel, description: str, seed: int) -> np.ndarray:
    """Speak a text: float32 [samples] at the model's rate. Nobody listens live, so live listeners go first."""
    processor = model.speech_processor
    ids = processor.tokenize(spoken_text(description))
    cap = min(processor.max_patches(ids), MAX_PATCHES)
    request = SpeechRequest(
        f"voice-{uuid.uuid4().hex}",
        model.name,
        (SpeechSegment(tuple(ids), min(processor.min_patches, cap), cap),),
        seed,
        processor.cfg_value,
        solver_steps(context, model),
        live=False,
        arrival=time.monotonic(),
    )
    return np.concatenate([delta.audio for delta in await answered(context.engine.submit(request))])
