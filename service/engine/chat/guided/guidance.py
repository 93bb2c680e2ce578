"""The engine's side of answers that match a grammar: its mask servers, its requests to them, and their replies.

A matcher is built when its request comes, and the request is admitted once it is built. The masks of a step are
requested while its layers run, from tokens that are on their way to the host: a MaskJob is made when the layers are
launched, and requests the masks once the previous tokens have arrived. Meanwhile the engine's thread reads and sends
those tokens, and launches the sampling when the masks are computed. MaskTable copies them to the device.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import select
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import llguidance
import msgspec
import numpy as np
import torch

from models.interfaces import cpus
from models.text.processor import ChatProcessor
from service.engine.chat.guided.mask_server import (
    BROKEN,
    Build,
    Built,
    Compute,
    Computed,
    Forget,
    MaskRequest,
    MaskServer,
    Ready,
    Reply,
    ServerSettings,
    build_tokenizer,
    deep_thread,
)
from service.engine.chat.sequence import ChatSequence, Guide
from service.engine.chat.slot_state import SlotState
from service.engine.core.readback import Readback
from service.link.config import EngineConfig
from service.system.children import Silence, python_command, python_environment

log = logging.getLogger(__name__)

_MAX_PROCESSES = 4
_PROCESSORS_EACH = 4
"""Number of the host's processors for each mask server: it computes during a part of every step, while the engine and
the API processes need processors as well."""


class MaskThread:
    """The server in a thread; `server` is there once it was started."""

    own_interpreter = False
    """Whether the server has an interpreter, and so an interpreter lock, of its own."""

    def __init__(self, tokenizer: Callable[[], llguidance.LLTokenizer], masks: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._masks = masks

    def start(self) -> Connection:
        """Starts a server and returns the engine's end of its connection. The server ends when that is closed."""
        ours, theirs = Pipe()
        self.server = MaskServer(theirs, self._masks, self._tokenizer)
        deep_thread(self.server.run, "masks")
        return ours

    def kill(self) -> bool:
        """Ends the last server at once; False if that is not possible."""
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


MaskHost = MaskThread | MaskProcess
"""Starts and ends one mask server; at most one runs at a time."""


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

    def __init__(self, wanted: Mapping[int, GuidedRow], num_rows: int, servers: Guidance) -> None:
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


_LONGEST_COMPUTATION = 10.0
"""Seconds after which a server that computes masks is given up. The budgets of grammars end far earlier."""
_LONGEST_SILENCE = 60.0
"""The same for a server that reads the vocabulary or builds matchers, each of which takes seconds."""
_FEW = 4
"""Guides that a server takes before another one gets any."""
_SPIN = 0.001
"""Seconds that the engine looks for masks before it sleeps until they come: waking takes a part of a short step, once
for each server."""


@dataclass(frozen=True)
class _Asked:
    """Masks of a job that a server computes, from `first` on, and since when."""

    job: MaskJob
    first: int
    count: int
    since: float


