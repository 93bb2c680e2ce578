"""Describes the failures between the hub and the disk, each in one line with a remedy."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from service.system.access import no_space

# The client library below is httpx in huggingface_hub 1 and httpx2 in 2; HfHubHTTPError derives from its HTTPError.
TransportError: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


class BrokenTransfer(Exception):
    """A file that ended early, or does not match the hub's list."""


HUB_ERRORS = (HfHubHTTPError, TransportError, OfflineModeIsEnabled)
"""Errors of a hub request. Disk errors are OSError, but so is HfHubHTTPError: test for it first."""


def is_transient(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, (BrokenTransfer, TransportError))


def asked_delay(error: BaseException) -> float:
    """Seconds that the hub asks to wait (Retry-After); 0 if it does not."""
    seconds = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return float(seconds) if seconds.isdigit() else 0.0


def describe(error: BaseException, source: str, revision: str | None, cache: Path) -> str:
    """One line: the request, the result, and what to do."""
    where = f"{source}@{revision}" if revision else source
    if isinstance(error, HfHubHTTPError):
        return f"{where}: {_refusal(error, source, revision)}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{where}: missing or incomplete in the cache {cache}, and HF_HUB_OFFLINE is set"
    if isinstance(error, TransportError):
        return f"{where}: {constants.ENDPOINT} cannot be reached ({_short(error)}), and the cache {cache} has no copy"
    if isinstance(error, BrokenTransfer):
        return f"{where}: the download kept failing ({error}): start again to resume it"
    if isinstance(error, OSError) and no_space(error):
        return f"{where}: no space left in {cache}: free some, or set HF_HOME to a directory on another disk"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{where}: cannot use the cache {cache} ({reason or error}): set HF_HOME to a directory that can be written"


def short_reason(error: BaseException) -> str:
    """The reason for another attempt, for a line of progress."""
    return _status(error) if isinstance(error, HfHubHTTPError) else _short(error)


def _refusal(error: HfHubHTTPError, source: str, revision: str | None) -> str:
    page = f"{constants.ENDPOINT}/{source}"
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        account = "the account of HF_TOKEN has no access" if get_token() else "HF_TOKEN is not set"
        return (
            f"a gated repository, and {account}: accept its licence at {page} and set HF_TOKEN to a token of that "
            f"account ({status})"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {revision or 'main'!r}"
    if isinstance(error, RepositoryNotFoundError):
        return f"not found at {page}, or private: check the name; for a private one set HF_TOKEN ({status})"
    if status == 401:
        return f"{constants.ENDPOINT} does not accept HF_TOKEN (401): it is wrong or has expired"
    if status == 403:
        return f"{constants.ENDPOINT} forbids it (403): HF_TOKEN must be of an account that may read {page}"
    if status == 429:
        return f"{_status(error)}: wait a while, or set HF_TOKEN, whose limit is higher"
    if status >= 500:
        return f"{_status(error)}: try again later"
    return _status(error)


def _status(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 429:
        return f"{constants.ENDPOINT} limits the rate of requests (429)"
    kind = "fails" if status >= 500 else "answers"
    return f"{constants.ENDPOINT} {kind} ({status} {error.response.reason_phrase})"


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
