"""Messages of a chat request, checked, and the pictures and videos that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from models.interfaces.media import ChatMessage
from models.interfaces.media import ContentPart as PromptPart
from models.text.chat_template import ROLES
from service.api.chat.prompt_media import MediaReference
from service.api.chat.schema import ChatRequestBody, ContentPart, MediaUrl, Message
from service.api.chat.spoken_schema import PastAudio
from service.api.chat.tools import earlier_calls, result_order
from service.api.chat.video_sampling import first_stated, of_all_videos, refuse_pixel_bounds, stated
from service.api.context import ServerContext
from service.api.http.errors import bad_request

TEXT_KINDS = ("text", "refusal")
PART_KINDS = (*TEXT_KINDS, "image_url", "video_url")
"""Types of content parts. The content of a part is in a field with the name of its type."""
MAX_MESSAGES = 1000
MAX_VIDEOS = 4
MAX_PARTS = 256
"""Content parts of all messages together."""
MAX_CHARACTERS_PER_TOKEN = 16
"""No text has more characters per token than this on average; ordinary text has three to five."""
NamedTranscripts = Mapping[str, str | None]
"""Looks up the transcript of an answer by its id; None if none is kept."""


async def named_transcripts(body: ChatRequestBody, context: ServerContext) -> NamedTranscripts:
    """Look up the transcripts of spoken answers that messages name only by their id."""
    if len(body.messages) > MAX_MESSAGES:  # it is refused
        return {}
    spoken = [message.audio for message in body.messages if message.audio is not None]
    named = dict.fromkeys(audio.id for audio in spoken if audio.transcript is None and audio.id is not None)
    return {id: await context.transcript_of(id) for id in named}


def read_messages(
    body: ChatRequestBody, context: ServerContext, max_model_len: int, transcripts: NamedTranscripts
) -> tuple[list[ChatMessage], list[MediaReference]]:
    """The messages as the chat template takes them, and the pictures and videos that their parts name by index.

    Raises ApiError or InputError that names the field that does not fit.
    """
    settings, messages = context.settings, body.messages
    if len(messages) > MAX_MESSAGES:
        raise bad_request(_too_many("messages", len(messages), MAX_MESSAGES), "messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > MAX_PARTS:
        raise bad_request(_too_many("content parts", parts, MAX_PARTS), "messages")
    # Before the arguments are parsed, since their values take much more memory than their text.
    calls = (call for message in messages for call in message.tool_calls or ())
    check_length(sum(len(call.function.arguments) for call in calls), max_model_len)
    references: list[MediaReference] = []
    collected = [
        _message(message, f"messages[{index}]", references, transcripts) for index, message in enumerate(messages)
    ]
    if any(message.role == "tool" or message.tool_calls for message in messages):
        collected = [collected[index] for index in result_order(messages)]
    for kind, limit in (("image", settings.max_images), ("video", MAX_VIDEOS)):
        count = sum(reference.kind == kind for reference in references)
        if count > limit:
            raise bad_request(_too_many(f"{kind}s", count, limit), "messages")
    if not references and not body.mm_processor_kwargs:
        return collected, []
    common = of_all_videos(body)
    return collected, [replace(one, sampling=first_stated((one.sampling, common))) for one in references]


def _too_many(what: str, count: int, limit: int) -> str:
    return f"messages: too many {what}: {count} given, at most {limit} allowed."


def check_length(length: int, max_model_len: int) -> None:
    """Refuses text that cannot fit, before it is tokenized. max_model_len: tokens of prompt and answer together."""
    limit = MAX_CHARACTERS_PER_TOKEN * max_model_len
    if length > limit:
        raise bad_request(
            f"messages: the prompt is too long: this model's maximum context length is {max_model_len} tokens; "
            f"{length} characters given, at most {limit} allowed.",
            "messages",
            "context_length_exceeded",
        )


def _message(
    message: Message, field: str, references: list[MediaReference], transcripts: NamedTranscripts
) -> ChatMessage:
    role = ROLES.get(message.role)
    if role is None:
        instead = "use tool" if message.role == "function" else "must be system, developer, user, assistant or tool"
        raise bad_request(f"{field}.role: {instead}.", f"{field}.role")
    if message.function_call:
        raise bad_request(f"{field}.function_call: not supported; use tool_calls.", f"{field}.function_call")
    if message.images:
        reason = "not supported; use content parts of the type image_url"
        raise bad_request(f"{field}.images: {reason}.", f"{field}.images", "unsupported_parameter")
    calls = earlier_calls(message, field) if message.tool_calls else ()
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    reasoning = thought if role == "assistant" else None
    content: tuple[PromptPart, ...] = ()
    if not message.content and role == "assistant" and message.audio is not None:
        content = (PromptPart(text=_transcript_of(message.audio, f"{field}.audio", transcripts)),)
    elif not message.content and role == "assistant" and message.refusal:
        content = (PromptPart(text=message.refusal),)
    elif isinstance(message.content, str):
        content = (PromptPart(text=message.content),)
    elif message.content is not None:
        content = tuple(
            _part(part, role, f"{field}.content[{index}]", references) for index, part in enumerate(message.content)
        )
    elif role != "assistant":
        raise bad_request(f"{field}.content: this field is required.", f"{field}.content")
    return ChatMessage(role, content, calls, reasoning)


def _transcript_of(audio: PastAudio, field: str, named: NamedTranscripts) -> str:
    """ApiError 400 if neither the message nor the server has the transcript."""
    if audio.transcript is not None:
        return audio.transcript
    if audio.id is None:
        raise bad_request(f"{field}.transcript: required, or the id of a spoken answer.", f"{field}.transcript")
    text = named.get(audio.id)
    if text is None:
        message = f"{field}.id: no spoken answer of this id is kept here, or no longer; send its transcript instead."
        raise bad_request(message, f"{field}.id", "audio_not_found")
    return text


def _part(part: ContentPart, role: str, field: str, references: list[MediaReference]) -> PromptPart:
    given = [name for name in PART_KINDS if getattr(part, name)]
    kind = part.type or next(iter(given), None)
    if kind in PART_KINDS and (other := next((name for name in given if name != kind), None)) is not None:
        # To leave it out would go unnoticed.
        raise bad_request(f"{field}.{other}: not in a part with {kind}; send a part of its own.", f"{field}.{other}")
    if kind in TEXT_KINDS and (kind == "text" or role == "assistant"):
        text = part.text if kind == "text" else part.refusal
        if text is None:
            raise bad_request(f"{field}.{kind}: this field is required.", f"{field}.{kind}")
        return PromptPart(text=text)
    if kind not in ("image_url", "video_url"):
        raise bad_request(f"{field}.type: must be text, image_url or video_url.", f"{field}.type")
    media = part.image_url if kind == "image_url" else part.video_url
    if media is None:
        raise bad_request(f"{field}.{kind}: this field is required.", f"{field}.{kind}")
    if role not in ("user", "tool"):
        raise bad_request(f"{field}: images and videos are only allowed in messages of users and tools.", field)
    refuse_pixel_bounds(part, field)
    at = f"{field}.{kind}"
    if isinstance(media, str):
        media = MediaUrl(media)
    else:
        refuse_pixel_bounds(media, at)
    sampling = first_stated((stated(media, at), stated(part, field)))
    at = at if isinstance(getattr(part, kind), str) else f"{at}.url"
    references.append(MediaReference("image" if kind == "image_url" else "video", media, at, sampling))
    return PromptPart(item=len(references) - 1)
