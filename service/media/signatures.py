"""First bytes of containers: a file that begins with them and cannot be opened is damaged, not of an unknown format."""

from __future__ import annotations

BOXES, MATROSKA = (b"ftyp", b"moov", b"mdat", b"wide"), b"\x1a\x45\xdf\xa3"
"""How files of MP4 and MOV begin, behind a length, and of MKV and WebM."""


def is_container(data: bytes) -> bool:
    """Whether this is MP4, MOV, M4A, Matroska or WebM, or the beginning of one."""
    return data[4:8] in BOXES or data.startswith(MATROSKA)
