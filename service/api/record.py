"""What is known of a request in progress: for its access log line and its metrics. Never prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Scope

from service.api.admission import Ticket

CLIENT_CLOSED = 499
"""Status in log and metrics where the client left before the answer began."""

Outcome = Literal["ok", "client_error", "aborted", "timeout", "overloaded", "error"]


@dataclass
class RequestRecord:
    """`model` is a hosted model's name once the request has named one. `outcome` is set by whoever ends a stream
    otherwise than its status says."""

    request_id: str
    endpoint: str
    ticket: Ticket
    arrival: float = field(default_factory=time.monotonic)
    model: str = "unknown"
    outcome: Outcome | None = None
    notes: dict[str, object] = field(default_factory=dict)
    """Further fields of the access log line."""

    def end_with(self, status: int) -> Outcome:
        """The outcome of a request whose answer had this status."""
        if self.outcome is not None:
            return self.outcome
        if status in (408, 504):
            return "timeout"
        if status in (429, 503):
            return "overloaded"
        return "ok" if status < 400 else "client_error" if status < 500 else "error"


def record_of(scope: Scope) -> RequestRecord:
    record = scope["reprise.record"]
    assert isinstance(record, RequestRecord)
    return record
