"""The server and its client, for all tests of the Realtime protocol: an engine without models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from models.interfaces.media import ChatMessage, TokenizedChat
from tests.support import refusals
from tests.support.fake_chat import FakeProcessor
from tests.support.fake_engine import FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait

MAX_ITEMS = 7
Event = dict[str, Any]


class Conversing:
    """seen: the messages of every request, as (role, text)."""

    def __init__(self, server: RunningServer, talker: FakeEngine) -> None:
        self.server = server
        self.talker = talker
        self.seen: list[list[tuple[str, str]]] = []

    def connect(self, query: str = "model=tiny", **options: Any) -> connect:
        url = self.server.url.replace("http", "ws") + f"/v1/realtime?{query}"
        return connect(url, max_size=None, open_timeout=GENEROUS, **options)


def shown(message: ChatMessage) -> str:
    calls = [f"{call.name}({json.dumps(call.arguments)})" for call in message.tool_calls]
    return "".join([*(part.text or "<>" for part in message.content), *calls])


async def tell(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def said(socket: ClientConnection) -> Event:
    event: Event = json.loads(await asyncio.wait_for(socket.recv(), GENEROUS))
    return event


async def up_to(socket: ClientConnection, kind: str) -> list[Event]:
    events = []
    while not events or events[-1]["type"] not in (kind, "error"):
        events.append(await said(socket))
    assert events[-1]["type"] == kind, events[-1]
    return events


async def refused(socket: ClientConnection, kind: str, **fields: Any) -> Event:
    """The error that answers an event."""
    await tell(socket, kind, event_id="mine", **fields)
    event = await said(socket)
    assert event["type"] == "error" and event["event_id"], event
    assert event["error"]["event_id"] == "mine"
    error: Event = event["error"]
    return error


def message(text: str, role: str = "user", **fields: Any) -> Event:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


def picture(size: int = 8) -> Event:
    return {"type": "input_image", "image_url": refusals.picture(size, size)}


async def add(socket: ClientConnection, text: str, **fields: Any) -> str:
    await tell(socket, "conversation.item.create", item=message(text, **fields))
    id: str = (await up_to(socket, "conversation.item.done"))[-1]["item"]["id"]
    return id


async def answer(socket: ClientConnection, **response: Any) -> list[Event]:
    await tell(socket, "response.create", response=response)
    return await up_to(socket, "response.done")


def joined(events: list[Event], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == kind)


def kinds(events: list[Event]) -> list[str]:
    """Types of events in order, deltas of a kind once."""
    types = [event["type"] for event in events]
    return [kind for index, kind in enumerate(types) if not index or types[index - 1] != kind]


async def refused_later(socket: ClientConnection, kind: str) -> Event:
    """The error that answers an event while a response goes on."""
    await tell(socket, kind, event_id="mine")
    while (event := await said(socket))["type"] != "error":
        pass
    assert event["error"]["event_id"] == "mine"
    error: Event = event["error"]
    return error


@pytest.fixture(scope="module")
def conversing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversing]:
    talker = FakeEngine()
    patch = pytest.MonkeyPatch()

    flags: dict[str, Any] = {"fixed_voices": "off", "max_images": 2}
    patch.setattr("service.api.realtime.conversation.MAX_PARTS", 12)
    patch.setattr("service.api.realtime.conversation.MAX_ITEMS", MAX_ITEMS)
    flags |= {"max_body": 400_000, "voices_dir": tmp_path_factory.mktemp("voices")}
    with running_server(talking_catalog(), engine=talker.serve, **flags) as server:
        conversing = Conversing(server, talker)
        apply = FakeProcessor.apply_chat_template

        def seeing(self: FakeProcessor, messages: Sequence[ChatMessage], *rest: Any, **options: Any) -> Any:
            conversing.seen.append([(one.role, shown(one)) for one in messages])
            return apply(self, messages, *rest, **options)

        patch.setattr(FakeProcessor, "apply_chat_template", seeing)
        yield conversing
        patch.undo()


@pytest.fixture
def nothing_is_left(conversing: Conversing) -> Iterator[None]:
    yield
    context = conversing.server.context
    wait(lambda: not context.open_sockets, what="every socket is closed")
    conversing.server.wait_idle()
    wait(lambda: conversing.talker.idle, what="the engine has nothing to do")


@pytest.fixture
async def socket(conversing: Conversing) -> AsyncIterator[ClientConnection]:
    async with conversing.connect() as socket:
        assert (await said(socket))["type"] == "session.created"
        yield socket


@pytest.fixture
def whole_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model reads all messages, not the last one alone."""
    apply = FakeProcessor.apply_chat_template

    def all_of(self: FakeProcessor, messages: Sequence[ChatMessage], *rest: Any, **options: Any) -> TokenizedChat:
        chat = apply(self, messages, *rest, **options)
        earlier = [ord("x")] * sum(len(shown(message)) for message in messages[:-1])
        return TokenizedChat(np.append(np.array(earlier, np.int32), chat.token_ids).astype(np.int32), ())

    monkeypatch.setattr(FakeProcessor, "apply_chat_template", all_of)
