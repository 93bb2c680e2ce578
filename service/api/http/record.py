"""What is recorded about a request for its access log line and metrics. Never prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Scope

from service.api.http.admission import Ticket
from service.api.tracing import RequestTrace

Outcome = Literal["ok", "client_error", "aborted", "timeout", "overloaded", "error"]


@dataclass
class RequestRecord:
    """One request in progress."""

    request_id: str
    endpoint: str
    ticket: Ticket
    client: str = ""
    """Who sent it, for code in which clients take turns: the address, or the digest of the API key if keys are
    required."""
    arrival: float = field(default_factory=time.monotonic)
    model: str = "unknown"
    """Name of the model, once it is known."""
    outcome: Outcome | None = None
    """Set if the request ends otherwise than its HTTP status says, as a stream may."""
    trace: RequestTrace | None = None
    """None if the request is not traced."""
    notes: dict[str, object] = field(default_factory=dict)
    """Further fields of the access log line."""

    def end_with(self, status: int) -> Outcome:
        """The outcome for a response status."""
        if self.outcome is not None:
            return self.outcome
        if status in (408, 504):
            return "timeout"
        if status == 503:
            return "overloaded"
        return "ok" if status < 400 else "client_error" if status < 500 else "error"


def record_of(scope: Scope) -> RequestRecord:
    record = scope["reprise.record"]
    assert isinstance(record, RequestRecord)
    return record
