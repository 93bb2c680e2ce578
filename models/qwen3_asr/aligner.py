"""Qwen3-ForcedAligner: when each word of a transcript is said. Torch-free.

The prompt is the audio, then every word with two markers behind it, for its start and its end. One forward gives each
marker a class, which is a time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import MediaItem, Prompt, TokenizedChat
from models.interfaces.processor import AlignedWord
from models.qwen3_asr.config import Qwen3ASRConfig, load_config
from models.qwen3_asr.processor import Qwen3ASRProcessor
from models.text.chat_template import ChatTemplate
from models.text.processor import load_text
from models.text.tokenizer import Tokenizer

MARKER = "<timestamp>"
_LANGUAGES = "Cantonese Chinese English French German Italian Japanese Korean Portuguese Russian Spanish"
_FEW_STRAYS = 2
_IDEOGRAPHS = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF))
_KANA = ((0x3040, 0x30FF),)
_OTHER_SCRIPT = re.compile("[\u0370-\u03ff\u0530-\u10ff\u1200-\u1dff]")  # Greek, Arabic, Thai, ...


class Qwen3AlignerProcessor(Qwen3ASRProcessor):
    """Implements models.interfaces.processor.Aligner."""

    max_seconds = 180.0
    """As the makers cut audio for it."""

    def __init__(
        self, config: Qwen3ASRConfig, tokenizer: Tokenizer, template: ChatTemplate, generation: Mapping[str, Any]
    ) -> None:
        super().__init__(config, tokenizer, template, generation)
        self.audio = None
        if config.aligner is None:
            raise CheckpointError("config.json: classify_num or id2label is missing: this is no aligner")
        # The engine samples one class as it would a token, which nobody reads.
        self.vocab_size, self.stop_token_ids = config.aligner.classes, frozenset({0})
        self._class_ms = config.aligner.class_ms
        self._marker = config.aligner.marker_id
        if tokenizer.special_ids.get(MARKER) != self._marker:
            raise CheckpointError(f"config.json: timestamp_token_id {self._marker} is not {MARKER} of the tokenizer")

    def words(self, text: str, language: str | None = None) -> list[str]:
        if language is not None and language not in _LANGUAGES.split():
            raise InputError("language", f"{language} cannot be aligned; these can: {_LANGUAGES}")
        if language is None and _OTHER_SCRIPT.search(text):
            raise InputError("language", f"text in this script cannot be aligned; these languages can: {_LANGUAGES}")
        return list(split_words(text, kana=language == "Japanese"))

    def alignment_prompt(self, item: MediaItem, words: Sequence[str]) -> Prompt:
        special = self.tokenizer.special_ids
        ids = [special["<|audio_start|>"], self.config.audio_token_id, special["<|audio_end|>"]]
        for word in words:
            ids += [*self.tokenizer.encode_plain(word), self._marker, self._marker]
        chat = TokenizedChat(np.array(ids, dtype=np.int32), ((1, 0),))
        return self.expand_placeholders(chat, [item])

    def aligned(self, words: Sequence[str], classes: np.ndarray) -> list[AlignedWord]:
        times = repaired((classes.astype(np.int64) * self._class_ms).tolist())
        return [
            AlignedWord(word, start / 1000, end / 1000)
            for word, start, end in zip(words, times[::2], times[1::2], strict=True)
        ]

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        prompt = super().expand_placeholders(chat, items)
        return replace(prompt, marks=np.flatnonzero(prompt.token_ids == self._marker).astype(np.int32))

    def apply_chat_template(self, *_: object, **__: object) -> NoReturn:
        raise InputError("model", "the model aligns transcripts with audio and answers no messages")


def split_words(text: str, *, kana: bool = False) -> Iterator[str]:
    """Runs of letters, digits and apostrophes between white space, without what else they hold; ideographs singly.
    kana: whether kana are single, too, as the makers' dictionary of Japanese is not used."""
    single = (*_IDEOGRAPHS, *(_KANA if kana else ()))
    for run in text.split():
        word = ""
        for character in run:
            if character != "'" and unicodedata.category(character)[0] not in "LN":
                continue
            if any(first <= ord(character) <= last for first, last in single):
                yield from filter(None, (word, character))
                word = ""
            else:
                word += character
        if word:
            yield word


def repaired(times: Sequence[int]) -> list[int]:
    """Milliseconds that do not decrease, by the rule of the makers' package: a longest non-decreasing subsequence stays
    (the first that the quadratic recurrence finds); up to two strays in a row take the nearer neighbour's time, more
    are spread evenly between their neighbours."""
    if not times:
        return []
    values = np.array(times)
    kept = _longest_rise(values)
    out = values.copy()
    for before, after in zip([-1, *kept], [*kept, len(values)], strict=True):
        run = np.arange(before + 1, after)
        if not len(run):
            continue
        left = values[before] if before >= 0 else values[after]
        right = values[after] if after < len(values) else values[before]
        if len(run) <= _FEW_STRAYS:
            out[run] = np.where(run - before <= after - run, left, right)
        else:
            out[run] = left + (right - left) / (len(run) + 1) * (run - before)
    found: list[int] = out.tolist()
    return found


def _longest_rise(values: np.ndarray) -> list[int]:
    """Indices of a longest non-decreasing subsequence: earliest end, and of each element the earliest predecessor."""
    length, parent = np.ones(len(values), dtype=np.int64), np.full(len(values), -1)
    for index in range(1, len(values)):
        before = np.where(values[:index] <= values[index], length[:index], 0)
        best = int(before.argmax())
        if before[best]:
            length[index], parent[index] = before[best] + 1, best
    indices, index = list[int](), int(length.argmax())
    while index >= 0:
        indices.append(index)
        index = int(parent[index])
    return indices[::-1]


def load_processor(directory: Path) -> Qwen3AlignerProcessor:
    return Qwen3AlignerProcessor(load_config(directory), *load_text(directory))
