"""Where the mask servers of a model run: in their own processes, or in a thread of the engine's process."""

from __future__ import annotations

import mmap
import os
import subprocess
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

import llguidance
import msgspec
import numpy as np

from models.interfaces import cpus
from models.interfaces.processor import ChatProcessor
from service.engine.chat.guided.mask_server import MaskServer, ServerSettings
from service.engine.chat.guided.matchers import build_tokenizer
from service.link.config import EngineConfig
from service.link.grammar_limits import deep_thread
from service.system.children import python_command, python_environment

_MAX_PROCESSES = 4
_PROCESSORS_EACH = 4
"""Number of the host's processors for each mask server: it computes during a part of every step, while the engine and
the API processes need processors as well."""


class MaskHost(Protocol):
    """Starts and ends one mask server; at most one runs at a time."""

    @property
    def own_interpreter(self) -> bool:
        """Whether the server has an interpreter, and so an interpreter lock, of its own."""
        ...

    def start(self) -> Connection:
        """Starts a server and returns the engine's end of its connection. The server ends when that is closed."""
        ...

    def kill(self) -> bool:
        """Ends the last server at once; False if that is not possible."""
        ...


class MaskThread:
    """The server in a thread; `server` is there once it was started."""

    own_interpreter = False

    def __init__(self, tokenizer: Callable[[], llguidance.LLTokenizer], masks: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._masks = masks

    def start(self) -> Connection:
        ours, theirs = Pipe()
        self.server = MaskServer(theirs, self._masks, self._tokenizer)
        deep_thread(self.server.run, "masks")
        return ours

    def kill(self) -> bool:
        return False


class SharedMasks:
    """masks int32 [rows, words], which processes see that are given the descriptor `memory`."""

    def __init__(self, rows: int, words: int) -> None:
        size = 4 * rows * words
        self.memory = os.memfd_create("masks")
        os.ftruncate(self.memory, size)
        self.masks = np.frombuffer(mmap.mmap(self.memory, size), np.int32).reshape(rows, words)
        weakref.finalize(self, os.close, self.memory)


class MaskProcess:
    """The server in a process."""

    own_interpreter = True

    def __init__(self, directory: str, vocab_limit: int, shared: SharedMasks, config: EngineConfig) -> None:
        """directory: the model's checkpoint."""
        rows, words = shared.masks.shape
        self._process: subprocess.Popen[bytes] | None = None
        self._shared = shared
        self._settings = ServerSettings(
            directory=directory,
            vocab_limit=vocab_limit,
            link=-1,
            memory=shared.memory,
            rows=rows,
            words=words,
            log_level=config.log_level,
            log_format=config.log_format,
        )

    @property
    def pid(self) -> int | None:
        """None while no server runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            settings = msgspec.structs.replace(self._settings, link=theirs.fileno())
            command = python_command("service.engine.chat.guided.mask_server", msgspec.json.encode(settings).decode())
            descriptors = (theirs.fileno(), self._shared.memory)
            self._process = subprocess.Popen(
                command, env=python_environment(), stdin=subprocess.DEVNULL, pass_fds=descriptors
            )
        return ours

    def kill(self) -> bool:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        return True

    def __del__(self) -> None:
        self.kill()


def hosts_of(
    name: str, processor: ChatProcessor, vocab_limit: int, config: EngineConfig, device: str
) -> tuple[np.ndarray, list[MaskHost]]:
    """Masks int32 [config.slots, words] and the hosts of the servers that write them: processes beside a GPU for
    a model that can be loaded there too, else one thread. vocab_limit: tokens of the model; rows of its embedding past
    them only pad it. device: type of the engine's."""
    rows, words = config.slots, -(-vocab_limit // 32)
    directory = next((model.directory for model in config.models if model.name == name), None)
    if device != "cuda" or directory is None:
        masks = np.zeros((rows, words), np.int32)
        return masks, [MaskThread(lambda: build_tokenizer(processor, vocab_limit), masks)]
    shared = SharedMasks(rows, words)
    count = min(_MAX_PROCESSES, max(1, cpus.available() // config.sharers // _PROCESSORS_EACH))
    return shared.masks, [MaskProcess(directory, vocab_limit, shared, config) for _ in range(count)]
