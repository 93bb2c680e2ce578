"""What a launch may raise, which requests that ends, and the failures that both kinds of models report.

A launch that fails ends the requests of its batch and no other. A fault of the device (torch.AcceleratorError) ends the
engine. It is a RuntimeError, so code that catches LAUNCH_ERRORS has to re-raise it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.link.messages import Failed

LAUNCH_ERRORS = (
    RuntimeError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
)
"""Errors that the contents of a batch may cause; RuntimeError includes torch.OutOfMemoryError."""
_RETRY_AFTER = 1.0
"""Seconds after which other requests may have freed memory."""
_QUEUE_RETRY_AFTER = 5.0
"""Seconds; the Retry-After of a request that timed out in the queue."""


class PrefillError(Exception):
    """A prefill failed before the state of any decode row was touched, so decode rows go on. __cause__ is the error."""


@contextmanager
def prefill_errors() -> Iterator[None]:
    """Turns LAUNCH_ERRORS inside into PrefillError."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except LAUNCH_ERRORS as error:
        raise PrefillError(f"the prefill failed ({type(error).__name__})") from error


def launch_failure(request_id: str, error: BaseException) -> Failed:
    """What a client is told when its launch failed; the text of the error goes only to the log."""
    cause = error.__cause__ if isinstance(error, PrefillError) else error
    if isinstance(cause, torch.OutOfMemoryError):
        message = "the device ran out of memory for this request"
        return Failed(request_id, 503, "out_of_memory", message, retry_after=_RETRY_AFTER)
    return Failed(request_id, 500, "engine_error", "the model could not process this request")


def queue_timeout(request_id: str) -> Failed:
    """What a client is told when its request had no step within the queue timeout."""
    message = "the request timed out in the queue (queue_timeout)"
    return Failed(request_id, 503, "queue_timeout", message, retry_after=_QUEUE_RETRY_AFTER)
