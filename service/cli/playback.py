"""Audio of the server on this machine's loudspeaker, while it arrives. Needs the extra `play` (PortAudio)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from service.cli.client import is_standard_output, write_to_standard_output
from service.system.children import PYTHON

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


WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
"""Header of a file of 16-bit PCM: RIFF, size, WAVE, fmt, 16, format, channels, rate, bytes per second, ..., data,
size."""
INSTALL = f"{PYTHON} -m pip install 'reprise-server[play]'"


class PlaybackError(Exception):
    """Audio cannot be played here; the message says what would help."""


class Speaker(Protocol):
    def write(self, pcm: bytes) -> object:
        """Blocks until there is room for the 16-bit samples."""


@contextmanager
def speaker(rate: int, channels: int) -> Iterator[Speaker]:
    """A stream of 16-bit samples, played to its end on leaving. PlaybackError without library or device."""
    sounddevice = _library()
    try:
        stream = sounddevice.RawOutputStream(samplerate=rate, channels=channels, dtype="int16")
        stream.start()
    except sounddevice.PortAudioError as error:
        raise PlaybackError(f"no sound can be played here ({error})") from error
    try:
        yield stream
    except BaseException:
        stream.abort()
        raise
    else:
        stream.stop()  # after what is queued
    finally:
        stream.close()


def require_playback() -> None:
    """Raises PlaybackError if nothing could be played, before any request to a server."""
    sounddevice = _library()
    try:
        sounddevice.query_devices(kind="output")
    except (sounddevice.PortAudioError, ValueError) as error:
        raise PlaybackError(f"this machine has no audio output ({error})") from error


def play(wav: Iterable[bytes]) -> None:
    """Plays the chunks of a WAV file as they arrive. PlaybackError also if they end within its header."""
    chunks = iter(wav)
    head = b""
    while len(head) < WAV_HEADER.size:
        if (chunk := next(chunks, None)) is None:
            raise PlaybackError(f"the audio ended after {len(head)} bytes, within its WAV header")
        head += chunk
    _, _, _, _, _, _, channels, rate, *_ = WAV_HEADER.unpack_from(head)
    frame = 2 * channels
    with speaker(rate, channels) as stream:
        rest = head[WAV_HEADER.size :]
        for chunk in chunks:
            rest = _write_frames(stream, rest + chunk, frame)
        _write_frames(stream, rest, frame)


def _write_frames(stream: Speaker, pcm: bytes, frame: int) -> bytes:
    """The rest of the last frame."""
    whole = len(pcm) // frame * frame
    if whole:
        stream.write(pcm[:whole])
    return pcm[whole:]


def _library() -> Any:
    """The module sounddevice, which is optional."""
    try:
        import sounddevice
    except ImportError as error:
        raise PlaybackError(f"playing needs another package: {INSTALL}") from error
    except OSError as error:  # the wheel for Linux has no PortAudio of its own
        raise PlaybackError(f"playing needs PortAudio (Debian: libportaudio2): {error}") from error
    return sounddevice
