"""The alphabet of byte-level tokenizers, as GPT-2's published encoder.py makes it."""

from __future__ import annotations


def byte_alphabet() -> list[str]:
    """A printable character for each of the 256 bytes: its Latin-1 character, or the next one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]
