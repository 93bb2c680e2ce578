"""First bytes of files: a container that cannot be opened is damaged, not of an unknown format; a picture of a format
that is not supported is called by its name, whatever the file is called."""

from __future__ import annotations

BOXES, MATROSKA = (b"ftyp", b"moov", b"mdat", b"wide"), b"\x1a\x45\xdf\xa3"
"""How files of MP4 and MOV begin, behind a length, and of MKV and WebM."""


def is_container(data: bytes) -> bool:
    """Whether this is MP4, MOV, M4A, Matroska or WebM, or the beginning of one."""
    return data[4:8] in BOXES or data.startswith(MATROSKA)


_PICTURES = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG", "GIF": b"GIF8"}
_OTHER_PICTURES = {
    "HEIC": (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypmif1", b"ftypmsf1"),
    "AVIF": (b"ftypavif", b"ftypavis"),
    "JPEG XL": (b"JXL ",),
}
"""Formats that phones and programs save under the name of another one, by what stands behind four bytes."""


def other_picture(data: bytes) -> str:
    """The name of a picture's format that is not supported; empty if it is not known."""
    if data.startswith((b"II*\0", b"MM\0*")):
        return "TIFF"
    return next((name for name, starts in _OTHER_PICTURES.items() if data[4:].startswith(starts)), "")


def supported_picture(data: bytes) -> str:
    """The name of the format of a picture that is supported; empty for anything else, and for a BMP."""
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for name, start in _PICTURES.items() if data.startswith(start)), "")
