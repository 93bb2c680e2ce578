"""Audio of the server on this machine's loudspeaker, while it arrives. Needs the extra `play` (PortAudio)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from service.system.children import PYTHON

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