class _Server:
    """One mask server. `start` starts it, and starts it again if it has ended."""

    def __init__(self, host: MaskHost, poll: select.poll) -> None:
        """poll: watches its connection."""
        self._host = host
        self._poll = poll
        self._replies = msgspec.msgpack.Decoder(Reply)
        self.guides: dict[int, Guide] = {}
        """The guides that the server knows, by number."""
        self.link: Connection | None = None
        self.ready = False
        """Whether it has read the vocabulary."""
        self.asked: _Asked | None = None
        self._unsent: list[Build | Forget] = []
        """Requests to be sent once it reads them: while it starts, computes masks or hangs, a full connection would
        stop the engine."""
        self._unanswered: dict[int, None] = {}
        """The guides whose matchers it was asked for and has not answered about, in the order of the requests."""
        self._silence = Silence(time.monotonic)
        """Since it was started, has read the vocabulary, or began with the first of these."""

    def start(self) -> bool:
        """Starts the server unless it runs; False if it cannot be started."""
        if self.link is None:
            try:
                self.link = self._host.start()
            except OSError as error:
                log.error("no mask server can be started: %s", error)
                return False
            self._poll.register(self.link.fileno(), select.POLLIN)
            self._end = weakref.finalize(self, self.link.close)
            self._silence.end()
        return True

    def build(self, guide: Guide, grammar: str, *, slow: bool) -> None:
        self.guides[guide.number] = guide
        self._unsent.append(Build(guide.number, grammar, slow))
        self.send_unsent()

    def forget(self, guide: Guide) -> None:
        if self.guides.pop(guide.number, None) is None:
            return
        unsent = [request for request in self._unsent if request.guide != guide.number]
        if len(unsent) == len(self._unsent):
            unsent.append(Forget(guide.number))
        self._unsent = unsent
        self.send_unsent()

    def compute(self, asked: _Asked, rows: list[tuple[int, list[int]]]) -> None:
        self.asked = asked
        self._send(Compute(asked.first, rows))

    def receive(self) -> list[Guide]:
        """Takes in one message that has come: a guide that was built, or masks."""
        assert self.link is not None
        try:
            match self._replies.decode(self.link.recv_bytes()):
                case Ready():
                    self.ready = True
                case Built(number, problem):
                    if number == next(iter(self._unanswered)):
                        self._silence.end()
                    del self._unanswered[number]
                    if (guide := self.guides.get(number)) is not None:  # It may have ended since.
                        guide.built, guide.problem = True, problem
                        return [guide]
                case Computed() as computed:
                    self._finish(computed)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            return self._lose(f"a mask server has ended: {error!r}")
        return []

    def end_if_late(self) -> list[Guide]:
        late = self._late()
        return self._lose(f"a mask server {late} and is started anew") if late and self._host.kill() else []

    def _late(self) -> str:
        """Description of the overdue operation, for the log."""
        if self.asked is not None and time.monotonic() - self.asked.since > _LONGEST_COMPUTATION:
            return f"has computed for {_LONGEST_COMPUTATION:g} s"
        busy = self.link is not None and (self._unanswered or not self.ready)
        if busy and self._silence.look() > _LONGEST_SILENCE:
            return f"has {'built one grammar' if self.ready else 'read the vocabulary'} for {_LONGEST_SILENCE:g} s"
        return ""

    def _lose(self, message: str) -> list[Guide]:
        """Fails the guided answers of a server that has ended; returns those of their guides that were being built."""
        log.error("%s; %d guided answers fail", message, len(self.guides))
        self._host.kill()
        assert self.link is not None
        self._poll.unregister(self.link.fileno())
        self._end()
        self.link, self.ready, self._unsent, self._unanswered = None, False, [], {}
        unbuilt = [guide for guide in self.guides.values() if not guide.built]
        for guide in self.guides.values():
            guide.built, guide.problem = True, guide.problem or BROKEN
        self.guides = {}
        if self.asked is not None:
            self._finish(Computed(dict.fromkeys(range(self.asked.count), BROKEN), 0.0))
        return unbuilt

    def _finish(self, computed: Computed) -> None:
        assert self.asked is not None
        asked, self.asked = self.asked, None
        asked.job.finish(asked.first, asked.count, computed)

    def send_unsent(self) -> None:
        """Sends what it can take in now."""
        while self._unsent and self.ready and self.asked is None and self._writable():
            request = self._unsent.pop(0)
            if isinstance(request, Build):
                if not self._unanswered:
                    self._silence.end()
                self._unanswered[request.guide] = None
            self._send(request)

    def _writable(self) -> bool:
        """Whether there is room for another request: sockets say so while a quarter of their buffer is full at most."""
        assert self.link is not None
        room = select.poll()
        room.register(self.link.fileno(), select.POLLOUT)
        return bool(room.poll(0))

    def _send(self, request: MaskRequest) -> None:
        # One that has ended is noticed by `receive`.
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.send_bytes(msgspec.msgpack.encode(request))


