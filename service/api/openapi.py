"""The OpenAPI document: every route declares its body and every answer that it can give. WebSockets, which OpenAPI does
not know, are described by their messages below "x-websockets"."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from fastapi import FastAPI

from service.api.errors import ErrorBody

REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
SSE = "text/event-stream"

DESCRIPTIONS = {
    400: "The request does not fit; `param` names the field.",
    401: "API key missing or wrong.",
    403: "Called from a web page of an origin that is not allowed.",
    404: "No such model or path.",
    408: "The body did not come in time.",
    409: "A voice of that name exists, or there are as many as allowed.",
    413: "The body is too large.",
    415: "The body is compressed.",
    499: "The client left; never seen by one.",
    500: "The server failed on this request.",
    503: "Overloaded, loading or shutting down; retry after the time in Retry-After.",
    504: "The request took too long.",
    507: "The disk is full.",
}
WORK_ERRORS = (400, 401, 403, 404, 408, 413, 415, 499, 500, 503, 504)
"""Statuses of routes that make an engine work."""

_types: dict[str, type] = {}
_sockets: dict[str, dict[str, Any]] = {}


def operation(
    summary: str,
    answer: Mapping[str, type | None],
    *,
    events: tuple[type, ...] = (),
    errors: tuple[int, ...] = (401,),
    body: Mapping[str, type] | None = None,
    statuses: Mapping[int, type] | None = None,
) -> dict[str, Any]:
    """A route's openapi_extra. answer, body: msgspec type by media type (None: no schema). events: what a stream tells,
    besides an error. statuses: further answers that are no error objects."""
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": _content(answer)}}
    if events:
        responses["200"]["content"][SSE] = {"schema": _events(*events, ErrorBody)}
    for status, kind in (statuses or {}).items():
        responses[str(status)] = {"description": DESCRIPTIONS[status], "content": _content({JSON: kind})}
    for status in errors:
        responses[str(status)] = {"description": DESCRIPTIONS[status], "content": _content({JSON: ErrorBody})}
    if "503" in responses:
        responses["503"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    extra: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _content(body)}
    return extra


def websocket(path: str, summary: str, *, client: Any, server: Any) -> None:
    """Describe a WebSocket. client, server: unions of the msgspec types that each side sends, besides binary frames."""
    described: dict[str, Any] = {"summary": summary}
    for side, union in (("client", client), ("server", server)):
        described[side] = [_reference(kind) for kind in get_args(union)]
    _sockets[path] = described


def _reference(kind: type) -> dict[str, str]:
    _types[kind.__name__] = kind
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def _events(*kinds: type) -> dict[str, Any]:
    """An event of a stream: JSON in its data, or the end's mark."""
    payload = {"anyOf": [_reference(kind) for kind in kinds]}
    data = {
        "anyOf": [
            {"const": "[DONE]"},
            {"type": "string", "contentMediaType": JSON, "contentSchema": payload},
        ]
    }
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}}


def _description(kind: type) -> str:
    """A type's own words behind those of the types that it extends."""
    documented = [base.__doc__ for base in reversed(kind.__mro__) if issubclass(base, msgspec.Struct)]
    return "\n\n".join(inspect.cleandoc(text) for text in documented[1:] if text)


def _content(types: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for media_type, kind in types.items():
        content[media_type] = {}
        if kind is not None:
            content[media_type] = {"schema": _reference(kind)}
    return content


def install_openapi(app: FastAPI) -> None:
    """Add the schemas of msgspec types to FastAPI's document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, components = msgspec.json.schema_components(_types.values(), ref_template=REFERENCE)
        for name, kind in _types.items():
            components[name]["description"] = _description(kind)
        document.setdefault("components", {})["schemas"] = components  # without FastAPI's own, which nothing uses
        document["x-websockets"] = _sockets
        for operations in document["paths"].values():
            for described in operations.values():
                described["responses"].pop("422", None)  # FastAPI's own; those answers are 400 with an error object
                content = described["responses"]["200"]["content"]
                if content.get(JSON) == {"schema": {}}:  # FastAPI's own, too
                    del content[JSON]
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
