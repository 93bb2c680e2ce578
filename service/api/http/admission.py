"""Admission control: limits on work in progress. A request over the limit on requests gets 503 with Retry-After; bytes
that find no room wait for their turn, first come, first served.

Bytes are those of bodies, WebSocket messages, fetched and decoded media. A part of them is set aside for one request at
a time that does not fit into the rest, so that the first in the queue always gets on. Requests with many bytes, or that
load media, leave a quarter of all limits to others.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from models.interfaces.errors import InputError
from service.api.engines.shared_usage import UsageRow
from service.api.http.errors import ApiError
from service.media.fetch import FetchesBusy
from service.media.loader import NoRoom, Room
from service.metrics.metrics import Metrics

AT_ONCE = 4
"""Requests prepared in one turn of the loop: a few milliseconds of work between two polls of the sockets."""


class Turns:
    """Let at most `at_once` requests through in each turn of the loop, first come, first served. 64 requests prepared
    in one turn would leave streams without audio and tokens for tens of milliseconds."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def wait(self) -> None:
        await self._places.acquire()
        asyncio.get_running_loop().call_soon(self._places.release)


MIN_RETRY_AFTER, MAX_RETRY_AFTER = 1.0, 60.0
"""Bounds of Retry-After in seconds. OpenAI's clients obey up to 60."""
FREE_BYTES = 1 << 16
"""Bytes of WebSocket messages that are not charged."""
SMALL_BYTES = 1 << 18
"""A request with at most so many bytes never waits behind larger ones."""
LARGE_SHARE = 0.75
"""Share of a kind's bytes that requests with more than SMALL_BYTES can use, and of its requests that can load media."""
POLL_SECONDS = 0.1
"""Time between two looks at what other processes of the server hold, which do not tell when that changes."""
KINDS = {
    **dict.fromkeys(("responses", "completions", "embeddings", "rerank", "realtime", "transcriptions"), "chat"),
    "voices": "speech",
}
"""Kind of work of an endpoint, if the two names differ."""
EXCESS = "excess"
"""Column of the shared table: requests that load media, and bytes of the request that uses the part set aside."""
DURATION_WEIGHT = 0.1


@dataclass(eq=False)
class Turn:
    ticket: Ticket
    size: int
    decoding: bool
    granted: Future[None] = field(default_factory=Future)

    @property
    def small(self) -> bool:
        return max(self.ticket.size + self.size, self.ticket.body_size) <= SMALL_BYTES


