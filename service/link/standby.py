"""A process that waits to become the engine at its next start. It is started while an engine serves and imports what an
engine imports, above all torch. A restart, or the first request to a sleeping server, then begins by loading weights.
It does not touch the GPU, and ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import PIPE, Process
from typing import Literal

import msgspec

from service.children import python_command, python_environment
from service.link.config import EngineConfig
from service.link.host_threads import thread_variables

log = logging.getLogger(__name__)

PREPARE_AFTER = 5.0
"""Seconds from an engine's readiness until the standby process is started, so that it does not delay the first
requests."""
STANDBY = "standby"
"""First argument of such a process, in the place of the engine's address."""


class EngineAddress(msgspec.Struct, frozen=True):
    """The second line of a standby's standard input: what other engine processes get as arguments."""

    address: str
    shared: bool


async def start_engine_process(config: EngineConfig, *arguments: str) -> Process:
    """`service.link.process ARGUMENTS`, with the line that it reads first. OSError if it cannot be started."""
    process = await asyncio.create_subprocess_exec(
        *python_command("service.link.process", *arguments),
        env=engine_environment(config),
        stdin=PIPE,
        start_new_session=True,  # Ctrl-C is for the API process, which drains first
    )
    write_line(process, config)
    return process


def engine_environment(config: EngineConfig) -> dict[str, str]:
    device = {"CUDA_VISIBLE_DEVICES": config.gpu} if config.gpu else {}
    return python_environment() | thread_variables(config) | device


def write_line(process: Process, line: msgspec.Struct) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(line) + b"\n")


def standby_for(mode: Literal["auto", "on", "off"]) -> Standby | None:
    """The standby processes that the setting asks for: auto keeps one if the engine has a GPU."""
    return None if mode == "off" else Standby(beside_cpu=mode == "on")


class Standby:
    """At most one standby process of an engine. Belongs to one event loop and ends with it."""

    def __init__(self, *, beside_cpu: bool = False) -> None:
        """beside_cpu: also if the engine runs on a CPU, where a start takes less time."""
        self._beside_cpu = beside_cpu
        self._keeper: asyncio.Task[None] | None = None
        self._process: Process | None = None

    def prepare(self, config: EngineConfig, entry: str, device: str) -> None:
        """Starts the standby process for an engine that has become ready on this device. entry: as in ProcessLink."""
        if self._keeper is None and (device != "cpu" or self._beside_cpu):
            life = msgspec.structs.replace(config, restarted=True)
            self._keeper = asyncio.create_task(self._keep(life, entry), name="engine-standby")

    async def _keep(self, config: EngineConfig, entry: str) -> None:
        """Watches the process until it is taken. One that ends by itself is not replaced before the engine's next
        start."""
        await asyncio.sleep(PREPARE_AFTER)
        try:
            process = self._process = await start_engine_process(config, STANDBY, entry)
        except OSError as error:
            log.warning("no process can stand by for the next start of the engine: %s", error)
            return
        try:
            status = await process.wait()
            if self._process is process:
                log.warning("the process that stood by for the engine has ended (%d)", status)
        finally:
            if self._process is process:
                self._process = None
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def take(self, address: EngineAddress) -> Process | None:
        """The process, which becomes the engine at this address; None if there is none."""
        process, self._process = self._process, None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if process is None or process.returncode is not None:
            return None
        write_line(process, address)
        return process
