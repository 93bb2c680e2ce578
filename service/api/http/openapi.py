"""The OpenAPI document: every route declares its body and all its responses. OpenAPI has no WebSockets."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Request
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from service.api.http.errors import ErrorBody

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])

REFERENCE = "#/components/schemas/{name}"
JSON = "application/json"
SSE = "text/event-stream"


def json_response(payload: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """payload: what msgspec encodes."""
    return Response(msgspec.json.encode(payload), status, headers, media_type=JSON)


DESCRIPTIONS = {
    400: "The request is invalid; `param` names the field.",
    401: "API key missing or invalid.",
    403: "The web page's origin is not allowed.",
    404: "No such model, voice or path.",
    408: "Timed out reading the request body.",
    409: "A voice of this name exists, or there are too many.",
    413: "The request body is too large.",
    415: "Compressed request bodies are not supported.",
    421: "The host name in Host is not allowed.",
    500: "The server failed on this request.",
    503: "Overloaded, loading or shutting down; retry after Retry-After seconds.",
    504: "The request took too long.",
    507: "The server's disk is full.",
}
MISDIRECTED = 421
WORK_ERRORS = (400, 401, 403, 404, 408, 413, 415, 500, 503, 504)
"""Error statuses of routes that use the engine."""

_types: dict[str, type] = {}


def operation(
    summary: str,
    answer: Mapping[str, type | None],
    *,
    events: tuple[type, ...] = (),
    errors: tuple[int, ...] = (401,),
    body: Mapping[str, type] | None = None,
    statuses: Mapping[int, type] | None = None,
) -> dict[str, Any]:
    """A route's openapi_extra. answer, body: msgspec type by media type (None: no schema). events: types of a stream's
    events, besides errors. statuses: types of further responses that are not error objects."""
    responses: dict[str, Any] = {"200": {"description": "The result.", "content": _content(answer)}}
    if events:
        responses["200"]["content"][SSE] = {"schema": _events(*events, ErrorBody)}
    for status, kind in (statuses or {}).items():
        responses[str(status)] = {"description": DESCRIPTIONS[status], "content": _content({JSON: kind})}
    for status in (*errors, MISDIRECTED):
        responses[str(status)] = {"description": DESCRIPTIONS[status], "content": _content({JSON: ErrorBody})}
    if "503" in responses:
        responses["503"]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    extra: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _content(body)}
    return extra


def get(
    router: APIRouter, path: str, summary: str, answer: Mapping[str, type | None], **described: Any
) -> Callable[[Endpoint], Endpoint]:
    """Register a route for GET and for HEAD, which probes of load balancers and `wget --spider` use; uvicorn leaves
    out the body. What follows the path is as in `operation`."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.head(path, include_in_schema=False)(endpoint)
        return router.get(path, openapi_extra=operation(summary, answer, **described))(endpoint)

    return register


def _reference(kind: type) -> dict[str, str]:
    _types[kind.__name__] = kind
    return {"$ref": REFERENCE.format(name=kind.__name__)}


def _events(*kinds: type) -> dict[str, Any]:
    """A server-sent event: its data is JSON, or [DONE] at the end."""
    payload = {"anyOf": [_reference(kind) for kind in kinds]}
    data = {"anyOf": [{"const": "[DONE]"}, {"type": "string", "contentMediaType": JSON, "contentSchema": payload}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}}


def _description(kind: type) -> str:
    """The docstring of a type, after those of its base types."""
    documented = [base.__doc__ for base in reversed(kind.__mro__) if issubclass(base, msgspec.Struct)]
    return "\n\n".join(inspect.cleandoc(text) for text in documented[1:] if text)


def _content(types: Mapping[str, Any]) -> dict[str, Any]:
    return {media_type: {} if kind is None else {"schema": _reference(kind)} for media_type, kind in types.items()}


def install_openapi(
    app: FastAPI, open_paths: Collection[str] | None, limits: Mapping[tuple[type, str], int] | None = None
) -> None:
    """Add the schemas of msgspec types to FastAPI's document. open_paths: paths without API key; None: all of them.
    limits: the most that this server allows in integer fields, by type and name."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, components = msgspec.json.schema_components(_types.values(), ref_template=REFERENCE)
        for described in components.values():
            if "description" in described:
                described["description"] = inspect.cleandoc(described["description"])  # Python 3.12 keeps indentation
        for name, kind in _types.items():
            components[name]["description"] = _description(kind)
        for (kind, field), most in (limits or {}).items():
            for option in components[kind.__name__]["properties"][field]["anyOf"]:
                if option["type"] == "integer":
                    option["maximum"] = most
        document.setdefault("components", {})["schemas"] = components  # without FastAPI's own, which nothing uses
        for path, operations in document["paths"].items():
            for described in operations.values():
                described["responses"].pop("422", None)  # FastAPI's own; those answers are 400 with an error object
                content = described["responses"]["200"]["content"]
                if content.get(JSON) == {"schema": {}}:  # FastAPI's own, too
                    del content[JSON]
                if open_paths is not None and path in open_paths:
                    described["security"] = []
        if open_paths is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


router = APIRouter()

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
PAGE = Environment(
    loader=PackageLoader("service.api.http", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
).get_template("docs_page.html")


@router.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(render(request.app.openapi()), headers={"content-security-policy": POLICY})


def render(document: Mapping[str, Any]) -> str:
    return PAGE.render(document=document, type_text=type_text, fields=fields, schema_name=schema_name)


def schema_name(schema: Mapping[str, Any]) -> str:
    """The component that a schema refers to; empty if it is not a reference."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def fields(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table of a component: required fields first, and last those that are refused."""
    required = schema.get("required", ())
    rows = [
        {"name": name, "schema": described, "required": name in required, "default": described.get("default")}
        for name, described in schema.get("properties", {}).items()
    ]
    return sorted(rows, key=lambda row: (not row["required"], "not supported" in row["schema"].get("description", "")))


def type_text(schema: Mapping[str, Any]) -> Markup:
    """A schema in short, with links to components; what it says besides is JSON."""
    if name := schema_name(schema):
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "anyOf" in schema:
        return Markup(" or ").join(type_text(option) for option in schema["anyOf"] if option != {"type": "null"})
    if "items" in schema:
        return Markup("list of {}").format(type_text(schema["items"]))
    rules = {key: value for key, value in schema.items() if key not in ("description", "default")}
    if not rules:
        return Markup.escape(schema.get("description", "anything"))
    return Markup("<code>{}</code>").format(msgspec.json.encode(rules).decode())
