"""Whether audio was cut short, where its container tells how much there was.

libsndfile and FFmpeg read what is left of a WAV, MP3, Matroska or WebM file without a word; they refuse cut FLAC, AAC
and M4A themselves. Nothing is known of what was streamed: MP3 without a Xing header, WebM of unknown size. Nor of Ogg:
its last page should have a flag, but valid files lack it, Android's recordings among them.
"""

from __future__ import annotations

from service.media.file_formats import MATROSKA

# From here on a WAV's size stands for "unknown", as programs write it that do not seek back to the header.
UNKNOWN_WAV_SIZE = 0x7FFF_0000
SLIP = 100
"""A file may lack this fraction (1 / n) of what it tells: some programs count the header, too."""
SEGMENT = b"\x18\x53\x80\x67"
_XING_PLACES = (13, 21, 36)
"""Behind the head and the side information of an MP3's first frame: MPEG-2 mono; MPEG-1 mono, MPEG-2 stereo; MPEG-1
stereo."""

Extent = tuple[int, int]
"""(where it begins, bytes from there as the container tells them)"""


def is_cut_short(data: bytes) -> bool:
    """Whether more than 1 / SLIP is missing of what the header of a WAV, MP3, Matroska or WebM file tells."""
    extent = _samples_of_wav(data) or _segment_of_matroska(data) or _frames_of_mp3(data)
    if extent is None:
        return False
    begin, size = extent
    return size - (len(data) - begin) > size // SLIP


def _samples_of_wav(data: bytes) -> Extent | None:
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    place = 12
    while place + 8 <= len(data):
        name, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        place += 8
        if name == b"data":
            return (place, size) if size < UNKNOWN_WAV_SIZE else None
        place += size + size % 2
    return None


def _segment_of_matroska(data: bytes) -> Extent | None:
    """The element behind the file's head, which holds all else. A live recording does not tell its size (RFC 9559)."""
    head = _ebml_extent(data, len(MATROSKA)) if data.startswith(MATROSKA) else None
    if head is None:
        return None
    begin, size = head
    segment = begin + size
    return _ebml_extent(data, segment + len(SEGMENT)) if data.startswith(SEGMENT, segment) else None


def _ebml_extent(data: bytes, place: int) -> Extent | None:
    """The data of an element whose size is written at `place`; None if the size is unknown (RFC 8794)."""
    first = data[place] if place < len(data) else 0
    length = 9 - first.bit_length() if first else 0
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(data[place : place + length], "big") & unknown
    return None if size == unknown else (place + length, size)


def _frames_of_mp3(data: bytes) -> Extent | None:
    """All of them, as the Xing header in the first frame tells, which encoders write when they have made the others."""
    place = 0
    if data[:3] == b"ID3":
        place = 10 + sum(byte << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
    if data[place : place + 1] != b"\xff":
        return None
    for header in (place + offset for offset in _XING_PLACES):
        if data[header : header + 4] in (b"Xing", b"Info"):
            flags = int.from_bytes(data[header + 4 : header + 8], "big")
            size = header + 8 + 4 * (flags & 1)  # behind the number of frames, if that is there
            return (place, int.from_bytes(data[size : size + 4], "big")) if flags & 2 else None
    return None
