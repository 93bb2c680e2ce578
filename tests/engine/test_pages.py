"""The page pool against a model that keeps everything in plain dictionaries."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.engine.core.pages import PagePool

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences hold pages; their full pages carry digests of small prefixes, so that sharing is frequent."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, 4)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """Digest of every indexed page, as the model believes."""

    @rule(digests=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3), more=st.integers(0, 4))
    def admit(self, digests: list[bytes], more: int) -> None:
        digests = [b"".join(digests[: i + 1]) for i in range(len(digests))]
        hits = self.pool.match(digests)
        shared = self.pool.share(digests[:hits])
        assert [self.content[page] for page in shared] == digests[:hits]
        if len(digests) - hits + more > self.pool.num_available:
            self.pool.release(shared)
            return
        own = self.pool.allocate(len(digests) - hits + more)
        assert 0 not in own and not set(own) & {page for pages in self.held for page in pages}
        for page in own:
            self.content.pop(page, None)
        for page, digest in zip(own, digests[hits:], strict=False):
            known = digest in self.content.values()
            self.pool.index(page, digest)
            if not known:
                self.content[page] = digest
        self.held.append(shared + own)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        used = {page for pages in self.held for page in pages}
        assert self.pool.num_used == len(used)
        assert self.pool.num_available == NUM_PAGES - 1 - len(used)
        live = {page: digest for page, digest in self.content.items() if self.pool.match([digest])}
        assert set(self.content) - set(live) <= set(range(1, NUM_PAGES)) - used
        self.content = live


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_page_is_evicted_and_the_last_of_a_prefix_first() -> None:
    pool = PagePool(5, 4)
    first = pool.allocate(2)
    pool.index(first[0], b"1")
    pool.index(first[1], b"12")
    second = pool.allocate(2)
    pool.index(second[0], b"2")
    pool.index(second[1], b"22")
    pool.release(first)
    pool.release(second)
    assert pool.num_cached == 4
    pool.release(pool.share([b"1", b"12"]))
    pool.allocate(1)
    assert (pool.match([b"2", b"22"]), pool.match([b"1", b"12"])) == (1, 2)
    pool.allocate(2)
    assert (pool.match([b"2"]), pool.match([b"1", b"12"])) == (0, 1)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 available"):
        pool.allocate(2)


def test_an_equal_page_stays_private() -> None:
    pool = PagePool(4, 4)
    first, second = pool.allocate(2)
    pool.index(first, b"x")
    pool.index(second, b"x")
    assert pool.share([b"x"]) == [first]
    pool.release([second])
    assert pool.num_cached == 0 and pool.num_available == 2
