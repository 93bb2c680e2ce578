"""What hosted models hear in generated speech: when its words are said, and whether they are those of its text."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import cast

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.media import Prompt
from models.interfaces.processor import AlignedWord, Aligner
from service.api.context import ServerContext
from service.api.engines.request_stream import EngineError, answered
from service.api.http.middleware import RequestRecord
from service.api.speech.request import SpeechJob
from service.api.spoken_text.normaliser import normalise
from service.api.spoken_text.text_splitting import words_of
from service.hub.catalog import HostedModel
from service.link.messages import ChatDelta, ChatRequest
from service.link.sampling import SamplingParams
from service.media.reference_audio import resample

AUDIBLE = 0.01
"""-40 dBFS: softer audio at the ends of a segment is not part of a word."""
MOST_SUBSTITUTED = 0.2
"""Share of a segment's words that may be heard as others: names are."""
MOST_TRAILING = 1.0
"""Seconds of sound that may follow the last word."""
NO_WORD = re.compile(r"[^\w'’]|_")


def audible(audio: np.ndarray) -> tuple[int, int] | None:
    """The samples from the first to the last audible one of float32 [n]; None where there is none."""
    loud = np.flatnonzero(np.abs(audio) >= AUDIBLE)
    return (int(loud[0]), int(loud[-1]) + 1) if len(loud) else None


def word_errors(text: str, transcript: str, *, noise: bool = False) -> Counter[str]:
    """Deletions, insertions and substitutions of words, without case and punctuation, and with numbers in words;
    "failed" is 1 if the transcript does not say what the text says. noise: sound behind the last word, which counts as
    an insertion."""
    said, heard = _words(text), _words(transcript)
    errors = Counter(deletions=0, insertions=int(noise), substitutions=0)
    for kind, a, b, c, d in SequenceMatcher(None, said, heard, autojunk=False).get_opcodes():
        if kind == "equal" or "".join(said[a:b]) == "".join(heard[c:d]):  # "every day", "everyday"
            continue
        both, more = min(b - a, d - c), (d - c) - (b - a)
        if both and abs(more) == 1:  # one word heard as two: "engine x", "Nginx"
            both, more = both + 1, 0
        errors.update(substitutions=both, insertions=max(0, more), deletions=max(0, -more))
    replaced = errors["substitutions"] > MOST_SUBSTITUTED * len(said)
    errors["failed"] = int(replaced or errors["deletions"] + errors["insertions"] > 0)
    return errors


def _words(text: str) -> list[str]:
    words = words_of(NO_WORD.sub(" ", normalise(text)).casefold())
    return [bare for word in words if (bare := re.sub("['’]", "", word))]


async def segment_errors(context: ServerContext, job: SpeechJob, text: str, audio: np.ndarray) -> Counter[str]:
    """word_errors of what the recogniser hears of float32 [n], as generated; "unavailable" is 1 if it cannot."""
    model, rate = context.catalog.of_task("transcription"), job.processor.sample_rate
    assert model is not None and model.chat_processor.audio is not None
    processor, hears = model.chat_processor, model.chat_processor.audio
    try:
        item = await context.in_thread(lambda: hears.item(resample(audio, rate, hears.sample_rate)))
        prompt = hears.prompt(item)
        most = min(hears.max_new_tokens(item), context.max_model_len(model) - len(prompt.token_ids))
        sampling = SamplingParams(max(most, 1), temperature=0.0, stop_token_ids=tuple(sorted(processor.stop_token_ids)))
        deltas = await _answer(context, model, prompt, sampling, job.record)
    except (EngineError, InputError):
        return Counter(unavailable=1)
    raw = processor.detokenize([token for delta in deltas for token in delta.token_ids])
    times, heard = await word_times(context, job, text, audio), audible(audio)
    noise = times is not None and heard is not None and heard[1] / rate - times[-1][1] > MOST_TRAILING
    return word_errors(text, hears.transcript(raw.decode(errors="replace")).text, noise=noise)


async def word_times(
    context: ServerContext, job: SpeechJob, text: str, audio: np.ndarray
) -> list[tuple[float, float]] | None:
    """(start, end) of each word of `words_of`, in seconds of the generated audio. None: no aligner is hosted, or it
    cannot tell or does not answer."""
    model = context.catalog.of_task("alignment")
    if model is None:
        return None
    aligner = cast(Aligner, model.processor)
    samples = partial(resample, audio, job.processor.sample_rate, aligner.sample_rate)
    try:
        words = ["".join(aligner.words(word)) for word in words_of(text)]
        found = iter(await align(context, [*filter(None, words)], samples, job.record))
    except (EngineError, InputError):
        return None
    times, end = list[tuple[float, float]](), 0.0
    for word in words:  # a sign between spaces has no letters
        start, end = (one.start, one.end) if word and (one := next(found)) else (end, end)
        times.append((start, end))
    return times


async def align(
    context: ServerContext, words: Sequence[str], samples: Callable[[], np.ndarray], record: RequestRecord
) -> list[AlignedWord]:
    """When the words are said. samples: makes float32 [n] at the aligner's rate. Raises EngineError, InputError."""
    model = context.catalog.of_task("alignment")
    assert model is not None
    aligner = cast(Aligner, model.processor)
    prompt = await context.in_thread(lambda: aligner.alignment_prompt(aligner.item(samples()), words))
    deltas = await _answer(context, model, prompt, SamplingParams(max_tokens=1, temperature=0.0), record)
    classes = deltas[-1].classes
    assert classes is not None
    return aligner.aligned(words, classes)


async def _answer(
    context: ServerContext, model: HostedModel, prompt: Prompt, sampling: SamplingParams, record: RequestRecord
) -> list[ChatDelta]:
    id, salted = f"heard-{uuid.uuid4().hex}", prompt.salted(context.owner(record.client))
    request = ChatRequest(id, model.name, salted, sampling, time.monotonic())
    return await answered(context.engine.submit(request))
