"""The part of a chat processor that only its tokenizer and configuration decide. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.published import read_optional_json, sampling_defaults, stop_token_ids
from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import ChatMessage, MediaItem, MediaKind, Prompt, TokenizedChat, Tool
from models.interfaces.processor import AudioInput, ChatProcessor
from models.text.chat_template import (
    ChatTemplate,
    escape_with,
    load_chat_template,
    reasoning_apart,
    template_turn,
    unused_character,
)
from models.text.placeholders import MediaTokens, check_length, expand, tokenized_chat
from models.text.tokenizer import Tokenizer, load_tokenizer
from models.text.tools import Escape, Turn, escaped_tools, prompt_texts


class TextProcessor:
    """Base of every family's models.interfaces.processor.ChatProcessor.

    text: the language model's configuration. stop_tokens: the family's, beside those that the files name. recommended:
        sampling for a generation_config.json that names none.
    """

    reasoning_markers: tuple[str, str] | None = None
    template_options: frozenset[str] = frozenset()
    divides_answers = False
    """Whether the template is given reasoning in the text of an earlier answer apart from it."""
    template_defaults: Mapping[str, bool] = {}
    """Options that the template is always given, by their default."""
    refused_options: Mapping[str, str] = {}
    """Options that would change nothing, and why."""
    audio: AudioInput | None = None
    modes: Mapping[str, ChatProcessor] = {}
    placeholder_ids: frozenset[int]
    """Ids that the template makes of items."""

    def __init__(
        self,
        text: Mapping[str, Any],
        tokenizer: Tokenizer,
        template: ChatTemplate,
        generation: Mapping[str, Any],
        stop_tokens: Sequence[str],
        recommended: Mapping[str, float] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.call_format = template.call_format
        # The embedding may have more rows than there are tokens; the rest is padding, which is never generated.
        self.vocab_size, rows = tokenizer.vocab_size, int(text["vocab_size"])
        if tokenizer.vocab_size > rows:
            raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size} ids, config.json says vocab_size {rows}")
        self.context_length = int(text["max_position_embeddings"])
        self.stop_token_ids = stop_token_ids(generation, tokenizer.special_ids, stop_tokens, text.get("eos_token_id"))
        self.generation_defaults: Mapping[str, float | int] = sampling_defaults(generation, recommended)

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode_plain(text)

    def tokenize_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, unused_character([text]))

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return self.tokenizer.decode(token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> TokenizedChat:
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
        turns = [self.template_turn(message, kinds, escaped) for message in told]
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

    def template_turn(self, message: ChatMessage, kinds: Sequence[MediaKind], escaped: Escape) -> Turn:
        """What the template is given for a message. kinds: of the items that the messages name."""
        return template_turn(message, kinds.__getitem__, escaped)

    def template_chat(self, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> TokenizedChat:
        """The chat of these ids of a rendered template."""
        return tokenized_chat(token_ids, messages, self.placeholder_ids)

    def plain_prompt(self, chat: TokenizedChat, media: Sequence[MediaTokens], items: Sequence[MediaItem]) -> Prompt:
        """The prompt with placeholders replaced by `media`, for models whose positions count tokens. Raises
        PromptTooLong."""
        token_ids, placeholders = expand(chat, media)
        check_length(token_ids, self.context_length)
        positions = np.arange(len(token_ids), dtype=np.int32)[None]
        return Prompt(token_ids, positions, len(token_ids), tuple(items), placeholders)


def load_text(directory: Path, *, spoken: Collection[str] = ()) -> tuple[Tokenizer, ChatTemplate, Mapping[str, Any]]:
    """The tokenizer, the chat template and generation_config.json of a checkpoint. spoken: as Tokenizer takes it."""
    tokenizer = load_tokenizer(directory, spoken=frozenset(spoken))
    return tokenizer, load_chat_template(directory), read_optional_json(directory, "generation_config.json")
