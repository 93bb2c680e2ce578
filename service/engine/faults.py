"""What a launch may raise, and which requests it ends.

A launch that fails ends the requests of its batch and no other. A fault of the device (torch.AcceleratorError) ends the
engine: it is a RuntimeError too, so whoever catches LAUNCH_ERRORS lets it through first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.engine.messages import Failed

LAUNCH_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError)
"""What a launch may raise for what is in its batch, torch.OutOfMemoryError among it."""
_RETRY_AFTER = 1.0
"""Seconds; by then other requests may have given memory back."""


class PrefillError(Exception):
    """The pass over prompts failed before any state of decoding rows was touched: they go on. Its cause says why."""


@contextmanager
def prefill_errors() -> Iterator[None]:
    """Turns LAUNCH_ERRORS inside into PrefillError."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except LAUNCH_ERRORS as error:
        raise PrefillError(f"the prompts' pass failed ({type(error).__name__})") from error


def launch_failure(request_id: str, error: BaseException) -> Failed:
    """What the client of a request in a failed launch is told: nothing of the error's own words."""
    cause = error.__cause__ if isinstance(error, PrefillError) else error
    if isinstance(cause, torch.OutOfMemoryError):
        message = "the device ran out of memory for this request"
        return Failed(request_id, 503, "out_of_memory", message, retry_after=_RETRY_AFTER)
    return Failed(request_id, 500, "engine_error", "the model could not process this request")
