"""A chat request -> Prompt: text is tokenized while media load, then placeholders are expanded."""

from __future__ import annotations

import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from models.interfaces.errors import InputError, PromptTooLong
from models.interfaces.media import ChatMessage, MediaItem, MediaKind, Prompt, TokenizedChat, Tool
from models.interfaces.media import ContentPart as PromptPart
from models.text.chat_template import ROLES
from models.text.processor import ChatProcessor
from models.text.tools import prompt_texts
from service.api.chat import prompt_media, schema
from service.api.chat.tools import earlier_calls, result_order
from service.api.context import ServerContext
from service.api.http.errors import bad_request, invalid, one_of
from service.api.http.middleware import RequestRecord
from service.hub.catalog import HostedModel
from service.system.concurrency import all_results

TEXT_KINDS = ("text", "refusal")
MEDIA: dict[str, MediaKind] = {"image_url": "image", "video_url": "video", "input_audio": "audio"}
PART_KINDS = (*TEXT_KINDS, *MEDIA)
"""Types of content parts. The content of a part is in a field with the name of its type."""
MAX_MESSAGES = 1000
MAX_VIDEOS = 4
MAX_RECORDINGS = 4
MAX_PARTS = 256
"""Content parts of all messages together."""
MAX_CHARACTERS_PER_TOKEN = 16
"""No text has more characters per token than this on average; ordinary text has three to five."""


def read_messages(
    body: schema.ChatRequestBody, context: ServerContext, max_model_len: int
) -> tuple[list[ChatMessage], list[prompt_media.MediaReference]]:
    """The messages as the chat template takes them, and the pictures and videos that their parts name by index.

    Raises ApiError or InputError that names the field that does not fit.
    """
    settings = context.settings
    if len(body.messages) > MAX_MESSAGES:
        raise bad_request(_too_many("messages", len(body.messages), MAX_MESSAGES), "messages")
    messages = _with_transcripts(body.messages, max_model_len)
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if parts > MAX_PARTS:
        raise bad_request(_too_many("content parts", parts, MAX_PARTS), "messages")
    # Before the arguments are parsed, since their values take much more memory than their text.
    calls = (call for message in messages for call in message.tool_calls or ())
    check_length(sum(len(call.function.arguments) for call in calls), max_model_len)
    references: list[prompt_media.MediaReference] = []
    collected = [_message(message, f"messages[{index}]", references) for index, message in enumerate(messages)]
    if any(message.role == "tool" or message.tool_calls for message in messages):
        collected = [collected[index] for index in result_order(messages)]
    limits = {"image": ("images", settings.max_images), "video": ("videos", MAX_VIDEOS)}
    for kind, (name, limit) in {**limits, "audio": ("recordings", MAX_RECORDINGS)}.items():
        count = sum(reference.kind == kind for reference in references)
        if count > limit:
            raise bad_request(_too_many(name, count, limit), "messages")
    return collected, references


def _too_many(what: str, count: int, limit: int) -> str:
    return f"messages: too many {what}: {count} given, at most {limit} allowed."


def check_length(length: int, max_model_len: int) -> None:
    """Refuse text that cannot fit, before it is tokenized. max_model_len: tokens of prompt and answer together."""
    limit = MAX_CHARACTERS_PER_TOKEN * max_model_len
    if length > limit:
        raise invalid(
            "messages",
            f"the prompt is too long: this model's maximum context length is {max_model_len} tokens; "
            f"{length} characters given, at most {limit} allowed",
            "context_length_exceeded",
        )


