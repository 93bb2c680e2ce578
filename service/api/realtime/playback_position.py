"""How much of a spoken answer has been heard: exact between segments, estimated from the lengths of words within
one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
"""A word, or a character of a script without spaces. Underscores are not part of words: the first character of a word
never matches what lies between words, so a search takes linear time."""
CLOSING = re.compile(r"[^\w\s]*")
CHARACTERS_PER_SECOND = 15.0
"""Characters per second assumed while no segment of the speech is complete."""
NEAR, FAR = 200, 4096
"""Characters of a transcript in which the next word, and the beginning of the next segment, are searched: unspoken text
(code, links) may lie in between."""
OPENING_WORDS = 3
"""Number of a segment's first words that locate its begin in the transcript."""


@dataclass(frozen=True)
class Playback:
    """The timing of a spoken answer. texts: those of its segments as they were spoken: without markup, numbers in
    words. segments: begin and end of each complete one, in seconds of audio, with pauses between them. seconds: length
    of the audio. whole: the whole transcript was spoken. begun: begin of the next segment, if it has begun."""

    texts: Sequence[str]
    segments: Sequence[tuple[float, float]]
    seconds: float
    whole: bool
    begun: float | None = None


def heard(transcript: str, playback: Playback, seconds: float) -> str:
    """The beginning of the transcript that is heard in the first `seconds` of its audio, in whole words."""
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
    """Where a segment begins at or after the cursor; the cursor itself if the segment is written differently from how
    it is spoken."""
    opening = r"[\W_]*".join(re.escape(word[0]) for word in words[:OPENING_WORDS])
    found = re.compile(opening).search(transcript, cursor, cursor + FAR) if opening else None
    return found.start() if found else cursor
