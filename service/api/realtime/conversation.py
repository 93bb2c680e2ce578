"""The items of one connection, within the limits of the chat request that carries them to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from service.api.chat import prompt as prompt_messages
from service.api.http.admission import Ticket
from service.api.http.errors import bad_request
from service.api.realtime.items import ConversationItem, new_id, pictures
from service.api.realtime.playback_position import Playback, heard
from service.api.realtime.to_messages import Source, SourcedMessage, as_messages
from service.settings.settings import Settings

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
        self._left_out: set[str] = set()
        """Items that the model is no longer shown."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def last_id(self) -> str | None:
        return next(reversed(self._entries), None)

    def item(self, id: str, field: str = "item_id") -> ConversationItem:
        """ApiError 400 names the field whose id no item has."""
        return self._entries[self._known(id, field)].item

    def size(self, id: str) -> int:
        """Approximate size of an item in bytes."""
        return self._entry(id).size

    def messages(self, *, shortened: bool) -> list[SourcedMessage]:
        """shortened: without the items that `leave_out` left out."""
        return as_messages(Source(item) for item in self._shown(shortened))

    def turns(self, *, shortened: bool) -> list[str]:
        """The ids of the user's items in `messages`."""
        return [str(item.id) for item in self._shown(shortened) if item.role == "user"]

    def leave_out(self, before: str, *, system: bool) -> None:
        """Leaves out all items that now precede one. system: including a system message at the beginning."""
        if before not in self._entries:
            return  # deleted while its response was being prepared; the next one looks again
        ids = list(self._entries)
        first = 1 if not system and self._entries[ids[0]].item.role == "system" else 0
        self._left_out.update(ids[first : ids.index(before)])

    def _shown(self, shortened: bool) -> list[ConversationItem]:
        left_out = self._left_out if shortened else ()
        return [entry.item for id, entry in self._entries.items() if id not in left_out]

    def check_room(self, item: ConversationItem) -> None:
        """ApiError 400 if the item would not fit."""
        self._check_new(item)
        limits = self._settings
        held = [entry.item for entry in self._entries.values()] + [item]
        for what, count, most in (
            ("items", len(held), max_items()),
            ("content parts", sum(len(one.content or ()) for one in held), prompt_messages.MAX_PARTS),
            ("images", sum(1 for one in held for _ in pictures(one)), limits.max_images),
            ("bytes", self._size + _size(item), limits.max_body),
        ):
            if count > most:
                message = f"item: too many {what} in this conversation: {count} with this item, at most {most} allowed."
                raise bad_request(f"{message} Delete some.", "item", "conversation_full")

    def add(self, item: ConversationItem, previous: str | None = None) -> str | None:
        """Puts an item after `previous` (None: at the end) and returns the id of the one before it. ApiError 400 for an
        unknown `previous`, 503 if the server has no room."""
        self._check_new(item)
        before = (
            self.last_id
            if previous is None
            else None
            if previous == ROOT
            else self._known(previous, "previous_item_id")
        )
        entry = _Entry(item, _size(item))
        self._ticket.grow(size=entry.size)
        self._size += entry.size
        assert item.id is not None
        if before == self.last_id:
            self._entries[item.id] = entry
            return before
        ordered = list(self._entries.items())
        place = 0 if before is None else list(self._entries).index(before) + 1
        self._entries = dict([*ordered[:place], (item.id, entry), *ordered[place:]])
        return before

    def put_answer(self, item: ConversationItem, playback: Playback | None = None) -> str | None:
        """Adds an answer that has begun at the end, or replaces it, and returns the id of the item before it. An answer
        of the server is never refused; the limits stop the next item instead."""
        assert item.id is not None
        held, before = self._entries.get(item.id), self.last_id
        entry = _Entry(item, _size(item), playback)
        self._charge(entry.size - (held.size if held else 0))
        self._entries[item.id] = entry
        return before

    def delete(self, id: str) -> None:
        """ApiError 400 for an unknown item or an answer that is in progress."""
        self._check_settled(id)
        self._charge(-self._entries.pop(id).size)
        self._left_out.discard(id)

    def truncate(self, id: str, content_index: int, milliseconds: int) -> None:
        """Keeps the part of a spoken answer that was heard until then. ApiError 400 if its audio is shorter than
        that."""
        self._check_settled(id)
        entry = self._entry(id)
        playback, content = entry.playback, entry.item.content
        if playback is None or not content:
            raise bad_request("item_id: only an answer that was spoken can be truncated.", "item_id")
        if content_index != 0:
            raise bad_request("content_index: must be 0: a spoken answer has one part.", "content_index")
        seconds = milliseconds / 1000
        if milliseconds > round(playback.seconds * 1000):
            longest = round(playback.seconds * 1000)
            message = f"audio_end_ms: {milliseconds} given, the item has {longest} ms of audio."
            raise bad_request(message, "audio_end_ms")
        part = msgspec.structs.replace(content[0], transcript=heard(content[0].transcript or "", playback, seconds))
        item = msgspec.structs.replace(entry.item, content=[part])
        self.put_answer(item, replace(playback, seconds=seconds))

    def _entry(self, id: str) -> _Entry:
        return self._entries[self._known(id, "item_id")]

    def _known(self, id: str, field: str) -> str:
        if id not in self._entries:
            raise bad_request(f"{field}: no item of this conversation has this id.", field, "item_not_found")
        return id

    def _check_new(self, item: ConversationItem) -> None:
        if item.id == ROOT:
            raise bad_request(f"item.id: {ROOT} stands for the beginning of the conversation.", "item.id")
        if item.id in self._entries:
            raise bad_request("item.id: another item of this conversation has this id.", "item.id")

    def _check_settled(self, id: str) -> None:
        if self._entry(id).item.status == "in_progress":
            raise bad_request("item_id: this answer is in progress; send response.cancel first.", "item_id")

    def _charge(self, size: int) -> None:
        self._ticket.adjust(size)
        self._size += size


def check_counts(given: Sequence[ConversationItem], field: str) -> None:
    """ApiError 400 for more items or content parts than any conversation has room for, before they are read."""
    for what, count, most in (
        ("items", len(given), max_items()),
        ("content parts", sum(len(item.content or ()) for item in given), prompt_messages.MAX_PARTS),
    ):
        if count > most:
            message = f"{field}: too many {what}: {count} given, at most {most} allowed."
            raise bad_request(message, field, "conversation_full")


def max_items() -> int:
    """The most items of a conversation: the chat request has one more message, the instructions."""
    return max(1, prompt_messages.MAX_MESSAGES - 1)


def _size(item: ConversationItem) -> int:
    texts = [text for part in item.content or () for text in (part.text, part.image_url, part.transcript)]
    texts += [item.call_id, item.name, item.arguments, item.output]
    # Base64 of a picture is ASCII, so its megabytes can be counted without a copy.
    return ITEM_BYTES + sum(len(text) if text.isascii() else len(text.encode()) for text in texts if text)