@dataclass(eq=False)
class Admission:
    """Counts requests in flight and their bytes, for each kind of work (chat, speech).

    excess_bytes: the part of max_pending_bytes that is set aside for one request that does not fit into the rest.
    shares: fraction of both limits that a kind of work may use, so that it cannot starve others; 1 where none is given.
    others: the work of the server's other API processes, which counts, too; None: there are none.
    max_wait: seconds that bytes wait for their turn; then 503.

    Thread-safe: media are charged by the threads that decode them.
    """

    max_in_flight: int
    max_pending_bytes: int
    metrics: Metrics
    shares: Mapping[str, float] | None = None
    others: UsageRow | None = None
    excess_bytes: int = 0
    max_wait: float = 120.0
    _requests: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)
    _num_loading: int = 0
    _exceeding: Ticket | None = None
    """Uses the part set aside."""
    _waiting: defaultdict[str, list[Turn]] = field(default_factory=lambda: defaultdict(list))
    _seconds: dict[str, float] = field(default_factory=dict)
    _retry_at: dict[str, float] = field(default_factory=dict)
    """When the last client that was refused was told to come back (time.monotonic())."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._max_bytes = self.max_pending_bytes - self.excess_bytes

    @property
    def in_flight(self) -> int:
        return self._requests.total()

    @property
    def pending_bytes(self) -> int:
        return self._bytes.total() + (self._exceeding.excess if self._exceeding is not None else 0)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def max_requests(self, endpoint: str) -> int:
        """The most that one request can take of the requests in flight."""
        return self._share(KINDS.get(endpoint, endpoint), self.max_in_flight)

    def largest(self, endpoint: str) -> int:
        """Bytes that a single request can take without the part set aside."""
        return int(LARGE_SHARE * self._share(KINDS.get(endpoint, endpoint), self._max_bytes))

    def ticket(self, endpoint: str) -> Ticket:
        return Ticket(self, endpoint)

    # For tickets, which hold the lock.

    def check_requests(self, ticket: Ticket, requests: int) -> None:
        """ApiError 503 unless there is room for so many more requests."""
        in_flight = self._used(self._requests, None if self.others is None else self.others.requests())
        if requests and in_flight[ticket.kind] + requests > self._room(in_flight, ticket.kind, self.max_in_flight):
            raise self.refusal(ticket.endpoint, "in_flight", "Too many requests in progress; retry shortly.")

    def charge(self, turn: Turn, *, waits: bool = True) -> bool:
        """Charge bytes if there is room for them. waits: the request could also wait, so it does not overtake others,
        and may use the part set aside."""
        ticket, size = turn.ticket, turn.size
        queue, exceeds = self._waiting[ticket.kind], self._exceeding is ticket
        if waits and queue and turn not in queue and not exceeds and not turn.small:
            return False
        if self._fits(ticket.kind, size, small=turn.small):
            self.hold(ticket.kind, size=size)
        elif waits and self._may_exceed(ticket, size):
            self._exceeding = ticket
            ticket.excess += size
            self._tell_excess()
        else:
            return False
        ticket.size += size
        ticket.decoding += size if turn.decoding else 0
        return True

    def give_back(self, ticket: Ticket, size: int) -> None:
        """Give bytes back, those of the part set aside first, or charge more whatever the limits (size < 0)."""
        excess = min(ticket.excess, size) if size > 0 else 0
        ticket.excess -= excess
        ticket.size -= size
        self.hold(ticket.kind, size=excess - size)
        self.grant()

    def grant(self) -> None:
        """Grant waiting requests what was given back: first the one that uses the part set aside, since others may wait
        for that part, then small requests."""
        self._leave_excess()
        for queue in self._waiting.values():
            while queue:
                turn = min(queue, key=lambda turn: (turn.ticket is not self._exceeding, not turn.small))
                if not self.charge(turn):
                    break
                queue.remove(turn)
                turn.granted.set_result(None)

    def hold(self, kind: str, requests: int = 0, size: int = 0) -> None:
        if not (requests or size):
            return  # a scrape or a health check is not work, and the shared table counts only work
        self._requests[kind] += requests
        self._bytes[kind] += size
        if self.others is not None:
            self.others.tell(kind, self._requests[kind], self._bytes[kind])
        self.metrics.observe("admitted_bytes", self.pending_bytes)

    def count_loading(self, ticket: Ticket, change: int) -> None:
        """Count a request that begins or ceases to load media. ApiError 503 where too many do."""
        loading = self._num_loading + (0 if self.others is None else self.others.requests()[EXCESS])
        if change > 0 and loading >= max(1, int(LARGE_SHARE * self.max_requests(ticket.kind))):
            raise self.refusal(ticket.endpoint, "media", "Too many requests with media in progress; retry shortly.")
        self._num_loading += change
        self._tell_excess()

    async def wait(self, turn: Turn) -> None:
        """Charge bytes when it is the request's turn. ApiError 503 where the queue is full, or after `max_wait`."""
        ticket = turn.ticket
        queue = self._waiting[ticket.kind]
        with self.lock:
            if self.charge(turn):
                return
            if len(queue) >= max(1, int((1 - LARGE_SHARE) * self.max_requests(ticket.kind))):
                raise self.no_room(ticket.endpoint)
            queue.append(turn)
        granted, end = asyncio.wrap_future(turn.granted), time.monotonic() + self.max_wait
        try:
            while not granted.done():
                if (left := end - time.monotonic()) <= 0:
                    raise self.no_room(ticket.endpoint)
                await asyncio.wait({granted}, timeout=left if self.others is None else min(left, POLL_SECONDS))
                with self.lock:
                    self.grant()
        except BaseException:
            with self.lock:
                if turn in queue:
                    queue.remove(turn)
                    self.grant()
                else:  # it was granted in the same turn of the loop that cancelled it
                    ticket.decoding -= turn.size if turn.decoding else 0
                    self.give_back(ticket, turn.size)
            raise

    def note_duration(self, kind: str, seconds: float) -> None:
        mean = self._seconds.get(kind, seconds)
        self._seconds[kind] = mean + DURATION_WEIGHT * (seconds - mean)

    def no_room(self, endpoint: str) -> ApiError:
        message = "Too many bytes in progress (request bodies, fetched and decoded media); retry shortly."
        return self.refusal(endpoint, "bytes", message)

    def refusal(self, endpoint: str, reason: str, message: str) -> ApiError:
        """503, counted by its reason. Clients are told to come back one by one, as places become free."""
        self.metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)
        kind, now = KINDS.get(endpoint, endpoint), time.monotonic()
        each = self._seconds.get(kind, MIN_RETRY_AFTER) / max(1, self._requests[kind])
        at = min(max(self._retry_at.get(kind, now), now) + each, now + MAX_RETRY_AFTER)
        self._retry_at[kind] = at
        return ApiError(503, message, code="overloaded", retry_after=max(MIN_RETRY_AFTER, at - now))

    def _fits(self, kind: str, size: int, *, small: bool) -> bool:
        """Whether there is room beside the part set aside."""
        in_bytes = self._used(self._bytes, None if self.others is None else self.others.num_bytes())
        room = self._room(in_bytes, kind, self._max_bytes)
        return in_bytes[kind] + size <= (room if small else int(LARGE_SHARE * room))

    def _may_exceed(self, ticket: Ticket, size: int) -> bool:
        """Whether a request may have `size` bytes of the part set aside. It has no other limit there than those on
        every request, which no more than one of its media that are being decoded at a time can exceed."""
        if self._exceeding is None:
            return self.others is None or not self.others.num_bytes()[EXCESS]
        return self._exceeding is ticket and (not ticket.decoding or ticket.excess + size <= self.excess_bytes)

    def _leave_excess(self) -> None:
        """Free the part set aside if the request that uses it has nothing there, or now fits into the rest."""
        ticket = self._exceeding
        if ticket is None or ticket.decoding:
            return
        if ticket.excess and self._fits(ticket.kind, ticket.excess, small=ticket.size <= SMALL_BYTES):
            self.hold(ticket.kind, size=ticket.excess)
            ticket.excess = 0
        if not ticket.excess:
            self._exceeding = None
        self._tell_excess()

    def _tell_excess(self) -> None:
        if self.others is not None:
            self.others.tell(EXCESS, self._num_loading, self._exceeding.excess if self._exceeding else 0)

    @staticmethod
    def _used(own: Counter[str], others: Counter[str] | None) -> Counter[str]:
        used = own if others is None else own + others
        return Counter({kind: count for kind, count in used.items() if kind != EXCESS})

    def _room(self, used: Mapping[str, int], kind: str, limit: int) -> int:
        """What a kind may use of a limit: its share, but no more than the other kinds leave."""
        others = sum(min(used[other], self._share(other, limit)) for other in used if other != kind)
        return min(self._share(kind, limit), limit - others)

    def _share(self, kind: str, limit: int) -> int:
        return max(1, int((self.shares or {}).get(kind, 1.0) * limit))


