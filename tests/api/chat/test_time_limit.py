"""A chat whose time is up keeps what it has been given so far."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from openai import AsyncOpenAI

from tests.support.servers import RunningServer, running_server

USER = [{"role": "user", "content": "!endless words"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(request_timeout=6) as server:
        yield server


@pytest.mark.slow
async def test_answers_end_as_those_that_reach_their_length(server: RunningServer) -> None:
    """None names a number of tokens, all would go on for longer than they may."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def streamed() -> tuple[str, set[str | None], int]:
            text, reasons, tokens = "", set(), 0
            options = {"include_usage": True}
            async for chunk in await client.chat.completions.create(
                model="tiny", messages=USER, stream=True, stream_options=options
            ):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                reasons |= {choice.finish_reason for choice in chunk.choices}
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            return text, reasons, tokens

        whole, several, stream = await asyncio.gather(
            client.chat.completions.create(model="tiny", messages=USER),
            client.chat.completions.create(model="tiny", messages=USER, n=3),
            streamed(),
        )
    for choice in (*whole.choices, *several.choices):
        assert choice.finish_reason == "length" and choice.message.content.startswith("!endless wo")
    assert whole.usage.completion_tokens == len(whole.choices[0].message.content)
    text, reasons, tokens = stream
    assert reasons == {None, "length"} and tokens == len(text) > 0
    server.wait_idle()
    text = (await asyncio.to_thread(httpx.get, f"{server.url}/metrics")).text
    assert 'outcome="ok",status="200"} 3.0' in text and 'outcome="timeout"' not in text