def _message(message: schema.Message, field: str, references: list[prompt_media.MediaReference]) -> ChatMessage:
    role = ROLES.get(message.role)
    if role is None:
        instead = "use tool" if message.role == "function" else "must be system, developer, user, assistant or tool"
        raise invalid(f"{field}.role", instead)
    if message.function_call:
        raise invalid(f"{field}.function_call", "not supported; use tool_calls")
    if message.images:
        reason = "not supported; use content parts of the type image_url"
        raise invalid(f"{field}.images", reason, "unsupported_parameter")
    calls = earlier_calls(message, field) if message.tool_calls else ()
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    reasoning = thought if role == "assistant" else None
    content: tuple[PromptPart, ...] = ()
    if not message.content and role == "assistant" and message.refusal:
        content = (PromptPart(text=message.refusal),)
    elif isinstance(message.content, str):
        content = (PromptPart(text=message.content),)
    elif message.content is not None:
        content = tuple(
            _part(part, role, f"{field}.content[{index}]", references) for index, part in enumerate(message.content)
        )
    elif role != "assistant":
        raise invalid(f"{field}.content", "this field is required")
    return ChatMessage(role, content, calls, reasoning)


def _with_transcripts(messages: Sequence[schema.Message], max_model_len: int) -> list[schema.Message]:
    """The messages with what spoken answers said as their content. An id may expand a thousandfold, so the sum is
    checked after each."""
    read, length = [], 0
    for index, message in enumerate(messages):
        if message.audio is not None and not message.content and ROLES.get(message.role) == "assistant":
            text = _transcript_of(message.audio, f"messages[{index}].audio")
            check_length(length := length + len(text), max_model_len)
            message = msgspec.structs.replace(message, content=text, refusal=None)
        read.append(message)
    return read


def _transcript_of(audio: schema.PastAudio, field: str) -> str:
    """ApiError 400 if the message has neither the transcript nor an id of this server."""
    if audio.transcript is not None:
        return audio.transcript
    if audio.id is None:
        raise invalid(f"{field}.transcript", "required, or the id of a spoken answer")
    text = schema.transcript_in(audio.id)
    if text is None:
        problem = "no spoken answer of this server has this id; send its transcript instead"
        raise invalid(f"{field}.id", problem, "audio_not_found")
    return text


def _part(part: schema.ContentPart, role: str, field: str, references: list[prompt_media.MediaReference]) -> PromptPart:
    given = [name for name in PART_KINDS if getattr(part, name)]
    kind = part.type or next(iter(given), None)
    if kind in PART_KINDS and (other := next((name for name in given if name != kind), None)) is not None:
        # To leave it out would go unnoticed.
        raise invalid(f"{field}.{other}", f"not in a part with {kind}; send a part of its own")
    if kind in TEXT_KINDS and (kind == "text" or role == "assistant"):
        text = part.text if kind == "text" else part.refusal
        if text is None:
            raise invalid(f"{field}.{kind}", "this field is required")
        return PromptPart(text=text)
    if kind not in MEDIA:
        raise invalid(f"{field}.type", f"must be {one_of(['text', *MEDIA])}")
    media = getattr(part, kind)
    if media is None:
        raise invalid(f"{field}.{kind}", "this field is required")
    if role not in ("user", "tool"):
        raise invalid(field, "media are only allowed in messages of users and tools")
    schema.refuse(part, schema.PIXEL_BOUNDS, at=f"{field}.")
    references.append(_reference(MEDIA[kind], media, part, field, f"{field}.{kind}"))
    return PromptPart(item=len(references) - 1)


def _reference(
    kind: MediaKind, media: schema.InputAudio | schema.MediaUrl | str, part: schema.ContentPart, field: str, at: str
) -> prompt_media.MediaReference:
    """field, at: paths of the part and of what it shows."""
    if isinstance(media, schema.InputAudio):
        url = schema.MediaUrl(f"data:audio/{media.format};base64,{media.data}")
        return prompt_media.MediaReference(kind, url, f"{at}.data")
    if isinstance(media, str):
        return prompt_media.MediaReference(kind, schema.MediaUrl(media), at, prompt_media.first_stated((part, field)))
    schema.refuse(media, schema.PIXEL_BOUNDS, at=f"{at}.")
    sampling = prompt_media.first_stated((media, at), (part, field))
    return prompt_media.MediaReference(kind, media, f"{at}.url", sampling)


