"""What WebSocket routes share: messages that wait are charged to their connection, and a client that has gone."""

from __future__ import annotations

from typing import Any, cast

import pytest
from starlette.types import Message
from starlette.websockets import WebSocket

from service.api.http.admission import FREE_BYTES, Admission
from service.api.http.errors import ApiError
from service.api.sockets import Inbox, close
from service.metrics.metrics import Metrics
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


@pytest.mark.parametrize("failure", [OSError, RuntimeError])
async def test_a_client_that_has_gone_when_its_socket_is_closed_is_no_error(failure: type[Exception]) -> None:
    """uvicorn raises OSError from the close frame; starlette makes a WebSocketDisconnect of it, which it would log."""

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.close":
            raise failure

    socket = WebSocket({"type": "websocket", "headers": []}, receive, send)
    await socket.accept()
    await close(socket, 1000, "")
