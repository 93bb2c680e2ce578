"""Standby processes: each waits to become the engine at its next start, and has already imported what an engine
imports, above all torch.

The one for the first start imports while the server itself does. Those for later starts are started while an engine
serves, so that a restart, or the first request to a sleeping server, can load weights at once. Until then they do not
touch the GPU. Each ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from models.interfaces import cpus
from service.link.config import EngineConfig
from service.system.children import python_command, python_environment, working_directory

log = logging.getLogger(__name__)

# Threads that compute on the host, and how they wait for each other.
#
# torch's threads synchronise at the end of each operation. By default, waiting OpenMP threads spin, each on a whole
# processor. If the machine has other work, they keep the thread that they wait for from running, and a step takes as
# long as the scheduler's time slices. So here waiting threads sleep.

MAX_THREADS = 16
"""Limit of the default, since each operation waits for its slowest thread."""
SMALL_BYTES = 64 << 20
"""With fewer bytes of weights than this, an operation ends before a second thread has woken up. On two idle processors
an embedded model takes 38 ms for an answer of 16 tokens with two spinning threads, 74 ms with two sleeping ones, and 39
ms with one."""


def num_threads(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> int:
    """The setting `threads`, else OMP_NUM_THREADS, else one for small models, else one for each usable processor up to
    MAX_THREADS. Several engines divide the processors."""
    if config.threads is not None:
        return config.threads
    named = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return 1 if _are_small(config) else min(MAX_THREADS, max(1, cpus.available() // config.sharers))


def thread_variables(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for a process that will load torch. Variables that the operator has set are kept.

    GNU's OpenMP reads OMP_WAIT_POLICY, LLVM's and Intel's KMP_BLOCKTIME (milliseconds); OpenBLAS and MKL take their
    number of threads from OMP_NUM_THREADS.
    """
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    if "OMP_WAIT_POLICY" in environ:  # which Intel's library reads only if its own variable is not set
        waiting = {}
    kept = {name: value for name, value in waiting.items() if name not in environ}
    return kept | {"OMP_NUM_THREADS": str(num_threads(config, environ))}


def _are_small(config: EngineConfig) -> bool:
    """Whether the weights of all models together are small; False if there are no files (random weights)."""
    sizes = [path.stat().st_size for model in config.models for path in Path(model.directory).glob("*.safetensors")]
    return 0 < sum(sizes) < SMALL_BYTES


PREPARE_AFTER = 5.0
"""Seconds from an engine's readiness until the standby process is started, so that it does not delay the first
requests."""
ENTRY = "service.engine.start:serve"
"""The function that an engine process runs."""
STANDBY = "standby"
"""First argument of a standby process, in place of the engine's address."""


class EngineAddress(msgspec.Struct, frozen=True):
    """The second line on a standby process's standard input: what other engine processes get as arguments."""

    address: str
    shared: bool


async def start_engine_process(config: EngineConfig, *arguments: str) -> Process:
    """Starts `service.link.process ARGUMENTS` and writes the configuration to its standard input. OSError if it cannot
    be started."""
    process = await asyncio.create_subprocess_exec(
        *python_command("service.link.process", *arguments),
        env=engine_environment(config),
        cwd=working_directory(),
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
    """The standby processes of an engine by the setting `standby`: auto keeps one if the engine has a GPU."""
    return None if mode == "off" else Standby(beside_cpu=mode == "on")


@dataclass(frozen=True)
class EngineStart:
    """An engine that is to be started, and its standby processes (None: it has none)."""

    config: EngineConfig
    standby: Standby | None


async def begin_engines(configs: Sequence[EngineConfig], mode: Literal["auto", "on", "off"]) -> list[EngineStart]:
    """Starts the standby processes for the engines' first starts, unless the mode is off. The server must run in the
    same event loop."""
    starts = [EngineStart(config, standby_for(mode)) for config in configs]
    for start in starts:
        if start.standby is not None:
            await start.standby.begin(start.config, ENTRY)
    return starts


class Standby:
    """Keeps at most one standby process for an engine. It belongs to one event loop and ends with it."""

    def __init__(self, *, beside_cpu: bool = False) -> None:
        """beside_cpu: keep one for an engine on a CPU, too, although such an engine starts faster."""
        self._beside_cpu = beside_cpu
        self._keeper: asyncio.Task[None] | None = None
        self._process: Process | None = None

    async def begin(self, config: EngineConfig, entry: str) -> None:
        """Starts the standby process for the engine's first start. If that fails, the engine's process is started
        later, which reports why it cannot be."""
        with suppress(OSError):
            process = self._process = await start_engine_process(config, STANDBY, entry)
            self._keeper = asyncio.create_task(self._watch(process), name="engine-standby")

    def prepare(self, config: EngineConfig, entry: str, device: str) -> None:
        """Starts the standby process for the next start of an engine that has become ready on `device`. entry: as in
        ProcessLink."""
        if self._keeper is None and (device != "cpu" or self._beside_cpu):
            restart = msgspec.structs.replace(config, restarted=True)
            self._keeper = asyncio.create_task(self._keep(restart, entry), name="engine-standby")

    async def _keep(self, config: EngineConfig, entry: str) -> None:
        await asyncio.sleep(PREPARE_AFTER)
        try:
            process = self._process = await start_engine_process(config, STANDBY, entry)
        except OSError as error:
            log.warning("no process can stand by for the next start of the engine: %s", error)
            return
        await self._watch(process)

    async def _watch(self, process: Process) -> None:
        """Watches the process until it is taken. If it ends by itself, it is not replaced before the engine's next
        start."""
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
        """Turns the standby process into the engine at this address and returns it; None if there is none."""
        process, self._process = self._process, None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if process is None or process.returncode is not None:
            return None
        write_line(process, address)
        return process
