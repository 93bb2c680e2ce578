"""A chat request -> Prompt: text is tokenized while media load, then placeholders are expanded.

prompt_messages.py reads the messages, prompt_media.py loads the media.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from models.interfaces.errors import InputError, PromptTooLong
from models.interfaces.media import MediaItem, Prompt, TokenizedChat, Tool
from models.interfaces.processor import ChatProcessor
from models.text.tools import prompt_texts
from service.api.chat.prompt_media import PromptMedia
from service.api.chat.prompt_messages import check_length, named_transcripts, read_messages
from service.api.chat.schema import ChatRequestBody, ThinkingSwitch
from service.api.context import ServerContext
from service.api.http.errors import bad_request
from service.api.http.record import RequestRecord
from service.hub.catalog import HostedModel
from service.system.concurrency import all_results

T = TypeVar("T")
U = TypeVar("U")

TEMPLATE_OPTIONS = ("enable_thinking", "add_vision_id")
SMALL_PROMPT = 4096
"""Up to this many characters are tokenized in the event loop. That takes a millisecond or two, no more than handing the
work to a thread and back."""
SMALL_EXPANSION = 16_384
"""Up to this many prompt positions, placeholders are expanded in the event loop, which takes less than a
millisecond."""
OPENING_TOKENS = 16
"""Tokens at the end of a prompt that are searched for an opening reasoning marker."""


async def build_prompt(
    context: ServerContext, model: HostedModel, body: ChatRequestBody, tools: Sequence[Tool], record: RequestRecord
) -> Prompt:
    """The prompt of a request. The bytes of fetched and decoded media are charged to the record's ticket.

    Raises ApiError or InputError that names the field that does not fit.
    """
    processor = model.chat_processor
    options, paths = _template_options(body)
    max_model_len = context.max_model_len(model)
    names_audio = any(message.audio is not None for message in body.messages)
    transcripts = await named_transcripts(body, context) if names_audio else {}
    messages, references = read_messages(body, context, max_model_len, transcripts)
    length = sum(map(len, prompt_texts(messages, tools)))
    check_length(length, max_model_len)
    kinds = [reference.kind for reference in references]
    apply = partial(processor.apply_chat_template, messages, kinds, options=options, tools=tools)
    tokenize = partial(_tokenize, context, apply, paths, small=length <= SMALL_PROMPT)
    items: list[MediaItem] = []
    if references:
        media = PromptMedia(context, processor, references, record.client, record.ticket)
        (chat, seconds), items = await _concurrently(tokenize, media.loads())
    else:
        chat, seconds = await tokenize()
    began = time.monotonic()
    prompt = await _expand(context, processor, chat, items)
    context.metrics.observe("tokenize_duration_seconds", seconds + time.monotonic() - began, model=model.name)
    _observe(context, model.name, prompt)
    owner = context.owner(record.client)
    return prompt.salted(f"{owner}/{body.cache_salt or ''}") if owner or body.cache_salt else prompt


async def _tokenize(
    context: ServerContext, apply: Callable[[], TokenizedChat], paths: Mapping[str, str], *, small: bool
) -> tuple[TokenizedChat, float]:
    """The tokenized conversation with placeholders for media, and the seconds that it took. apply: renders and
    tokenizes it. paths: of the template's options in the request. small: it takes so little time that it needs no
    thread."""
    began = time.monotonic()
    try:
        chat = apply() if small else await context.in_thread(apply)
    except InputError as error:
        raise InputError(paths.get(error.field, error.field), str(error)) from error
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


def _template_options(body: ChatRequestBody) -> tuple[dict[str, bool], dict[str, str]]:
    """Options of the chat template, and the path of each in the request. ApiError 400 for one that no template has."""
    given = {name: value for name, value in (body.chat_template_kwargs or {}).items() if value is not None}
    for name, value in given.items():
        if name not in (*TEMPLATE_OPTIONS, "thinking"):
            known = " and ".join(TEMPLATE_OPTIONS)
            raise bad_request(f"chat_template_kwargs: only {known} are supported.", "chat_template_kwargs")
        if not isinstance(value, bool):
            raise bad_request(f"chat_template_kwargs.{name}: must be true or false.", f"chat_template_kwargs.{name}")
    if body.reasoning is not None and body.reasoning.exclude:
        message = "reasoning.exclude: true is not supported; leave the field reasoning of the answer unread."
        raise bad_request(message, "reasoning.exclude", "unsupported_parameter")
    switch = body.thinking
    switches = {
        "chat_template_kwargs.enable_thinking": given.get("enable_thinking"),
        "chat_template_kwargs.thinking": given.get("thinking"),
        "enable_thinking": body.enable_thinking,
        "think": body.think,
        "thinking": switch.type == "enabled" if isinstance(switch, ThinkingSwitch) else switch,
        "reasoning.enabled": None if body.reasoning is None else body.reasoning.enabled,
    }
    path, thinking = next(((path, value) for path, value in switches.items() if value is not None), ("", None))
    options = {} if thinking is None else {"enable_thinking": thinking}
    if "add_vision_id" in given:
        options["add_vision_id"] = given["add_vision_id"]
    return options, {"enable_thinking": path, "add_vision_id": "chat_template_kwargs.add_vision_id"}


async def _concurrently(
    step: Callable[[], Coroutine[Any, Any, U]], work: Sequence[Coroutine[Any, Any, T]]
) -> tuple[U, list[T]]:
    """Results of `step` and `work`. `step` starts after all of `work` have started, so that its computation overlaps
    with their I/O. When both fail, the error of `work` is raised."""

    async def begin() -> U:
        await asyncio.sleep(0)  # the tasks of `work` are created after this one
        return await step()

    stepping = asyncio.ensure_future(begin())
    stepping.add_done_callback(_forget)
    try:
        results = await all_results(work)
        return await stepping, results
    finally:
        stepping.cancel()


def _forget(task: asyncio.Future[Any]) -> None:
    """Retrieves an exception that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _observe(context: ServerContext, model: str, prompt: Prompt) -> None:
    metrics = context.metrics
    metrics.observe("request_input_tokens", len(prompt.token_ids), model=model)
    for kind, count in media_tokens(prompt).items():
        metrics.observe("prompt_tokens_total", count, model=model, kind=kind)
    images = sum(item.kind == "image" for item in prompt.items)
    frames = sum(len(item.frames) for item in prompt.items if item.kind == "video")
    metrics.observe("request_images", images, model=model)
    metrics.observe("request_video_frames", frames, model=model)
