"""Tokens that come faster than their events can be sent share an event, and nothing of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from openai import OpenAI

from service.link.config import Channel, EngineConfig
from service.link.messages import Command, Outputs
from tests.support import fake_engine
from tests.support.inline_link import InlineLink
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS

TEXT = "abcdefgh" * 40
SOME, MORE = 5, 60
"""Tokens that come one by one, and those that all come while the event loop stands still."""


class PacedChannel:
    """An engine's channel: SOME tokens pass, the next when `behind` is set; `sent` is set when MORE have gone out."""

    def __init__(self, channel: Channel) -> None:
        self.behind, self.sent = threading.Event(), threading.Event()
        self._channel = channel
        self._tokens = 0

    def receive(self, timeout: float | None) -> list[Command]:
        return self._channel.receive(timeout)

    def send(self, outputs: Outputs) -> None:
        if outputs.chat:
            if self._tokens == SOME:
                assert self.behind.wait(GENEROUS)
            self._tokens += 1
        self._channel.send(outputs)
        if self._tokens == SOME + MORE:
            self.sent.set()

    def hold_the_loop(self) -> None:
        """Called in the event loop."""
        self.behind.set()
        assert self.sent.wait(GENEROUS)


@pytest.fixture
def paced() -> Iterator[tuple[RunningServer, PacedChannel]]:
    channels: list[PacedChannel] = []

    def serve(config: EngineConfig, channel: Channel) -> None:
        channels.append(PacedChannel(channel))
        fake_engine.serve(config, channels[-1])

    with running_server(make_link=lambda config: InlineLink(config, serve)) as server:
        yield server, channels[0]


@pytest.mark.parametrize("logprobs", [False, True])
def test_tokens_that_wait_for_the_loop_share_an_event(
    paced: tuple[RunningServer, PacedChannel], logprobs: bool
) -> None:
    server, channel = paced
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
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
        if len(chunks) == 2:
            server.loop.call_soon_threadsafe(channel.hold_the_loop)
    *said, ended, usage = chunks[1:]
    contents = [chunk.choices[0].delta.content for chunk in said]
    assert "".join(contents) == TEXT
    assert max(map(len, contents)) >= MORE, "what came while the loop stood still was sent in pieces"
    assert ended.choices[0].finish_reason == "stop" and not usage.choices
    shown = 0
    for chunk, content in zip(said, contents, strict=True):
        shown += len(content)
        # A token of the stop string may have been made already, but not be shown.
        assert shown <= chunk.usage.completion_tokens <= len(TEXT) + len("STOP")
        entries = chunk.choices[0].logprobs.content if logprobs else []
        assert "".join(entry.token for entry in entries) == (content if logprobs else "")
    assert usage.usage.completion_tokens == len(TEXT) + len("STOP")
