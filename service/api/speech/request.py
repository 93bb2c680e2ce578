"""Fields of a speech request -> SpeechRequest of the engine: voice, reference audio, text segments."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.errors import InputError
from models.processor import SpeechProcessor
from service.api.context import ServerContext
from service.api.http.errors import ApiError, bad_request
from service.api.http.record import RequestRecord
from service.api.speech.lexicon import Lexicon, LexiconFilter
from service.api.speech.named_voices import named_reference
from service.api.speech.normalising.text import TextNormaliser
from service.api.speech.references import check_room, check_text, encode, encode_reference, encoder_of
from service.api.speech.schema import SpeechOptions
from service.api.speech.text_splitting import CONTROL, Granularity, TextSplitter
from service.api.tracing import phase
from service.catalog import OPENAI_PCM_RATE, OPENAI_SPEECH_NAMES, HostedModel
from service.link.messages import SpeechRequest, SpeechSegment
from service.media.audio_out import FORMATS, StreamingEncoder
from service.media.reference_level import level_reference
from service.voice_store import LONGEST_NAME, Voice, VoiceStoreError, name_key

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

DEFAULT_CFG = 2.0
DEFAULT_MIN_PATCHES = 2
PARENTHESES = str.maketrans("", "", "()（）")
"""Removed from instructions: the model takes text in parentheses as the description."""
UNSPEAKABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufeff\ud800-\udfff]")
WHITESPACE = re.compile(r"\s+")


SMALL_TEXT = 512
"""Up to this many characters are split and tokenized in the event loop, which is as fast as handing the work to a
thread."""


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


@dataclass(frozen=True, eq=False)
class SpeechJob:
    """The validated fields of a request except its text."""

    id: str
    model: HostedModel
    speaker: Speaker
    seed: int
    cfg_value: float
    solver_steps: int
    temperature: float
    min_patches: int
    max_patches: int | None
    """None: the model's cap for the length of each text."""
    response_format: str
    sample_rate: int
    """Samples per second of what the client gets."""
    speed: float
    granularity: Granularity
    """Where a text is cut into segments."""
    markup: bool
    """Whether Markdown, HTML tags and emoji are removed."""
    normalised: bool
    """Whether numbers and signs become words."""
    lexicons: tuple[Lexicon, ...]
    segment_length: int
    """Limit of a segment, as text_splitting.spoken_length counts."""
    retries: int
    """SpeechRequest.retries."""
    record: RequestRecord

    @property
    def processor(self) -> SpeechProcessor:
        return self.model.speech_processor

    def encoder(self) -> StreamingEncoder:
        return StreamingEncoder(self.response_format, self.processor.sample_rate, self.sample_rate, self.speed)

    def splitter(self, first: Granularity | None = None) -> TextSplitter:
        """first: the granularity of the first segment, if it differs."""
        return TextSplitter(self.granularity, max_length=self.segment_length, first=first)

    def filters(self) -> list[LexiconFilter | TextNormaliser]:
        """The steps of script.py for a text that arrives in chunks: each takes the output of the one before."""
        filters: list[LexiconFilter | TextNormaliser] = [LexiconFilter(*self.lexicons)] if self.lexicons else []
        return [*filters, TextNormaliser()] if self.normalised else filters

    def segment(self, text: str) -> SpeechSegment:
        """InputError if the text cannot be tokenized."""
        ids = self.processor.tokenize(f"({self.speaker.design}){text}" if self.speaker.design else text)
        cap = self.processor.max_patches(ids)
        if self.max_patches is not None:
            cap = min(cap, self.max_patches)
        return SpeechSegment(tuple(ids), min(self.min_patches, cap), cap)

    def control_of(self, first_text: str) -> str:
        """The description in parentheses at the start of a text, which later segments repeat."""
        match = None if self.speaker.prompt is not None else CONTROL.match(first_text)
        return match[0] if match else ""

    def transcript_ids(self, first_text: str) -> tuple[int, ...]:
        """The prompt's transcript and the first segment's text, tokenized as one. InputError if they cannot be
        tokenized together."""
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
        """transcript_ids: see the method of that name. number: counts the texts of this job (utterances of a
        WebSocket)."""
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
            retries=self.retries,
            adapter=self.speaker.adapter,
        )


async def prepare(
    context: ServerContext,
    options: SpeechOptions,
    record: RequestRecord,
    *,
    default_format: str,
    default_granularity: Granularity,
) -> SpeechJob:
    """Validates all fields but the text, and loads or encodes the voice.

    default_format, default_granularity: where the request names none. Raises ApiError or InputError that names the
    invalid field.
    """
    model = speech_model(context, options.model, record)
    processor, settings = model.speech_processor, context.settings
    steps = solver_steps(context, model, options.inference_timesteps)
    name = options.response_format or default_format
    pcm_rate = settings.pcm_sample_rate or (OPENAI_PCM_RATE if options.model in OPENAI_SPEECH_NAMES else None)
    sample_rate = options.sample_rate or _default_rate(name, processor.sample_rate, pcm_rate)
    max_patches = options.max_len if options.max_len is not None else options.max_new_tokens
    if options.min_len is not None and max_patches is not None and options.min_len > max_patches:
        raise bad_request(f"min_len: {options.min_len} given, must be at most max_len, {max_patches}.", "min_len")
    speed = 1.0 if options.speed is None else options.speed
    # InputError for a rate or speed that the format cannot have.
    await context.encoders.prepare(StreamingEncoder(name, processor.sample_rate, sample_rate, speed))
    speaker = await _resolve_speaker(context, options, model, record.client)
    if speaker.design:
        patches = 0 if speaker.reference is None else len(speaker.reference)
        check_room(model, f"({speaker.design})", "instructions", reference_patches=patches)
    return SpeechJob(
        id=f"speech-{secrets.token_hex(16)}",
        model=model,
        speaker=speaker,
        seed=secrets.randbits(63) if options.seed is None else options.seed & (2**63 - 1),
        cfg_value=DEFAULT_CFG if options.cfg_value is None else options.cfg_value,
        solver_steps=steps,
        temperature=1.0 if options.temperature is None else options.temperature,
        min_patches=DEFAULT_MIN_PATCHES if options.min_len is None else options.min_len,
        max_patches=max_patches,
        response_format=name,
        sample_rate=sample_rate,
        speed=speed,
        granularity=options.split_granularity or default_granularity,
        markup=settings.clean_markup,
        normalised=options.normalize is not False,
        lexicons=_lexicons(context, options),
        segment_length=settings.speech_segment_length,
        retries=settings.speech_retries if max_patches is None else 0,  # a length that is asked for is not a runaway
        record=record,
    )