class Ticket:
    """The admitted usage of one request; `release` gives all of it back."""

    def __init__(self, admission: Admission, endpoint: str) -> None:
        self.admission = admission
        self.endpoint = endpoint
        self.kind = KINDS.get(endpoint, endpoint)
        self.size = 0
        """Bytes."""
        self.excess = 0
        """Those of them in the part set aside. Written by Admission."""
        self.body_size = 0
        """Bytes that a body is expected to have, while it comes."""
        self.decoding = 0
        """Bytes of media that are being decoded."""
        self._requests = 0
        self._loading = 0
        self._began = 0.0

    def check(self) -> None:
        with self.admission.lock:
            self.admission.check_requests(self, 1)

    def grow(self, requests: int = 0, size: int = 0) -> None:
        """Take more, or raise ApiError 503 and keep what it has."""
        with self.admission.lock:
            self.admission.check_requests(self, requests)
            if size and not self.admission.charge(Turn(self, size, decoding=False), waits=False):
                raise self.admission.no_room(self.endpoint)
            self._began = self._began if self._requests else time.monotonic()
            self._requests += requests
            self.admission.hold(self.kind, requests)

    def take_decoding(self, size: int) -> bool:
        """Take bytes of media that are decoded now, if there is room for them."""
        with self.admission.lock:
            return self.admission.charge(Turn(self, size, decoding=True))

    async def wait(self, size: int, *, decoding: bool = False) -> None:
        """Take more bytes when there is room for them. ApiError 503 where too many requests wait, or for too long."""
        await self.admission.wait(Turn(self, size, decoding))

    def load(self, change: int) -> None:
        """Count media that the request is loading. ApiError 503 where too many requests do."""
        with self.admission.lock:
            if not self._loading or not self._loading + change:
                self.admission.count_loading(self, change)
            self._loading += change

    def adjust(self, size: int) -> None:
        """Add bytes that are already in memory, whatever the limits, or give some back (size < 0)."""
        with self.admission.lock:
            self.admission.give_back(self, -size)

    def release(self) -> None:
        with self.admission.lock:
            if self._requests:
                self.admission.note_duration(self.kind, time.monotonic() - self._began)
            self.admission.hold(self.kind, -self._requests)
            self._requests = 0
            self.admission.give_back(self, self.size)


