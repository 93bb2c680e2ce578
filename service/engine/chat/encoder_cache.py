"""Encoder outputs by content digest, under a byte limit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Entry:
    """The place of an item in the cache."""

    num_bytes: int
    """Bytes of its embeddings, which count from its first pin on."""
    pins: int = 0
    """Number of sequences that still need them."""
    embeds: Tensor | None = None
    """[num_embeds, embeds_width]; None until it is encoded."""


class EncoderCache:
    """The entries, by digest of the item. Pinned ones stay; the others are evicted, least recently used first, to make
    room.

    num_bytes: of all entries; pinned_bytes: of those with a pin.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.pinned_bytes = 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def embeds(self, digest: bytes) -> Tensor | None:
        """The item's embeddings [num_embeds, embeds_width]; None if it is unknown or not encoded yet."""
        entry = self._entries.get(digest)
        return entry.embeds if entry else None

    def try_pin(self, sizes: dict[bytes, int]) -> bool:
        """Pins the entries of these digests, all or none; sizes are in bytes. Unknown digests get an empty entry.

        False if they do not fit next to the pinned entries. If nothing is pinned, they are admitted even over the
        limit.
        """
        more = sum(
            size for digest, size in sizes.items() if digest not in self._entries or not self._entries[digest].pins
        )
        if self.pinned_bytes and self.pinned_bytes + more > self.limit_bytes:
            return False
        for digest, size in sizes.items():
            entry = self._entries.get(digest)
            if entry is None:
                entry = self._entries[digest] = Entry(size)
                self.num_bytes += size
            if not entry.pins:
                self.pinned_bytes += entry.num_bytes
            entry.pins += 1
            self._entries.move_to_end(digest)
        self._make_room()
        return True

    def unpin(self, digest: bytes) -> bool:
        """Removes one pin. True if the entry was dropped: it was empty, and no sequence waits for it any more."""
        entry = self._entries[digest]
        entry.pins -= 1
        if entry.pins:
            return False
        self.pinned_bytes -= entry.num_bytes
        if entry.embeds is None:
            self._drop(digest)
            return True
        self._make_room()
        return False

    def fill(self, digest: bytes, embeds: Tensor) -> None:
        """Stores the embeddings of a pinned entry."""
        entry = self._entries[digest]
        assert entry.pins and embeds.numel() * embeds.element_size() == entry.num_bytes
        entry.embeds = embeds

    def _make_room(self) -> None:
        while self.num_bytes > self.limit_bytes:
            victim = next((digest for digest, entry in self._entries.items() if not entry.pins), None)
            if victim is None:
                return
            self._drop(victim)

    def _drop(self, digest: bytes) -> None:
        self.num_bytes -= self._entries.pop(digest).num_bytes