def solver_steps(context: ServerContext, model: HostedModel, given: int | None) -> int:
    """ApiError for a number of solver steps that the server does not offer. given: None for the first one."""
    served = context.settings.solver_steps or model.speech_processor.solver_steps
    steps = served[0] if given is None else given
    if steps not in served:
        allowed = ", ".join(map(str, sorted(served)))
        raise bad_request(f"inference_timesteps: {steps} given, must be one of {allowed}.", "inference_timesteps")
    return steps


def _lexicons(context: ServerContext, options: SpeechOptions) -> tuple[Lexicon, ...]:
    """The request's lexicon, followed by the server's."""
    own = (Lexicon(options.lexicon),) if options.lexicon else ()
    return own if context.lexicon is None else (*own, context.lexicon)


def speech_model(context: ServerContext, name: str | None, record: RequestRecord) -> HostedModel:
    """The named model, or the only speech model when no name is given."""
    if name is None:
        hosted = [model for model in context.catalog.models if model.kind == "speech"]
        if len(hosted) != 1:
            several = f"this field is required: {len(hosted)} speech models are served"
            raise bad_request(f"model: {several if hosted else 'no speech model is served'}.", "model")
        name = hosted[0].name
    return context.model(name, "speech", record)


def _default_rate(name: str, native: int, pcm_rate: int | None) -> int:
    if name == "pcm" and pcm_rate is not None:
        return pcm_rate
    return native if native in FORMATS[name].rates else FORMATS[name].rates[0]


async def _resolve_speaker(context: ServerContext, options: SpeechOptions, model: HostedModel, client: str) -> Speaker:
    """The voice that the fields ask for. ApiError or InputError names the invalid field."""
    design = clean_text((options.instructions or "").translate(PARENTHESES)).strip()
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
        speaker = await _reference_speaker(context, options.ref_audio, options.ref_text, model, design, client)
        adapter = context.lora_voices.get(name_key(_voice_name(options)[:LONGEST_NAME]), "")
        speaker = replace(speaker, adapter=adapter)
    else:
        speaker = await _named_speaker(context, options, model, design)
    if not options.prompt_audio or not options.prompt_text:
        return speaker
    check_text(model, options.prompt_text, "prompt_text")
    wave = await _load_audio(context, options.prompt_audio, model, "prompt_audio", client)
    prompt = await encode(context, model, wave, "left")
    return Speaker(speaker.reference, prompt, options.prompt_text, adapter=speaker.adapter)


async def _named_speaker(context: ServerContext, options: SpeechOptions, model: HostedModel, design: str) -> Speaker:
    voice = find_voice(context, _voice_name(options) or DEFAULT_VOICE, model)
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


def find_voice(context: ServerContext, name: str, model: HostedModel | None) -> Voice | Adapter | str:
    """An uploaded voice, an adapter, or the name of a built-in one. model: the one that will speak, if it is known.
    ApiError 404 for an unknown voice, 400 for one of another model."""
    key = name_key(name) if len(name) <= LONGEST_NAME else ""
    if key == DEFAULT_VOICE or key in OPENAI_VOICES:
        return key
    if key in context.lora_voices:
        return Adapter(context.lora_voices[key])
    voice = context.voices.find(name)
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
    context: ServerContext, url: str, text: str | None, model: HostedModel, design: str, client: str
) -> Speaker:
    wave = await _load_audio(context, url, model, "ref_audio", client)
    latents = await encode_reference(context, model, wave, text)
    return Speaker(latents["reference"], latents.get("prompt"), text or "", design)


async def _load_audio(context: ServerContext, url: str, model: HostedModel, field: str, client: str) -> np.ndarray:
    try:
        rate = model.speech_processor.reference_sample_rate
        with phase("media", kind="audio"):
            wave = await context.media.audio(url, sample_rate=rate, field=field, client=client)
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
        raise ApiError(500, f"voice: {error}.", param="voice", code="voice_unreadable") from error
    if design or voice.ref_text is None:
        return Speaker(latents["reference"], design=design)
    return Speaker(latents["reference"], latents.get("prompt"), voice.ref_text)


def clean_text(text: str) -> str:
    """Text as the model gets it: runs of whitespace become one space, control characters are removed.

    A space at either end stays, as in the reference implementation.
    """
    return WHITESPACE.sub(" ", UNSPEAKABLE.sub("", text))


def speakable(text: str) -> bool:
    """Whether the text has a letter or digit."""
    return any(character.isalnum() for character in text)