class Guidance:
    """The guides of one model, distributed over its mask servers. `start` makes the first one read the vocabulary. The
    others are started with the first guide, since each of them takes the memory of a vocabulary."""

    def __init__(self, hosts: Sequence[MaskHost]) -> None:
        self._poll = select.poll()
        self._servers = [_Server(host, self._poll) for host in hosts]
        self._spins = all(host.own_interpreter for host in hosts)
        """Whether to look for masks before sleeping: servers in the engine's interpreter need its lock meanwhile."""
        self._numbers = count()
        self._building: dict[int, Guide] = {}
        self._built: list[Guide] = []
        """Guides that have been built since the last `take_built`."""

    def start(self) -> None:
        """Starts the first server, which reads the vocabulary while graphs are captured."""
        self._servers[0].start()

    @property
    def building(self) -> bool:
        """Whether a guide is being built."""
        return bool(self._building)

    def begin(self, grammar: str, *, slow: bool = False) -> Guide:
        """The guide of an answer that must match the grammar. Its matcher is built from now on. slow: that takes long,
        unless a matcher of this grammar is kept."""
        self.receive(0.0)  # A server that has ended is started again.
        running = [index for index, server in enumerate(self._servers) if server.start()]
        # A server that is still reading the vocabulary gets no guides if another one is ready. Few rows are left
        # together, since every server that takes part in a step has to be asked and heard.
        index = min(running, key=lambda index: (not self._servers[index].ready, self._load(index)), default=0)
        guide = Guide(next(self._numbers), index)
        if running:
            self._servers[index].build(guide, grammar, slow=slow)
            self._building[guide.number] = guide
        else:
            guide.built, guide.problem = True, BROKEN
            self._built.append(guide)
        return guide

    def _load(self, index: int) -> int:
        """Number of guides of a server; 0 for few of them."""
        load = len(self._servers[index].guides)
        return load if load >= _FEW else 0

    def take_built(self) -> list[Guide]:
        """The guides that have been built since the last call."""
        if self._building or any(server.asked is not None for server in self._servers):
            self.receive(0.0)
        built, self._built = self._built, []
        return built

    def forget(self, guide: Guide) -> None:
        """Drops the guide of a sequence that has ended."""
        guide.ended = True
        self._building.pop(guide.number, None)
        self._servers[guide.server].forget(guide)

    def masks(self, sequences: Sequence[ChatSequence], unread: Sequence[Unread]) -> MaskJob:
        """Begins to compute the masks of a step. sequences: its rows; unread: tokens of each that were sampled and have
        not been read."""
        wanted = {
            # Tokens are copied: the engine's thread may read more of them.
            row: GuidedRow(guide, sequence.generated[guide.num_consumed :], places)
            for row, (sequence, places) in enumerate(zip(sequences, unread, strict=True))
            if (guide := sequence.guide) is not None
        }
        return MaskJob(wanted, len(sequences), self)

    def compute(self, job: MaskJob, server: int, first: int, rows: list[tuple[int, list[int]]]) -> None:
        """Requests masks of a server, from place `first` on, for guides and the tokens that their matchers have not
        seen. `receive` calls `job.finish` with the reply."""
        self._servers[server].compute(_Asked(job, first, len(rows), time.monotonic()), rows)

    def _messages(self, seconds: float) -> list[tuple[int, int]]:
        """Descriptors that have messages, with poll's events."""
        events = self._poll.poll(0)
        if seconds and self._spins:
            spin = min(seconds, _SPIN)
            until = time.monotonic() + spin
            while not events and time.monotonic() < until:
                events = self._poll.poll(0)
            seconds -= spin  # Other models of the engine wait as long as this does.
        return events or self._poll.poll(math.ceil(1e3 * seconds))

    def receive(self, seconds: float) -> None:
        """Handles messages; waits up to `seconds` for the first one."""
        ready = {descriptor for descriptor, _ in self._messages(seconds)}
        for server in self._servers:
            heard = server.link is not None and server.link.fileno() in ready
            for guide in server.receive() if heard else server.end_if_late():
                self._building.pop(guide.number, None)
                self._built.append(guide)
            server.send_unsent()
