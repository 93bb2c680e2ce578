"""Which replica a request goes to: one that has seen its picture before, or that has the least to do."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from service.api.chat.schema import Message

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
LISTING_INTERVAL = 1.0
"""Seconds after which the replicas are listed again. One that is not there any more costs a failed connection."""
LISTING_TIMEOUT = 10.0
SEARCH_INTERVAL = 0.25
"""The same while a replica is looked for because those that are known are leaving."""


class _Conversation(msgspec.Struct, frozen=True):
    messages: list[Message]


def media_key(body: bytes) -> str | None:
    """Hash of the first picture or video of a chat request; None where there is none, or the body is no such request.

    The first one stays when a conversation goes on, so that its turns meet their prefix in the cache, too. A remote
    URL is hashed as it is written.
    """
    try:
        messages = msgspec.json.decode(body, type=_Conversation).messages
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            media = part.image_url or part.video_url
            if media:
                url = media if isinstance(media, str) else media.url
                return hashlib.blake2b(url.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return None


def ranked(key: str, names: Sequence[str]) -> list[str]:
    """Names by rendezvous hashing, the best first: when one comes or goes, only its own keys move."""

    def weight(name: str) -> bytes:
        return hashlib.blake2b(f"{key} {name}".encode(), digest_size=DIGEST_BYTES).digest()

    return sorted(names, key=weight, reverse=True)


class Replicas:
    """The replicas that run, and how many requests this front has at each of them. Ray's own routing asks a replica
    before each request, and tells it afterwards; this asks all of them once in a while.

    listed: gives their addresses. most: requests that one takes at once.
    """

    def __init__(self, listed: Callable[[], Awaitable[Collection[str]]], most: int) -> None:
        self._listed = listed
        self._most = most
        self._addresses: Collection[str] = ()
        self._running: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._listing: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        """Somebody looks for a replica that is not known yet."""

    @asynccontextmanager
    async def one(self, key: str | None, failed: Collection[str] = ()) -> AsyncGenerator[str]:
        """Address of a replica with room, which has one request more until exit. Waits for it."""
        if self._listing is None:
            self._listing = asyncio.create_task(self._keep_listing())
        address = self._with_room(key, failed)
        if address is None:
            async with self._changed:
                while (address := self._with_room(key, failed)) is None:
                    await self._changed.wait()
        self._running[address] += 1
        try:
            yield address
        finally:
            was_full = self._running[address] == self._most
            self._running[address] -= 1
            if not self._running[address]:
                del self._running[address]
            if was_full:
                async with self._changed:
                    self._changed.notify_all()

    def others(self, addresses: Collection[str]) -> bool:
        """Whether there are replicas beside these."""
        return any(address not in addresses for address in self._addresses)

    async def find_others(self, addresses: Collection[str], seconds: float) -> None:
        """Lists the replicas until there are some beside these, for at most so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.others(addresses):
                    self._wanted.set()
                    await asyncio.sleep(SEARCH_INTERVAL)

    def _with_room(self, key: str | None, failed: Collection[str]) -> str | None:
        running = {address: self._running[address] for address in self._addresses}
        return next((address for address in order(key, running, failed) if running[address] < self._most), None)

    async def _keep_listing(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LISTING_TIMEOUT):
                    self._addresses = await self._listed()
            except Exception as error:  # whatever Ray raises: without this task new replicas would never be found
                reason = f"{type(error).__name__}: {error}"
                log.warning("the replicas could not be listed, those of before are used: %s", reason)
            async with self._changed:
                self._changed.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(LISTING_INTERVAL):
                    await self._wanted.wait()
            self._wanted.clear()


def order(key: str | None, running: Mapping[str, int], failed: Collection[str] = ()) -> list[str]:
    """Replicas, the best first: in the key's ranking, or those with the fewest requests. running: requests by replica.
    failed: come last."""
    names = ranked(key, list(running)) if key else sorted(running, key=lambda name: (running[name], random.random()))
    return sorted(names, key=lambda name: name in failed)
