"""What a launch may raise, which requests that ends, and the failures that both kinds of models report.

A launch that fails ends the requests of its batch and no other. A fault of the device (torch.AcceleratorError) ends the
engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from service.engine.core.worker import WorkerContext
from service.graphs.observations import Observations
from service.graphs.pool import release_cached
from service.link.messages import Failed

log = logging.getLogger(__name__)

# A second try for a launch that ran out of memory.
#
# Before it raises, torch's allocator gives the device back what it keeps, but only whole segments. Of segments that
# other sizes have left, the failed launch itself may hold a part, with gaps that are too small for what it still needs.
# Once nothing of it is left, it begins again in segments of its own.

Result = TypeVar("Result")


def with_second_try(launch: Callable[[], Result], context: WorkerContext, *, model: str, kind: str) -> Result:
    """What `launch` returns. If it raises a RepeatableLaunchError for lack of memory, it is called once more, when
    nothing is in flight and nothing cached. Other errors, and any of the second try, are passed on.

    kind: that of the metric.
    """
    try:
        return launch()
    except RepeatableLaunchError as error:
        if not error.out_of_memory:
            raise
        # As text: a handler that kept the error would keep what it holds.
        log.warning("a launch of %s (%s) is tried once more: %s", model, kind, str(error.__cause__))
    # Not in the handler: its exception holds the frames of the first try, and with them its memory.
    release_cached(context.device)
    outcome = "failed"
    try:
        result = launch()
        outcome = "succeeded"
    finally:
        context.observations.count("memory_retries_total", model=model, kind=kind, outcome=outcome)
    return result


_LAUNCH_ERRORS = (
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
_NO_HOST_MEMORY = "can't allocate memory"
"""What torch's RuntimeError says if the host has none."""
_RETRY_AFTER = 1.0
"""Seconds after which other requests may have freed memory."""
_QUEUE_RETRY_AFTER = 5.0
"""Seconds; the Retry-After of a request that timed out in the queue."""


class LaunchError(Exception):
    """A launch failed, and its batch may be the cause. __cause__ is the error."""

    @property
    def out_of_memory(self) -> bool:
        """Whether the device, or the host, had no room for what the launch would have allocated."""
        kinds = (torch.OutOfMemoryError, MemoryError)
        return isinstance(self.__cause__, kinds) or _NO_HOST_MEMORY in str(self.__cause__)


class RepeatableLaunchError(LaunchError):
    """A pass of prompts or of an encoder failed. It may be launched again, which writes once more all that it has
    written."""


@contextmanager
def launch_errors(kind: type[LaunchError] = LaunchError) -> Iterator[None]:
    """Turns errors that the contents of a batch may cause into a LaunchError of this kind. A fault of the device, which
    is a RuntimeError too, is passed on."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except _LAUNCH_ERRORS as error:
        raise kind(f"a launch failed ({type(error).__name__})") from error


def launch_failure(request_id: str, error: LaunchError) -> Failed:
    """What a client is told when its launch failed; the text of the error goes only to the log."""
    if error.out_of_memory:
        message = "the server ran out of memory for this request"
        return Failed(request_id, 503, "out_of_memory", message, retry_after=_RETRY_AFTER)
    return Failed(request_id, 500, "engine_error", "the model could not process this request")


def corrupted(request_id: str, model: str, observations: Observations) -> Failed:
    """What a client is told when the model computed NaN or infinity for it, which is logged and counted."""
    log.error("%s computed NaN or infinite values for %s; its weights may be damaged", model, request_id)
    observations.count("corrupted_requests_total", model=model)
    return Failed(request_id, 500, "engine_error", "the model computed values that are not finite (NaN or infinity)")


def queue_timeout(request_id: str) -> Failed:
    """What a client is told when its request had no step within the queue timeout."""
    message = "the request timed out in the queue (queue_timeout)"
    return Failed(request_id, 503, "queue_timeout", message, retry_after=_QUEUE_RETRY_AFTER)
