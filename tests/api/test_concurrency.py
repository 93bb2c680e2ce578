"""Several streams as one, and several results: order, errors, and that nothing runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from service.system.concurrency import all_results, merged


class Source:
    """Yields `items`; an exception among them is raised. `ended` once it was closed or came to its end."""

    def __init__(self, *items: int | Exception, endless: bool = False) -> None:
        self.taken = 0
        self.ended = False
        self._items, self._endless = items, endless

    async def stream(self) -> AsyncGenerator[int]:
        try:
            for item in self._items:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                self.taken += 1
                yield item
            while self._endless:
                await asyncio.sleep(0)
                self.taken += 1
                yield 0
        finally:
            self.ended = True


@pytest.mark.parametrize("ahead", [0, 1])
async def test_items_of_all_with_their_source(ahead: int) -> None:
    sources = [Source(1, 2, 3), Source(), Source(10, 20)]
    taken = [item async for item in merged([source.stream() for source in sources], ahead)]
    assert sorted(taken) == [(0, 1), (0, 2), (0, 3), (2, 10), (2, 20)]
    assert [item for index, item in taken if index == 0] == [1, 2, 3]
    assert all(source.ended for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_an_error_of_one_ends_the_others(others: int) -> None:
    sources = [Source(1, ValueError("no")), *(Source(endless=True) for _ in range(others))]
    with pytest.raises(ValueError, match="no"):
        async for _ in merged([source.stream() for source in sources]):
            pass
    assert all(source.ended for source in sources)


@pytest.mark.parametrize("others", [0, 1])
async def test_no_source_runs_further_ahead_than_allowed_and_leaving_ends_all(others: int) -> None:
    sources = [Source(endless=True) for _ in range(1 + others)]
    async with aclosing(merged([source.stream() for source in sources], 3)) as items:
        await anext(items)
        for _ in range(100):
            await asyncio.sleep(0)
        assert all(source.taken <= 3 + 2 for source in sources)
    assert all(source.ended for source in sources)


async def test_a_failure_ends_the_other_work_before_it_is_raised() -> None:
    ended = False

    async def fail() -> None:
        raise ValueError("first")

    async def go_on() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    with pytest.raises(ValueError, match="first"):
        await all_results([go_on(), fail()])
    assert ended
