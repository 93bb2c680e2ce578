"""Routes whose function takes only the request."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send


class RequestRoute(APIRoute):
    """Calls the route's function directly. FastAPI's handling of dependencies, validation and clean-up, none of which
    these routes use, takes as long as tokenizing a sentence."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
