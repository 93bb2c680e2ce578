"""The engine process, `service.link.process ADDRESS ENTRY [shared]`, the configuration as one JSON line on stdin.

engine_link.py starts and watches it. It ends when the engine returns or fails, or when its stdin closes because the
process that started it has ended. With `standby ENTRY` it imports what an engine imports, and reads its address later,
from a second line (standby.py).
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from models.checkpoints.registry import resolve
from models.interfaces.errors import CheckpointError
from service.link import wire
from service.link.config import ConfigurationError, EngineConfig
from service.link.messages import Command, Outputs
from service.link.shared import SharedChannel
from service.link.standby import STANDBY, EngineAddress
from service.system.children import leave_signals_to_parent, wait_for_end_of_parent
from service.system.logs import configure_logging

log = logging.getLogger("reprise.engine")

DRIVER = "libcuda.so.1"


def begin_context(device: str) -> threading.Thread | None:
    """Creates the primary context of the first visible GPU, which torch will use, in a thread. Returns the thread at
    once; None for the CPU. Errors are ignored here, since torch will meet and report them. device: as configured."""
    if device == "cpu":
        return None
    # torch sets this before it starts the driver, which reads it once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_retain_context, name="gpu-context", daemon=True)
    thread.start()
    return thread


def _retain_context() -> None:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:  # no driver is installed
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


SHARED = "shared"
"""Argument of an engine that several API processes use (shared.py)."""
CONFIGURATION_ERROR = 3
"""Exit status of an engine that cannot start with its configuration; the log says why."""


class ZmqChannel:
    """The engine's end of a ZeroMQ pair. Both directions are unbounded, since the API process bounds what it admits."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._decoder = wire.command_decoder()

    def receive(self, timeout: float | None) -> list[Command]:
        commands: list[Command] = []
        if timeout != 0 and not self._socket.poll(None if timeout is None else round(timeout * 1000)):
            return commands
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return commands
            commands.append(self._decoder.decode([frame.buffer for frame in frames]))

    def send(self, outputs: Outputs) -> None:
        frames = wire.encode(outputs)
        self._socket.send_multipart(frames, copy=wire.is_small(frames))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _exit_with_parent(address: str) -> None:
    wait_for_end_of_parent()
    # A killed parent has not removed the directory of its socket.
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


def _prepare(entry: str, config: EngineConfig) -> None:
    """Imports the entry's module and calls its `prepare`, if it has one. Errors are ignored here, since the start will
    report them."""
    module = importlib.import_module(entry.partition(":")[0])
    with suppress(CheckpointError, ImportError):
        getattr(module, "prepare", lambda _: None)(config)


def main(arguments: list[str]) -> int:
    leave_signals_to_parent()
    address, entry, *shared = arguments
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    if address == STANDBY:
        _prepare(entry, config)
        if not (line := sys.stdin.buffer.readline()):
            return 0  # The server has ended.
        given = msgspec.json.decode(line, type=EngineAddress)
        address, shared = given.address, [SHARED] if given.shared else []
        config = msgspec.structs.replace(config, stood_by=config.restarted)
    threading.Thread(target=_exit_with_parent, args=(address,), daemon=True).start()
    names = {} if config.index is None else {"engine": config.index}
    configure_logging(config.log_level, config.log_format, **names)
    begin_context(config.device)
    channel = SharedChannel(address) if shared == [SHARED] else ZmqChannel(address)
    try:
        resolve(entry)(config, channel)
    except (CheckpointError, ConfigurationError) as error:
        log.error("%s", error)
        return CONFIGURATION_ERROR
    except ImportError as error:
        log.error("the Python package %s cannot be imported (%s); install it again", error.name, error)
        return CONFIGURATION_ERROR
    finally:
        channel.close()
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process at once. The operating system frees its memory and its GPU sooner than the interpreter would,
    and a request that wakes a sleeping engine waits for that."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
