"""Messages of a WebSocket that wait for their session are charged to its connection."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fastapi import WebSocket

from service.api.http.admission import FREE_BYTES, Admission
from service.api.http.errors import ApiError
from service.api.sockets import Inbox
from service.metrics import Metrics
from tests.support.waiting import until

LARGE = "x" * (FREE_BYTES + 1)


class Client:
    """What a WebSocket's receive() returns."""

    def __init__(self, *messages: str) -> None:
        self._messages = [{"type": "websocket.receive", "text": message} for message in messages]

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop(0) if self._messages else {"type": "websocket.disconnect"}


def inbox(admission: Admission, *messages: str, most: int = 3) -> Inbox:
    return Inbox(cast(WebSocket, Client(*messages)), admission.ticket("realtime"), most)


async def test_large_messages_are_charged_until_the_next_is_asked_for() -> None:
    admission = Admission(10, 10 * len(LARGE), Metrics({}))
    messages = inbox(admission, LARGE, "small", LARGE)
    await until(lambda: admission.pending_bytes == 2 * len(LARGE))
    assert await messages.next() == LARGE and admission.pending_bytes == 2 * len(LARGE)
    assert await messages.next() == "small" and admission.pending_bytes == len(LARGE)
    assert await messages.next() == LARGE and admission.pending_bytes == len(LARGE)
    assert await messages.next() is None and admission.pending_bytes == 0
    await messages.close()


async def test_a_message_without_room_comes_as_an_error_after_those_before() -> None:
    admission = Admission(10, 3 * len(LARGE), Metrics({}))
    other = admission.ticket("chat")
    other.grow(1, len(LARGE))
    messages = inbox(admission, LARGE, LARGE, LARGE)
    assert await messages.next() == LARGE
    assert await messages.next() == LARGE
    with pytest.raises(ApiError) as refused:
        await messages.next()
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    await messages.close()
