"""Languages and transcripts of Qwen3-ASR, by the rules of the makers' package qwen-asr. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from models.interfaces.errors import InputError
from models.interfaces.processor import Transcript

TEXT_TAG = "<asr_text>"
"""What stands between the language and the text; one token."""
LANGUAGES = {
    "ar": "Arabic",
    "yue": "Cantonese",
    "zh": "Chinese",
    "cs": "Czech",
    "da": "Danish",
    "nl": "Dutch",
    "en": "English",
    "fil": "Filipino",
    "fi": "Finnish",
    "fr": "French",
    "de": "German",
    "el": "Greek",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "fa": "Persian",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "es": "Spanish",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
}
_OTHER_CODES = {"tl": "fil"}
_LANGUAGE = "language "
_CHARACTER_LOOP = re.compile(r"(.)\1{20,}", re.DOTALL)
_PATTERN_LOOP = re.compile(r"(?=.{40})(.{1,20}?)\1{19,}", re.DOTALL)
_WITHOUT_SPACES = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
"""Chinese and Japanese characters and their punctuation."""


def language_name(asked: str, known: Mapping[str, str]) -> str:
    """The model's name of a language: of a name, or of an ISO code, with a region or without. known: names by code."""
    code = asked.strip().lower().replace("_", "-").partition("-")[0]
    code = _OTHER_CODES.get(code, code)
    if code in known:
        return known[code]
    name = asked.strip().capitalize()
    if name in known.values():
        return name
    listed = ", ".join(f"{code} ({name})" for code, name in known.items())
    raise InputError("language", f"{asked!r} is not a language of this model, which knows {listed}")


def read_transcript(raw: str, language: str | None = None) -> Transcript:
    """models.interfaces.processor.AudioInput.transcript."""
    raw = without_loops(raw.strip())
    if language is not None:
        return Transcript(language, raw)
    before, tag, text = raw.partition(TEXT_TAG)
    if not tag:
        return Transcript(None, raw)
    if "language none" in before.lower():
        return Transcript(None, text.strip())
    lines = (line.strip() for line in before.splitlines())
    named = next((line[len(_LANGUAGE) :] for line in lines if line.lower().startswith(_LANGUAGE)), "")
    return Transcript(named.strip().capitalize() or None, text.strip())


def without_loops(text: str) -> str:
    """One of what stands there more than 20 times in a row: a character, or a pattern of up to 20."""
    return _PATTERN_LOOP.sub(r"\1", _CHARACTER_LOOP.sub(r"\1", text))


def joined(transcripts: Sequence[Transcript]) -> Transcript:
    """models.interfaces.processor.AudioInput.joined."""
    text, languages = "", list[str]()
    for one in transcripts:
        seam = text[-1:] + one.text[:1]
        text += " " * (len(seam) == 2 and not _WITHOUT_SPACES.search(seam)) + one.text
        if one.language is not None and languages[-1:] != [one.language]:
            languages.append(one.language)
    return Transcript(",".join(languages) or None, text)
