"""Which errors of a launch end its requests and no others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from service.engine.core.faults import LaunchError, RepeatableLaunchError, launch_errors, launch_failure


def _overflow() -> None:
    np.zeros(1, dtype=np.int64)[0] = 2**63


def _no_memory() -> None:
    raise MemoryError


def _no_device_memory() -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(("launch", "status"), [(_overflow, 500), (_no_memory, 503), (_no_device_memory, 503)])
def test_what_a_batch_may_cause_ends_its_requests(launch: Callable[[], None], status: int) -> None:
    with pytest.raises(LaunchError) as error, launch_errors():
        launch()
    failed = launch_failure("request", error.value)
    assert (failed.request_id, failed.status) == ("request", status)


def test_a_fault_of_the_device_is_passed_on() -> None:
    with pytest.raises(torch.AcceleratorError), launch_errors():
        raise torch.AcceleratorError


def test_a_failed_launch_that_is_repeatable_is_still_known_as_one_outside() -> None:
    with pytest.raises(RepeatableLaunchError), launch_errors(), launch_errors(RepeatableLaunchError):
        raise ValueError
