"""A model that transcribes, without weights: it says how long the audio of each piece is, in English or the language
that is asked for. Silence has no language. Its engine is that of fake_engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem, PlaceholderRange, Prompt, TokenizedChat, source_digest
from models.interfaces.processor import AlignedWord
from models.qwen3_asr.aligner import split_words
from models.qwen3_asr.items import quiet_pieces
from models.qwen3_asr.transcript import TEXT_TAG, joined, language_name, read_transcript
from service.hub import Checkpoint
from service.hub.catalog import Catalog, HostedModel
from tests.support.fake_chat import FakeProcessor, fake_catalog

TAG = 259
POSITIONS = 4
"""Of an item in the prompt."""


class FakeHearing(FakeProcessor):
    vocab_size = 260
    reasoning_markers = ("language ", TEXT_TAG)
    sample_rate = 16_000
    max_seconds = 150.0
    languages: Mapping[str, str] = {"en": "English", "de": "German", "zh": "Chinese"}
    start_id = TAG
    pieces = staticmethod(quiet_pieces)
    transcript = staticmethod(read_transcript)
    joined = staticmethod(joined)

    def __init__(self) -> None:
        self.audio: Any = self

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(TEXT_TAG.encode() if one == TAG else FakeProcessor.detokenize(self, [one]) for one in token_ids)

    def item(self, samples: np.ndarray) -> MediaItem:
        if len(samples) < 160:
            raise InputError("file", "too short")
        digest = source_digest(samples.tobytes())
        return MediaItem("audio", (), {"samples": samples}, POSITIONS, 1, POSITIONS, digest)

    def language(self, name: str) -> str:
        return language_name(name, self.languages)

    def prompt(
        self, item: MediaItem, *, context: str = "", language: str | None = None, continuation: str = ""
    ) -> Prompt:
        """The engine answers with the ids of the prompt, of which those of the audio have no text."""
        samples = item.arrays["samples"]
        silent = not samples.any()
        text = "" if silent else f"{f'{context}: ' if context else ''}{len(samples) / self.sample_rate:.2f} s."
        named = [] if language else [*f"language {None if silent else 'English'}".encode(), TAG]
        ids = np.array([*named, *text.encode(), *[257] * POSITIONS], np.int32)
        run = PlaceholderRange(0, len(ids) - POSITIONS, POSITIONS)
        return Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids), (item,), (run,))

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        return self.prompt(items[0])

    def max_new_tokens(self, item: MediaItem) -> int:
        return 500


class FakeAligner(FakeHearing):
    """Each word takes a quarter of a second, and a quarter is between two words."""

    def __init__(self) -> None:
        self.audio = None

    def words(self, text: str, language: str | None = None) -> list[str]:
        if language == "German":
            raise InputError("language", "German cannot be aligned")
        return list(split_words(text))

    def alignment_prompt(self, item: MediaItem, words: Sequence[str]) -> Prompt:
        return replace(self.prompt(item), marks=np.zeros(2 * len(words), np.int32))

    def aligned(self, words: Sequence[str], classes: np.ndarray) -> list[AlignedWord]:
        times = (classes / 4).tolist()
        return [AlignedWord(*one) for one in zip(words, times[::2], times[1::2], strict=True)]


def hearing_catalog(*, aligns: bool = False) -> Catalog:
    """A model that transcribes, one that chats and takes no audio, and, if `aligns`, an aligner."""
    checkpoint = Checkpoint("Qwen3-ASR-tiny", Path("/nowhere"))
    ears = HostedModel(("ears",), "chat", checkpoint, FakeHearing, 1, family_task="transcription")
    aligner = HostedModel(("aligner",), "chat", checkpoint, FakeAligner, 1, family_task="alignment")
    return Catalog([ears, *fake_catalog().models, *([aligner] if aligns else [])])
