"""A second try for a launch that ran out of memory.

Before it raises, torch's allocator gives the device back what it keeps, but only whole segments. Of segments that other
sizes have left, the failed launch itself may hold a part, with gaps that are too small for what it still needs. Once
nothing of it is left, it begins again in segments of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from service.engine.core.faults import RepeatableLaunchError
from service.engine.core.worker import WorkerContext
from service.graphs.allocator import release_cached

log = logging.getLogger(__name__)

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
