"""Messages in short, and both steps of building a chat prompt at once, for tests that already have the items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from models.interfaces.media import ChatMessage, ContentPart, MediaItem, Prompt, Tool, ToolCall
from models.text.processor import ChatProcessor


def say(role: str, *content: str | int, calls: Sequence[ToolCall] = (), reasoning: str | None = None) -> ChatMessage:
    """content: texts, and numbers of items."""
    parts = (ContentPart(text=part) if isinstance(part, str) else ContentPart(item=part) for part in content)
    return ChatMessage(role, tuple(parts), tuple(calls), reasoning)


def prompt_of(
    processor: ChatProcessor,
    messages: Sequence[ChatMessage],
    items: Sequence[MediaItem] = (),
    *,
    options: Mapping[str, Any] | None = None,
    tools: Sequence[Tool] = (),
) -> Prompt:
    chat = processor.apply_chat_template(messages, [item.kind for item in items], options=options or {}, tools=tools)
    return processor.expand_placeholders(chat, items)
