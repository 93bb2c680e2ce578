"""The items of one connection, within the limits of the chat request that carries them to the model: what clients may
create, how much of a spoken answer was heard, and the chat messages that items stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from models.text.processor import ChatProcessor
from service.api.chat.prompt import MAX_MESSAGES, MAX_PARTS
from service.api.chat.prompt_media import MediaReference, PromptMedia
from service.api.chat.schema import CalledFunction, ContentPart, MediaUrl, Message, ToolCallEntry
from service.api.chat.tools import NO_CALL, NO_RESULT, arguments_of, check_call_id, check_name
from service.api.chat.turns import Names, Turn, joined, located, translated
from service.api.context import ServerContext
from service.api.http.admission import Ticket
from service.api.http.errors import ApiError, invalid
from service.api.realtime import schema
from service.api.realtime.schema import ConversationItem, ItemContent, Role, new_id
from service.media.fetch import is_data_url
from service.settings.settings import Settings

# Items that clients create

ALLOWED: dict[Role, tuple[schema.ContentType, ...]] = {
    "user": ("input_text", "input_image"),
    "system": ("input_text",),
    "assistant": ("output_text",),
}
"""Kinds of content that a client may create, by role."""
CALL_FIELDS: dict[schema.ItemType, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


def created_item(given: ConversationItem, field: str) -> ConversationItem:
    """Return the item as it is kept. ApiError names the invalid field below `field`."""
    settled: dict[str, Any] = {"id": given.id or new_id("item"), "object": "realtime.item", "status": "completed"}
    if given.type in CALL_FIELDS:
        names = CALL_FIELDS[given.type]
        _require(given, names, field)
        # Reported here, since an error at the next response could only point somewhere into the conversation.
        check_call_id(given.call_id or "", f"{field}.call_id")
        if given.type == "function_call":
            check_name(given.name or "", f"{field}.name")
            arguments_of(given.arguments or "", f"{field}.arguments")
        return ConversationItem(type=given.type, **{name: getattr(given, name) for name in names}, **settled)
    if given.type != "message":
        raise invalid(f"{field}.type", "must be message, function_call or function_call_output")
    _require(given, ("role",), field)
    if not given.content or given.role is None:
        raise invalid(f"{field}.content", "at least one part is required")
    content = [_created_content(part, given.role, f"{field}.content[{n}]") for n, part in enumerate(given.content)]
    return ConversationItem(type=given.type, role=given.role, content=content, **settled)


def _require(given: ConversationItem | ItemContent, names: Sequence[str], field: str) -> None:
    for name in names:
        if getattr(given, name) is None:
            raise invalid(f"{field}.{name}", "this field is required")


def _created_content(part: ItemContent, role: Role, field: str) -> ItemContent:
    if part.type == "input_audio":
        problem = "not in an item: send input_audio_buffer.append where a model hears, else text as input_text"
        raise invalid(f"{field}.type", problem, "unsupported_parameter")
    if part.type not in ALLOWED[role]:
        raise invalid(f"{field}.type", f"must be {' or '.join(ALLOWED[role])} in an item with role {role}")
    if part.type == "input_image":
        _require(part, ("image_url",), field)
        if not is_data_url(part.image_url or ""):
            raise invalid(f"{field}.image_url", "must be a data: URL")
        return ItemContent(type=part.type, image_url=part.image_url, detail=part.detail)
    _require(part, ("text",), field)
    return ItemContent(type=part.type, text=part.text)


def pictures(item: ConversationItem) -> Iterator[tuple[int, ItemContent]]:
    """The parts of an item that are pictures, with their places."""
    return ((place, part) for place, part in enumerate(item.content or ()) if part.type == "input_image")


async def check_pictures(context: ServerContext, processor: ChatProcessor, item: ConversationItem, client: str) -> None:
    """Load the pictures of a client's item as a chat request would. InputError names the invalid one; ApiError 503 if
    the server is full."""
    references = [
        MediaReference("image", MediaUrl(part.image_url or "", detail=part.detail), f"item.content[{place}].image_url")
        for place, part in pictures(item)
    ]
    if not references:
        return
    ticket = context.admission.ticket("realtime")
    media = PromptMedia(context, processor, references, client, ticket)
    try:
        ticket.grow(1)
        for reference in references:
            await media.load(reference)
    finally:
        ticket.release()


# How much of a spoken answer was heard: exact between segments, estimated from the lengths of words within one

WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
"""A word, or a character of a script without spaces."""
CHARACTERS_PER_SECOND = 15.0
"""Assumed while no segment of the speech is complete."""


@dataclass(frozen=True)
class Playback:
    """The timing of a spoken answer. texts: those of its segments as they were spoken: without markup, numbers in
    words. segments: begin and end of each complete one, in seconds of audio, with pauses between them. seconds: length
    of the audio. whole: the whole transcript was spoken. begun: begin of the next segment, if it has begun."""

    texts: Sequence[str]
    segments: Sequence[tuple[float, float]]
    seconds: float
    whole: bool
    begun: float | None = None


def heard(transcript: str, playback: Playback, seconds: float) -> str:
    """What is heard of an answer in the first `seconds` of its audio: the transcript if that is all of it, else whole
    words as they were spoken."""
    if playback.whole and seconds >= playback.seconds:
        return transcript
    said = []
    for text, (begin, end) in zip(playback.texts, [*playback.segments, _unfinished(playback)], strict=False):
        pace = (end - begin) / len(text)
        ends = [word.end() for word in WORD.finditer(text) if begin + pace * word.end() <= seconds]
        said.append(text[: ends[-1]] if ends else "")
    return " ".join(filter(None, said))


def _unfinished(playback: Playback) -> tuple[float, float]:
    """Begin and end of the segment behind the complete ones: at their pace, and not before the end of the audio."""
    complete = len(playback.segments)
    text = playback.texts[complete] if complete < len(playback.texts) else ""
    begin = playback.begun if playback.begun is not None else playback.segments[-1][1] if complete else 0.0
    spoken = sum(map(len, playback.texts[:complete]))
    sounding = sum(end - start for start, end in playback.segments)
    pace = sounding / spoken if spoken else 1 / CHARACTERS_PER_SECOND
    return begin, max(begin + pace * len(text), playback.seconds)


# The conversation

MAX_ITEMS = MAX_MESSAGES - 1
"""The chat request has one more message, the instructions."""
ROOT = "root"
"""The previous_item_id that puts an item before all others."""
ITEM_BYTES = 256
"""Bytes charged for an item in addition to its texts."""


@dataclass(frozen=True)
class _Entry:
    """size: bytes of the item. playback: the timing of a spoken answer."""

    item: ConversationItem
    size: int
    playback: Playback | None = None


class Conversation:
    """Ordered items. Their bytes are charged to the ticket of the connection, like a request body."""

    def __init__(self, settings: Settings, ticket: Ticket) -> None:
        self.id = new_id("conv")
        self._settings = settings
        self._ticket = ticket
        self._entries: dict[str, _Entry] = {}
        self._size = 0

    @property
    def full(self) -> bool:
        return len(self._entries) >= MAX_ITEMS

    def __contains__(self, id: str) -> bool:
        return id in self._entries

    def item(self, id: str, field: str = "item_id") -> ConversationItem:
        return self._entry(id, field).item

    def size(self, id: str) -> int:
        """Approximate size of an item in bytes."""
        return self._entry(id).size

    def turns(self) -> list[Turn[Source]]:
        return as_turns(Source(entry.item) for entry in self._entries.values())

    def check_room(self, item: ConversationItem) -> None:
        """ApiError 400 if the item cannot be added."""
        if item.id == ROOT:
            raise invalid("item.id", f"{ROOT} stands for the beginning of the conversation")
        if item.id in self._entries:
            raise invalid("item.id", "another item of this conversation has this id")
        items = [*(entry.item for entry in self._entries.values()), item]
        calls = {one.call_id for one in items if one.type == "function_call"}
        if item.type == "function_call_output" and item.call_id not in calls:
            raise invalid("item.call_id", "no function_call of this conversation has this call_id")
        images = sum(1 for one in items for _ in pictures(one))
        size = self._size + _size(item)
        limits = self._settings
        check_counts(items, "item", ("images", images, limits.max_images), ("bytes", size, limits.max_body))

    def add(self, item: ConversationItem, previous: str | None = None) -> str | None:
        """Put an item after `previous` (None: at the end) and return the id of the one before it. ApiError 400 for an
        unknown `previous` and an item that does not fit, 503 if the server has no room."""
        self.check_room(item)
        ids = list(self._entries)
        place = len(ids)
        if previous == ROOT:
            place = 0
        elif previous is not None:
            self._entry(previous, "previous_item_id")
            place = ids.index(previous) + 1
        entry = _Entry(item, _size(item))
        self._ticket.grow(size=entry.size)
        self._size += entry.size
        entries = list(self._entries.items())
        self._entries = dict([*entries[:place], (str(item.id), entry), *entries[place:]])
        return ids[place - 1] if place else None

    def put_answer(self, item: ConversationItem, playback: Playback | None = None) -> str | None:
        """Add an answer that has begun at the end, or replace it, and return the id of the item before it. An answer of
        the server is never refused; the limits stop the next item instead."""
        assert item.id is not None
        held, before = self._entries.get(item.id), next(reversed(self._entries), None)
        entry = _Entry(item, _size(item), playback)
        self._charge(entry.size - (held.size if held else 0))
        self._entries[item.id] = entry
        return before

    def delete(self, id: str) -> None:
        """ApiError 400 for an unknown item or an answer that is in progress."""
        self._check_settled(id)
        self._charge(-self._entries.pop(id).size)

    def truncate(self, id: str, content_index: int, milliseconds: int) -> None:
        """Keep the part of a spoken answer that was heard until then. ApiError 400 if its audio is shorter than
        that."""
        self._check_settled(id)
        entry = self._entry(id)
        playback, content = entry.playback, entry.item.content
        if playback is None or not content:
            raise invalid("item_id", "only an answer that was spoken can be truncated")
        if content_index != 0:
            raise invalid("content_index", "must be 0: a spoken answer has one part")
        if milliseconds > (longest := round(playback.seconds * 1000)):
            raise invalid("audio_end_ms", f"{milliseconds} given, the item has {longest} ms of audio")
        seconds = milliseconds / 1000
        part = msgspec.structs.replace(content[0], transcript=heard(content[0].transcript or "", playback, seconds))
        item = msgspec.structs.replace(entry.item, content=[part])
        self.put_answer(item, replace(playback, seconds=seconds))

    def _entry(self, id: str, field: str = "item_id") -> _Entry:
        if id not in self._entries:
            raise invalid(field, "no item of this conversation has this id", "item_not_found")
        return self._entries[id]

    def _check_settled(self, id: str) -> None:
        if self._entry(id).item.status == "in_progress":
            raise invalid("item_id", "this answer is in progress; send response.cancel first")

    def _charge(self, size: int) -> None:
        self._ticket.adjust(size)
        self._size += size


def check_counts(items: Sequence[ConversationItem], field: str, *counts: tuple[str, int, int]) -> None:
    """ApiError 400 for more items or content parts than a conversation may have. counts: (name, number, limit) of what
    else is limited."""
    parts = sum(len(item.content or ()) for item in items)
    for what, count, most in (("items", len(items), MAX_ITEMS), ("content parts", parts, MAX_PARTS), *counts):
        if count > most:
            problem = f"too many {what} for a conversation: {count} given, at most {most} allowed"
            raise invalid(field, problem, "conversation_full")


def _size(item: ConversationItem) -> int:
    texts = [text for part in item.content or () for text in (part.text, part.image_url, part.transcript)]
    texts += [item.call_id, item.name, item.arguments, item.output]
    # Base64 of a picture is ASCII, so its megabytes can be counted without a copy.
    return ITEM_BYTES + sum(len(text) if text.isascii() else len(text.encode()) for text in texts if text)


# The chat messages that items stand for, and what an error in them is called in the client's events

CONVERSATION = "conversation"
INPUT = "response.input"

RENAMED: Names = (
    (r"audio((?:\..*)?)", r"response.audio.output\1"),
    (r"max_completion_tokens", "response.max_output_tokens"),
    (r"tools\[(\d+)\]\.function(.*)", r"response.tools[\1]\2"),
    (r"tool_choice\.function\.(.*)", r"response.tool_choice.\1"),
    (r"(tools|tool_choice)", r"response.\1"),
    (r"modalities", "response.output_modalities"),
    (r"(temperature|seed)", r"response.\1"),
)
"""Fields of a chat request, and the names that they have here."""

PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Source:
    """An item. field: its path in the client's event, or "conversation" for an item of the conversation. given: its
    fields are in the event."""

    item: ConversationItem
    field: str = CONVERSATION
    given: bool = False


def as_turns(sources: Iterable[Source]) -> list[Turn[Source]]:
    """The items as chat messages. A call that was cut off is left out, and so is an answer that nobody heard any of."""
    return joined(turn for source in sources if (turn := _turn(source)) is not None)


def _turn(source: Source) -> Turn[Source] | None:
    item = source.item
    if item.type == "function_call":
        call = ToolCallEntry(item.call_id or "", CalledFunction(item.name or "", item.arguments or ""))
        called = Turn(Message("assistant", tool_calls=[call]), None, [source])
        return called if item.status == "completed" else None
    if item.type == "function_call_output":
        return Turn(Message("tool", item.output, tool_call_id=item.call_id), source)
    assert item.role is not None and item.content is not None
    if item.role == "user":
        return Turn(Message(item.role, [_as_part(part) for part in item.content]), source)
    text = "".join(part.text or part.transcript or "" for part in item.content)
    return Turn(Message(item.role, text), source) if text else None


def _as_part(part: ItemContent) -> ContentPart:
    if part.type != "input_image":
        return ContentPart(type="text", text=part.text or part.transcript or "")
    assert part.image_url is not None
    return ContentPart(type="image_url", image_url=MediaUrl(part.image_url, detail=part.detail))


def in_response(error: ApiError) -> ApiError:
    """The error for a field of a chat request, under the name that the field has here."""
    return error if error.param is None else error.at(translated(error.param, RENAMED))


def in_conversation(error: ApiError, turns: Sequence[Turn[Source]], whole: str) -> ApiError:
    """The same for an error in a request's messages. whole: CONVERSATION or INPUT, which an error that is not about one
    item names."""
    if error.param is None or not error.param.startswith("messages"):
        return error
    place = located(error.param, turns)
    source, rest = place or (None, "")
    if source is None:
        return error.at(whole)
    moved = error.at(source.field + rest if source.given else source.field)
    known = PLAIN.fullmatch(source.item.call_id or "")
    call_id = f"call_id {source.item.call_id}" if known else "call_id"
    output = "which no function_call before it has; nothing but other calls and outputs may be between the two"
    call = "must be followed by a function_call_output of the same call_id"
    moved.message = moved.message.replace(NO_CALL, f"this function_call_output has the {call_id}, {output}")
    moved.message = moved.message.replace(NO_RESULT, f"this function_call, with the {call_id}, {call}")
    return moved
