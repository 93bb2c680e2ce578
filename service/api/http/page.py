"""The page at /: plain files of service/page, read once at start.

Its parts are served under a path with a hash of them all, so browsers keep them for good and a new version of the
package is a new path. The document itself is asked for again each time and answered 304 while it is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
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
DOCUMENT = "index.html"
FOLDER = "PAGE_FOLDER"
"""Stands in the document for the path of the parts, relative to it, so that a proxy may serve the page below a path."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(self), geolocation=(), display-capture=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
REVALIDATE = "no-cache"
FOR_GOOD = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Part:
    """One path of the page. etag: with its quotes."""

    data: bytes
    content_type: str
    etag: str
    cache_control: str

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag, "cache-control": self.cache_control}
        if self.etag in (tag.strip() for tag in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.data, headers={**headers, "content-type": self.content_type})


def page_router() -> APIRouter:
    """Routes of the page."""
    parts = page_parts(read_sources())
    router = APIRouter()

    async def serve(request: Request) -> Response:
        return parts[request.scope["path"]].response(request)

    for path in parts:
        router.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False)
    return router


def page_parts(sources: Mapping[str, bytes]) -> dict[str, Part]:
    """The parts by path."""
    folder = f"page/{_digest(*(data for _, data in sorted(sources.items())))}"
    document = sources[DOCUMENT].replace(FOLDER.encode(), folder.encode())
    parts = {"/": _part(DOCUMENT, document, REVALIDATE)}
    for name, data in sources.items():
        if name != DOCUMENT:
            parts[f"/{folder}/{name}"] = _part(name, data, FOR_GOOD)
    return parts


def read_sources() -> dict[str, bytes]:
    folder = files("service.page")
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}


def _part(name: str, data: bytes, cache_control: str) -> Part:
    return Part(data, TYPES[name.rpartition(".")[2]], f'"{_digest(data)}"', cache_control)


def _digest(*parts: bytes) -> str:
    hasher = hashlib.sha256()
    for data in parts:
        hasher.update(len(data).to_bytes(8, "big"))
        hasher.update(data)
    return hasher.hexdigest()[:16]
