from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from service.api.engines import engine_client
from tests.support.servers import RunningServer, running_server


@pytest.fixture(scope="package", autouse=True)
def quick_restarts() -> Iterator[None]:
    """The times between restarts of an engine that falls again and again are not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "BACKOFF_SECONDS", (0.1,))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The application over a fake engine that answers with the prompt's own bytes."""
    with running_server(max_n=4, max_images=3, max_body="4M") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
