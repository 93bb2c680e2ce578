"""What the cache of encoder outputs evicts, and what pins keep."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.engine.chat.encoder import EncoderCache

LIMIT = 100
SIZES = {b"a": 40, b"b": 40, b"c": 60, b"d": 160}


def embeds(size: int) -> torch.Tensor:
    return torch.zeros(size // 4)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(LIMIT)
        self.pins: list[bytes] = []

    @rule(digests=st.sets(st.sampled_from(sorted(SIZES)), min_size=1, max_size=2))
    def pin(self, digests: set[bytes]) -> None:
        before = self.cache.pinned_bytes
        more = sum(SIZES[d] for d in digests if d not in self.pins)
        pinned = self.cache.try_pin({d: SIZES[d] for d in digests})
        assert pinned == (not before or before + more <= LIMIT)
        if pinned:
            self.pins += digests

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        if self.pins:
            digest = data.draw(st.sampled_from(self.pins))
            if self.cache.embeds(digest) is None:
                self.cache.fill(digest, embeds(SIZES[digest]))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            digest = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
            had_content = self.cache.embeds(digest) is not None
            assert self.cache.unpin(digest) == (digest not in self.pins and not had_content)

    @invariant()
    def bytes_are_accounted(self) -> None:
        assert self.cache.pinned_bytes == sum(SIZES[d] for d in set(self.pins))
        assert self.cache.num_bytes <= max(LIMIT, self.cache.pinned_bytes)
        assert sum(entry.pins > 0 for entry in self.cache._entries.values()) == len(set(self.pins))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_the_least_recently_pinned_content_makes_room() -> None:
    cache = EncoderCache(LIMIT)
    for digest in (b"a", b"b"):
        assert cache.try_pin({digest: 40})
        cache.fill(digest, embeds(40))
        cache.unpin(digest)
    assert cache.try_pin({b"a": 40})
    assert cache.try_pin({b"c": 60})
    assert cache.embeds(b"a") is not None and cache.embeds(b"b") is None
