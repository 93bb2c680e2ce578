"""Admission control: limits on work in progress, applied before bodies are read and media are decoded. A request over a
limit gets 503 with Retry-After."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from service.api.http.errors import ApiError
from service.api.http.shared_usage import UsageRow
from service.metrics import Metrics

RETRY_AFTER = 1.0
FREE_BYTES = 1 << 16
"""Bytes of WebSocket messages that are not charged."""
KINDS = {"voices": "speech", "realtime": "chat"}
"""Kind of work of an endpoint, if the two names differ."""


class Admission:
    """Counts requests in flight and the bytes of their bodies, of media that were fetched for them and of decoded
    media, for each kind of work (chat, speech).

    shares: fraction of both limits that a kind of work may use. The rest is reserved for the other kinds, so that none
        can be starved. A kind without a share may use everything.
    others: the work of the server's other API processes, which counts in addition to this one's, and which this one
        tells of its own; None: there are none.

    Thread-safe: media are charged by the threads that decode them.
    """

    def __init__(
        self,
        max_in_flight: int,
        max_pending_bytes: int,
        metrics: Metrics,
        shares: Mapping[str, float] | None = None,
        others: UsageRow | None = None,
    ) -> None:
        self._max_in_flight = max_in_flight
        self._max_pending_bytes = max_pending_bytes
        self._metrics = metrics
        self._shares = dict(shares or {})
        self._others = others
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.changed = threading.Condition()
        """Notified when something is given back; its lock guards all of this."""
        self.decoding = 0
        """Pictures and videos that this process is decoding; soon they will take fewer bytes."""

    @property
    def in_flight(self) -> int:
        return self._requests.total()

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight, in this process or others of the server."""
        return not self.in_flight and (self._others is None or not self._others.requests().total())

    @property
    def pending_bytes(self) -> int:
        return self._bytes.total()

    def max_requests(self, endpoint: str) -> int:
        """The most that one request can take of the requests in flight."""
        return self._share(KINDS.get(endpoint, endpoint), self._max_in_flight)

    def ticket(self, endpoint: str) -> Ticket:
        return Ticket(self, endpoint)

    def take(self, endpoint: str, requests: int, size: int, held: int) -> None:
        """ApiError 503 unless `requests` more with `size` more bytes fit. held: bytes that this request holds
        already."""
        kind = KINDS.get(endpoint, endpoint)
        with self.changed:
            in_flight = self._requests if self._others is None else self._requests + self._others.requests()
            if requests and in_flight[kind] + requests > self._room(in_flight, kind, self._max_in_flight):
                raise self.refusal(endpoint, "in_flight", "Too many requests in progress; retry shortly.")
            if not self.fits(endpoint, size, held):
                raise self.refusal(
                    endpoint,
                    "bytes",
                    "Too many bytes in progress (request bodies, fetched and decoded media); retry shortly.",
                )
            self._hold(kind, requests, size)

    def fits(self, endpoint: str, size: int, held: int) -> bool:
        """Whether there is room for `size` more bytes of a request that holds `held`."""
        kind = KINDS.get(endpoint, endpoint)
        with self.changed:
            in_bytes = self._bytes if self._others is None else self._bytes + self._others.num_bytes()
            # The only request of its kind is always admitted: the limits for single requests bound it.
            alone = in_bytes[kind] <= held
            return alone or in_bytes[kind] + size <= self._room(in_bytes, kind, self._max_pending_bytes)

    def give_back(self, endpoint: str, requests: int, size: int) -> None:
        with self.changed:
            self._hold(KINDS.get(endpoint, endpoint), -requests, -size)
            self.changed.notify_all()

    def _room(self, used: Mapping[str, int], kind: str, limit: int) -> int:
        """What a kind may use of a limit: its share, but no more than the other kinds leave."""
        others = sum(min(used[other], self._share(other, limit)) for other in used if other != kind)
        return min(self._share(kind, limit), limit - others)

    def _share(self, kind: str, limit: int) -> int:
        return max(1, int(self._shares.get(kind, 1.0) * limit))

    def _hold(self, kind: str, requests: int, size: int) -> None:
        if not (requests or size):
            return  # a scrape or a health check is not work, and the shared table counts only work
        self._requests[kind] += requests
        self._bytes[kind] += size
        if self._others is not None:
            self._others.tell(kind, self._requests[kind], self._bytes[kind])
        self._metrics.observe("admitted_bytes", self.pending_bytes)

    def refusal(self, endpoint: str, reason: str, message: str) -> ApiError:
        """503, counted by its reason."""
        self._metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)
        return ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER)


class Ticket:
    """The admitted usage of one request; `release` gives all of it back."""

    def __init__(self, admission: Admission, endpoint: str) -> None:
        self.admission = admission
        self._endpoint = endpoint
        self._requests = 0
        self.size = 0

    def grow(self, requests: int = 0, size: int = 0) -> None:
        """Takes more, or raises ApiError 503 and keeps what it has."""
        with self.admission.changed:
            self.admission.take(self._endpoint, requests, size, self.size)
            self._requests += requests
            self.size += size

    def fits(self, size: int) -> bool:
        """Whether `size` more bytes could be taken now."""
        return self.admission.fits(self._endpoint, size, self.size)

    def refusal(self, reason: str, message: str) -> ApiError:
        """503 for something else than its bytes, counted by its reason."""
        return self.admission.refusal(self._endpoint, reason, message)

    def adjust(self, size: int) -> None:
        """Adds bytes that are already in memory, whatever the limits, or gives some back (size < 0)."""
        with self.admission.changed:
            self.admission.give_back(self._endpoint, 0, -size)
            self.size += size

    def release(self) -> None:
        with self.admission.changed:
            self.admission.give_back(self._endpoint, self._requests, self.size)
            self._requests = self.size = 0
