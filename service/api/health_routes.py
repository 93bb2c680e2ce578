"""GET routes for discovery and operation: models, health, readiness, metrics, version."""

from __future__ import annotations

from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from service.api.context import ServerContext, context_of
from service.api.engines.engines import Engines
from service.api.http.errors import ApiError
from service.api.http.openapi import JSON, get, json_response
from service.hub.catalog import DEMO_NOTICES, HostedModel, Task
from service.metrics.metrics import CONTENT_TYPE
from service.system.packages import server_version

router = APIRouter()

RETRY = {"retry-after": "2"}


class Architecture(msgspec.Struct, frozen=True):
    """What requests and answers may have, as OpenRouter lists it: text, image, video, audio."""

    input_modalities: tuple[str, ...]
    output_modalities: tuple[str, ...]


class ModelCard(msgspec.Struct, frozen=True):
    """root: the checkpoint's repository or folder. notice: only for the embedded models."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    kind: Task
    architecture: Architecture
    object: Literal["model"] = "model"
    notice: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Background(msgspec.Struct, frozen=True):
    """Work that goes on after readiness while there are no requests: captures of CUDA graphs."""

    captures_left: int


class Health(msgspec.Struct, frozen=True):
    """engine: phase of the engine (starting, loading, capturing, ready, down, failed). engines: phase
    of each, if there are several; status is ok as long as one is alive."""

    status: Literal["ok", "engine_down"]
    engine: str
    restarts: int
    background: Background
    engines: list[str] | UnsetType = UNSET


class Readiness(msgspec.Struct, frozen=True):
    """detail: what the engine is loading or capturing. engines: phase of each, where there are several."""

    status: Literal["ready", "not_ready"]
    engine: str
    detail: str
    draining: bool
    background: Background
    engines: list[str] | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    version: str


@get(router, "/v1/models", "List the served models.", {JSON: ModelList})
async def list_models(request: Request) -> Response:
    context = context_of(request)
    return json_response(
        ModelList([_card(context, model, name) for model in context.catalog.models for name in model.names])
    )


@get(router, "/v1/models/{name:path}", "One served model.", {JSON: ModelCard}, errors=(401, 404))
async def get_model(request: Request, name: str) -> Response:
    context = context_of(request)
    model = context.catalog.get(name)
    if model is None:
        message = "No model of this name is served; GET /v1/models lists the names."
        raise ApiError(404, message, param="model", code="model_not_found")
    return json_response(_card(context, model, name))


def _card(context: ServerContext, model: HostedModel, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created,
        owned_by="reprise",
        root=model.root,
        max_model_len=context.max_model_len(model),
        kind=model.task,
        architecture=_architecture(context, model),
        notice=DEMO_NOTICES[model.task] if model.demo else UNSET,
    )


def _architecture(context: ServerContext, model: HostedModel) -> Architecture:
    if model.task == "speech":
        return Architecture(("text",), ("audio",))
    if model.task in ("transcription", "alignment"):
        return Architecture(("audio", "text"), ("text",))
    if model.task == "embedding":
        return Architecture(("text", "image", "video"), ("embeddings",))
    if model.task == "rerank":
        return Architecture(("text", "image", "video"), ("rerank",))
    heard = () if model.chat_processor.audio is None else ("audio",)
    return Architecture(
        ("text", "image", "video", *heard), ("text", "audio") if context.catalog.of_kind("speech") else ("text",)
    )


@get(router, "/health", "Liveness: is the engine alive?", {JSON: Health}, errors=(), statuses={503: Health})
async def health(request: Request) -> Response:
    context = context_of(request)
    engine = context.engine
    status: Literal["ok", "engine_down"] = "ok" if engine.alive else "engine_down"
    answer = Health(status, engine.phase, engine.restarts, _background(context), _phases(engine))
    return json_response(answer, *((200, {}) if engine.alive else (503, RETRY)))


@get(
    router,
    "/ready",
    "Readiness: does the server accept requests?",
    {JSON: Readiness},
    errors=(),
    statuses={503: Readiness},
)
async def ready(request: Request) -> Response:
    context = context_of(request)
    engine = context.engine
    detail = engine.state.detail if engine.state is not None else ""
    status: Literal["ready", "not_ready"] = "ready" if context.ready else "not_ready"
    answer = Readiness(status, engine.phase, detail, context.draining, _background(context), _phases(engine))
    return json_response(answer, *((200, {}) if context.ready else (503, RETRY)))


def _background(context: ServerContext) -> Background:
    return Background(sum(state.captures_left for state in context.engine.states))


def _phases(engine: Engines) -> list[str] | UnsetType:
    return [client.phase for client in engine.clients] if len(engine.clients) > 1 else UNSET


@get(router, "/metrics", "Metrics in Prometheus's text format.", {"text/plain": None})
async def metrics(request: Request) -> Response:
    context = context_of(request)
    observe_life(context)
    page = await (context.in_thread(context.metrics.exposition) if context.scrape is None else context.scrape())
    return Response(page, headers={"content-type": CONTENT_TYPE})


@get(router, "/metrics/history", "What the page shows of the last five minutes.", {JSON: None})
async def metrics_history(request: Request) -> Response:
    return json_response(context_of(request).history.readings)


def observe_life(context: ServerContext) -> None:
    """Set the gauges that describe the moment of a scrape."""
    context.metrics.observe("ready", float(context.ready))
    context.metrics.observe("engine_up", float(context.engine.alive))


@get(router, "/version", "The server's version.", {JSON: Version})
async def get_version() -> Response:
    return json_response(Version(server_version()))
