"""Waits for several computations at a time: their items as they come, or their results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar


async def shielded(work: asyncio.Future[T]) -> T:
    """The result of the work, which a cancellation here does not reach. What the work raises when nobody waits any more
    is ignored: asyncio.shield logs it with a traceback from Python 3.14 on."""
    work.add_done_callback(_retrieve)
    await asyncio.wait([work])
    return work.result()


def _retrieve(work: asyncio.Future[T]) -> None:
    """asyncio logs what nobody has retrieved."""
    if not work.cancelled():
        work.exception()


T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T]], ahead: int = 0) -> AsyncGenerator[tuple[int, T]]:
    """(index of the source, item) as they come, until all have ended. An error of one ends the others and is raised.

    ahead: items that may wait to be taken; 0: any number. A single source needs no task.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(ahead)

    async def collect(index: int, source: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(collect(index, source)) for index, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            taken = await queue.get()
            if isinstance(taken, Exception):
                raise taken
            if taken is None:
                running -= 1
            else:
                yield taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def all_results(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first failure ends the others and is raised, once they have ended."""
    if len(work) <= 1:  # a task would take two more turns of the loop
        return [await step for step in work]
    tasks = [asyncio.ensure_future(step) for step in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
