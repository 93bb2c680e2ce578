"""Pages (KV blocks) of the cache: allocation, prefix sharing, eviction. All operations take constant time per page.

A page is free, in use (one or more holders), or cached: full, indexed by its prefix and held by nobody. When no page is
free, cached ones are evicted, least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np


class SlotPool:
    """Slots 1..num_slots; slot 0 is scratch, so state tensors have num_slots + 1 rows."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(1, num_slots + 1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        return self._free.popleft()

    def release(self, slot: int) -> None:
        assert 0 < slot <= self.num_slots and slot not in self._free
        self._free.append(slot)


Digest = bytes


def pages_for(positions: int, page_size: int) -> int:
    """Number of pages that hold this many positions."""
    return -(-positions // page_size)


def kv_slots(pages: Sequence[int], count: int, page_size: int) -> np.ndarray:
    """KV slots int64 [count] of the first positions of a sequence with these pages."""
    positions = np.arange(count)
    return np.asarray(pages, dtype=np.int64)[positions // page_size] * page_size + positions % page_size


def packed_chunks(chunks: Sequence[tuple[Sequence[int], int, int]], page_size: int) -> dict[str, np.ndarray]:
    """Where chunks of prompts, packed one behind the other, are in the cache, by the names of PagedBatch: slot_mapping
    int64 [n], cu_seqlens_q and cu_seqlens_k int32 [chunks + 1] and, where a chunk has cached context, context_slots
    int64 [keys]. A chunk is the positions [start, end) of a sequence: its pages, start and end."""
    keys = [kv_slots(pages, end, page_size) for pages, _, end in chunks]
    arrays = {
        "slot_mapping": np.concatenate([slots[start:] for slots, (_, start, _) in zip(keys, chunks, strict=True)]),
        "cu_seqlens_q": np.cumsum([0, *(end - start for _, start, end in chunks)], dtype=np.int32),
        "cu_seqlens_k": np.cumsum([0, *(end for _, _, end in chunks)], dtype=np.int32),
    }
    if any(start for _, start, _ in chunks):
        arrays["context_slots"] = np.concatenate(keys)
    return arrays


def scratch_chunks(lengths: Sequence[int], cached: int, page_size: int) -> dict[str, np.ndarray]:
    """packed_chunks of prompts of these lengths, each after `cached` keys, in the scratch page."""
    chunks = [([0] * pages_for(cached + length, page_size), cached, cached + length) for length in lengths]
    return packed_chunks(chunks, page_size)


def block_tables(sequences: Sequence[Sequence[int]], max_pages: int) -> np.ndarray:
    """The pages of each sequence, int32 [sequences, max_pages]; the scratch page where a sequence has none."""
    tables = np.zeros((len(sequences), max_pages), dtype=np.int32)
    for table, pages in zip(tables, sequences, strict=True):
        table[: len(pages)] = pages
    return tables


class PagePool:
    """Pages 1..num_pages-1; page 0 is scratch."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(1, num_pages))
        self._holders = [0] * num_pages
        self._digests: list[Digest | None] = [None] * num_pages
        self._index: dict[Digest, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.evicted: Callable[[Digest], object] = lambda digest: None
        """Called with the digest of each page that is evicted."""

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    def num_freed_by(self, holds: Iterable[int]) -> int:
        """Number of pages that nobody holds any more once these holds are released: a page for each of them."""
        return sum(self._holders[page] == count for page, count in Counter(holds).items())

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each, which must be available."""
        assert count <= self.num_available, f"{count} pages wanted, {self.num_available} available"
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            assert self._holders[page] == 0
            self._holders[page] = 1
        return pages

    def _evict(self) -> int:
        digest = self._digests[next(iter(self._cached))]
        assert digest is not None
        self.forget(digest)
        self.evicted(digest)
        return self._free.pop()

    def forget(self, digest: Digest) -> None:
        """Takes a page out of the prefix index, if it is there; one that nobody holds is free from then on."""
        if (page := self._index.pop(digest, None)) is None:
            return
        self._digests[page] = None
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def release(self, pages: Sequence[int]) -> None:
        """Removes one holder from each page. Pass the pages of a sequence in order, so that its last ones are evicted
        first."""
        for page in reversed(pages):
            assert self._holders[page] > 0
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._digests[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def index(self, page: int, digest: Digest) -> None:
        """Puts a full page, whose keys launched steps write, into the prefix index. If another page already holds that
        prefix, this one stays private."""
        assert self._holders[page] > 0 and self._digests[page] is None
        if digest not in self._index:
            self._index[digest] = page
            self._digests[page] = digest

    def __contains__(self, digest: Digest) -> bool:
        """Whether the prefix with this digest is indexed."""
        return digest in self._index

    def match(self, digests: Sequence[Digest]) -> int:
        """Number of leading pages of a prefix that are indexed."""
        for count, digest in enumerate(digests):
            if digest not in self._index:
                return count
        return len(digests)

    def share(self, digests: Sequence[Digest]) -> list[int]:
        """The indexed pages of these prefixes, with one more holder each."""
        pages = [self._index[digest] for digest in digests]
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1
        return pages

    def check(self) -> None:
        """Asserts that every page is in exactly one state."""
        used = sum(1 for holders in self._holders[1:] if holders)
        assert used + len(self._free) + len(self._cached) == self.num_pages - 1
        assert len(set(self._free) | set(self._cached)) == len(self._free) + len(self._cached)
        assert all(self._digests[page] is not None for page in self._cached)
        assert all(self._digests[page] is None for page in self._free)
        assert all(self._digests[page] == digest for digest, page in self._index.items())
