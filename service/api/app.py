"""The ASGI application: routes, middleware, start and stop of what they share."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from models.interfaces import resizing
from models.interfaces.cpus import default_threads
from models.interfaces.errors import CheckpointError
from service.api import health_routes as operations
from service.api.chat import embeddings, responses, transcriptions
from service.api.chat import route as chat
from service.api.chat.job import max_choices
from service.api.chat.schema import ChatRequestBody
from service.api.context import ServerContext
from service.api.engines.engine_client import EngineClient
from service.api.engines.engines import Engines
from service.api.engines.shared_usage import UsageRow
from service.api.http import openapi as docs_page
from service.api.http.admission import Admission
from service.api.http.errors import install_error_handlers
from service.api.http.middleware import Guards, HostRule, RequestMiddleware
from service.api.http.openapi import install_openapi
from service.api.http.page import page_router
from service.api.realtime import websocket as realtime
from service.api.speech import route as speech
from service.api.speech import voices
from service.api.speech import websocket as speech_stream
from service.api.speech.voices import lora_voices
from service.api.spoken_text.lexicon import Lexicon, load_lexicon
from service.api.tracing import tracing_from
from service.hub.catalog import Catalog
from service.link.engine_link import START_TIMEOUT, EngineLink
from service.media.audio_out import EncoderPool
from service.media.fetch import Fetcher, UrlPolicy
from service.media.image_decode import DECODING_BYTES
from service.media.loader import MediaLoader, decode_workers
from service.media.messages import ImageLimits, MediaLimits, RequestLimits, VideoLimits
from service.metrics.metrics import Metrics
from service.settings.reading import SettingsError
from service.settings.settings import Settings
from service.system.packages import server_version, version_of
from service.voices import VoiceStore

PROBES = ("/health", "/ready")
DOCUMENTS = ("/docs", "/openapi.json")
ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/speech": "speech",
    "/v1/audio/speech/stream": "speech",
    "/v1/audio/voices": "voices",
    "/v1/realtime": "realtime",
}
"""Paths with admission control, and the value of `endpoint` in their metrics."""
EXPOSED_HEADERS = (
    *("x-request-id", "retry-after", "x-sample-rate", "x-channels", "x-bits-per-sample"),
    *("x-unspoken-text", "x-verification"),
)
"""Response headers that pages of other origins may read (CORS)."""
BYTES_PER_PIXEL = 3
SHARES = {"chat": 0.75, "speech": 0.75}
"""Share of the requests and bytes in progress that each kind of model may take if both are served."""
LAG_PERIOD = 0.5
MAX_VOICES = 1000
"""Voices that may be uploaded."""


def create_metrics(catalog: Catalog) -> Metrics:
    """The metrics of a process that answers requests."""
    metrics = Metrics({model.name: model.kind for model in catalog.models})
    metrics.observe(
        "build_info", 1, version=server_version(), python=platform.python_version(), torch=version_of("torch")
    )
    return metrics


def create_engine(settings: Settings, metrics: Metrics, make_link: Callable[[], EngineLink] | None) -> EngineClient:
    """A client of an engine, which this process starts and watches unless make_link is None."""
    return EngineClient(make_link, metrics, hang_timeout=settings.hang_timeout, start_timeout=START_TIMEOUT)


def create_context(
    settings: Settings, catalog: Catalog, engine: Engines, metrics: Metrics, *, others: UsageRow | None = None
) -> ServerContext:
    """The objects that routes share. Starts nothing; the application's lifespan does that. SettingsError for an
    unusable voices_dir, lora_voices, lexicon or OTEL_ variable.

    metrics: include the engine's. others: API processes with which the limits are shared."""
    workers = decode_workers(settings.media_workers)
    media_threads = threads_of_each(settings)
    resizing.use_threads(media_threads)
    return ServerContext(
        settings,
        catalog,
        engine,
        metrics,
        MediaLoader(
            Fetcher(UrlPolicy(settings.media_urls, frozenset(settings.media_domain))),
            workers,
            media_limits(settings),
            image_threads=media_threads,
            image_pool=decode_workers(media_threads) if settings.isolate_images else None,
            on_read=lambda kind, seconds: metrics.observe("media_fetch_duration_seconds", seconds, kind=kind),
        ),
        workers,
        create_admission(settings, catalog, metrics, others),
        voice_store(settings),
        EncoderPool(media_threads),
        ThreadPoolExecutor(media_threads, thread_name_prefix="work"),
        tracing_from(server_version()),
        lexicon=server_lexicon(settings),
        lora_voices=lora_voices(settings, catalog),
    )


def server_lexicon(settings: Settings) -> Lexicon | None:
    """SettingsError if the file of the setting is not valid."""
    try:
        return None if settings.lexicon is None else load_lexicon(settings.lexicon.expanduser())
    except ValueError as error:
        raise SettingsError(f"lexicon: {error}") from error


