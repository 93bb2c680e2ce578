"""From the fields of a speech request to what the engine is asked: voice, text, segments."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from models.errors import InputError
from models.processor import SpeechProcessor
from service.api.context import ServerContext
from service.api.errors import ApiError, bad_request
from service.api.record import RequestRecord
from service.api.speech_schema import SpeechOptions
from service.catalog import HostedModel
from service.engine.messages import EncodeReference, SpeechRequest, SpeechSegment
from service.media.audio_out import FORMATS, StreamingEncoder
from service.text.cleaning import MarkupStripper, clean_text, strip_markup
from service.text.splitting import CONTROL, Granularity, TextSplitter
from service.voices import Voice, VoiceStoreError

T = TypeVar("T")

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
"""Names that OpenAI's clients ask for, as voice designs."""

DEFAULT_CFG = 2.0
DEFAULT_MIN_PATCHES = 2
UNPRONOUNCED = str.maketrans("", "", "()（）")


@dataclass(frozen=True, eq=False)
class Speaker:
    """Who speaks. reference and prompt: patches float32 [n, frames, channels]; transcript: what the prompt clip says;
    design: what is said of the voice or manner in front of the text."""

    reference: np.ndarray | None = None
    prompt: np.ndarray | None = None
    transcript: str = ""
    design: str = ""


@dataclass(frozen=True, eq=False)
class SpeechJob:
    """A request's fields, checked and resolved; texts follow."""

    id: str
    model: HostedModel
    speaker: Speaker
    seed: int
    cfg_value: float
    solver_steps: int
    temperature: float
    min_patches: int
    max_patches: int | None
    response_format: str
    sample_rate: int
    speed: float
    granularity: Granularity
    markup: bool
    segment_length: int
    record: RequestRecord

    @property
    def processor(self) -> SpeechProcessor:
        return self.model.speech_processor

    def encoder(self) -> StreamingEncoder:
        return StreamingEncoder(self.response_format, self.processor.sample_rate, self.sample_rate, self.speed)

    def splitter(self) -> TextSplitter:
        return TextSplitter(self.granularity, max_length=self.segment_length)

    def strip(self, text: str) -> str:
        """A whole text before it is split: what spans lines goes, line breaks stay, since they are borders."""
        return strip_markup(text) if self.markup else text

    def stripper(self) -> MarkupStripper | None:
        """`strip` for a text that arrives in pieces."""
        return MarkupStripper() if self.markup else None

    def segment(self, text: str) -> SpeechSegment:
        """InputError when the text cannot be spoken."""
        ids = self.processor.tokenize(f"({self.speaker.design}){text}" if self.speaker.design else text)
        cap = self.processor.max_patches(ids)
        if self.max_patches is not None:
            cap = min(cap, self.max_patches)
        return SpeechSegment(tuple(ids), min(self.min_patches, cap), cap)

    def control_of(self, first_text: str) -> str:
        """What a text says in front of how it is to be spoken: its later segments are told so, too."""
        match = None if self.speaker.prompt is not None else CONTROL.match(first_text)
        return match[0] if match else ""

    def transcript_ids(self, first_text: str) -> tuple[int, ...]:
        """Transcript of the prompt clip and the first segment's text, tokenized as one. InputError when they cannot be
        spoken together."""
        if self.speaker.prompt is None:
            return ()
        return tuple(self.processor.tokenize(self.speaker.transcript + first_text))

    def request(
        self,
        segments: Sequence[SpeechSegment],
        transcript_ids: tuple[int, ...],
        *,
        live: bool,
        open: bool,
        arrival: float,
        number: int = 0,
    ) -> SpeechRequest:
        """transcript_ids: of the first segment's text. number: which of the texts of this job it is."""
        return SpeechRequest(
            request_id=f"{self.id}-{number}",
            model=self.model.name,
            segments=tuple(segments),
            seed=self.seed,
            cfg_value=self.cfg_value,
            solver_steps=self.solver_steps,
            live=live,
            arrival=arrival,
            temperature=self.temperature,
            open=open,
            transcript_ids=transcript_ids,
            reference=self.speaker.reference,
            prompt=self.speaker.prompt,
            speed=self.speed,
        )


