"""Tokens that come faster than their events can be sent share an event, and nothing of them is lost."""

from __future__ import annotations

import time

import pytest
from openai import OpenAI

from tests.support.servers import RunningServer

TEXT = "abcdefgh" * 40


@pytest.mark.parametrize("logprobs", [False, True])
def test_tokens_that_wait_for_the_loop_share_an_event(server: RunningServer, client: OpenAI, logprobs: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 1} if logprobs else {}
    chunks = []
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": TEXT + "STOP and no further"}],
        stop=["STOP"],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **fields,
    ):
        chunks.append(chunk)
        if len(chunks) == 5:
            server.loop.call_soon_threadsafe(time.sleep, 0.3)
    *said, ended, usage = chunks[1:]
    contents = [chunk.choices[0].delta.content for chunk in said]
    assert "".join(contents) == TEXT
    assert max(map(len, contents)) > 20, "the loop was never behind"
    assert ended.choices[0].finish_reason == "stop" and not usage.choices
    shown = 0
    for chunk, content in zip(said, contents, strict=True):
        shown += len(content)
        # A token of the stop string may have been made already, but not be shown.
        assert shown <= chunk.usage.completion_tokens <= len(TEXT) + len("STOP")
        entries = chunk.choices[0].logprobs.content if logprobs else []
        assert "".join(entry.token for entry in entries) == (content if logprobs else "")
    assert usage.usage.completion_tokens == len(TEXT) + len("STOP")
