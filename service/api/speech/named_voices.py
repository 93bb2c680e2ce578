"""Fixed voices: a sentence is spoken once with the voice's description and a fixed seed, and kept as the reference."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing

import numpy as np

from models.interfaces.errors import InputError
from service.api.context import ServerContext
from service.api.http.errors import ApiError
from service.api.speech.references import encode, encoder_of
from service.hub.catalog import HostedModel
from service.link.messages import Pause, SpeechRequest, SpeechSegment
from service.media.reference_level import level_reference
from service.media.resample import resample
from service.system.concurrency import shielded
from service.voices.named import load_named, save_named, voice_key, weights_of

log = logging.getLogger(__name__)

TEXT = "Hello there. This is how I sound when I read something to you."
SEED = 20_260_101
MAX_PATCHES = 32
"""About five seconds: enough for a voice, and short in front of every text."""
PAUSE_INTERVAL = 0.02
"""Seconds between two looks whether a voice that nobody waits for must pause for a request."""
ATTEMPTS = 3
"""Number of seeds that are tried, since the sentence may come out too short or too quiet."""
VERSION = "1"
"""Must be changed with everything above, and with `cfg_value` and `min_patches` of a processor, so that new references
are made."""


async def named_reference(
    context: ServerContext, model: HostedModel, name: str, description: str, *, wanted: bool = True
) -> np.ndarray:
    """Patches float32 [n, frames, channels] of the built-in voice `name`: those on disk or of the checkpoint, or made
    now and kept. Requests at the same time wait for the same result, which is finished even if they leave.

    wanted: a request waits for it; a voice that no request has wanted pauses while there are requests.
    """
    voice = model.name, name
    if wanted:
        context.voices_left.pop(voice, None)
    making = context.named_voices.get(voice)
    if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
        making = asyncio.ensure_future(_named(context, model, name, description))
        context.named_voices[voice] = making
        context.keep_task(making)
    return making.result() if making.done() else await shielded(making)


def _key(model: HostedModel, solver_steps: int, name: str, description: str) -> str:
    """File of a voice on disk. Weights are identified by their revision, or for a folder by its contents."""
    checkpoint = model.checkpoint
    weights = "" if checkpoint.revision else weights_of(checkpoint.directory)
    published = model.speech_processor.solver_steps[0]
    version = VERSION if solver_steps == published else f"{VERSION}, {solver_steps} solver steps"
    return voice_key(version, encoder_of(model), weights, name, description)


async def _named(context: ServerContext, model: HostedModel, name: str, description: str) -> np.ndarray:
    directory = context.settings.voices_dir.expanduser()
    key = await context.in_thread(lambda: _key(model, _solver_steps(context, model), name, description))
    kept = await context.in_thread(lambda: load_named(directory, key, model.checkpoint.directory))
    if kept is not None:
        return kept
    began = time.monotonic()
    voice = model.name, name
    reference, _ = await described_reference(
        context, model, description, SEED, may_wait=lambda: voice in context.voices_left
    )
    context.metrics.observe("built_in_voices_made_total", model=model.name)
    log.info("the built-in voice %s of %s was made in %.1f s", name, model.name, time.monotonic() - began)
    await context.in_thread(lambda: save_named(directory, key, reference))
    # Servers that share the directory all speak with the reference that is there now.
    stored = await context.in_thread(lambda: load_named(directory, key))
    return reference if stored is None else stored


async def described_reference(
    context: ServerContext,
    model: HostedModel,
    description: str,
    seed: int,
    *,
    may_wait: Callable[[], bool] = lambda: False,
) -> tuple[np.ndarray, float]:
    """(patches, seconds) of a described voice. ApiError 500 if no take is good enough. may_wait: whether it pauses
    while there are requests."""
    processor = model.speech_processor
    for attempt in range(ATTEMPTS):
        wave = await _spoken(context, model, description, (seed + attempt) & (2**63 - 1), may_wait)

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


async def _spoken(
    context: ServerContext, model: HostedModel, description: str, seed: int, may_wait: Callable[[], bool]
) -> np.ndarray:
    """Speaks a text: float32 [samples] at the model's rate. Nobody listens live, so live listeners go first."""
    processor = model.speech_processor
    ids = processor.tokenize(spoken_text(description))
    cap = min(processor.max_patches(ids), MAX_PATCHES)
    request = SpeechRequest(
        f"voice-{uuid.uuid4().hex}",
        model.name,
        (SpeechSegment(tuple(ids), min(processor.min_patches, cap), cap),),
        seed,
        processor.cfg_value,
        _solver_steps(context, model),
        live=False,
        arrival=time.monotonic(),
    )
    pausing = asyncio.ensure_future(_pause_for_requests(context, request.request_id, may_wait))
    try:
        async with aclosing(context.engine.submit(request)) as stream:
            return np.concatenate([delta.audio async for delta in stream])
    finally:
        pausing.cancel()


async def _pause_for_requests(context: ServerContext, request_id: str, may_wait: Callable[[], bool]) -> None:
    """Pause the generation while a request is in progress, from one step to the next."""
    paused = False
    while paused or may_wait():
        await asyncio.sleep(PAUSE_INTERVAL)
        if paused != (may_wait() and not context.admission.idle):
            paused = not paused
            context.engine.send(Pause(request_id, paused))


def _solver_steps(context: ServerContext, model: HostedModel) -> int:
    """The number of solver steps that the server captures for requests that name none."""
    return (context.settings.solver_steps or model.speech_processor.solver_steps)[0]
