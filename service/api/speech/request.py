"""Fields of a speech request -> SpeechRequest of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechProcessor
from service.api.context import ServerContext
from service.api.http.errors import invalid
from service.api.http.middleware import RequestRecord
from service.api.speech.schema import SpeechOptions
from service.api.speech.speaker import Speaker, check_room, resolve_speaker, solver_steps
from service.api.spoken_text.lexicon import Lexicon
from service.api.spoken_text.markup import speakable
from service.api.spoken_text.text_splitting import CONTROL, Granularity
from service.hub.catalog import HostedModel
from service.link.messages import SpeechRequest, SpeechSegment
from service.media.audio_formats import FORMATS
from service.media.audio_out import StreamingEncoder

MAX_WHOLE_CHARS = 4096
"""Limit in characters of a text that is answered with a complete file. Longer texts must be streamed, since such a file
is held in memory."""
SPOKEN_GROWTH = 2
"""How many times its limit a text may have once its numbers have become words."""


class SpokenTooLong(InputError):
    """The text is within its limit, but the words that are spoken for it are not."""


class Unspeakable(InputError):
    """The model can speak no letter and no digit of a segment."""


def max_written_chars(context: ServerContext, *, live: bool) -> int:
    """Limit in characters of a text to speak. live: the audio is streamed."""
    most = context.settings.max_speech_chars
    return most if live else min(most, MAX_WHOLE_CHARS)


def max_spoken_chars(context: ServerContext, *, live: bool) -> int:
    """Limit in characters of a text as it is spoken."""
    return SPOKEN_GROWTH * max_written_chars(context, live=live)


RETRIES = 3
"""How often a segment that runs to its cap, or a text that fails its verification, gets another seed."""
SMALL_TEXT = 512
"""Up to this many characters are split and tokenized in the event loop, which is as fast as handing the work to a
thread."""


@dataclass(frozen=True, eq=False)
class SpeechJob:
    """The validated fields of a request except its text."""

    model: HostedModel
    speaker: Speaker
    template: SpeechRequest
    """The engine's request without segments."""
    min_patches: int
    max_patches: int | None
    """None: the model's cap for the length of each text."""
    response_format: str
    sample_rate: int
    """Samples per second of what the client gets."""
    granularity: Granularity
    """Where a text is cut into segments."""
    normalised: bool
    """Whether numbers and signs become words."""
    lexicons: tuple[Lexicon, ...]
    segment_length: int
    """Limit of a segment, as text_splitting.spoken_length counts."""
    record: RequestRecord

    @property
    def processor(self) -> SpeechProcessor:
        return self.model.speech_processor

    @property
    def heard_rate(self) -> float:
        """Samples of the model's audio that a listener hears in a second."""
        return self.processor.sample_rate * self.template.speed

    def encoder(self) -> StreamingEncoder:
        rate, speed = self.processor.sample_rate, self.template.speed
        return StreamingEncoder(self.response_format, rate, self.sample_rate, speed)

    def speaks(self, text: str) -> bool:
        """Whether the model can speak a letter or digit of the text."""
        return speakable(text.translate(dict.fromkeys(map(ord, self.processor.unspoken(text)))))

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

    def spoken(self, index: int, text: str) -> str:
        """What is heard of a segment: the description at the start of the text is not."""
        return text if index else text.removeprefix(self.control_of(text)) or text

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
        return msgspec.structs.replace(
            self.template,
            request_id=f"{self.template.request_id}-{number}",
            segments=tuple(segments),
            transcript_ids=transcript_ids,
            live=live,
            open=open,
            arrival=arrival,
        )


async def prepare(
    context: ServerContext,
    options: SpeechOptions,
    record: RequestRecord,
    *,
    default_format: str,
    default_granularity: Granularity,
) -> SpeechJob:
    """Validate all fields but the text, and load or encode the voice. The defaults are for a request that names none.
    ApiError or InputError names the invalid field."""
    model = speech_model(context, options.model, record)
    processor = model.speech_processor
    steps = solver_steps(context, model, options.inference_timesteps)
    name = options.response_format or default_format
    native = context.pcm_rate if name == "pcm" else processor.sample_rate
    rates = FORMATS[name].rates
    sample_rate = options.sample_rate or (native if native in rates else rates[0])
    max_patches = options.max_len if options.max_len is not None else options.max_new_tokens
    if options.min_len is not None and max_patches is not None and options.min_len > max_patches:
        raise invalid("min_len", f"{options.min_len} given, must be at most max_len, {max_patches}")
    speed = 1.0 if options.speed is None else options.speed
    # InputError for a rate or speed that the format cannot have.
    await context.encoders.prepare(StreamingEncoder(name, processor.sample_rate, sample_rate, speed))
    speaker = await resolve_speaker(context, options, model, record)
    if speaker.design:
        patches = 0 if speaker.reference is None else len(speaker.reference)
        check_room(model, f"({speaker.design})", "instructions", reference_patches=patches)
    lexicons = (Lexicon(options.lexicon),) if options.lexicon else ()
    template = SpeechRequest(
        request_id=f"speech-{secrets.token_hex(16)}",
        model=model.name,
        segments=(),
        seed=secrets.randbits(63) if options.seed is None else options.seed & (2**63 - 1),
        cfg_value=processor.cfg_value if options.cfg_value is None else options.cfg_value,
        solver_steps=steps,
        live=False,
        arrival=record.arrival,
        temperature=1.0 if options.temperature is None else options.temperature,
        reference=speaker.reference,
        prompt=speaker.prompt,
        speed=speed,
        retries=RETRIES if max_patches is None else 0,  # a length that is asked for is not a runaway
        adapter=speaker.adapter,
    )
    return SpeechJob(
        model=model,
        speaker=speaker,
        template=template,
        min_patches=processor.min_patches if options.min_len is None else options.min_len,
        max_patches=max_patches,
        response_format=name,
        sample_rate=sample_rate,
        granularity=options.split_granularity or default_granularity,
        normalised=options.normalize is not False,
        lexicons=lexicons if context.lexicon is None else (*lexicons, context.lexicon),
        segment_length=context.segment_length,
        record=record,
    )


def speech_model(context: ServerContext, name: str | None, record: RequestRecord) -> HostedModel:
    """The named model, or the only speech model when no name is given."""
    if name is None:
        hosted = context.catalog.of_kind("speech")
        if len(hosted) != 1:
            several = f"this field is required: {len(hosted)} speech models are served"
            raise invalid("model", several if hosted else "no speech model is served")
        name = hosted[0].name
    return context.model(name, "speech", record)
