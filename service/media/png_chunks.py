"""What of a PNG is needed to see it. The rest may cost more than the picture: Pillow keeps copies of every text, and
refuses pictures with a large compressed one."""

from __future__ import annotations

import re

from models.interfaces.errors import InputError

PNG = b"\x89PNG\r\n\x1a\n"
LAST_CHUNK = b"IEND"
NEEDED = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"eXIf", b"acTL", b"fcTL", b"fdAT"})
TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
ORIENTING = (b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Names of texts that may say which side is up."""
KIND = re.compile(rb"\w{4}")
"""What Pillow takes for a kind of chunk; the standard has letters alone."""
HEAD, TAIL = 8, 4
"""Bytes of a chunk before and behind its data: length and kind, and the checksum."""
MAX_CHUNKS = 100_000
"""20 MB have room for 1.6 million empty ones, which took four seconds."""


def without_metadata(data: bytes, field: str) -> bytes:
    """A PNG without its metadata, but for what may turn the picture; other data as it is. InputError for too many
    chunks. What cannot be read as a chunk stays, so that Pillow can judge it."""
    if not data.startswith(PNG):
        return data
    kept: list[memoryview] = []
    view, start, place = memoryview(data), 0, len(PNG)
    for _ in range(MAX_CHUNKS):
        kind = data[place + 4 : place + HEAD]
        end = place + HEAD + int.from_bytes(data[place : place + 4], "big") + TAIL
        if kind == LAST_CHUNK or not KIND.fullmatch(kind) or end > len(data):
            return b"".join([*kept, view[start:]]) if kept else data
        if kind not in NEEDED and not (kind in TEXTS and _name(data, place) in ORIENTING):
            kept.append(view[start:place])
            start = end
        place = end
    raise InputError(field, f"the image has too many chunks: at most {MAX_CHUNKS} allowed")


def _name(data: bytes, place: int) -> bytes:
    """Of the text in the chunk at `place`: up to 79 bytes, and a zero behind them."""
    return data[place + HEAD : place + HEAD + 80].partition(b"\0")[0]
