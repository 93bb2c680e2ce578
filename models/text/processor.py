"""The part of a chat processor that only its tokenizer and configuration decide. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from models.checkpoints.published import sampling_defaults, stop_token_ids
from models.interfaces.errors import CheckpointError
from models.interfaces.processor import AudioInput, ChatProcessor
from models.text.chat_template import ChatTemplate, unused_character
from models.text.tokenizer import Tokenizer


class TextProcessor:
    """Base of models.interfaces.processor.ChatProcessor for families with a tokenizer.json.

    text: the language model's configuration. stop_tokens: the family's, beside those that the files name. recommended:
        sampling for a generation_config.json that names none.
    """

    template_options: frozenset[str] = frozenset()
    audio: AudioInput | None = None
    modes: Mapping[str, ChatProcessor] = {}

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
            raise CheckpointError(f"tokenizer.json has {tokenizer.vocab_size} ids, config.json says vocab_size {rows}")
        self.context_length = int(text["max_position_embeddings"])
        self.stop_token_ids = stop_token_ids(generation, tokenizer.special_ids, stop_tokens, text.get("eos_token_id"))
        self.generation_defaults: Mapping[str, float | int] = sampling_defaults(generation, recommended)

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode_plain(text)

    def tokenize_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, unused_character([text]))

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return self.tokenizer.decode(token_ids)

    def tokenizer_json(self, special_ids: Collection[int]) -> str | None:
        return self.tokenizer.without_specials(special_ids)
