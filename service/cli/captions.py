"""Captions of spoken text as files: SubRip (SRT) and WebVTT (W3C)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.cli.outputs import is_standard_output, write_to_standard_output

LONGEST = 84
"""Characters that are shown at once: two lines of 42, as is usual for broadcasters."""
WIDE = "\u2e80"
"""Characters from this code point on count as two."""


@dataclass(frozen=True)
class Cue:
    """start, end: seconds."""

    start: float
    end: float
    text: str


def cues(segments: Iterable[dict[str, Any]]) -> list[Cue]:
    """segments: events speech.audio.segment with words. A segment with more text than can be shown at once is cut
    between words, at times that are estimates; its own begin and end are exact."""
    return [cue for segment in segments for cue in _shown(segment)]


def _shown(segment: dict[str, Any]) -> Iterator[Cue]:
    groups = _grouped(segment["words"])
    starts = [segment["start"], *(group[0]["start"] for group in groups[1:])]
    text, at = segment["text"], 0
    for group, start, end in zip(groups, starts, [*starts[1:], segment["end"]], strict=True):
        begin = text.index(group[0]["word"], at)
        for word in group:
            at = text.index(word["word"], at) + len(word["word"])
        yield Cue(start, end, text[begin:at])


def _grouped(words: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: list[list[dict[str, Any]]] = []
    room = 0
    for word in words:
        length = _width(word["word"]) + 1
        if length > room or not groups:
            groups.append([])
            room = LONGEST + 1
        groups[-1].append(word)
        room -= length
    return groups


def _width(text: str) -> int:
    return sum(2 if character >= WIDE else 1 for character in text)


def write_srt(path: Path, shown: Sequence[Cue]) -> None:
    blocks = [
        f"{number}\n{_time(cue.start, ',')} --> {_time(cue.end, ',')}\n{cue.text}\n"
        for number, cue in enumerate(shown, 1)
    ]
    _write(path, "\n".join(blocks))


def write_vtt(path: Path, shown: Sequence[Cue]) -> None:
    blocks = [f"{_time(cue.start, '.')} --> {_time(cue.end, '.')}\n{_escaped(cue.text)}\n" for cue in shown]
    _write(path, "\n".join(["WEBVTT\n", *blocks]))


def _write(path: Path, text: str) -> None:
    if is_standard_output(path):
        write_to_standard_output(iter([text.encode()]))
    else:
        path.write_text(text, "utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
