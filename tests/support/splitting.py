"""A whole text split at once."""

from __future__ import annotations

from service.api.spoken_text.text_splitting import Granularity, TextSplitter


def split_text(text: str, *, max_length: int, granularity: Granularity = "none") -> list[str]:
    """Segments of a whole text; see TextSplitter."""
    return TextSplitter(granularity, max_length=max_length).feed(text, final=True)