async def prepare(
    context: ServerContext,
    options: SpeechOptions,
    record: RequestRecord,
    *,
    default_format: str,
    default_granularity: Granularity,
) -> SpeechJob:
    """ApiError or InputError names the field that does not fit."""
    model = speech_model(context, options.model, record)
    processor, settings = model.speech_processor, context.settings
    steps = processor.solver_steps[0] if options.inference_timesteps is None else options.inference_timesteps
    if steps not in processor.solver_steps:
        allowed = ", ".join(map(str, sorted(processor.solver_steps)))
        raise bad_request(f"inference_timesteps: must be one of {allowed}.", "inference_timesteps")
    name = options.response_format or default_format
    sample_rate = options.sample_rate or _default_rate(name, processor.sample_rate, settings.pcm_sample_rate)
    max_patches = options.max_len if options.max_len is not None else options.max_new_tokens
    StreamingEncoder(name, processor.sample_rate, sample_rate, options.speed)  # a rate or speed it cannot have raises
    return SpeechJob(
        id=f"speech-{secrets.token_hex(16)}",
        model=model,
        speaker=await _speaker(context, options, model),
        seed=secrets.randbits(63) if options.seed is None else options.seed & (2**63 - 1),
        cfg_value=DEFAULT_CFG if options.cfg_value is None else options.cfg_value,
        solver_steps=steps,
        temperature=1.0 if options.temperature is None else options.temperature,
        min_patches=DEFAULT_MIN_PATCHES if options.min_len is None else options.min_len,
        max_patches=max_patches,
        response_format=name,
        sample_rate=sample_rate,
        speed=options.speed,
        granularity=options.split_granularity or default_granularity,
        markup=settings.clean_markup,
        segment_length=settings.speech_segment_length,
        record=record,
    )


def speech_model(context: ServerContext, name: str | None, record: RequestRecord) -> HostedModel:
    """The named model, or the only one that speaks."""
    if name is None:
        talkers = [model for model in context.catalog.models if model.kind == "speech"]
        if len(talkers) != 1:
            raise bad_request("model: this field is required.", "model")
        name = talkers[0].name
    return context.model(name, "speech", record)


def _default_rate(name: str, native: int, pcm_rate: int | None) -> int:
    if name == "pcm" and pcm_rate is not None:
        return pcm_rate
    return native if native in FORMATS[name].rates else FORMATS[name].rates[0]


async def _speaker(context: ServerContext, options: SpeechOptions, model: HostedModel) -> Speaker:
    design = clean_text((options.instructions or "").translate(UNPRONOUNCED)).strip()
    if options.instructions:
        _check_text(model, options.instructions, "instructions")
    if options.ref_text and not options.ref_audio:
        raise bad_request("ref_text: belongs to a clip in ref_audio.", "ref_text")
    if bool(options.prompt_audio) != bool(options.prompt_text):
        missing = "prompt_text" if options.prompt_audio else "prompt_audio"
        raise bad_request(f"{missing}: is needed, a clip to continue goes with what it says.", missing)
    if options.prompt_audio and options.ref_text:
        raise bad_request("ref_text: there is a clip to continue already (prompt_audio).", "ref_text")
    if design and (options.ref_text or options.prompt_audio):
        message = "instructions: a clip that is continued (ref_text, prompt_text) cannot be given a manner."
        raise bad_request(message, "instructions")
    if options.ref_audio:
        speaker = await _clip_speaker(context, options.ref_audio, options.ref_text, model, design)
    else:
        speaker = await _named_speaker(context, options, model, design)
    if not options.prompt_audio or not options.prompt_text:
        return speaker
    _check_text(model, options.prompt_text, "prompt_text")
    wave = await _clip(context, options.prompt_audio, model, "prompt_audio")
    return Speaker(speaker.reference, await _encode(context, model, wave, "left"), options.prompt_text)


