"""The server and its client, for all tests of the Realtime protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection

from models.interfaces.media import ChatMessage, TokenizedChat
from service.link.config import EngineConfig
from service.link.engine_link import EngineLink
from tests.api.realtime.conversing import MAX_ITEMS, Conversing, said, shown
from tests.support.fake_chat import FakeProcessor
from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.inline_link import InlineLink
from tests.support.servers import running_server
from tests.support.waiting import wait


@pytest.fixture(scope="module")
def conversing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversing]:
    talker = FakeTalker()
    patch = pytest.MonkeyPatch()

    def link(config: EngineConfig) -> EngineLink:
        return InlineLink(config, talker.serve)

    flags: dict[str, Any] = {"fixed_voices": "off", "max_images": 2}
    patch.setattr("service.api.chat.prompt.MAX_PARTS", 12)
    patch.setattr("service.api.chat.prompt.MAX_MESSAGES", MAX_ITEMS + 1)
    flags |= {"max_body": 400_000, "voices_dir": tmp_path_factory.mktemp("voices")}
    with running_server(talking_catalog(), link, **flags) as server:
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
    assert not context.unvoiced


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
