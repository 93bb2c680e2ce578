"""A KV cache that holds fewer tokens than the model's context is the limit that clients are told and held to."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support import fake_engine
from tests.support.fake_chat import FakeProcessor
from tests.support.servers import running_server

PAGES, PAGE_SIZE = 100, 16
HELD = PAGES * PAGE_SIZE


@pytest.mark.parametrize(("pages", "longest"), [(PAGES, HELD), (fake_engine.PAGES, FakeProcessor.context_length)])
def test_the_longest_sequence_is_what_context_and_cache_hold(
    monkeypatch: pytest.MonkeyPatch, pages: int, longest: int
) -> None:
    monkeypatch.setattr(fake_engine, "PAGES", pages)
    with running_server(num_engines=2) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for card in (client.models.list().data[0], client.models.retrieve("tiny")):
            assert card.to_dict()["max_model_len"] == longest
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x" * longest}]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["error"]
        assert refused["code"] == "context_length_exceeded" and f"{longest} tokens" in refused["message"]
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**body, "messages": [{**body["messages"][0], "content": "x" * (longest - 20)}]},
        )
        assert answer.status_code == 200
        server.wait_idle()
