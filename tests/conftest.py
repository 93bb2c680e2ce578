"""GPU tests run on a stream of their own, as the engine does: graphs cannot be captured on the default one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def engine_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.cuda.is_available():
        pytest.fail("a test marked gpu needs a CUDA device")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
