"""What of a spoken answer has been heard: exact between segments, estimated from the lengths of words within one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
"""A word, or a character of a script that writes none apart. No underscore is part of one: what words begin with never
matches what lies between them, so a search takes linear time."""
CLOSING = re.compile(r"[^\w\s]*")
CHARACTERS_PER_SECOND = 15.0
"""Of speech of which no segment is complete."""
NEAR, FAR = 200, 4096
"""Characters of a transcript in which the next word, and the beginning of the next segment, are looked for: what is not
spoken (code, links) may stand between them."""
OPENING_WORDS = 3
"""Of a segment: so many together tell where in the transcript it begins."""


@dataclass(frozen=True)
class Playback:
    """Of a spoken answer. texts: of its segments, as they were spoken: without markup, numbers in words. segments:
    where each that is complete begins and ends, in seconds of audio; pauses lie between them. seconds: all of the
    audio. whole: all of the transcript was spoken. begun: where the segment after those begins, if it does."""

    texts: Sequence[str]
    segments: Sequence[tuple[float, float]]
    seconds: float
    whole: bool
    begun: float | None = None


def heard(transcript: str, playback: Playback, seconds: float) -> str:
    """The beginning of the transcript that is heard in the first `seconds` of its audio, whole words only."""
    if playback.whole and seconds >= playback.seconds:
        return transcript
    cursor, last = 0, 0.0
    for index, text in enumerate(playback.texts):
        complete = index < len(playback.segments)
        begin, end = playback.segments[index] if complete else _expected(playback, text, last)
        words = list(WORD.finditer(text))
        cursor = _segment_start(transcript, words, cursor)
        for word in words:
            if begin + (end - begin) * word.end() / len(text) > seconds:
                return transcript[:cursor].rstrip()
            at = transcript.find(word[0], cursor, cursor + NEAR)
            cursor = cursor if at < 0 else at + len(word[0])
        closing = CLOSING.match(transcript, cursor)
        cursor = closing.end() if closing else cursor
        if not complete:
            break
        last = end
    return transcript[:cursor].rstrip()


def _expected(playback: Playback, text: str, last: float) -> tuple[float, float]:
    """Begin and end of the first segment that is not complete: at the pace of those before it, the last of which ended
    at `last`, and not before the audio that is there."""
    begin = last if playback.begun is None else playback.begun
    spoken = sum(map(len, playback.texts[: len(playback.segments)]))
    sounding = sum(end - start for start, end in playback.segments)
    pace = sounding / spoken if spoken else 1 / CHARACTERS_PER_SECOND
    return begin, max(begin + pace * len(text), playback.seconds)


def _segment_start(transcript: str, words: Sequence[re.Match[str]], cursor: int) -> int:
    """Where a segment begins at or after the cursor; the cursor where it is written otherwise than it is spoken."""
    opening = r"[\W_]*".join(re.escape(word[0]) for word in words[:OPENING_WORDS])
    found = re.compile(opening).search(transcript, cursor, cursor + FAR) if opening else None
    return found.start() if found else cursor
