"""The engine's side of answers that match a grammar: its requests to the mask servers, and their replies.

A matcher is built when its request comes, and the request is admitted once it is built. A MaskJob
(service.engine.chat.guided.masks) requests the masks of each step.
"""

from __future__ import annotations

import logging
import math
import select
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection

import msgspec

from service.engine.chat.guide import Guide
from service.engine.chat.guided.mask_server import (
    BROKEN,
    Build,
    Built,
    Compute,
    Computed,
    Forget,
    MaskRequest,
    Ready,
    Reply,
)
from service.engine.chat.guided.masks import GuidedRow, MaskHost, MaskJob, Unread
from service.engine.chat.sequence import ChatSequence
from service.system.children import Silence

log = logging.getLogger(__name__)

_LONGEST_COMPUTATION = 10.0
"""Seconds after which a server that computes masks is given up. The budgets of grammars end far earlier."""
_LONGEST_BUILD = 30.0
"""The same for a server that builds a matcher, which takes a few seconds of one processor at most."""
_LONGEST_READING = 300.0
"""The same for a server that reads the vocabulary, which takes seconds, but may be done beside captures."""
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
        """What it has done for too long, in words."""
        if self.asked is not None and time.monotonic() - self.asked.since > _LONGEST_COMPUTATION:
            return f"has computed for {_LONGEST_COMPUTATION:g} s"
        if self.link is not None and not self.ready and self._silence.look() > _LONGEST_READING:
            return f"has read the vocabulary for {_LONGEST_READING:g} s"
        if self._unanswered and self._silence.look() > _LONGEST_BUILD:
            return f"has built one grammar for {_LONGEST_BUILD:g} s"
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
            with suppress(OSError):
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

    # service.engine.chat.guided.masks.MaskServers

    def compute(self, job: MaskJob, server: int, first: int, rows: list[tuple[int, list[int]]]) -> None:
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
