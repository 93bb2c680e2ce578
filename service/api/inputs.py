"""Messages of a chat request -> Prompt: text is tokenized while the media load, then placeholders are expanded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from PIL import Image

from models.errors import InputError
from models.media import ChatMessage, MediaItem, MediaKind, Prompt, TokenizedChat, VideoFrames, VideoMetadata
from models.media import ContentPart as PromptPart
from models.processor import ChatProcessor
from service.api.admission import Ticket
from service.api.context import ServerContext
from service.api.errors import ApiError, bad_request
from service.api.schema import PIXEL_BOUNDS, ChatRequestBody, ContentPart, MediaUrl, Message
from service.catalog import HostedModel
from service.media.loader import MediaBudget, is_frame_list

T = TypeVar("T")
U = TypeVar("U")

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEMPLATE_OPTIONS = ("enable_thinking", "add_vision_id")
DEFAULT_FRAME_LIST_FPS = 2.0
MOST_CHARACTERS_PER_TOKEN = 16
"""Text that fills a context has three to five."""
SMALL_PROMPT = 2048
"""Characters that are tokenized in a millisecond or two. A thread would hold the interpreter lock for most of that, and
waking it, and the loop after it, would take as long again on an idle server."""
SMALL_EXPANSION = 16_384
"""Prompt positions whose placeholders are expanded in less than a millisecond."""
OPENING_TOKENS = 16
"""Tokens at a prompt's end in which an opening reasoning marker is looked for."""


@dataclass(frozen=True)
class MediaReference:
    """field: where in the request it stands. sampling: where fps and max_frames of a video stand."""

    kind: MediaKind
    media: MediaUrl
    field: str
    sampling: str


async def build_prompt(context: ServerContext, model: HostedModel, body: ChatRequestBody, ticket: Ticket) -> Prompt:
    """The prompt of a request; ApiError or InputError names the field that does not fit. The ticket is charged with
    what its media take in memory."""
    options = _template_options(body.chat_template_kwargs or {})
    messages, references = _collect(body.messages, context)
    _check_length(_length(messages), model.chat_processor)
    kinds = [reference.kind for reference in references]
    budget = context.media.budget()
    (chat, seconds), items = await _beside(
        lambda: _tokenize(context, model.chat_processor, messages, kinds, options),
        [_load(context, model.chat_processor, reference, references, budget, ticket) for reference in references],
    )
    began = time.monotonic()
    if len(chat.token_ids) + sum(item.num_embeds for item in items) <= SMALL_EXPANSION:
        prompt = model.chat_processor.expand_placeholders(chat, items)
    else:
        prompt = await context.in_thread(lambda: model.chat_processor.expand_placeholders(chat, items))
    context.metrics.observe("tokenize_duration_seconds", seconds + time.monotonic() - began, model=model.name)
    _count(context, model.name, prompt)
    return prompt


async def _tokenize(
    context: ServerContext,
    processor: ChatProcessor,
    messages: Sequence[ChatMessage],
    kinds: Sequence[MediaKind],
    options: dict[str, bool],
) -> tuple[TokenizedChat, float]:
    """The conversation before its media are known, and the seconds that it took. A short one waits for nothing."""
    began = time.monotonic()

    def apply() -> TokenizedChat:
        return processor.apply_chat_template(messages, kinds, options=options)

    try:
        chat = apply() if _length(messages) <= SMALL_PROMPT else await context.in_thread(apply)
    except InputError as error:
        if error.field not in TEMPLATE_OPTIONS:
            raise
        raise InputError(f"chat_template_kwargs.{error.field}", str(error)) from error
    return chat, time.monotonic() - began


def opens_reasoning(processor: ChatProcessor, prompt: Prompt) -> bool:
    """Whether the template ended the prompt with the opening reasoning marker."""
    if processor.reasoning_markers is None:
        return False
    tail = processor.detokenize(prompt.token_ids[-OPENING_TOKENS:].tolist()).decode(errors="replace")
    return tail.rstrip().endswith(processor.reasoning_markers[0])


def media_tokens(prompt: Prompt) -> dict[str, int]:
    """Prompt positions by kind: text, image, video."""
    counts = {"image": 0, "video": 0}
    for span in prompt.spans:
        counts[prompt.items[span.item].kind] += span.length
    return {"text": len(prompt.token_ids) - sum(counts.values()), **counts}


def _template_options(options: dict[str, Any]) -> dict[str, bool]:
    for name, value in options.items():
        if name not in TEMPLATE_OPTIONS:
            known = " and ".join(TEMPLATE_OPTIONS)
            raise bad_request(f"chat_template_kwargs: only {known} can be set.", "chat_template_kwargs")
        if not isinstance(value, bool):
            raise bad_request(f"chat_template_kwargs.{name}: must be true or false.", f"chat_template_kwargs.{name}")
    return options