class Decoding(Room):
    """The bytes of one picture, video or audio, from the first that is fetched to what is kept of it. take() is called
    by the thread that decodes it; all else belongs to the event loop, which may leave the block (a client that has
    gone) while the thread is still at work. FetchesBusy leaves the block as ApiError 503.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.refused = False
        """Whether there was no room for it."""
        self._ticket = ticket
        self._lock = ticket.admission.lock
        self._fetched = 0
        self._size = 0
        """Bytes charged for decoding it."""
        self._taken = 0
        """Those of them that take() has asked for."""
        self._open = True

    def __enter__(self) -> Decoding:
        self._ticket.load(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._open = False
            self._end(0)
            self._ticket.load(-1)
        if isinstance(error, FetchesBusy):
            raise self._ticket.admission.refusal(self._ticket.endpoint, "fetches", str(error)) from error

    async def reserve(self, size: int) -> None:
        """Charge the most bytes that a fetch may bring, when it is its turn. ApiError 503 if that does not come."""
        await self._wait(size)
        self._fetched = size

    def fetched(self, size: int) -> None:
        """Charge what was fetched in place of what was reserved for it, until it is decoded."""
        self._ticket.adjust(size - self._fetched)
        self._fetched = size

    def take(self, size: int) -> None:
        """Charge `size` bytes. NoRoom if they have to wait for their turn. InputError if nobody waits for the picture
        any more: it is not decoded then."""
        with self._lock:
            if not self._open:
                raise InputError("", "the request has ended")
            missing = self._taken + size - self._size
            if not self._size and not self._ticket.take_decoding(size):
                raise NoRoom(partial(self._turn, size))
            if self._size and missing > 0:  # of a later frame, beside those that are decoded already
                self._ticket.adjust(missing)
                self._ticket.decoding += missing
            self._size += max(0, missing)
            self._taken += size

    def keep(self, size: int) -> None:
        """Charge `size` decoded bytes in place of the bytes that were taken and fetched."""
        with self._lock:
            self._end(size)

    async def _turn(self, size: int) -> None:
        await self._wait(size, decoding=True)
        self._size = size

    async def _wait(self, size: int, *, decoding: bool = False) -> None:
        try:
            await self._ticket.wait(size, decoding=decoding)
        except ApiError:
            self.refused = True
            raise

    def _end(self, kept: int) -> None:
        self._ticket.decoding -= self._size
        if kept != self._fetched + self._size:
            self._ticket.adjust(kept - self._fetched - self._size)
        self._fetched = self._size = 0
