"""The page at /: plain files of service/page, read once at start. Browsers ask for each again and get 304 for the same
file."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media types by the ending of a file's name; files of other kinds are not served."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(self), geolocation=(), display-capture=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_router() -> APIRouter:
    """Routes of the page: the document at /, its parts at /page/NAME."""
    sources = read_sources()
    paths = {"/" if name == "index.html" else f"/page/{name}": name for name in sources}
    etags = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, data in sources.items()}
    router = APIRouter()

    async def serve(request: Request) -> Response:
        name = paths[request.scope["path"]]
        headers = {**HEADERS, "etag": etags[name]}
        if etags[name] in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        return Response(sources[name], headers={**headers, "content-type": TYPES[name.rpartition(".")[2]]})

    for path in paths:
        router.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def read_sources() -> dict[str, bytes]:
    folder = files("service.page")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}
