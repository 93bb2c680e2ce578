"""Items of a conversation: what clients may create, and the chat messages that they stand for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from models.interfaces.processor import ChatProcessor
from service.api.chat.prompt_media import MediaReference, PromptMedia
from service.api.chat.schema import MediaUrl
from service.api.chat.tools import arguments_of, check_call_id, check_name
from service.api.chat.video_sampling import VideoSampling
from service.api.context import ServerContext
from service.api.http.errors import bad_request
from service.media.data_url import is_data_url

ShortId = Annotated[str, Meta(min_length=1, max_length=128)]
ItemType = Literal["message", "item_reference", "function_call", "function_call_output", "mcp_approval_response"]
ContentType = Literal["input_text", "input_image", "input_audio", "output_text", "output_audio"]
Role = Literal["user", "system", "assistant"]
Status = Literal["completed", "incomplete", "in_progress"]

ALLOWED: dict[Role, tuple[ContentType, ...]] = {
    "user": ("input_text", "input_image"),
    "system": ("input_text",),
    "assistant": ("output_text",),
}
"""Kinds of content that a client may create, by role."""
CALL_FIELDS: dict[ItemType, tuple[str, ...]] = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
NO_RECOGNITION = "this server has no speech recognition; send text as input_text"


class ItemContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a message. image_url: a data: URL. transcript: of an output_audio part, whose audio is not kept."""

    type: ContentType
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    audio: str | None = None
    transcript: str | None = None


class ConversationItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """role, content: of a message. call_id, name, arguments: of a function_call. call_id, output: of a
    function_call_output. All of them are required."""

    type: ItemType
    id: ShortId | None = None
    object: Literal["realtime.item"] | None = None
    status: Status | None = None
    role: Role | None = None
    content: list[ItemContent] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def created_item(given: ConversationItem, field: str) -> ConversationItem:
    """The item as it is kept. ApiError names the invalid field below `field`."""
    if given.type in CALL_FIELDS:
        return _created_call(given, CALL_FIELDS[given.type], field)
    if given.type != "message":
        allowed = "message, function_call or function_call_output"
        raise bad_request(f"{field}.type: must be {allowed}.", f"{field}.type")
    if given.role is None:
        raise bad_request(f"{field}.role: this field is required.", f"{field}.role")
    if not given.content:
        raise bad_request(f"{field}.content: at least one part is required.", f"{field}.content")
    content = [_created_content(part, given.role, f"{field}.content[{n}]") for n, part in enumerate(given.content)]
    return ConversationItem(type=given.type, role=given.role, content=content, **_settled(given))


def _created_call(given: ConversationItem, required: Sequence[str], field: str) -> ConversationItem:
    for name in required:
        if getattr(given, name) is None:
            raise bad_request(f"{field}.{name}: this field is required.", f"{field}.{name}")
    # Reported here, since an error at the next response could only point somewhere into the conversation.
    check_call_id(given.call_id or "", f"{field}.call_id")
    if given.type == "function_call":
        check_name(given.name or "", f"{field}.name")
        arguments_of(given.arguments or "", f"{field}.arguments")
    return ConversationItem(type=given.type, **{name: getattr(given, name) for name in required}, **_settled(given))


def _settled(given: ConversationItem) -> dict[str, Any]:
    return {"id": given.id or new_id("item"), "object": "realtime.item", "status": "completed"}


def _created_content(part: ItemContent, role: Role, field: str) -> ItemContent:
    if part.type == "input_audio":
        raise bad_request(f"{field}.type: {NO_RECOGNITION}.", f"{field}.type", "unsupported_parameter")
    if part.type not in ALLOWED[role]:
        allowed = " or ".join(ALLOWED[role])
        raise bad_request(f"{field}.type: must be {allowed} in an item with role {role}.", f"{field}.type")
    if part.type == "input_image":
        if part.image_url is None:
            raise bad_request(f"{field}.image_url: this field is required.", f"{field}.image_url")
        if not is_data_url(part.image_url):
            raise bad_request(f"{field}.image_url: must be a data: URL.", f"{field}.image_url")
        return ItemContent(type=part.type, image_url=part.image_url, detail=part.detail)
    if part.text is None:
        raise bad_request(f"{field}.text: this field is required.", f"{field}.text")
    return ItemContent(type=part.type, text=part.text)


def pictures(item: ConversationItem) -> Iterator[tuple[int, ItemContent]]:
    """The parts of an item that are pictures, with their places."""
    return ((place, part) for place, part in enumerate(item.content or ()) if part.type == "input_image")


async def check_pictures(
    context: ServerContext, processor: ChatProcessor, item: ConversationItem, field: str, client: str
) -> None:
    """Loads the pictures of a client's item as a chat request would. InputError names the invalid one; ApiError 503 if
    the server is full."""
    references = [
        MediaReference("image", MediaUrl(part.image_url or "", detail=part.detail), at, VideoSampling(at))
        for place, part in pictures(item)
        for at in [f"{field}.content[{place}].image_url"]
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