async def _named_speaker(context: ServerContext, options: SpeechOptions, model: HostedModel, design: str) -> Speaker:
    name = options.voice if isinstance(options.voice, str) or options.voice is None else options.voice.id
    voice = context.voices.find(name) if name else None
    if voice is not None:
        return await _stored_speaker(context, voice, model, design)
    if not name or name.lower() == DEFAULT_VOICE:
        return Speaker(design=design)
    if name.lower() in OPENAI_VOICES:
        return Speaker(design=design or OPENAI_VOICES[name.lower()])
    raise ApiError(404, "voice: there is no voice of that id or name.", param="voice", code="voice_not_found")


async def _clip_speaker(context: ServerContext, url: str, text: str | None, model: HostedModel, design: str) -> Speaker:
    wave = await _clip(context, url, model, "ref_audio")
    latents = await encode_clip(context, model, wave, text)
    return Speaker(latents["reference"], latents.get("prompt"), text or "", design)


async def _clip(context: ServerContext, url: str, model: HostedModel, field: str) -> np.ndarray:
    try:
        rate = model.speech_processor.reference_sample_rate
        return await context.media.audio(url, sample_rate=rate, field=field)
    except InputError:
        context.metrics.observe("media_rejections_total", kind="audio", reason="refused")
        raise


async def _stored_speaker(context: ServerContext, voice: Voice, model: HostedModel, design: str) -> Speaker:
    if voice.encoder != encoder_of(model):
        message = "voice: this voice was made with another model; upload it again."
        raise bad_request(message, "voice", "voice_of_other_model")
    try:
        latents = context.voices.cached(voice)
        if latents is None:
            latents = await context.in_thread(lambda: context.voices.latents(voice))
    except VoiceStoreError as error:
        raise ApiError(500, f"voice: {error}.", param="voice", code="voice_unreadable") from error
    if design or voice.ref_text is None:
        return Speaker(latents["reference"], design=design)
    return Speaker(latents["reference"], latents.get("prompt"), voice.ref_text)


def encoder_of(model: HostedModel) -> str:
    """Names the checkpoint whose codec made a voice's latents."""
    checkpoint = model.checkpoint
    return f"{checkpoint.source}@{checkpoint.revision}" if checkpoint.revision else checkpoint.directory.name


async def encode_clip(
    context: ServerContext, model: HostedModel, wave: np.ndarray, text: str | None
) -> dict[str, np.ndarray]:
    """Patches of a clip: "reference", and "prompt" when there is a text that it says. wave: float32 [samples]."""
    if text is not None:
        _check_text(model, text, "ref_text")
    latents = {"reference": await _encode(context, model, wave, "right")}
    if text is not None:
        # The last patch of a prompt must end where the clip ends.
        latents["prompt"] = await _encode(context, model, wave, "left")
    return latents


async def _encode(context: ServerContext, model: HostedModel, wave: np.ndarray, pad: str) -> np.ndarray:
    key = hashlib.blake2b(wave.tobytes(), key=f"{model.name}/{pad}".encode()[:64]).digest()
    cached = context.clips.get(key)
    if cached is not None:
        return cached
    request = EncodeReference(f"clip-{uuid.uuid4().hex}", model.name, wave, pad, time.monotonic())
    async with aclosing(context.engine.submit(request)) as answers:
        async for answer in answers:
            context.clips.put(key, answer.patches)
            return answer.patches
    raise ApiError(500, "The clip could not be encoded.", code="internal_error")


def speakable(text: str) -> bool:
    """There is a letter or digit in it."""
    return any(character.isalnum() for character in text)


def _check_text(model: HostedModel, text: str, field: str) -> None:
    named(field, lambda: model.speech_processor.tokenize(text))


def named(field: str, step: Callable[[], T]) -> T:
    """A processor calls every text "input"; only here it is known which field it came from."""
    try:
        return step()
    except InputError as error:
        raise InputError(field, str(error)) from error
