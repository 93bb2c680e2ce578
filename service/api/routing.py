"""Routes whose functions take the request and nothing else."""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send


class RequestRoute(APIRoute):
    """Calls its function with the request: there are no dependencies to be solved, no values to be validated and
    nothing to be closed, for which FastAPI takes as long as tokenizing a sentence does."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
