"""The objects that all routes share: one ServerContext per server, at app.state.context."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from service.api.engines.engines import Engines
from service.api.http.admission import Admission, Turns
from service.api.http.errors import ENGINE_RETRY_AFTER, ApiError, FieldWarnings, unread_fields
from service.api.http.json_body import parse
from service.api.http.middleware import RequestRecord
from service.api.http.openapi import JSON, WORK_ERRORS, json_response, operation
from service.api.spoken_text.lexicon import Lexicon
from service.api.structured.grammar import GrammarChecks
from service.api.tracing import Tracing
from service.confined.workers import WorkerPool
from service.hub.catalog import OPENAI_PCM_RATE, Catalog, HostedModel, Task
from service.link.config import PAGE_SIZE
from service.media.audio_out import EncoderPool
from service.media.loader import MediaLoader
from service.media.voice_activity import VoiceActivity
from service.metrics.metrics import Metrics
from service.metrics.page import History
from service.settings.settings import Settings
from service.voices import CACHED_REFERENCES, LruCache, VoiceStore

T = TypeVar("T")
Answered = TypeVar("Answered", bound=Callable[..., Awaitable[Response | msgspec.Struct]])

PATHS: dict[Task, str] = {
    "chat": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "embedding": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "transcription": "/v1/audio/transcriptions",
    "alignment": "the model that transcribes; this one gives it the times of words",
}
LARGE_BODY = 1 << 18
"""Bytes above which a JSON body is parsed in a thread."""


@dataclass(eq=False)
class ServerContext:
    settings: Settings
    catalog: Catalog
    engine: Engines
    metrics: Metrics
    media: MediaLoader
    media_workers: WorkerPool
    admission: Admission
    voices: VoiceStore
    encoders: EncoderPool
    threads: ThreadPoolExecutor
    """Threads for work that would block the event loop: tokenizing, resizing, parsing large bodies."""
    tracing: Tracing | None = None
    segment_length: int = 400
    """Characters of a segment of speech (Han, kana and hangul count three); longer texts are cut."""
    pcm_rate: int = OPENAI_PCM_RATE
    """Sample rate of pcm if a request names none, Hz."""
    speech_ahead: float = 20.0
    """Seconds of audio that a slow client may leave unread before its stream pauses."""
    lexicon: Lexicon | None = None
    """The lexicon that the setting names."""
    kv_positions: dict[str, int] = field(default_factory=dict)
    """Positions of each chat model's KV cache, as the engine that has fewest last reported it."""
    named_voices: dict[tuple[str, str], asyncio.Future[np.ndarray]] = field(default_factory=dict)
    """References of built-in voices, finished or being made, by model and name."""
    lora_voices: Mapping[str, str] = field(default_factory=dict)
    """Folder of each adapter by the name_key of its voice."""
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    references: LruCache[bytes, np.ndarray] = field(default_factory=lambda: LruCache(CACHED_REFERENCES))
    turns: Turns = field(default_factory=Turns)
    voice_activity: VoiceActivity = field(default_factory=VoiceActivity)
    field_warnings: FieldWarnings = field(default_factory=FieldWarnings)
    draining: bool = False
    """Whether the server is shutting down and accepts no new requests."""
    drain_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more connections are accepted; then idle WebSockets are closed."""
    open_sockets: int = 0
    """Open WebSockets, also those over which nothing is being answered."""
    history: History = field(default_factory=History)
    """Of this process's metrics; empty where there are several API processes."""
    scrape: Callable[[], Awaitable[bytes]] | None = None
    """Page of the metrics of all API processes; None: this is the only one."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Background tasks, cancelled when the server stops."""

    def owner(self, client: str) -> str:
        """Return who shares caches and uploaded voices with a client (RequestRecord.client): with separate_keys those
        who have its key, else "", everyone."""
        return client if self.settings.separate_keys else ""

    def keep_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a background task until it has ended; the server cancels it when it stops."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def in_thread(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, step)

    async def read_json(self, request: Request, kind: type[T]) -> T:
        """The body of a request as a `kind`, parsed when it is this request's turn. ApiError or a msgspec error if it
        is not one."""
        raw = await request.body()
        await self.turns.wait()

        def read() -> tuple[T, list[str]]:
            return parse(raw, kind), unread_fields(raw, kind)

        body, unread = await self.in_thread(read) if len(raw) > LARGE_BODY else read()
        self.field_warnings.warn(request.scope["path"], unread)
        return body

    def max_model_len(self, model: HostedModel) -> int:
        """Tokens that prompt and answer may have together: the model's context, or the KV cache if it holds fewer."""
        states = [one for state in self.engine.states for one in state.models]
        pages = [one.pages_total for one in states if one.model == model.name and one.pages_total]
        if pages:
            self.kv_positions[model.name] = min(pages) * PAGE_SIZE
        context: int = model.processor.context_length
        return min(context, self.kv_positions.get(model.name, context))

    @property
    def ready(self) -> bool:
        """Whether the server accepts requests: models loaded, graphs captured, not draining."""
        return self.engine.ready and not self.draining

    def require_ready(self) -> None:
        """ApiError 503 with Retry-After unless the server accepts requests."""
        if self.draining:
            message = "The server is shutting down."
            raise ApiError(503, message, code="shutting_down", retry_after=ENGINE_RETRY_AFTER)
        if not self.engine.ready:
            message = f"The engine is not ready ({self.engine.phase}); retry shortly."
            raise ApiError(503, message, code="engine_unavailable", retry_after=ENGINE_RETRY_AFTER)

    def served(self, task: Task) -> str:
        """The names of the models for a task, for an error about another name."""
        names = ", ".join(model.name for model in self.catalog.models if model.task == task)
        return f"{task} models here: {names}" if names else f"there is no {task} model here"

    def model(self, name: str, task: Task, record: RequestRecord) -> HostedModel:
        """The model with that served name, which is also written to the record. ApiError 404 for an unknown name, 400
        for a model for another task; one that transcribes also takes chats, and answers with the transcript."""
        model = self.catalog.get(name)
        if model is None:
            message = f"model: no model of this name is served; {self.served(task)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        record.model = model.name
        if model.task != task and (model.task, task) != ("transcription", "chat"):
            article = "an" if model.task in ("embedding", "alignment") else "a"
            problem = f"this is {article} {model.task} model, which this endpoint does not serve"
            message = f"model: {problem}; use {PATHS[model.task]}."
            raise ApiError(400, message, param="model", code="wrong_endpoint")
        return model


