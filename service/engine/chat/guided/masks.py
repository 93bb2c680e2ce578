"""The masks of a step's guided rows, requested while its layers run, from tokens that are on their way to the host.

A MaskJob is made when the layers are launched. Once the previous tokens have arrived, it requests the masks from the
mask servers. Meanwhile the engine's thread reads and sends those tokens, and launches the sampling when the masks are
computed. mask_table.py copies them to the device.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Protocol

import llguidance
import msgspec
import numpy as np
import torch

from models.interfaces import cpus
from models.interfaces.processor import ChatProcessor
from service.engine.chat.guide import Guide
from service.engine.chat.guided.mask_server import Computed, MaskServer, ServerSettings, deep_thread
from service.engine.chat.guided.matchers import build_tokenizer
from service.engine.chat.slot_state import SlotState
from service.engine.core.readback import Readback
from service.link.config import EngineConfig
from service.system.children import python_command, python_environment

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class _CopyStream:
    """Events around the copies of masks on a GPU. sent: after the last copy. read: on the engine's stream, after the
    last launch that reads the masks."""

    stream: torch.cuda.Stream
    sent: torch.cuda.Event
    read: torch.cuda.Event


class MaskTable:
    """What the sampling of a step with guided rows reads: masks on the host, where the mask server writes them, and on
    the device (SlotState.allowed), and which slot and which mask each row has (SlotState.sampled)."""

    def __init__(self, state: SlotState, masks: np.ndarray) -> None:
        """masks int32 [slots, words]: the host's."""
        self._allowed, self._sampled = state.allowed, state.sampled
        self._host = torch.from_numpy(masks)
        self._rows = torch.zeros(state.sampled.shape, dtype=torch.int64, pin_memory=state.allowed.is_cuda)
        self._copies: _CopyStream | None = None
        if state.allowed.is_cuda:
            stream = torch.cuda.Stream(state.allowed.device)
            self._copies = _CopyStream(stream, torch.cuda.Event(), torch.cuda.Event())
            self._copies.read.record()  # The tables are filled on the engine's stream, too.
            self._pin()

    def _pin(self) -> None:
        runtime, address = torch.cuda.cudart(), self._host.data_ptr()
        if problem := int(runtime.cudaHostRegister(address, self._host.nbytes, 0)):
            log.warning("masks are copied more slowly: their memory cannot be pinned (CUDA error %d)", problem)
            # CUDA keeps the error for the next launch, which fails: here it is one that changes nothing.
            with contextlib.suppress(torch.AcceleratorError):
                self._allowed[0].fill_(-1)
        else:
            weakref.finalize(self, runtime.cudaHostUnregister, address)

    def writable(self) -> None:
        """Waits until no copy reads the host's masks and rows any more."""
        if self._copies is not None:
            self._copies.sent.synchronize()

    @contextlib.contextmanager
    def sent(self, slots: np.ndarray, mask_rows: np.ndarray, count: int) -> Iterator[None]:
        """Copies the first `count` masks to rows 1 .. count on the device, and slots and mask rows int64 [rows], after
        the launches that still read the current ones and in parallel with what runs. Launches inside the context read
        the new ones."""
        rows = self._rows.numpy()
        rows[:, len(slots) :] = 0
        rows[0, : len(slots)], rows[1, : len(slots)] = slots, mask_rows
        target, source = self._allowed[1 : 1 + count], self._host[:count]
        if self._copies is None:
            target.copy_(source)
            self._sampled.copy_(self._rows)
            yield
            return
        with torch.cuda.stream(self._copies.stream):
            self._copies.stream.wait_event(self._copies.read)
            target.copy_(source, non_blocking=True)
            self._sampled.copy_(self._rows, non_blocking=True)
            self._copies.sent.record(self._copies.stream)
        torch.cuda.current_stream().wait_event(self._copies.sent)
        try:
            yield
        finally:
            self._copies.read.record()


_MAX_WAIT = 0.004
"""Seconds that the engine waits for masks before it looks for commands again."""


