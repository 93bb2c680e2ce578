"""Messages of a chat request -> Prompt: text is tokenized while media load, then placeholders are expanded.

prompt_media.py loads the media.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from models.chat_template import ROLES
from models.errors import InputError, PromptTooLong
from models.media import ChatMessage, MediaItem, Prompt, TokenizedChat, Tool
from models.media import ContentPart as PromptPart
from models.processor import ChatProcessor
from models.tools import prompt_texts
from service.api.chat.past_answers import NamedTranscripts, named_transcripts, transcript_of
from service.api.chat.prompt_media import MediaReference, PromptMedia
from service.api.chat.schema import PIXEL_BOUNDS, ChatRequestBody, ContentPart, MediaUrl, Message
from service.api.chat.tools import earlier_calls, result_order
from service.api.chat.video_sampling import first_stated, of_all_videos, stated
from service.api.context import ServerContext
from service.api.http.errors import bad_request
from service.api.http.record import RequestRecord
from service.catalog import HostedModel

T = TypeVar("T")
U = TypeVar("U")

TEMPLATE_OPTIONS = ("enable_thinking", "add_vision_id")
PART_KINDS = ("text", "image_url", "video_url")
"""Types of content parts. The content of a part is in a field with the name of its type."""
MAX_CHARACTERS_PER_TOKEN = 16
"""No text has more characters per token than this on average; ordinary text has three to five."""
SMALL_PROMPT = 4096
"""Up to this many characters are tokenized in the event loop. That takes a millisecond or two, no more than handing the
work to a thread and back (`python -m benchmarks.host_path`)."""
SMALL_CHAT = 256
"""Conversations of more messages are not looked at for their length in the event loop: they count as large."""
SMALL_EXPANSION = 16_384
"""Up to this many prompt positions, placeholders are expanded in the event loop, which takes less than a
millisecond."""
OPENING_TOKENS = 16
"""Tokens at the end of a prompt that are searched for an opening reasoning marker."""


async def build_prompt(
    context: ServerContext, model: HostedModel, body: ChatRequestBody, tools: Sequence[Tool], record: RequestRecord
) -> Prompt:
    """The prompt of a request. The bytes of decoded media are charged to the record's ticket.

    Raises ApiError or InputError that names the field that does not fit.
    """
    processor = model.chat_processor
    options = _template_options(body.chat_template_kwargs or {})
    max_model_len = context.max_model_len(model)
    messages, references = _collect(body, context, max_model_len, await named_transcripts(body, context))
    length = sum(map(len, prompt_texts(messages, tools)))
    _check_length(length, max_model_len)
    media = PromptMedia(context, processor, references, record)
    apply = partial(processor.apply_chat_template, messages, media.kinds, options=options, tools=tools)
    (chat, seconds), items = await _concurrently(
        lambda: _tokenize(context, apply, small=length <= SMALL_PROMPT), media.loads()
    )
    began = time.monotonic()
    prompt = await _expand(context, processor, chat, items)
    context.metrics.observe("tokenize_duration_seconds", seconds + time.monotonic() - began, model=model.name)
    _observe(context, model.name, prompt)
    return prompt


async def _tokenize(
    context: ServerContext, apply: Callable[[], TokenizedChat], *, small: bool
) -> tuple[TokenizedChat, float]:
    """The tokenized conversation with placeholders for media, and the seconds that it took. apply: renders and
    tokenizes it. small: that takes so little time that it needs no thread."""
    began = time.monotonic()
    try:
        chat = apply() if small else await context.in_thread(apply)
    except InputError as error:
        if error.field not in TEMPLATE_OPTIONS:
            raise
        raise InputError(f"chat_template_kwargs.{error.field}", str(error)) from error
    return chat, time.monotonic() - began


async def _expand(
    context: ServerContext, processor: ChatProcessor, chat: TokenizedChat, items: Sequence[MediaItem]
) -> Prompt:
    """The prompt with a position for each embedding of the items; ApiError if the context cannot hold it."""
    expand = partial(processor.expand_placeholders, chat, items)
    try:
        if len(chat.token_ids) + sum(item.num_embeds for item in items) <= SMALL_EXPANSION:
            return expand()
        return await context.in_thread(expand)
    except PromptTooLong as error:
        raise bad_request(f"{error.field}: {error}.", error.field, "context_length_exceeded") from error


def opens_reasoning(processor: ChatProcessor, prompt: Prompt) -> bool:
    """Whether the prompt ends with the opening reasoning marker."""
    if processor.reasoning_markers is None:
        return False
    tail = processor.detokenize(prompt.token_ids[-OPENING_TOKENS:].tolist()).decode(errors="replace")
    return tail.rstrip().endswith(processor.reasoning_markers[0])


def media_tokens(prompt: Prompt) -> dict[str, int]:
    """Prompt positions by kind: text, image, video."""
    counts = {"image": 0, "video": 0}
    for run in prompt.placeholders:
        counts[prompt.items[run.item].kind] += run.length
    return {"text": len(prompt.token_ids) - sum(counts.values()), **counts}


def _template_options(options: dict[str, Any]) -> dict[str, bool]:
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if name not in TEMPLATE_OPTIONS:
            known = " and ".join(TEMPLATE_OPTIONS)
            raise bad_request(f"chat_template_kwargs: only {known} are supported.", "chat_template_kwargs")
        if not isinstance(value, bool):
            raise bad_request(f"chat_template_kwargs.{name}: must be true or false.", f"chat_template_kwargs.{name}")
    return options


def _collect(
    body: ChatRequestBody, context: ServerContext, max_model_len: int, transcripts: NamedTranscripts
) -> tuple[list[ChatMessage], list[MediaReference]]:
    settings, messages = context.settings, body.messages
    if len(messages) > settings.max_messages:
        raise bad_request(_too_many("messages", len(messages), settings.max_messages), "messages")
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > settings.max_parts:
        raise bad_request(_too_many("content parts", parts, settings.max_parts), "messages")
    # Before the arguments are parsed, since their values take much more memory than their text.
    calls = (call for message in messages for call in message.tool_calls or ())
    _check_length(sum(len(call.function.arguments) for call in calls), max_model_len)
    references: list[MediaReference] = []
    collected = [
        _message(message, f"messages[{index}]", references, transcripts) for index, message in enumerate(messages)
    ]
    collected = [collected[index] for index in result_order(messages)]
    for kind, limit in (("image", settings.max_images), ("video", settings.max_videos)):
        count = sum(reference.kind == kind for reference in references)
        if count > limit:
            raise bad_request(_too_many(f"{kind}s", count, limit), "messages")
    common = of_all_videos(body)
    return collected, [replace(one, sampling=first_stated((one.sampling, common))) for one in references]


def _too_many(what: str, count: int, limit: int) -> str:
    return f"messages: too many {what}: {count} given, at most {limit} allowed."


def is_small(body: ChatRequestBody) -> bool:
    """Whether the prompt is built without awaiting I/O or threads: short texts, no media and no tools."""
    length = 0
    if body.tools or len(body.messages) > SMALL_CHAT:
        return False
    for message in body.messages:
        if message.tool_calls:
            return False
        parts = message.content if isinstance(message.content, list) else [ContentPart(text=message.content)]
        if any(part.image_url or part.video_url for part in parts):
            return False
        length += len(message.reasoning_content or "") + sum(len(part.text or "") for part in parts)
    return length <= SMALL_PROMPT


def _check_length(length: int, max_model_len: int) -> None:
    """Refuses text that cannot fit, before it is tokenized. max_model_len: tokens of prompt and answer together."""
    limit = MAX_CHARACTERS_PER_TOKEN * max_model_len
    if length > limit:
        raise bad_request(
            f"messages: too much text: {length} characters given, at most {limit} allowed for a context of "
            f"{max_model_len} tokens.",
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
    calls = earlier_calls(message, field)
    reasoning = message.reasoning_content if role == "assistant" else None
    content: tuple[PromptPart, ...] = ()
    if not message.content and role == "assistant" and message.audio is not None:
        content = (PromptPart(text=transcript_of(message.audio, f"{field}.audio", transcripts)),)
    elif isinstance(message.content, str):
        content = (PromptPart(text=message.content),)
    elif message.content is not None:
        content = tuple(
            _part(part, role, f"{field}.content[{index}]", references) for index, part in enumerate(message.content)
        )
    elif role != "assistant":
        raise bad_request(f"{field}.content: this field is required.", f"{field}.content")
    return ChatMessage(role, content, calls, reasoning)


def _part(part: ContentPart, role: str, field: str, references: list[MediaReference]) -> PromptPart:
    given = [name for name in PART_KINDS if getattr(part, name)]
    kind = part.type or next(iter(given), None)
    if kind in PART_KINDS and (other := next((name for name in given if name != kind), None)) is not None:
        # To leave it out would go unnoticed.
        raise bad_request(f"{field}.{other}: not in a part with {kind}; send a part of its own.", f"{field}.{other}")
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
        raise bad_request(f"{field}: images and videos are only allowed in user messages.", field)
    _refuse_pixel_bounds(part, field)
    at = f"{field}.{kind}"
    if isinstance(media, str):
        media = MediaUrl(media)
    else:
        _refuse_pixel_bounds(media, at)
    sampling = first_stated((stated(media, at), stated(part, field)))
    at = at if isinstance(getattr(part, kind), str) else f"{at}.url"
    references.append(MediaReference("image" if kind == "image_url" else "video", media, at, sampling))
    return PromptPart(item=len(references) - 1)


def _refuse_pixel_bounds(fields: ContentPart | MediaUrl, at: str) -> None:
    for name in PIXEL_BOUNDS:
        if getattr(fields, name) is not None:
            raise bad_request(
                f"{at}.{name}: not supported; use detail for pictures, fps and max_frames for videos.",
                f"{at}.{name}",
                "unsupported_parameter",
            )


async def _concurrently(
    step: Callable[[], Coroutine[Any, Any, U]], work: Sequence[Coroutine[Any, Any, T]]
) -> tuple[U, list[T]]:
    """Results of `step` and `work`. `step` starts after all of `work` have started, so that its computation overlaps
    with their I/O. When both fail, the error of `work` is raised."""
    if not work:
        return await step(), []

    async def begin() -> U:
        await asyncio.sleep(0)  # the tasks of `work` are created after this one
        return await step()

    stepping = asyncio.ensure_future(begin())
    stepping.add_done_callback(_forget)
    try:
        results = await _all(work)
        return await stepping, results
    finally:
        stepping.cancel()


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieves an exception that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the rest."""
    if len(work) <= 1:  # a task would take two more turns of the loop
        return [await step for step in work]
    tasks = [asyncio.ensure_future(step) for step in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _observe(context: ServerContext, model: str, prompt: Prompt) -> None:
    metrics = context.metrics
    metrics.observe("request_input_tokens", len(prompt.token_ids), model=model)
    for kind, count in media_tokens(prompt).items():
        metrics.observe("prompt_tokens_total", count, model=model, kind=kind)
    images = sum(item.kind == "image" for item in prompt.items)
    frames = sum(len(item.frames) for item in prompt.items if item.kind == "video")
    metrics.observe("request_images", images, model=model)
    metrics.observe("request_video_frames", frames, model=model)
