"""GET /docs: the OpenAPI document as one HTML page, rendered by the server, without scripts or assets of other
hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from starlette.responses import HTMLResponse

from service.api.http.openapi import get

router = APIRouter()

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
PAGE = Environment(
    loader=PackageLoader("service.api.http", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
).get_template("docs_page.html")


@get(router, "/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(render(request.app.openapi()), headers={"content-security-policy": POLICY})


def render(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as HTML."""
    return PAGE.render(document=document, type_text=type_text, fields=fields, schema_name=schema_name)


def schema_name(schema: Mapping[str, Any]) -> str:
    """The component that a schema refers to; empty if it is not a reference."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def fields(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table of a component."""
    required = schema.get("required", ())
    return [
        {"name": name, "schema": described, "required": name in required, "default": described.get("default")}
        for name, described in schema.get("properties", {}).items()
    ]


def type_text(schema: Mapping[str, Any]) -> Markup:
    """A schema in words, with links to components."""
    if name := schema_name(schema):
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "anyOf" in schema:
        return Markup(" or ").join(type_text(option) for option in schema["anyOf"] if option != {"type": "null"})
    if "enum" in schema:
        return Markup(" | ").join(Markup("<code>{}</code>").format(value) for value in schema["enum"])
    if "const" in schema:
        return Markup("<code>{}</code>").format(schema["const"])
    if "type" not in schema:
        return Markup.escape(schema.get("description", "anything"))
    kind = schema["type"]
    if kind == "array":
        return Markup("{} of {}").format(_counted("list", schema, "Items"), type_text(schema.get("items", {})))
    if kind == "object":
        values = schema.get("additionalProperties")
        return Markup("map to {}").format(type_text(values)) if isinstance(values, Mapping) else Markup("object")
    if kind == "string":
        return Markup(_counted("string", schema, "Length"))
    return Markup.escape(f"{kind} {_bounds(schema)}".rstrip())


def _counted(word: str, schema: Mapping[str, Any], what: str) -> str:
    bounds = [
        f"{words} {schema[key]}"
        for key, words in ((f"min{what}", "at least"), (f"max{what}", "at most"))
        if key in schema
    ]
    return f"{word} ({', '.join(bounds)})" if bounds else word


def _bounds(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least == -(2**63):
        return "of 64 bits"
    if least is not None and most is not None:
        return f"{least} to {most}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {schema[key]}" for key, sign in signs.items() if key in schema)
