"""The link to an engine's process."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from typing import Any

from service.link.config import EngineConfig
from service.link.engine_link import ProcessLink
from service.link.wire import WireError


async def test_a_process_that_ends_with_a_message_that_cannot_be_read_is_not_killed() -> None:
    """It is gone: to kill it is an error, which would end the supervision of the engine."""
    process = await asyncio.create_subprocess_exec("true", stdin=PIPE)

    class Socket:
        async def read(self, on_outputs: Any) -> None:
            await process.wait()
            raise WireError("no message")

    socket: Any = Socket()
    ended = await ProcessLink(EngineConfig(models=()))._wait_for_end(process, socket, lambda outputs: None)
    assert ended.reason == "its messages could not be read: no message"
