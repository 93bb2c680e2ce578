"""Common parts of WebSocket routes: close codes, bounded reading, sending to clients that may be slow or gone."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from service.api.context import LARGE_BODY, ServerContext

log = logging.getLogger(__name__)

# Close codes (RFC 6455).
GOING_AWAY = 1001
NOT_JSON = 1007
POLICY = 1008
FAILED = 1011
TRY_LATER = 1013


class StreamClosed(Exception):
    """Ends the session with this close code."""

    def __init__(self, code: int = 1000, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def read_into(socket: WebSocket, messages: asyncio.Queue[str | bytes | None]) -> None:
    """Reads into a bounded queue: when it is full, the transport holds back a client that writes too fast. None: the
    client has gone."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            await messages.put(None)
            return
        await messages.put(message.get("text") or message.get("bytes") or b"")


def as_text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


async def send(context: ServerContext, socket: WebSocket, message: msgspec.Struct | bytes, size: int = 0) -> None:
    """A struct as JSON, bytes as a binary frame. WebSocketDisconnect when the client has gone, StreamClosed when it
    reads nothing for the write timeout. size: approximate bytes of a struct that may be large; the JSON of a large one
    is encoded in a thread."""
    try:
        async with asyncio.timeout(context.settings.write_timeout):
            if isinstance(message, bytes):
                await socket.send_bytes(message)
            else:
                large = size > LARGE_BODY
                text = await context.in_thread(partial(as_text, message)) if large else as_text(message)
                await socket.send_text(text)
    except TimeoutError:
        raise StreamClosed(POLICY, "the client reads too slowly") from None
    except (RuntimeError, OSError):
        raise WebSocketDisconnect from None


async def close(socket: WebSocket, code: int, reason: str) -> None:
    if socket.application_state is not WebSocketState.DISCONNECTED:
        try:
            await socket.close(code, reason)
        except (RuntimeError, OSError):
            log.debug("the client had closed the socket")