TEMPLATE_OPTIONS = ("enable_thinking", "add_vision_id")
"""Options that are accepted for every model; ChatProcessor.template_options has what a template takes beside them."""
EFFORTS: dict[str, str | None] = {
    "none": None,
    "minimal": None,
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}
"""reasoning_effort as OpenAI's clients name it -> as templates do; None: no reasoning."""
SMALL_PROMPT = 4096
"""Up to this many characters are tokenized in the event loop. That takes a millisecond or two, no more than handing the
work to a thread and back."""
SMALL_EXPANSION = 16_384
"""Up to this many prompt positions, placeholders are expanded in the event loop, which takes less than a
millisecond."""
OPENING_TOKENS = 16
"""Tokens at the end of a prompt that are searched for an opening reasoning marker."""


async def build_prompt(
    context: ServerContext,
    model: HostedModel,
    body: schema.ChatRequestBody,
    tools: Sequence[Tool],
    record: RequestRecord,
    raw: str | list[int] | Prompt | None = None,
) -> Prompt:
    """The prompt of a request. The bytes of fetched and decoded media are charged to the record's ticket. raw: a text
    with special tokens, ids, or a prompt, in place of messages.

    Raises ApiError or InputError that names the field that does not fit.
    """
    if isinstance(raw, Prompt):
        return _accepted(context, model, body, raw, record)
    processor = processor_of(model, body)
    options, paths = template_options(body, processor.template_options)
    max_model_len = context.max_model_len(model)
    messages, references = read_messages(body, context, max_model_len)
    length = sum(map(len, prompt_texts(messages, tools))) if raw is None else len(raw)
    check_length(length, max_model_len)
    kinds = [reference.kind for reference in references]
    if "audio" in kinds and processor.audio is None:
        field = references[kinds.index("audio")].field
        raise invalid(field, "this model takes no audio", "unsupported_parameter")

    def apply() -> TokenizedChat:
        if raw is None:
            return processor.apply_chat_template(messages, kinds, options=options, tools=tools)
        ids = processor.tokenize_prompt(raw) if isinstance(raw, str) else raw
        return TokenizedChat(np.array(ids, np.int32))

    async def tokenized() -> tuple[TokenizedChat, float]:
        """The conversation with placeholders for media, and the seconds that it took."""
        began = time.monotonic()
        try:
            chat = apply() if length <= SMALL_PROMPT else await context.in_thread(apply)
        except InputError as error:
            raise InputError(paths.get(error.field, error.field), str(error)) from error
        return chat, time.monotonic() - began

    loads: Iterable[Coroutine[Any, Any, MediaItem]] = ()
    if references:
        common = prompt_media.of_all_videos(body)
        media = prompt_media.PromptMedia(context, processor, references, record.client, record.ticket, common)
        loads = map(media.load, references)
    # The text last: the event loop computes while the fetches, which have begun, wait for the network.
    results: list[Any] = await all_results([*loads, tokenized()])
    *items, (chat, seconds) = results
    began = time.monotonic()
    prompt = await _expand(context, processor, chat, items)
    context.metrics.observe("tokenize_duration_seconds", seconds + time.monotonic() - began, model=model.name)
    return _accepted(context, model, body, prompt, record)


def _accepted(
    context: ServerContext, model: HostedModel, body: schema.ChatRequestBody, prompt: Prompt, record: RequestRecord
) -> Prompt:
    """The prompt, counted, with the cache keys of its owner."""
    metrics, name = context.metrics, model.name
    metrics.observe("request_input_tokens", len(prompt.token_ids), model=name)
    for kind, count in media_tokens(prompt).items():
        metrics.observe("prompt_tokens_total", count, model=name, kind=kind)
    metrics.observe("request_images", sum(item.kind == "image" for item in prompt.items), model=name)
    frames = sum(len(item.frames) for item in prompt.items if item.kind == "video")
    metrics.observe("request_video_frames", frames, model=name)
    owner = context.owner(record.client)
    return prompt.salted(f"{owner}/{body.cache_salt or ''}") if owner or body.cache_salt else prompt


