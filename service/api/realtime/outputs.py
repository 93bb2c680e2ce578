"""The items of a response, as events: a message, written or spoken, and calls of tools."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from service.api.chat.spoken import SpokenAnswer
from service.api.realtime.conversation import Conversation
from service.api.realtime.events import (
    AnyServerEvent,
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    ItemAdded,
    ItemDone,
    OutputAudioDelta,
    OutputAudioDone,
    OutputItemAdded,
    OutputItemDone,
    OutputPart,
    OutputTextDelta,
    OutputTextDone,
    OutputTranscriptDelta,
    OutputTranscriptDone,
)
from service.api.realtime.items import ConversationItem, ItemContent, Status, new_id
from service.api.realtime.playback_position import Playback
from service.api.realtime.session_config import RealtimeFormat

Emit = Callable[[AnyServerEvent], Awaitable[None]]


@dataclass(frozen=True)
class Place:
    """The place that an item is added to: a response, and a conversation unless that is None."""

    response_id: str
    index: int
    emit: Emit
    conversation: Conversation | None

    async def begin(self, item: ConversationItem) -> str | None:
        """The id of the item before it."""
        previous = None if self.conversation is None else self.conversation.put_answer(item)
        await self.emit(OutputItemAdded(response_id=self.response_id, output_index=self.index, item=item))
        if self.conversation is not None:
            await self.emit(ItemAdded(item=item, previous_item_id=previous))
        return previous

    async def end(self, item: ConversationItem, previous: str | None, playback: Playback | None = None) -> None:
        if self.conversation is not None:
            self.conversation.put_answer(item, playback)
            await self.emit(ItemDone(item=item, previous_item_id=previous))
        await self.emit(OutputItemDone(response_id=self.response_id, output_index=self.index, item=item))


class MessageOutput:
    """A message with one part. spoken: how its audio is sent; the text is then the transcript."""

    def __init__(self, place: Place, *, spoken: RealtimeFormat | None) -> None:
        self._place = place
        self._spoken = spoken
        self._id = new_id("item")
        self._previous: str | None = None
        self._text: list[str] = []
        self._sound_bytes = 0

    async def begin(self) -> None:
        self._previous = await self._place.begin(self._item("in_progress", []))
        await self._place.emit(ContentPartAdded(**self._where, part=self._part("")))

    async def write(self, text: str) -> None:
        self._text.append(text)
        kind = OutputTranscriptDelta if self._spoken else OutputTextDelta
        await self._place.emit(kind(**self._where, delta=text))

    async def sound(self, data: bytes) -> None:
        """data: whole samples."""
        self._sound_bytes += len(data)
        await self._place.emit(OutputAudioDelta(**self._where, delta=base64.b64encode(data).decode()))

    async def end(self, status: Status, speech: SpokenAnswer | None) -> ConversationItem:
        text, emit, where = "".join(self._text), self._place.emit, self._where
        if self._spoken:
            content = ItemContent(type="output_audio", transcript=text)
            await emit(OutputAudioDone(**where, unspoken=(speech and speech.unspoken) or UNSET))
            await emit(OutputTranscriptDone(**where, transcript=text))
        else:
            content = ItemContent(type="output_text", text=text)
            await emit(OutputTextDone(**where, text=text))
        await emit(ContentPartDone(**where, part=self._part(text)))
        item = self._item(status, [content])
        playback = None if speech is None else self._playback(speech, whole=status == "completed")
        await self._place.end(item, self._previous, playback)
        return item

    @property
    def _where(self) -> dict[str, Any]:
        return {"response_id": self._place.response_id, "output_index": self._place.index, "item_id": self._id}

    def _playback(self, speech: SpokenAnswer, *, whole: bool) -> Playback:
        seconds = self._sound_bytes / self._spoken.bytes_per_second if self._spoken else 0.0
        texts = tuple(line.text for line in speech.script.lines)
        return Playback(texts, tuple(speech.segments), seconds, whole=whole, begun=speech.begun)

    def _part(self, text: str) -> OutputPart:
        return OutputPart(type="audio", transcript=text) if self._spoken else OutputPart(type="text", text=text)

    def _item(self, status: Status, content: list[ItemContent]) -> ConversationItem:
        return ConversationItem(
            type="message", id=self._id, object="realtime.item", status=status, role="assistant", content=content
        )


class CallOutput:
    """A call of a function."""

    def __init__(self, place: Place, call_id: str, name: str) -> None:
        self._place = place
        self._item = ConversationItem(
            type="function_call",
            id=new_id("item"),
            object="realtime.item",
            status="in_progress",
            call_id=call_id,
            name=name,
            arguments="",
        )
        self._previous: str | None = None
        self._arguments: list[str] = []

    async def begin(self) -> None:
        self._previous = await self._place.begin(self._item)

    async def write(self, arguments: str) -> None:
        self._arguments.append(arguments)
        await self._place.emit(CallArgumentsDelta(**self._where, delta=arguments))

    async def end(self, status: Status, speech: SpokenAnswer | None) -> ConversationItem:
        """A call is not spoken."""
        arguments = "".join(self._arguments)
        name = self._item.name or ""
        await self._place.emit(CallArgumentsDone(**self._where, name=name, arguments=arguments))
        item = msgspec.structs.replace(self._item, status=status, arguments=arguments)
        await self._place.end(item, self._previous)
        return item

    @property
    def _where(self) -> dict[str, Any]:
        place, item = self._place, self._item
        return {
            "response_id": place.response_id,
            "output_index": place.index,
            "item_id": item.id,
            "call_id": item.call_id,
        }