def threads_of_each(settings: Settings) -> int:
    """Threads of an API process that decode pictures and tokenize, and as many that resize, and that encode audio."""
    return max(1, default_threads() // settings.num_api_processes)


def voice_store(settings: Settings) -> VoiceStore:
    """SettingsError when voices_dir is not a directory or cannot be read."""
    directory = settings.voices_dir.expanduser()
    try:
        return VoiceStore(directory, MAX_VOICES)
    except OSError as error:
        raise SettingsError(f"voices_dir: {directory} cannot be used ({error.strerror})") from error


def create_admission(
    settings: Settings, catalog: Catalog, metrics: Metrics, others: UsageRow | None = None
) -> Admission:
    """SettingsError for limits of which one allows a request that another could never admit."""
    most, pixels = settings.max_pending_bytes, settings.max_request_pixels
    # One picture at full size at a time is always decoded; of all others of a request, and of videos, little is left.
    excess = min(ImageLimits.max_pixels, pixels) * DECODING_BYTES
    kinds = {model.kind for model in catalog.models}
    shares = SHARES if len(kinds) > 1 else {}
    admission = Admission(
        settings.max_in_flight, most, metrics, shares, others, excess_bytes=excess, max_wait=settings.queue_timeout
    )
    largest = min(admission.largest(kind) for kind in shares or kinds)
    if most <= excess or settings.max_body > largest:
        raise SettingsError(
            f"max_pending_bytes: {most} cannot hold one request that max_request_pixels and max_body allow: {excess} "
            f"bytes while a picture is decoded (lower max_request_pixels), and beside it {settings.max_body} in three "
            f"quarters of what chat or speech may take (now {max(0, largest)}; lower max_body)"
        )
    return admission


def media_limits(settings: Settings) -> MediaLimits:
    decoded = settings.max_request_pixels * BYTES_PER_PIXEL
    return MediaLimits(
        image=ImageLimits(min(ImageLimits.max_bytes, settings.max_body)),
        video=VideoLimits(
            min(VideoLimits.max_bytes, settings.max_body), max_frames=settings.max_frames, max_decoded_bytes=decoded
        ),
        recording=replace(MediaLimits.recording, max_bytes=min(MediaLimits.recording.max_bytes, settings.max_body)),
        request=RequestLimits(settings.max_body, decoded),
    )


def create_app(context: ServerContext) -> FastAPI:
    settings = context.settings
    app = FastAPI(
        title="Reprise",
        description="Chat with images and videos, and text to speech, over OpenAI's API.",
        version=server_version(),
        lifespan=lambda app: _lifespan(context),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    sockets = [speech_stream.router, realtime.router]
    chats = [chat.router, responses.router, embeddings.router, transcriptions.router]
    routers = [*chats, speech.router, *sockets, voices.router, operations.router, docs_page.router]
    open_paths = [*PROBES, *(["/metrics"] if settings.metrics_open else []), *(DOCUMENTS if settings.page else [])]
    if settings.page:
        page = page_router()
        routers.append(page)
        open_paths += [route.path for route in page.routes if isinstance(route, APIRoute)]
    for router in routers:
        app.include_router(router)
    install_error_handlers(app, [*app.routes, *(route for router in routers for route in router.routes)])
    keys = settings.keys()
    choices, kinds = max_choices(context), (ChatRequestBody, chat.CompletionBody)
    install_openapi(app, open_paths if keys else None, {(kind, "n"): choices for kind in kinds})
    _add_middleware(app, context, keys, open_paths)
    return app


def _add_middleware(app: FastAPI, context: ServerContext, keys: Sequence[str], open_paths: Sequence[str]) -> None:
    """Add the middleware, the innermost first. open_paths: those that need no key."""
    settings = context.settings
    hosts = HostRule(settings.host, settings.allowed_host, keyed=bool(keys))
    app.add_middleware(
        RequestMiddleware,
        endpoints=ENDPOINTS,
        admission=context.admission,
        metrics=context.metrics,
        max_body=settings.max_body,
        guards=Guards(hosts, settings.cors_origin, keys, open_paths),
        tracing=context.tracing,
    )
    if settings.cors_origin:  # outermost: pages must be able to read error responses, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients add their own: OpenAI's sends x-stainless-lang and others
            expose_headers=EXPOSED_HEADERS,
        )


@asynccontextmanager
async def _lifespan(context: ServerContext) -> AsyncIterator[None]:
    """Start what the routes share, and stop it at the end."""
    context.engine.start()
    if any(model.kind == "speech" for model in context.catalog.models):
        context.encoders.import_ffmpeg()
    await _load_processors(context)
    lag = asyncio.create_task(_measure_lag(context.metrics))
    if context.scrape is None and context.settings.page:
        context.keep_task(asyncio.create_task(context.history.keep(context.metrics)))
    try:
        yield
    finally:
        lag.cancel()
        for task in tuple(context.tasks):
            task.cancel()
        await context.engine.stop()
        await context.media.close()
        await asyncio.to_thread(context.media_workers.close)
        await asyncio.to_thread(context.grammars.close)
        context.threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(context.encoders.close)
        if context.tracing is not None:
            await asyncio.to_thread(context.tracing.close)


async def _load_processors(context: ServerContext) -> None:
    """Load tokenizers and processors, which takes seconds, while the engine loads its weights."""
    try:
        await asyncio.to_thread(context.catalog.load_processors)
    except CheckpointError as error:
        context.engine.fail(str(error))


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_PERIOD
        await asyncio.sleep(LAG_PERIOD)
        metrics.observe("event_loop_lag_seconds", max(0.0, loop.time() - due))
        metrics.observe("event_loop_tasks", len(asyncio.all_tasks()))
