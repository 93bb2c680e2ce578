"""What routes share: one object per server, at app.state.context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from starlette.requests import HTTPConnection

from service.api.admission import Admission
from service.api.clips import ClipCache
from service.api.errors import ApiError
from service.api.record import RequestRecord
from service.api.turns import Turns
from service.catalog import Catalog, HostedModel
from service.engine.client import EngineClient
from service.media.audio_out import EncoderPool
from service.media.loader import MediaLoader
from service.media.workers import WorkerPool
from service.metrics import Metrics
from service.settings import Settings
from service.voices import VoiceStore

T = TypeVar("T")

ENGINE_RETRY_AFTER = 2.0


@dataclass(eq=False)
class ServerContext:
    """draining: the server is shutting down and takes no new requests."""

    settings: Settings
    catalog: Catalog
    engine: EngineClient
    metrics: Metrics
    media: MediaLoader
    media_workers: WorkerPool
    admission: Admission
    voices: VoiceStore
    encoders: EncoderPool
    threads: ThreadPoolExecutor
    """For work that would hold up the event loop: tokenizing, resizing, parsing large bodies."""
    clips: ClipCache = field(default_factory=ClipCache)
    turns: Turns = field(default_factory=Turns)
    draining: bool = False
    drain_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the engine takes no more requests: what is open for further ones ends."""
    open_sockets: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Background work that ends with the server."""

    async def in_thread(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, step)

    @property
    def ready(self) -> bool:
        """Requests are taken: loaded, captured, not draining."""
        return self.engine.ready and not self.draining

    def require_ready(self) -> None:
        """ApiError 503 with Retry-After unless requests are taken."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=ENGINE_RETRY_AFTER)
        if not self.engine.ready:
            message = f"The engine is not ready ({self.engine.phase}); retry in a moment."
            raise ApiError(503, message, code="engine_unavailable", retry_after=ENGINE_RETRY_AFTER)

    def model(self, name: str, kind: Literal["chat", "speech"], record: RequestRecord) -> HostedModel:
        """The model of that served name; ApiError 404, or 400 when it does something else. Noted in the record."""
        model = self.catalog.get(name)
        if model is None:
            raise ApiError(404, "model: no model of that name is served here.", param="model", code="model_not_found")
        record.model = model.name
        if model.kind != kind:
            does = {"chat": "answers questions", "speech": "speaks"}[model.kind]
            raise ApiError(
                400, f"model: this model {does}; ask another endpoint.", param="model", code="wrong_endpoint"
            )
        return model


def context_of(connection: HTTPConnection) -> ServerContext:
    context = connection.app.state.context
    assert isinstance(context, ServerContext)
    return context
