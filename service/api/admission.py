"""Bounds on work in progress, applied before a body is read or media decoded. Refusals are 503 with Retry-After."""

from __future__ import annotations

from service.api.errors import ApiError
from service.metrics import Metrics

RETRY_AFTER = 1.0


class Admission:
    """Counts requests in flight and the bytes of their bodies and decoded media."""

    def __init__(self, max_in_flight: int, max_pending_bytes: int, metrics: Metrics) -> None:
        self.in_flight = 0
        self.pending_bytes = 0
        self._max_in_flight = max_in_flight
        self._max_pending_bytes = max_pending_bytes
        self._metrics = metrics

    def ticket(self, endpoint: str) -> Ticket:
        return Ticket(self, endpoint)

    def take(self, endpoint: str, requests: int, size: int, held: int) -> None:
        """ApiError 503 unless `requests` more with `size` more bytes fit. held: bytes that the asker has already."""
        if self.in_flight + requests > self._max_in_flight:
            raise self._refusal(endpoint, "in_flight", "Too many requests are in progress; retry in a moment.")
        # A request that is alone always fits: its own limits bound it.
        if self.pending_bytes > held and self.pending_bytes + size > self._max_pending_bytes:
            raise self._refusal(endpoint, "bytes", "Too many bytes of requests are in progress; retry in a moment.")
        self.in_flight += requests
        self._hold(size)

    def give_back(self, requests: int, size: int) -> None:
        self.in_flight -= requests
        self._hold(-size)

    def _hold(self, change: int) -> None:
        self.pending_bytes += change
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
        self._admission.give_back(self._requests, self.size)
        self._requests = self.size = 0
