"""What a busy machine does to a server whose engine is a thread, on purpose and at random: the engine obeys and answers
late, and the event loop stands still. A test that fails with this leans on how fast the machine is."""

from __future__ import annotations

import asyncio
import time
from random import SystemRandom

import pytest

from service.link.engine_link import EngineExit
from service.link.engine_socket import OnOutputs
from service.link.messages import Command, Outputs
from tests.support.inline_link import InlineChannel, InlineLink

OBEY, ANSWER, STALL, REST = 0.6, 0.4, 0.15, 0.3
"""Seconds at most: before commands are obeyed, before results are sent, that the event loop stands still, and that it
runs in between."""
OBEYED_LATE, ANSWERED_LATE = 0.5, 0.1
"""How often."""
CHANCE = SystemRandom()
"""Not the generator that tests seed."""


def delay_engines(patch: pytest.MonkeyPatch) -> None:
    receive, send, run = InlineChannel.receive, InlineChannel.send, InlineLink.run

    def late_receive(channel: InlineChannel, timeout: float | None) -> list[Command]:
        commands = receive(channel, timeout)
        if commands and CHANCE.random() < OBEYED_LATE:
            _stand_still(OBEY)
        return commands

    def late_send(channel: InlineChannel, outputs: Outputs) -> None:
        if outputs.state is None and CHANCE.random() < ANSWERED_LATE:
            _stand_still(ANSWER)
        send(channel, outputs)

    async def stalled_run(link: InlineLink, on_outputs: OnOutputs) -> EngineExit:
        stalling = asyncio.create_task(_stall())
        try:
            return await run(link, on_outputs)
        finally:
            stalling.cancel()

    patch.setattr(InlineChannel, "receive", late_receive)
    patch.setattr(InlineChannel, "send", late_send)
    patch.setattr(InlineLink, "run", stalled_run)


def _stand_still(most: float) -> None:
    time.sleep(CHANCE.uniform(0, most))


async def _stall() -> None:
    while True:
        await asyncio.sleep(CHANCE.uniform(0, REST))
        _stand_still(STALL)
