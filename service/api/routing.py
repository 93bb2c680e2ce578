"""Routes whose functions take the request and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class RequestRoute(APIRoute):
    """Calls its function with the request: there are no dependencies to be solved and no values to be validated, for
    which FastAPI takes as long as tokenizing a sentence does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return handler
