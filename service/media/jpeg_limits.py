"""What makes a JPEG more work than its size says, found before it is decoded."""

from __future__ import annotations

import re

from PIL.JpegImagePlugin import MARKER

from models.interfaces.errors import InputError

JPEG, SCAN = b"\xff\xd8", b"\xff\xda"
MAX_SCANS, MAX_LARGE_SCANS = 500, 64
"""Of a JPEG, and of one with as many pixels as are allowed. Usual ones have one, or ten if they are progressive. A scan
may be a few bytes and still goes through all pixels: 20 MB of them would take most of an hour, 500 in a picture of 50
million pixels half a minute. The first number is that of libjpeg-turbo's own option."""
MAX_SEGMENTS = 500
"""Before the first scan, stray markers included. 20 MB have room for 320 full ones. Pillow keeps each, and copies what
it has of the EXIF data for every further piece, in time that grows with the square of their number."""
MAX_FILLING = 1_000_000
"""Bytes between segments before the first scan. Pillow goes through them one by one: 20 MB took five seconds."""
MOST_STEPS = 100_000
"""Segments that are looked at, scans among them."""

START_OF_SCAN, END_OF_IMAGE, ESCAPED = 0xFFDA, 0xFFD9, 0xFF00
WITHOUT_LENGTH = frozenset({0xFF01, 0xFFD8})
MARKER_AHEAD = re.compile(rb"\xff[^\xff]", re.DOTALL)
"""Behind the bytes that may fill the room before it. A pattern with these would go through a row of them from each one,
which takes hours where no marker follows."""
MARKER_BEHIND_SCAN = re.compile(rb"\xff[^\xff\x00\xd0-\xd7]", re.DOTALL)
"""What is no part of a scan's data."""


def check_segments(data: bytes, field: str) -> None:
    """InputError for too many segments of metadata, and for too much between them."""
    if not data.startswith(JPEG):
        return
    count, filling, _ = _segments(data)
    if count > MAX_SEGMENTS:
        raise InputError(field, f"the image has too many segments of metadata: at most {MAX_SEGMENTS} allowed")
    if filling > MAX_FILLING:
        raise InputError(field, f"the image has too many bytes between its segments: at most {MAX_FILLING} allowed")


def check_scans(data: bytes, pixels: int, max_pixels: int, field: str) -> None:
    """InputError for too many scans, each of which goes through all `pixels`."""
    most = min(MAX_SCANS, MAX_LARGE_SCANS * max_pixels // pixels)
    # Counted fast, with bytes that only look like a scan, as in what cameras append; then exactly where it matters.
    if data.startswith(JPEG) and data.count(SCAN) > most and (scans := _scans(data, field)) > most:
        raise InputError(field, f"the image has too many scans: {scans} given, at most {most} allowed at its size")


def components_of_first_scan(data: bytes) -> int:
    """How many of a JPEG's components its first scan has. If not all, libjpeg holds the coefficients of all of them."""
    place = _segments(data)[2] + 2  # behind the length of the scan's header
    return data[place] if place < len(data) else 0


def _segments(data: bytes) -> tuple[int, int, int]:
    """Number of segments before the first scan, and of markers that have no place there, as Pillow finds them; it is
    not counted beyond MAX_SEGMENTS + 1. Number of bytes between them. And the place behind the first scan's marker."""
    count, filling, place = 0, 0, len(JPEG)
    while count <= MAX_SEGMENTS:
        if (found := MARKER_AHEAD.search(data, place)) is None:
            return count, filling + max(0, len(data) - place), len(data)
        filling += found.start() - place
        marker, place = _marker(data, found), found.end()
        if marker == START_OF_SCAN or (marker not in MARKER and marker != ESCAPED):
            break  # others are refused by Pillow
        count += 1
        if marker in MARKER and MARKER[marker][2] is not None:
            place += _length(data, place)
    return count, filling, place


def _scans(data: bytes, field: str) -> int:
    """Number of scans up to the end of the picture, as libjpeg finds them. InputError for so many segments between them
    that they cannot be counted in a short time."""
    count, place = 0, len(JPEG)
    for _ in range(MOST_STEPS):
        found = MARKER_BEHIND_SCAN.search(data, place)
        if found is None or (marker := _marker(data, found)) == END_OF_IMAGE:
            return count
        place = found.end()
        if marker not in WITHOUT_LENGTH:
            count += marker == START_OF_SCAN
            place += _length(data, place)
    raise InputError(field, f"the image has too many segments between its scans: at most {MOST_STEPS} allowed")


def _marker(data: bytes, found: re.Match[bytes]) -> int:
    return int.from_bytes(data[found.end() - 2 : found.end()], "big")


def _length(data: bytes, place: int) -> int:
    return max(2, int.from_bytes(data[place : place + 2], "big"))
