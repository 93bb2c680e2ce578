"""The prefix cache of speech: pages with the keys of a voice's reference, which the streams of that voice share.

A prompt begins with its reference, so the keys of pages that hold nothing else depend on the reference alone. They stay
in the cache until their pages are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from service.engine.pages import PagePool, pages_for
from service.engine.speech.prefill import PrefillChunk
from service.engine.speech.stream import Stream, VoicePage


def voice_pages(token_ids: np.ndarray, reference: np.ndarray, adapter: str, page_size: int) -> tuple[VoicePage, ...]:
    """The leading pages of a prompt that hold nothing but the token that begins a reference, and its patches.

    token_ids int64 [n]: the prompt; reference float32 [patches, frames, channels], at positions 1 and later. adapter:
    its name, since it changes keys; "" for none.
    """
    if not len(reference):
        return ()
    digest = hashlib.blake2b(adapter.encode(), digest_size=16).digest()
    pages = []
    for start in range(0, (1 + len(reference)) // page_size * page_size, page_size):
        end = start + page_size
        patches = reference[max(0, start - 1) : end - 1]
        content = hashlib.blake2b(digest, digest_size=16)
        content.update(token_ids[start:end].tobytes())
        content.update(np.ascontiguousarray(patches).tobytes())
        digest = content.digest()
        pages.append(VoicePage(digest, len(patches)))
    return tuple(pages)


class VoicePages:
    """Shares pages of `pool` among the streams of a voice."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def look_up(self, stream: Stream) -> None:
        """Notes how much of a waiting stream's prompt is in the cache now."""
        count = self._pool.match([page.digest for page in stream.voice])
        stream.prefilled = count * self._pool.page_size
        stream.patches_before = sum(page.patches for page in stream.voice[:count])

    def allocate(self, streams: Sequence[Stream]) -> None:
        """Pages for streams that are admitted together, up to their length caps. What was found for them is shared
        before any page is evicted."""
        for stream in streams:
            found = stream.voice[: stream.prefilled // self._pool.page_size]
            stream.pages = self._pool.share([page.digest for page in found])
        for stream in streams:
            needed = pages_for(stream.positions, self._pool.page_size)
            stream.pages += self._pool.allocate(needed - len(stream.pages))

    def index_chunk(self, chunk: PrefillChunk) -> None:
        """Lets other streams share the pages that a launched chunk fills."""
        stream, size = chunk.stream, self._pool.page_size
        for number in range(chunk.start // size, min((chunk.start + chunk.length) // size, len(stream.voice))):
            self._pool.index(stream.pages[number], stream.voice[number].digest)
