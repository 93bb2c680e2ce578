"""The ASGI application: routes, middleware and the life of what they share."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from models import resizing
from service.api import chat, operations, reference, speech, speech_stream, voices
from service.api.admission import Admission
from service.api.auth import AuthMiddleware, KeyRing
from service.api.context import ServerContext
from service.api.errors import install_error_handlers
from service.api.middleware import RequestMiddleware
from service.api.openapi import install_openapi
from service.api.origin import OriginMiddleware
from service.catalog import Catalog
from service.engine.client import EngineClient
from service.engine.supervisor import EngineLink
from service.media.audio_out import EncoderPool
from service.media.fetch import Fetcher, UrlPolicy
from service.media.limits import (
    AudioLimits,
    FetchLimits,
    ImageLimits,
    MediaLimits,
    RequestLimits,
    VideoLimits,
    WorkerLimits,
)
from service.media.loader import MediaLoader
from service.media.workers import WorkerPool
from service.metrics import Metrics
from service.settings import Settings, default_threads
from service.voices import VoiceStore

PROBES = ("/health", "/ready")
DOCUMENTS = ("/docs", "/openapi.json")
ENDPOINTS = {
    "/v1/chat/completions": "chat",
    "/v1/audio/speech": "speech",
    "/v1/audio/speech/stream": "speech",
    "/v1/audio/voices": "voices",
}
"""Paths with admission and metrics of their own."""
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-sample-rate", "x-channels", "x-bits-per-sample")
"""Headers of answers that pages of other origins may read."""
BYTES_PER_PIXEL = 3
LAG_PERIOD = 0.5


def create_context(settings: Settings, catalog: Catalog, make_link: Callable[[], EngineLink]) -> ServerContext:
    """What routes share; nothing runs before the application starts."""
    metrics = Metrics({model.name: model.kind for model in catalog.models})
    metrics.observe(
        "build_info",
        1,
        version=operations.server_version(),
        python=platform.python_version(),
        torch=operations.version_of("torch"),
    )
    workers = WorkerPool(settings.media_workers, WorkerLimits())
    media_threads = settings.media_threads or default_threads()
    resizing.use_threads(media_threads)
    return ServerContext(
        settings,
        catalog,
        EngineClient(make_link, metrics, hang_timeout=settings.hang_timeout, start_timeout=settings.start_timeout),
        metrics,
        MediaLoader(
            Fetcher(UrlPolicy(settings.media_urls, frozenset(settings.media_domain))),
            workers,
            media_limits(settings),
            image_threads=media_threads,
            on_read=lambda kind, seconds: metrics.observe("media_fetch_duration_seconds", seconds, kind=kind),
        ),
        workers,
        Admission(settings.max_in_flight, settings.max_pending_bytes, metrics, admission_shares(settings, catalog)),
        VoiceStore(settings.voices_dir.expanduser(), settings.max_voices),
        EncoderPool(settings.encoder_threads or default_threads()),
        ThreadPoolExecutor(media_threads, thread_name_prefix="work"),
    )


def admission_shares(settings: Settings, catalog: Catalog) -> dict[str, float]:
    """None where there is nothing to be shared."""
    if len({model.kind for model in catalog.models}) < 2:
        return {}
    return {"chat": settings.chat_share, "speech": settings.speech_share}


def media_limits(settings: Settings) -> MediaLimits:
    decoded = settings.max_request_pixels * BYTES_PER_PIXEL
    return MediaLimits(
        image=ImageLimits(settings.max_image_bytes, settings.max_image_pixels),
        video=VideoLimits(settings.max_video_bytes, max_frames=settings.max_frames, max_decoded_bytes=decoded),
        audio=AudioLimits(settings.max_audio_bytes, settings.max_audio_seconds),
        request=RequestLimits(settings.max_images + settings.max_videos, settings.max_body, decoded),
        fetch=FetchLimits(settings.fetch_timeout, settings.fetch_timeout, settings.fetch_timeout),
    )


def create_app(context: ServerContext) -> FastAPI:
    settings = context.settings

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        context.engine.start()
        lag = asyncio.create_task(_measure_lag(context.metrics))
        try:
            yield
        finally:
            lag.cancel()
            for task in context.tasks:
                task.cancel()
            await context.engine.stop()
            await context.media.close()
            await asyncio.to_thread(context.media_workers.close)
            context.threads.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(context.encoders.close)

    app = FastAPI(
        title="Reprise",
        description="Answers questions about images and videos, and speaks, over the OpenAI protocol.",
        version=operations.server_version(),
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        routes=[*chat.router.routes, *speech.router.routes],  # found at once: an included router is searched twice
    )
    app.state.context = context
    app.include_router(speech_stream.router)
    app.include_router(voices.router)
    app.include_router(operations.router)
    install_error_handlers(app)
    install_openapi(app)
    app.include_router(reference.router)
    open_paths = [*PROBES, *(["/metrics"] if settings.metrics_open else []), *(DOCUMENTS if settings.docs_open else [])]
    app.add_middleware(AuthMiddleware, keys=KeyRing(settings.keys()), open_paths=open_paths)
    app.add_middleware(OriginMiddleware, allowed=settings.cors_origin)
    app.add_middleware(
        RequestMiddleware,
        endpoints=ENDPOINTS,
        admission=context.admission,
        metrics=context.metrics,
        max_body=settings.max_body,
        body_timeout=settings.body_timeout,
    )
    if settings.cors_origin:  # outermost: a page must be able to read a refusal, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=EXPOSED_HEADERS,
        )
    return app


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_PERIOD
        await asyncio.sleep(LAG_PERIOD)
        metrics.observe("event_loop_lag_seconds", max(0.0, loop.time() - due))
        metrics.observe("event_loop_tasks", len(asyncio.all_tasks()))
