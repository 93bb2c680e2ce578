"""Makes built-in voices in advance, so that the first request for one need not wait for it."""

from __future__ import annotations

import asyncio
import logging

from service.api.context import ServerContext
from service.api.engines.request_stream import EngineError
from service.api.http.errors import ApiError
from service.api.speech.named_voices import named_reference
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES

log = logging.getLogger(__name__)

LOOKING_INTERVAL = 0.25
"""Seconds between two checks whether the server has anything else to do."""


async def make_voices(context: ServerContext) -> None:
    """Make, or read from disk, the voices that the setting voices_at_start names, one after another and only while
    the server answers no request. A voice that fails is made at its first use."""
    models = context.catalog.of_kind("speech")
    if not models:
        return
    wanted = {(model.name, name): model for name in names(context) for model in models}
    context.voices_left.update(dict.fromkeys(wanted))
    try:
        await context.engine.wait_ready()
    except EngineError:
        return  # the server ends, and says why
    for (model_name, name), model in wanted.items():
        await _idle(context)
        try:
            await named_reference(context, model, name, OPENAI_VOICES.get(name, ""), wanted=False)
        except (ApiError, EngineError) as error:
            log.warning("the built-in voice %s of %s is made when it is asked for: %s", name, model_name, error)
        context.voices_left.pop((model_name, name), None)


def names(context: ServerContext) -> tuple[str, ...]:
    settings = context.settings
    if not settings.fixed_voices or settings.voices_at_start == "none":
        return ()
    return (DEFAULT_VOICE, *OPENAI_VOICES) if settings.voices_at_start == "all" else (DEFAULT_VOICE,)


async def _idle(context: ServerContext) -> None:
    """Waits until no request is in progress in any process of the server."""
    while True:
        if context.ready and context.admission.idle:
            return
        await asyncio.sleep(LOOKING_INTERVAL)
