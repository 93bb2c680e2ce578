"""The chat messages that items stand for, and what an error in them is called in the client's events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from service.api.chat.schema import ContentPart, MediaUrl, Message
from service.api.chat.tool_schema import CalledFunction, ToolCallEntry
from service.api.chat.tools import NO_CALL, NO_RESULT
from service.api.http.errors import ApiError
from service.api.realtime.items import ConversationItem, ItemContent

CONVERSATION = "conversation"
INPUT = "response.input"

RENAMED = (
    (r"audio((?:\..*)?)", r"response.audio.output\1"),
    (r"max_completion_tokens", "response.max_output_tokens"),
    (r"tools\[(\d+)\]\.function(.*)", r"response.tools[\1]\2"),
    (r"tool_choice\.function\.(.*)", r"response.tool_choice.\1"),
    (r"(tools|tool_choice)", r"response.\1"),
    (r"modalities", "response.output_modalities"),
    (r"(temperature|seed)", r"response.\1"),
)
"""Fields of a chat request, and the names that they have here."""

MESSAGES = re.compile(r"messages\b.*")
IN_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)")
IN_ITEM = (
    (r"(\.content\[\d+\]\.image_url)\.url", r"\1"),
    (r"\.tool_call_id|\.id", ".call_id"),
    (r"\.function(\..*)", r"\1"),
)
"""The same for fields of messages and of calls."""
PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Ids that errors may repeat."""


@dataclass(frozen=True)
class Source:
    """An item. field: its path in the client's event, or "conversation" for an item of the conversation. given: its
    fields are in the event."""

    item: ConversationItem
    field: str = CONVERSATION
    given: bool = False


@dataclass(frozen=True)
class SourcedMessage:
    """source: None for the instructions, and for an answer that is nothing but calls. calls: sources of its calls."""

    message: Message
    source: Source | None = None
    calls: tuple[Source, ...] = ()


def as_messages(sources: Iterable[Source]) -> list[SourcedMessage]:
    """The items as chat messages. Calls belong to the answer before them. A call that was cut off is left out, and so
    is an answer that nobody heard any of."""
    messages: list[SourcedMessage] = []
    for source in sources:
        item = source.item
        if item.type == "function_call":
            if item.status != "completed":
                continue
            call = ToolCallEntry(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))
            after_answer = bool(messages) and messages[-1].message.role == "assistant"
            answer = messages.pop() if after_answer else SourcedMessage(Message("assistant"))
            calls = [*(answer.message.tool_calls or ()), call]
            message = msgspec.structs.replace(answer.message, tool_calls=calls)
            messages.append(replace(answer, message=message, calls=(*answer.calls, source)))
        elif item.type == "function_call_output":
            messages.append(SourcedMessage(Message("tool", item.output, tool_call_id=item.call_id), source))
        elif (said := _as_message(item)) is not None:
            messages.append(SourcedMessage(said, source))
    return messages


def renamed(error: ApiError, within: str) -> ApiError:
    """The error for a field of a chat request, under the name that the field has here. within: session or response."""
    if error.param is None:
        return error
    for pattern, name in RENAMED:
        if found := re.fullmatch(pattern, error.param):
            return _moved(error, found.expand(name.replace("response.", f"{within}.", 1)))
    return error


def renamed_message(error: ApiError, messages: Sequence[SourcedMessage | None], whole: str) -> ApiError:
    """The same for an error in a request's messages. whole: CONVERSATION or INPUT, which an error that is not about one
    item names."""
    if error.param is None or not MESSAGES.fullmatch(error.param):
        return error
    found = IN_MESSAGE.fullmatch(error.param)
    message = messages[int(found[1])] if found and int(found[1]) < len(messages) else None
    if found is None or message is None:
        return _moved(error, whole)
    source = message.source if found[2] is None else message.calls[int(found[2])]
    if source is None:
        return _moved(error, whole)
    rest = found[3]
    for pattern, name in IN_ITEM:
        if inside := re.fullmatch(pattern, rest):
            rest = inside.expand(name)
            break
    return _moved(error, source.field + rest if source.given else source.field, source.item)


def _moved(error: ApiError, param: str, item: ConversationItem | None = None) -> ApiError:
    """The error under another name. item: where it is, if that is one item."""
    problem = error.message.removeprefix(f"{error.param}: ")
    if item is not None:
        problem = _in_words_of_items(problem, item)
    return ApiError(error.status, f"{param}: {problem}", param=param, code=error.code, retry_after=error.retry_after)


def _in_words_of_items(problem: str, item: ConversationItem) -> str:
    call_id = f"call_id {item.call_id}" if PLAIN.fullmatch(item.call_id or "") else "call_id"
    if problem == f"{NO_CALL}.":
        return (
            f"this function_call_output has the {call_id}, which no function_call before it has; nothing but other "
            "calls and outputs may be between the two."
        )
    if problem == f"{NO_RESULT}.":
        return (
            f"this function_call, with the {call_id}, must be followed by a function_call_output of the same call_id."
        )
    return problem


def _as_message(item: ConversationItem) -> Message | None:
    assert item.role is not None and item.content is not None
    if item.role != "user":
        text = "".join(part.text or part.transcript or "" for part in item.content)
        return Message(item.role, text) if text else None
    return Message(item.role, [_as_part(part) for part in item.content])


def _as_part(part: ItemContent) -> ContentPart:
    if part.type == "input_text":
        return ContentPart(type="text", text=part.text)
    assert part.image_url is not None
    return ContentPart(type="image_url", image_url=MediaUrl(part.image_url, detail=part.detail))
