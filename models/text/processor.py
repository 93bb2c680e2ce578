"""The host side of a chat family: text, media and positions. Runs in the API process; nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.checkpoints.published import read_optional_json, sampling_defaults, stop_token_ids
from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import (
    ChatMessage,
    ContentPart,
    MediaItem,
    MediaKind,
    Prompt,
    TokenizedChat,
    Tool,
    VideoFrames,
    VideoMetadata,
)
from models.interfaces.processor import AudioInput
from models.interfaces.resizing import FrameResizer
from models.text.chat_template import (
    ChatTemplate,
    escape_with,
    escaped_reasoning,
    load_chat_template,
    reasoning_apart,
    template_role,
    unused_character,
)
from models.text.placeholders import MediaTokens, check_length, expand, repeated, tokenized_chat
from models.text.tokenizer import Tokenizer, load_tokenizer
from models.text.tools import Escape, escaped_calls, escaped_tools, prompt_texts

QWEN_STOPS = ("<|im_end|>", "<|endoftext|>")
"""Ends of a turn and of a document in the tokenizers of Qwen."""


class ChatProcessor(ABC):
    """Turns messages and media into a Prompt. Base of every chat family's.

    text: the language model's configuration. placeholders: ids that the template makes of items, by kind. stop_tokens:
        the family's, beside those that the files name. recommended: sampling for a generation_config.json that names
        none.
    """

    reasoning_markers: tuple[str, str] | None = None
    """Strings around reasoning text in answers, e.g. ("<think>", "</think>")."""
    template_options: frozenset[str] = frozenset()
    """Options of this model's chat template: of enable_thinking, preserve_thinking and reasoning_effort those that it
    reads itself."""
    divides_answers = False
    """Whether the template is given reasoning in the text of an earlier answer apart from it."""
    template_defaults: Mapping[str, bool] = {}
    """Options that the template is always given, by their default."""
    refused_options: Mapping[str, str] = {}
    """Options that would change nothing, and why."""
    audio: AudioInput | None = None
    """None for models that take no audio."""
    modes: Mapping[str, ChatProcessor] = {}
    """By downsample_mode, the processor of a request that names it; empty for families without."""

    def __init__(
        self,
        text: Mapping[str, Any],
        tokenizer: Tokenizer,
        template: ChatTemplate,
        generation: Mapping[str, Any],
        placeholders: Mapping[MediaKind, int],
        stop_tokens: Sequence[str] = QWEN_STOPS,
        recommended: Mapping[str, float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.call_format = template.call_format  # how answers write calls of tools
        # The embedding may have more rows than there are tokens; the rest is padding, which is never generated.
        self.vocab_size, rows = tokenizer.vocab_size, int(text["vocab_size"])
        if tokenizer.vocab_size > rows:
            raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size} ids, config.json says vocab_size {rows}")
        for kind, token_id in placeholders.items():
            if token_id not in tokenizer.special_ids.values():
                field = f"{kind}_token_id or media_placeholder_token_id"
                raise CheckpointError(f"config.json: {field} {token_id} is no special token of the tokenizer")
        self.placeholders = placeholders
        self.context_length = int(text["max_position_embeddings"])
        self.stop_token_ids = stop_token_ids(generation, tokenizer.special_ids, stop_tokens, text.get("eos_token_id"))
        self.generation_defaults: Mapping[str, float | int] = sampling_defaults(generation, recommended)

    @abstractmethod
    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """source: models.interfaces.media.source_digest of the file that the picture was decoded from, which spares
        hashing its pixels."""

    @abstractmethod
    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        """Indices of the frames to decode, by the family's documented rule, at most max_frames."""

    @abstractmethod
    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        """What resizes `num_frames` sampled frames of a video. Raises InputError for a size that the model cannot
        take."""

    @abstractmethod
    def video(self, video: VideoFrames) -> MediaItem: ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of untrusted text: literal special tokens in it are encoded as plain text."""
        return self.tokenizer.encode_plain(text)

    def tokenize_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt: literal special tokens in it are special."""
        return self.tokenizer.encode(text, unused_character([text]))

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        """Bytes of generated ids, special tokens left out; joins over any split of the ids."""
        return self.tokenizer.decode(token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> TokenizedChat:
        """Renders the chat template and tokenizes it, which needs no media. kinds: those of the items that the messages
        name. options: enable_thinking, add_vision_id, template_options. tools: written as models/text/tools.py says.

        Raises InputError that names the field, or the option that would change nothing.
        """
        return self.rendered_chat(messages, kinds, tools, self.template_arguments(options))

    def rendered_chat(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        tools: Sequence[Tool] = (),
        given: Mapping[str, Any] | None = None,
        *,
        forced: str = "",
        continuation: str = "",
    ) -> TokenizedChat:
        """given: variables of the template. forced: the answer's beginning, and continuation: untrusted text behind
        it."""
        escape = unused_character([*prompt_texts(messages, tools), continuation])
        escaped = escape_with(escape, self.tokenizer.escape)
        told = map(reasoning_apart, messages) if self.divides_answers else messages
        turns = [
            {
                "role": template_role(message.role),
                "content": self.template_content(message.content, kinds, escaped),
                **escaped_reasoning(message, escaped),
                **escaped_calls(message, escaped),
            }
            for message in told
        ]
        rendered = self.template.render(turns, tools=escaped_tools(tools, escaped), **(given or {}))
        return self.template_chat(self.tokenizer.encode(rendered + forced + escaped(continuation), escape), messages)

    def template_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the template is given for the options of a request. Raises InputError for one that the model lacks."""
        for name, reason in self.refused_options.items():
            if options.get(name):
                raise InputError(name, reason)
        if options.get("enable_thinking") and self.reasoning_markers is None:
            raise InputError("enable_thinking", "this checkpoint has no reasoning mode")
        known = self.template_options | self.template_defaults.keys()
        return {**self.template_defaults, **{name: value for name, value in options.items() if name in known}}

    def template_content(self, parts: Sequence[ContentPart], kinds: Sequence[MediaKind], escaped: Escape) -> Any:
        """What the template is given of a message's content: its text as one string or, with items, a list of parts.
        kinds: of the items that the messages name."""
        if all(part.item is None for part in parts):
            return "".join(escaped(part.text) for part in parts if part.text is not None)
        return template_parts(parts, kinds, escaped)

    def template_chat(self, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> TokenizedChat:
        """The chat of these ids of a rendered template."""
        return tokenized_chat(token_ids, messages, frozenset(self.placeholders.values()))

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """Replaces placeholders by the tokens of their items and gives every token its position. Reads neither text nor
        pixels: 16,384 tokens take less than a millisecond. Raises InputError for a prompt that leaves no room for an
        answer."""
        return self.plain_prompt(chat, [self.media_tokens(items[item]) for _, item in chat.placeholders], items)

    def media_tokens(self, item: MediaItem) -> MediaTokens:
        """The tokens that replace an item's placeholder."""
        return repeated(self.placeholders[item.kind], item.num_embeds)

    def plain_prompt(self, chat: TokenizedChat, media: Sequence[MediaTokens], items: Sequence[MediaItem]) -> Prompt:
        """The prompt with placeholders replaced by `media`, for models whose positions count tokens. Raises
        PromptTooLong."""
        token_ids, placeholders = expand(chat, media)
        check_length(token_ids, self.context_length)
        positions = np.arange(len(token_ids), dtype=np.int32)[None]
        return Prompt(token_ids, positions, len(token_ids), tuple(items), placeholders)


def template_parts(parts: Sequence[ContentPart], kinds: Sequence[MediaKind], escaped: Escape) -> list[dict[str, str]]:
    """A message's content as a list of parts."""
    return [
        {"type": "text", "text": escaped(part.text or "")} if part.item is None else {"type": kinds[part.item]}
        for part in parts
    ]


def load_text(directory: Path, *, spoken: Collection[str] = ()) -> tuple[Tokenizer, ChatTemplate, Mapping[str, Any]]:
    """The tokenizer, the chat template and generation_config.json of a checkpoint. spoken: as Tokenizer takes it."""
    tokenizer = load_tokenizer(directory, spoken=frozenset(spoken))
    return tokenizer, load_chat_template(directory), read_optional_json(directory, "generation_config.json")