class MaskServers(Protocol):
    """The mask servers, as a MaskJob sees them."""

    def compute(self, job: MaskJob, server: int, first: int, rows: list[tuple[int, list[int]]]) -> None:
        """Requests masks of a server, from place `first` on, for guides and the tokens that their matchers have not
        seen. `receive` calls `job.finish` with the reply."""
        ...

    def receive(self, seconds: float) -> None:
        """Handles the replies that have come; waits up to `seconds` for the first one."""
        ...


Unread = Sequence[tuple[Readback, int]]
"""Where the tokens of a sequence that were sampled but not read yet will arrive: rows of results, the oldest first."""


@dataclass(eq=False, slots=True)
class GuidedRow:
    """A guided row of a step. tokens: those of its answer that its matcher has not seen; unread ones are appended.
    stopped: one of them is a stop token."""

    guide: Guide
    tokens: list[int]
    unread: Unread
    stopped: bool = False


class MaskJob:
    """The masks of one step, from the request for them until all have been computed.

    rows: int64 [rows of the step], the row of SlotState.allowed where the mask of each row is; 0 for those without one.
    count: number of masks. verdicts: by row, for the rows that do not go on (service.engine.chat.guided.mask_server).
    These three are complete once
        it is done.
    awaited: the results that it reads first.
    """

    def __init__(self, wanted: Mapping[int, GuidedRow], num_rows: int, servers: MaskServers) -> None:
        """wanted: the guided rows, by row of the step, which has `num_rows`."""
        self._wanted = wanted
        self._servers = servers
        self._asked: list[int] = []
        """Rows whose masks were asked for, in the order of these."""
        self._requested = False
        self._missing = 0
        """Number of masks that have not been computed yet."""
        self.rows = np.zeros(num_rows, np.int64)
        self.count = 0
        self.verdicts: dict[int, str] = {}
        self.awaited = list({readback: None for row in wanted.values() for readback, _ in row.unread})
        self.seconds = 0.0
        """Seconds that the slowest server took."""
        self.ask_when_ready()

    @property
    def done(self) -> bool:
        return self._requested and not self._missing

    def ask_when_ready(self) -> None:
        """Requests the masks, once, if the previous tokens have arrived."""
        if not self._requested and all(readback.ready() for readback in self.awaited):
            self._fetch()
            self._ask()

    def wait(self) -> None:
        """Waits until the previous tokens have arrived, then for the masks, or for a while."""
        if not self._requested:
            for readback in self.awaited:
                readback.wait()
            self.ask_when_ready()
            return
        until = time.monotonic() + _MAX_WAIT
        while self._missing and (left := until - time.monotonic()) > 0:
            self._servers.receive(left)

    def finish(self, first: int, count: int, computed: Computed) -> None:
        """Takes in `count` of the masks that were asked for, from `first` on."""
        self.verdicts |= {self._asked[first + place]: verdict for place, verdict in computed.verdicts.items()}
        self.seconds = max(self.seconds, computed.seconds)
        self._missing -= count

    def _fetch(self) -> None:
        """Appends the tokens that the engine has not read."""
        results = {readback: readback.read()["results"].tolist() for readback in self.awaited}
        for row in self._wanted.values():
            for readback, place in row.unread:
                token, stopped = results[readback][place]
                if stopped:
                    row.stopped = True
                row.tokens.append(token)

    def _ask(self) -> None:
        self._requested = True
        by_server: dict[int, list[int]] = {}
        for row, wanted in self._wanted.items():
            guide = wanted.guide
            if wanted.stopped or guide.ended:
                continue  # Its sequence has ended, or ends when these tokens are read.
            if guide.problem:
                self.verdicts[row] = guide.problem
            else:
                guide.num_consumed += len(wanted.tokens)
                by_server.setdefault(guide.server, []).append(row)
        self._asked = [row for rows in by_server.values() for row in rows]
        self.count = self._missing = len(self._asked)
        first = 0
        for server, rows in by_server.items():
            asked = [(self._wanted[row].guide.number, self._wanted[row].tokens) for row in rows]
            self._servers.compute(self, server, first, asked)
            first += len(rows)
        self.rows[self._asked] = range(1, 1 + self.count)