def context_of(connection: HTTPConnection) -> ServerContext:
    context = connection.app.state.context
    assert isinstance(context, ServerContext)
    return context


class PlainRoute(APIRoute):
    """Calls its endpoint with the request alone: FastAPI's look for dependencies takes each request 0.1 ms."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def post(
    router: APIRouter,
    path: str,
    summary: str,
    body: type,
    answer: type | Mapping[str, None],
    *,
    events: tuple[type, ...] = (),
) -> Callable[[Answered], Answered]:
    """Register a route for POST of JSON, answered once the server is ready.

    The endpoint takes the request, the context and the body, and returns a response or a struct that becomes JSON.
    answer: type of that struct, or media types without a schema. events: types of a stream's events."""

    def register(endpoint: Answered) -> Answered:
        async def respond(request: Request) -> Response:
            context = context_of(request)
            context.require_ready()
            answered = await endpoint(request, context, await context.read_json(request, body))
            return answered if isinstance(answered, Response) else json_response(answered)

        content = {JSON: answer} if isinstance(answer, type) else answer
        described = operation(summary, content, events=events, errors=WORK_ERRORS, body={JSON: body})
        plain: dict[str, Any] = {"methods": ["POST"], "route_class_override": PlainRoute}
        router.add_api_route(path, respond, name=endpoint.__name__, openapi_extra=described, **plain)
        return endpoint

    return register
