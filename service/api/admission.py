"""Bounds on work in progress, applied before a body is read or media decoded. Refusals are 503 with Retry-After."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from service.api.errors import ApiError
from service.metrics import Metrics

RETRY_AFTER = 1.0
KINDS = {"voices": "speech"}
"""Kind of work of an endpoint where it is not named like the endpoint."""


class Admission:
    """Counts requests in flight and the bytes of their bodies and decoded media, for each kind of work by itself.

    shares: the part of both bounds that a kind of work may take. What is left to the others is theirs whatever that
    kind does, so that none of them can be starved. A kind without a share may take everything.
    """

    def __init__(
        self, max_in_flight: int, max_pending_bytes: int, metrics: Metrics, shares: Mapping[str, float] | None = None
    ) -> None:
        self._max_in_flight = max_in_flight
        self._max_pending_bytes = max_pending_bytes
        self._metrics = metrics
        self._shares = dict(shares or {})
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return self._requests.total()

    @property
    def pending_bytes(self) -> int:
        return self._bytes.total()

    def ticket(self, endpoint: str) -> Ticket:
        return Ticket(self, endpoint)

    def take(self, endpoint: str, requests: int, size: int, held: int) -> None:
        """ApiError 503 unless `requests` more with `size` more bytes fit. held: bytes that the asker has already."""
        kind = KINDS.get(endpoint, endpoint)
        if requests and self._requests[kind] + requests > self._room(self._requests, kind, self._max_in_flight):
            raise self._refusal(endpoint, "in_flight", "Too many requests are in progress; retry in a moment.")
        # A request that is the only one of its kind always fits: its own limits bound it.
        alone = self._bytes[kind] <= held
        if not alone and self._bytes[kind] + size > self._room(self._bytes, kind, self._max_pending_bytes):
            raise self._refusal(endpoint, "bytes", "Too many bytes of requests are in progress; retry in a moment.")
        self._hold(kind, requests, size)

    def give_back(self, endpoint: str, requests: int, size: int) -> None:
        self._hold(KINDS.get(endpoint, endpoint), -requests, -size)

    def _room(self, used: Mapping[str, int], kind: str, most: int) -> int:
        """What a kind may have in all: its share, and no more than the others leave of their shares."""
        others = sum(min(used[other], self._share(other, most)) for other in used if other != kind)
        return min(self._share(kind, most), most - others)

    def _share(self, kind: str, most: int) -> int:
        return max(1, int(self._shares.get(kind, 1.0) * most))

    def _hold(self, kind: str, requests: int, size: int) -> None:
        self._requests[kind] += requests
        self._bytes[kind] += size
        self._metrics.observe("admitted_bytes", self.pending_bytes)

    def _refusal(self, endpoint: str, reason: str, message: str) -> ApiError:
        self._metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)
        return ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER)


class Ticket:
    """What one request has been admitted with; `release` gives all of it back."""

    def __init__(self, admission: Admission, endpoint: str) -> None:
        self._admission = admission
        self._endpoint = endpoint
        self._requests = 0
        self.size = 0

    def grow(self, requests: int = 0, size: int = 0) -> None:
        """Take more, or raise ApiError 503 and keep what there is."""
        self._admission.take(self._endpoint, requests, size, self.size)
        self._requests += requests
        self.size += size

    def release(self) -> None:
        self._admission.give_back(self._endpoint, self._requests, self.size)
        self._requests = self.size = 0
