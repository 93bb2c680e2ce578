"""A prompt's text is tokenized while its media are loaded."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from PIL import Image

from models.interfaces.media import ChatMessage, MediaItem, MediaKind, TokenizedChat, Tool
from service.api.chat.prompt import SMALL_PROMPT
from service.hub.catalog import Catalog
from tests.api.chat.test_chat import picture
from tests.support.fake_chat import FakeProcessor, fake_catalog
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS


class Waiting(FakeProcessor):
    """A picture is not ready before its prompt is tokenized."""

    context_length = 2 * SMALL_PROMPT

    def __init__(self) -> None:
        self.tokenized = threading.Event()
        self.kinds: list[MediaKind] = []

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        assert self.tokenized.wait(GENEROUS), "the text waits for the picture"
        return super().image(picture, detail=detail, source=source)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> TokenizedChat:
        chat = super().apply_chat_template(messages, kinds, options=options, tools=tools)
        self.kinds = list(kinds)
        self.tokenized.set()
        return chat


@pytest.mark.parametrize(("pictures", "characters"), [(1, 5), (2, SMALL_PROMPT + 1)])
def test_text_does_not_wait_for_pictures(pictures: int, characters: int) -> None:
    processor = Waiting()
    model = replace(fake_catalog().models[0], load=lambda: processor)
    parts = [{"type": "image_url", "image_url": {"url": picture()}} for _ in range(pictures)]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "x" * characters}]}
    with running_server(Catalog([model])) as server:
        body = {"model": "tiny", "messages": [message], "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=2 * GENEROUS)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == characters + 4 * pictures
    assert processor.kinds == ["image"] * pictures
