"""Bounds on work in progress, applied before a body is read or media decoded. Refusals are 503 with Retry-After."""

from __future__ import annotations

from service.api.errors import ApiError
from service.metrics import Metrics

RETRY_AFTER = 1.0


class Admission:
    """Counts requests in flight and the bytes of their bodies."""

    def __init__(self, max_in_flight: int, max_pending_bytes: int, metrics: Metrics) -> None:
        self.in_flight = 0
        self.pending_bytes = 0
        self._max_in_flight = max_in_flight
        self._max_pending_bytes = max_pending_bytes
        self._metrics = metrics

    def ticket(self, endpoint: str) -> Ticket:
        return Ticket(self, endpoint)

    def check(self, endpoint: str, requests: int, size: int) -> None:
        """ApiError 503 unless `requests` more with `size` more bytes fit."""
        if self.in_flight + requests > self._max_in_flight:
            raise self._refusal(endpoint, "in_flight", "Too many requests are in progress; retry in a moment.")
        # A body that is alone always fits: its own limit is max_body.
        if self.pending_bytes and self.pending_bytes + size > self._max_pending_bytes:
            raise self._refusal(endpoint, "bytes", "Too many bytes of requests are in progress; retry in a moment.")

    def _refusal(self, endpoint: str, reason: str, message: str) -> ApiError:
        self._metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)
        return ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER)


class Ticket:
    """What one request has been admitted with; `release` gives all of it back."""

    def __init__(self, admission: Admission, endpoint: str) -> None:
        self._admission = admission
        self._endpoint = endpoint
        self._requests = 0
        self._size = 0

    def grow(self, requests: int = 0, size: int = 0) -> None:
        """Take more, or raise ApiError 503 and keep what there is."""
        self._admission.check(self._endpoint, requests, size)
        self._admission.in_flight += requests
        self._admission.pending_bytes += size
        self._requests += requests
        self._size += size

    def release(self) -> None:
        self._admission.in_flight -= self._requests
        self._admission.pending_bytes -= self._size
        self._requests = self._size = 0
