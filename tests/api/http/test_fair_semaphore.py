"""Clients get a semaphore in rotation, whatever each of them asks for."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers

from service.api.http.admission import Admission
from service.api.http.middleware import Guards, HostRule, KeyRing
from service.api.http.record import RequestRecord
from service.confined.workers import FairSemaphore
from service.metrics.metrics import Metrics


class Askers:
    """Requests that note when they got the semaphore and hold it until they are let go."""

    def __init__(self, semaphore: FairSemaphore) -> None:
        self._semaphore = semaphore
        self.served: list[str] = []
        self._go = asyncio.Semaphore(0)

    def ask(self, client: str, name: str) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._hold(client, name))

    async def _hold(self, client: str, name: str) -> None:
        async with self._semaphore.acquire(client):
            self.served.append(name)
            await self._go.acquire()

    async def settle(self) -> list[str]:
        """Who was served, once nobody can go further by itself."""
        for _ in range(10):
            await asyncio.sleep(0)
        return self.served

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self._go.release()


async def test_one_of_another_client_waits_for_no_more_than_one_of_those_before_it() -> None:
    askers = Askers(FairSemaphore(1))
    tasks = [askers.ask("many", f"many {number}") for number in range(4)]
    await askers.settle()
    tasks += [askers.ask("one", "one"), askers.ask("two", "two 0"), askers.ask("two", "two 1")]
    await askers.settle()
    for _ in tasks:
        askers.let_go()
        await askers.settle()
    assert askers.served == ["many 0", "many 1", "one", "two 0", "many 2", "two 1", "many 3"]
    await asyncio.gather(*tasks)


async def test_one_client_holds_no_more_than_each_may() -> None:
    askers = Askers(FairSemaphore(3, each=2))
    tasks = [askers.ask("many", f"many {number}") for number in range(4)]
    assert await askers.settle() == ["many 0", "many 1"]
    tasks += [askers.ask("one", "one 0"), askers.ask("one", "one 1"), askers.ask("two", "two")]
    assert (await askers.settle())[2:] == ["one 0"]
    askers.let_go()  # of the first of many, which may have one more, and comes first
    assert (await askers.settle())[3:] == ["many 2"]
    askers.let_go(2)  # of the second of many, and of one
    assert (await askers.settle())[4:] == ["one 1", "two"]
    askers.let_go(10)
    await asyncio.gather(*tasks)
    assert askers.served[6:] == ["many 3"]


async def test_when_granted_to_who_is_cancelled_at_once_it_goes_on() -> None:
    askers = Askers(FairSemaphore(1))
    first, second, third = askers.ask("a", "first"), askers.ask("b", "second"), askers.ask("c", "third")
    await askers.settle()
    first.cancel()
    await asyncio.sleep(0)  # It is released here, and granted to the second.
    second.cancel()
    assert await askers.settle() == ["first", "third"]
    askers.let_go()
    await third


def test_a_client_is_known_by_its_key_or_else_by_its_address() -> None:
    seen: list[str] = []
    ticket = Admission(1, 1, Metrics()).ticket("chat")
    for keys, key in ((("one", "two"), b"one"), (("one", "two"), b"two"), ((), b"one")):
        record = RequestRecord("id", "chat", ticket, "10.0.0.1")
        scope = {"type": "http", "path": "/v1/x", "headers": [(b"authorization", b"Bearer " + key)]}
        guards = Guards(HostRule("localhost", (), keyed=True), (), KeyRing(keys), ())
        guards.check(scope, Headers(scope=scope), record)
        seen.append(record.client)
    first, second, without = seen
    assert len({first, second, without}) == 3 and without == "10.0.0.1" and "one" not in first
