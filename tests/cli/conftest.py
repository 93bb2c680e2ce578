from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

AnswerWith = Callable[[Callable[[], httpx.Response]], list[dict[str, Any]]]


@pytest.fixture
def answer_with(monkeypatch: pytest.MonkeyPatch) -> AnswerWith:
    """Answer all requests of commands; the list that is returned gets their bodies."""
    make = httpx.Client

    def stand_in(answer: Callable[[], httpx.Response]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []

        def handle(request: httpx.Request) -> httpx.Response:
            bodies.append(json.loads(request.content))
            return answer()

        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(
            "service.cli.commands.httpx.Client", lambda **options: make(base_url="http://server", transport=transport)
        )
        return bodies

    return stand_in


def chat_stream(text: str) -> httpx.Response:
    """A streamed answer of one chunk."""
    chunk = {"choices": [{"delta": {"content": text}}]}
    return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