def processor_of(model: HostedModel, body: schema.ChatRequestBody) -> ChatProcessor:
    """The model's, or the one of the downsample_mode that the request names. ApiError 400 if the model has no modes."""
    processor, options = model.chat_processor, body.mm_processor_kwargs
    if options is None:
        return processor
    schema.refuse(options, schema.PIXEL_BOUNDS, at="mm_processor_kwargs.")
    if options.downsample_mode is None:
        return processor
    if not processor.modes:
        raise invalid("mm_processor_kwargs.downsample_mode", "this model has no modes", "unsupported_parameter")
    return processor.modes[options.downsample_mode]


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
        raise invalid(error.field, f"{error}", "context_length_exceeded") from error


def opens_reasoning(processor: ChatProcessor, prompt: Prompt) -> bool:
    """Whether the prompt ends with the opening reasoning marker."""
    if processor.reasoning_markers is None:
        return False
    tail = processor.detokenize(prompt.token_ids[-OPENING_TOKENS:].tolist()).decode(errors="replace")
    return tail.rstrip().endswith(processor.reasoning_markers[0])


def media_tokens(prompt: Prompt) -> dict[str, int]:
    """Prompt positions by kind: text, image, video, audio."""
    counts = {"image": 0, "video": 0, "audio": 0}
    for run in prompt.placeholders:
        counts[prompt.items[run.item].kind] += run.length
    return {"text": len(prompt.token_ids) - sum(counts.values()), **counts}


def template_options(body: schema.ChatRequestBody, known: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of the chat template, and the path of each in the request. ApiError 400 for one that the model's has not.

    known: ChatProcessor.template_options.
    """
    given = {name: value for name, value in (body.chat_template_kwargs or {}).items() if value is not None}
    for name, value in given.items():
        if name not in (*TEMPLATE_OPTIONS, *known, "thinking"):
            supported = " and ".join(dict.fromkeys((*TEMPLATE_OPTIONS, *sorted(known))))
            raise invalid("chat_template_kwargs", f"only {supported} are supported")
        if name != "reasoning_effort" and not isinstance(value, bool):
            raise invalid(f"chat_template_kwargs.{name}", "must be true or false")
    if body.reasoning is not None and body.reasoning.exclude:
        problem = "true is not supported; leave the field reasoning of the answer unread"
        raise invalid("reasoning.exclude", problem, "unsupported_parameter")
    switch = body.thinking
    switches = {
        "chat_template_kwargs.enable_thinking": given.get("enable_thinking"),
        "chat_template_kwargs.thinking": given.get("thinking"),
        "enable_thinking": body.enable_thinking,
        "think": body.think,
        "thinking": switch.type == "enabled" if isinstance(switch, schema.ThinkingSwitch) else switch,
        "reasoning.enabled": None if body.reasoning is None else body.reasoning.enabled,
    }
    path, thinking = next(((path, value) for path, value in switches.items() if value is not None), ("", None))
    effort = _effort(body, given) if {"enable_thinking", "reasoning_effort"} & set(known) else None
    if effort is not None and EFFORTS[effort] is None and thinking is None:
        thinking = False
    options = {} if thinking is None else {"enable_thinking": thinking}
    if effort is not None and EFFORTS[effort] is not None and "reasoning_effort" in known:
        options["reasoning_effort"] = EFFORTS[effort]
    options |= {name: given[name] for name in ("add_vision_id", "preserve_thinking") if name in given}
    return options, {"enable_thinking": path, "add_vision_id": "chat_template_kwargs.add_vision_id"}


def _effort(body: schema.ChatRequestBody, given: Mapping[str, Any]) -> str | None:
    """The name of a reasoning effort in the request; ApiError 400 for one that is not in EFFORTS."""
    efforts = {
        "chat_template_kwargs.reasoning_effort": given.get("reasoning_effort"),
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": None if body.reasoning is None else body.reasoning.effort,
    }
    path, effort = next(((path, value) for path, value in efforts.items() if value is not None), ("", None))
    if effort is not None and not (isinstance(effort, str) and effort in EFFORTS):
        raise invalid(path, f"must be one of {', '.join(EFFORTS)}")
    return effort
