"""What the page pool evicts, and what it does not share. Its holders: tests/engine/chat/test_scheduler_machine.py."""

from __future__ import annotations

import pytest

from service.engine.core.pages import PagePool


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
