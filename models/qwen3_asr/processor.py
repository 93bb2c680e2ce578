"""Audio and prompts of Qwen3-ASR. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import ChatMessage, ContentPart, MediaItem, MediaKind, Prompt, TokenizedChat, Tool
from models.interfaces.processor import AudioInput
from models.qwen3_asr.config import CHUNK_ROWS, SAMPLE_RATE, Qwen3ASRConfig, load_config
from models.qwen3_asr.items import SEARCH_SECONDS, audio_item, quiet_pieces
from models.qwen3_asr.transcript import LANGUAGES, TEXT_TAG, joined, language_name, read_transcript
from models.text.chat_template import ChatTemplate
from models.text.processor import ChatProcessor, load_text
from models.text.tokenizer import Tokenizer

_GREEDY = {"temperature": 0.0}
_TOKENS_PER_SECOND, _MIN_NEW_TOKENS = 16, 64
"""More than speech of any language has, so that a loop ends."""
_HINTS = 128
"""Positions beside a piece and its answer."""
NO_PICTURES = "the model transcribes audio and takes no pictures or videos"


class Qwen3ASRProcessor(ChatProcessor):
    """Implements models.interfaces.processor.AudioInput, too. models/qwen3_asr/items.py describes the items."""

    reasoning_markers = ("language ", TEXT_TAG)
    """So that the answer to a chat is what was said, and its reasoning the language."""
    sample_rate = SAMPLE_RATE
    max_seconds = 1200.0
    joined = staticmethod(joined)
    transcript = staticmethod(read_transcript)

    def __init__(
        self, config: Qwen3ASRConfig, tokenizer: Tokenizer, template: ChatTemplate, generation: Mapping[str, Any]
    ) -> None:
        placeholders: dict[MediaKind, int] = {"audio": config.audio_token_id}
        super().__init__(config.text, tokenizer, template, generation, placeholders, recommended=_GREEDY)
        self.config = config
        self.audio: AudioInput | None = self
        self._settings = repr(config.audio).encode()
        named = config.languages or tuple(LANGUAGES.values())
        self.languages = {code: name for code, name in LANGUAGES.items() if name in named}
        if TEXT_TAG not in tokenizer.special_ids:
            raise CheckpointError(f"{TEXT_TAG} is no added token of the tokenizer")
        self.start_id = tokenizer.special_ids[TEXT_TAG]

    def item(self, samples: np.ndarray) -> MediaItem:
        if not len(samples):
            raise InputError("file", "the audio has no samples")
        if len(samples) > self.max_seconds * SAMPLE_RATE:
            raise InputError("file", f"the audio is longer than the {self.max_seconds:g} seconds that the model takes")
        peak = float(np.abs(samples).max())
        if not np.isfinite(peak):
            raise InputError("file", "the audio has samples that are not finite numbers")
        return audio_item(samples / np.float32(peak) if peak > 1 else samples, self.config.audio, self._settings)

    def language(self, name: str) -> str:
        return language_name(name, self.languages)

    def prompt(
        self, item: MediaItem, *, context: str = "", language: str | None = None, continuation: str = ""
    ) -> Prompt:
        messages = [ChatMessage("system", (ContentPart(text=context),)), ChatMessage("user", (ContentPart(item=0),))]
        forced = "" if language is None else f"language {language}{TEXT_TAG}"
        chat = self.rendered_chat(messages, [item.kind], forced=forced, continuation=continuation)
        return self.expand_placeholders(chat, [item])

    def max_new_tokens(self, item: MediaItem) -> int:
        return max(_MIN_NEW_TOKENS, _TOKENS_PER_SECOND * len(item.arrays["samples"]) // SAMPLE_RATE)

    def pieces(self, samples: np.ndarray, seconds: float) -> list[np.ndarray]:
        """So short that the context has room for the answer."""
        longest = (self.context_length - _HINTS) / (CHUNK_ROWS + _TOKENS_PER_SECOND)
        return quiet_pieces(samples, min(seconds, max(1.0, longest - SEARCH_SECONDS)))

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> TokenizedChat:
        """One audio in a user's message; the system's text is context. Everything else the template would leave out."""
        if options.get("enable_thinking"):
            raise InputError("enable_thinking", "the model has no reasoning mode")
        if tools:
            raise InputError("tools", "the model transcribes and calls no tools")
        if set(kinds) - {"audio"}:
            raise InputError("messages", NO_PICTURES)
        if len(kinds) != 1:
            raise InputError("messages", f"the model transcribes one audio at a time; these messages have {len(kinds)}")
        for message in messages:
            if message.role not in ("system", "developer") and any(part.text for part in message.content):
                raise InputError(
                    "messages",
                    f"the model reads no text of role {message.role!r}: it transcribes; hints go into a system message",
                )
        return self.rendered_chat(messages, kinds)

    def image(self, *_: object, **__: object) -> NoReturn:
        raise InputError("image_url", NO_PICTURES)

    def video(self, *_: object, **__: object) -> NoReturn:
        raise InputError("video_url", NO_PICTURES)

    sample_video = frame_resizer = video


def load_processor(directory: Path) -> Qwen3ASRProcessor:
    """Reads config.json, the feature extractor's settings, generation_config.json, the tokenizer and the chat
    template."""
    return Qwen3ASRProcessor(load_config(directory), *load_text(directory))
