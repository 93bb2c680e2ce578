"""An API process's link to an engine that another process starts and watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from service.link.engine_link import EngineExit
from service.link.engine_socket import EngineSocket, OnOutputs, discard
from service.link.messages import Command


class FollowedEngine:
    """What is known of an engine that another process supervises: where it runs, or that it does not run."""

    def __init__(self) -> None:
        self.address: str | None = None
        """Address of its current process; None if there is none."""
        self.problem = ""
        """Why this process cannot communicate with the engine; empty if it can."""
        self._changed = asyncio.Event()

    def tell(self, address: str | None) -> None:
        """Records what the supervising process reports."""
        self.address = address
        self._changed.set()

    async def started(self) -> None:
        """Waits until there is an engine process."""
        await self._until(lambda: self.address is not None)

    async def ended(self, address: str | None) -> None:
        """Waits until the engine process of that address is no longer the current one."""
        await self._until(lambda: self.address != address)

    def fail(self, problem: str) -> None:
        """Treats the engine as ended, so that its requests in this process fail at once."""
        self.problem = problem
        self.tell(None)

    async def failed(self) -> None:
        """Waits until this process cannot communicate with the engine, and so is of no more use."""
        await self._until(lambda: bool(self.problem))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


class AttachedLink:
    """Implements EngineLink for one start of an engine that another process supervises. Make it once `engine` has an
    address. peer: name of this process, which no other process has ever had."""

    def __init__(self, engine: FollowedEngine, peer: str) -> None:
        self.on_launch: Callable[[], None] = lambda: None
        self._engine = engine
        self._peer = peer
        self.send: Callable[[Command], None] = discard

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        address = self._engine.address
        if address is None:
            return EngineExit("it had ended already")
        try:
            socket = EngineSocket.attached(address, self._peer)
        except (OSError, zmq.ZMQError) as error:  # e.g. out of descriptors
            self._engine.fail(f"the engine could not be reached: {error}")
            return EngineExit("it could not be reached")
        self.send = socket.send
        reader = asyncio.create_task(socket.read(on_outputs), name="engine-reader")
        tasks = {reader, asyncio.create_task(self._engine.ended(address))}
        try:
            self.on_launch()
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                self._engine.fail(f"the engine's messages could not be read: {reader.exception()}")
            return EngineExit("its process has ended")
        finally:
            self.send = discard
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close()

    def kill(self) -> None:
        """The supervising process does that."""
