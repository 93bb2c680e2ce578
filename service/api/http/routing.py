"""Two ways to register routes: GET together with HEAD, and routes whose function takes only the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Endpoint = TypeVar("Endpoint", bound=Callable[..., Awaitable[Response]])


def get(router: APIRouter, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Registers a route for GET and for HEAD, which probes of load balancers and `wget --spider` use; uvicorn leaves
    out the body. options: those of FastAPI's decorator."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.head(path, include_in_schema=False)(endpoint)
        return router.get(path, **options)(endpoint)

    return register


class RequestRoute(APIRoute):
    """A route whose function is called directly with the request. FastAPI's handling of dependencies, validation and
    clean-up, which these routes do not use, would take as long as tokenizing a sentence."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
