"""Reference audio of requests and uploads, encoded by the model that is to speak with its voice."""

from __future__ import annotations

import hashlib
import time
import uuid
from contextlib import aclosing
from typing import Literal

import numpy as np

from service.api.context import ServerContext
from service.api.http.errors import ApiError, naming
from service.hub.catalog import HostedModel
from service.link.messages import EncodeReference


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
        check_text(model, text, "ref_text")
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
    async with aclosing(context.engine.submit(request)) as stream:
        async for encoded in stream:
            context.references.put(key, encoded.patches)
            return encoded.patches
    raise ApiError(500, "The reference audio could not be encoded.", code="internal_error")


def check_text(model: HostedModel, text: str, field: str) -> None:
    naming(field, lambda: model.speech_processor.tokenize(text))


def check_room(model: HostedModel, text: str, field: str, **patches: int) -> None:
    """InputError when text and patches (those of SpeechProcessor.layout) leave no position of the context to speak
    in: nobody could ever use them."""
    processor = model.speech_processor
    naming(field, lambda: processor.layout(processor.tokenize(text), **patches))