def _collect(messages: Sequence[Message], context: ServerContext) -> tuple[list[ChatMessage], list[MediaReference]]:
    settings = context.settings
    if len(messages) > settings.max_messages:
        raise bad_request(f"messages: at most {settings.max_messages} messages are taken.", "messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > settings.max_parts:
        raise bad_request(f"messages: at most {settings.max_parts} content parts are taken.", "messages")
    references: list[MediaReference] = []
    collected = [_message(message, f"messages[{index}]", references) for index, message in enumerate(messages)]
    for kind, most in (("image", settings.max_images), ("video", settings.max_videos)):
        if sum(reference.kind == kind for reference in references) > most:
            raise bad_request(f"messages: at most {most} {kind}s are taken.", "messages")
    return collected, references


def is_small(messages: Sequence[Message]) -> bool:
    """Whether a prompt is laid out without waiting for anything: short texts and no media."""
    length = 0
    for message in messages:
        parts = message.content if isinstance(message.content, list) else [ContentPart(text=message.content)]
        if any(part.image_url or part.video_url for part in parts):
            return False
        length += sum(len(part.text or "") for part in parts)
    return length <= SMALL_PROMPT


def _length(messages: Sequence[ChatMessage]) -> int:
    """Characters of the text."""
    return sum(len(part.text or "") for message in messages for part in message.content)


def _check_length(length: int, processor: ChatProcessor) -> None:
    """What cannot fit is refused before time is spent on its tokens."""
    most = MOST_CHARACTERS_PER_TOKEN * processor.context_length
    if length > most:
        raise bad_request(
            f"messages: the text has {length} characters; with a context of {processor.context_length} tokens at most "
            f"{most} are taken.",
            "messages",
            "context_length_exceeded",
        )


def _message(message: Message, field: str, references: list[MediaReference]) -> ChatMessage:
    role = ROLES.get(message.role)
    if message.role in ("tool", "function"):
        raise bad_request(f"{field}.role: tools are not supported by this server.", f"{field}.role")
    if role is None:
        raise bad_request(f"{field}.role: must be system, developer, user or assistant.", f"{field}.role")
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise bad_request(f"{field}.{name}: tools are not supported by this server.", f"{field}.{name}")
    if message.content is None:
        if role != "assistant":
            raise bad_request(f"{field}.content: this field is required.", f"{field}.content")
        return ChatMessage(role)
    if isinstance(message.content, str):
        return ChatMessage(role, (PromptPart(text=message.content),))
    content = tuple(
        _part(part, role, f"{field}.content[{index}]", references) for index, part in enumerate(message.content)
    )
    return ChatMessage(role, content)


def _part(part: ContentPart, role: str, field: str, references: list[MediaReference]) -> PromptPart:
    kind = part.type or next((name for name in ("text", "image_url", "video_url") if getattr(part, name)), None)
    if kind == "text":
        if part.text is None:
            raise bad_request(f"{field}.text: this field is required.", f"{field}.text")
        return PromptPart(text=part.text)
    if kind not in ("image_url", "video_url"):
        raise bad_request(f"{field}.type: must be text, image_url or video_url.", f"{field}.type")
    media = part.image_url if kind == "image_url" else part.video_url
    if media is None:
        raise bad_request(f"{field}.{kind}: this field is required.", f"{field}.{kind}")
    if role != "user":
        raise bad_request(f"{field}: images and videos belong into user messages.", field)
    _refuse_pixel_bounds(part, field)
    at = sampling = f"{field}.{kind}"
    if isinstance(media, str):
        media = MediaUrl(media)
    else:
        _refuse_pixel_bounds(media, at)
        at += ".url"
    if media.fps is None and media.max_frames is None:
        media, sampling = msgspec.structs.replace(media, fps=part.fps, max_frames=part.max_frames), field
    references.append(MediaReference("image" if kind == "image_url" else "video", media, at, sampling))
    return PromptPart(item=len(references) - 1)


def _refuse_pixel_bounds(fields: ContentPart | MediaUrl, at: str) -> None:
    for name in PIXEL_BOUNDS:
        if getattr(fields, name) is not None:
            raise bad_request(
                f"{at}.{name}: not supported by this server; detail bounds a picture, fps and max_frames a video.",
                f"{at}.{name}",
                "unsupported_parameter",
            )


async def _load(
    context: ServerContext,
    processor: ChatProcessor,
    reference: MediaReference,
    references: Sequence[MediaReference],
    budget: MediaBudget,
    ticket: Ticket,
) -> MediaItem:
    try:
        if reference.kind == "image":
            item = await _load_image(context, processor, reference, budget)
        else:
            item = await _load_video(context, processor, reference, references, budget)
    except (ApiError, InputError):
        context.metrics.observe("media_rejections_total", kind=reference.kind, reason="refused")
        raise
    ticket.grow(size=sum(frame.nbytes for frame in item.frames))
    return item


async def _load_image(
    context: ServerContext, processor: ChatProcessor, reference: MediaReference, budget: MediaBudget
) -> MediaItem:
    began = time.monotonic()

    def prepare(picture: Image.Image, source: bytes) -> tuple[MediaItem, float]:
        decoded = time.monotonic()
        detail = reference.media.detail
        return _named(reference.field, lambda: processor.image(picture, detail=detail, source=source)), decoded

    item, decoded = await context.media.image(reference.media.url, prepare, field=reference.field, budget=budget)
    context.metrics.observe("media_decode_duration_seconds", decoded - began, kind="image")
    context.metrics.observe("preprocess_duration_seconds", time.monotonic() - decoded, kind="image")
    return item


async def _load_video(
    context: ServerContext,
    processor: ChatProcessor,
    reference: MediaReference,
    references: Sequence[MediaReference],
    budget: MediaBudget,
) -> MediaItem:
    settings = context.settings
    media = reference.media
    videos = sum(other.kind == "video" for other in references)
    # Of a video of many pixels fewer frames are taken: a share for each video, and one for pictures if there are any.
    pixels = settings.max_request_pixels // (videos + (videos < len(references)))
    at = reference.sampling
    if media.fps is not None and media.fps > settings.max_fps:
        raise bad_request(f"{at}.fps: at most {settings.max_fps:g} can be asked for.", f"{at}.fps")
    share = max(1, settings.max_frames // videos)
    if media.max_frames is not None and media.max_frames > share:
        raise bad_request(
            f"{at}.max_frames: at most {share} frames of each video of this request are taken.",
            f"{at}.max_frames",
        )
    max_frames = media.max_frames or share
    # Whoever sends a list has chosen the frames: it is looked at as often as it stands for.
    fps = media.fps or (DEFAULT_FRAME_LIST_FPS if is_frame_list(media.url) else None)

    def choose(metadata: VideoMetadata) -> list[int]:
        most = min(max_frames, max(1, pixels // max(1, metadata.height * metadata.width)))
        return _named(reference.field, lambda: processor.sample_video(metadata, fps=fps, max_frames=most))

    began = time.monotonic()

    async def prepare(video: VideoFrames) -> MediaItem:
        decoded = time.monotonic()
        video = replace(video, requested_fps=fps)
        item = await context.in_thread(lambda: _named(reference.field, lambda: processor.video(video)))
        context.metrics.observe("media_decode_duration_seconds", decoded - began, kind="video")
        context.metrics.observe("preprocess_duration_seconds", time.monotonic() - decoded, kind="video")
        return item

    return await context.media.video(
        media.url,
        choose,
        prepare,
        frame_list_fps=fps or DEFAULT_FRAME_LIST_FPS,
        field=reference.field,
        budget=budget,
    )


def _named(field: str, step: Callable[[], T]) -> T:
    """A processor names the kind of the item it refuses; only here it is known where the item stands."""
    try:
        return step()
    except InputError as error:
        raise InputError(field, str(error)) from error


async def _beside(
    step: Callable[[], Coroutine[Any, Any, U]], work: Sequence[Coroutine[Any, Any, T]]
) -> tuple[U, list[T]]:
    """The result of `step`, which begins when all of `work` wait for threads or the network, and those of `work`, whose
    failure goes before one of `step`."""
    if not work:
        return await step(), []

    async def begin() -> U:
        await asyncio.sleep(0)  # tasks of `work` are made after this one
        return await step()

    beside = asyncio.ensure_future(begin())
    beside.add_done_callback(_forget)
    try:
        results = await _all(work)
        return await beside, results
    finally:
        beside.cancel()


def _forget(task: asyncio.Future[Any]) -> None:
    """Takes a failure that nobody asks for, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the rest."""
    if len(work) <= 1:  # a task of its own would take two more turns of the loop
        return [await step for step in work]
    tasks = [asyncio.ensure_future(step) for step in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count(context: ServerContext, model: str, prompt: Prompt) -> None:
    metrics = context.metrics
    metrics.observe("request_input_tokens", len(prompt.token_ids), model=model)
    for kind, count in media_tokens(prompt).items():
        metrics.observe("prompt_tokens_total", count, model=model, kind=kind)
    images = sum(item.kind == "image" for item in prompt.items)
    frames = sum(len(item.frames) for item in prompt.items if item.kind == "video")
    metrics.observe("request_images", images, model=model)
    metrics.observe("request_video_frames", frames, model=model)
