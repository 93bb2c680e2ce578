"""Makes several engine processes look like one engine (EngineClient) to an API process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import numpy as np

from service.api.engines.engine_client import STOPPED, EngineClient, unavailable
from service.api.engines.request_stream import EngineError, EngineLost, Request, RequestGroup, RequestStream
from service.api.engines.shared_usage import UsageRow
from service.link.messages import ChatRequest, Command, EngineState, SpeechAppend, SpeechRequest
from service.metrics.metrics import Metrics

log = logging.getLogger("reprise")

# Which of several engines gets a request: the one that has its pictures or its prefix cached, unless that is full.
#
# Every API process makes the same choice on its own. Keys are hashes of a request's contents, and each key orders the
# engines by rendezvous hashing (Thaler & Ravishankar 1998), so that an engine that ends moves only its own keys. The
# choice is bounded by load (as in consistent hashing with bounded loads, Mirrokni et al. 2016): an engine with clearly
# more work than the mean is skipped, so a very frequent key spreads over all engines.

KEY_BYTES = 16
PREFIXES = (256, 1024, 4096)
"""Numbers of leading tokens that are hashed. A shorter prompt is computed too quickly to be worth a detour."""
HEAD_START = 8
"""Up to this many requests in flight an engine is never full: their rows hardly lengthen a step."""
EXCESS = 1.125
"""An engine with more than this many times the mean number of requests in flight is full."""
LITTLE_SLACK = 0.25
"""Seconds of audio. An engine one of whose listeners has less left than this counts as if it had DETOUR more requests
when speech is sent. Without a limit, the engine that is a step ahead gets half as many again when many begin."""
DETOUR = 4

Reason = Literal["affinity", "spilled", "load"]


@dataclass(frozen=True)
class Load:
    """in_flight: requests of all API processes. slack: smallest slack of the engine's live streams, None without
    any."""

    in_flight: int
    slack: float | None = None


def keys(request: Request) -> list[bytes]:
    """Keys of a request, from the part that most requests share to the part that few do; empty if nothing is worth
    finding again."""
    if not isinstance(request, ChatRequest):
        return []
    prompt = request.prompt
    if prompt.items:
        digests = [item.digest for item in prompt.items]
        return [_key(request.model, digests[0]), _key(request.model, *digests)]
    tokens = np.ascontiguousarray(prompt.token_ids)
    return [_key(request.model, tokens[:length].tobytes()) for length in PREFIXES if len(tokens) >= length]


def _key(model: str, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join([model.encode(), b"\0", *parts]), digest_size=KEY_BYTES).digest()


def ranked(key: bytes, engines: Sequence[int]) -> list[int]:
    """Engines by rendezvous hashing, the best first."""
    return sorted(engines, key=lambda engine: hashlib.blake2b(b"%d" % engine, key=key, digest_size=8).digest())


def choose(request: Request, loads: Mapping[int, Load]) -> tuple[int, Reason]:
    """The engine for a request. At least one engine must accept requests."""
    found = keys(request)
    if not found:
        return _freest(request, loads), "load"
    most = max(HEAD_START, EXCESS * sum(load.in_flight for load in loads.values()) / len(loads))
    home = ranked(found[0], list(loads))[0]
    # Requests with a key that is too frequent for its engine are told apart by the next key: a conversation stays
    # together.
    others = [ranked(key, list(loads))[0] for key in found[1:]] + ranked(found[-1], list(loads))
    engine = next((each for each in (home, *others) if loads[each].in_flight < most), home)
    return engine, "affinity" if engine == home else "spilled"


def _freest(request: Request, loads: Mapping[int, Load]) -> int:
    """The engine with the fewest requests in flight; for speech preferably one whose listeners all have audio left.
    Ties are broken at random."""
    lots = ranked(_key(request.model, request.request_id.encode()), list(loads))
    speech = isinstance(request, SpeechRequest)

    def order(engine: int) -> int:
        slack = loads[engine].slack
        urgent = speech and slack is not None and slack < LITTLE_SLACK
        return loads[engine].in_flight + DETOUR * urgent

    return min(lots, key=order)


MOVABLE = frozenset({"overloaded", "out_of_memory"})
"""Codes of refusals after which another engine may accept the request."""


class Engines:
    """Send each request to one of `clients`.

    If that engine has no room, or ends before anything of the answer has come, the request goes to another one. The
    requests of a group end two engines at most. others: requests in flight of other API processes, by engine's index.
    """

    def __init__(self, clients: Sequence[EngineClient], metrics: Metrics, others: UsageRow | None = None) -> None:
        self.clients = tuple(clients)
        self._metrics = metrics
        self._others = others
        self._stopping = False
        self._changed = asyncio.Event()
        for index, client in enumerate(self.clients):
            if others is not None:
                client.requests.on_load = partial(others.tell, str(index), size=0)
            client.requests.on_loss = self._move
            client.on_change = self._changed.set

    # Life

    def start(self) -> None:
        for client in self.clients:
            client.start()

    async def wait_ready(self) -> None:
        """Wait until requests are answered; EngineError if an engine cannot be started."""
        while not self.ready:
            for client in self.clients:
                if client.failure is not None:
                    await client.wait_ready()  # raises
            self._changed.clear()
            await self._changed.wait()

    def fail(self, reason: str) -> None:
        for client in self.clients:
            client.fail(reason)

    async def stop(self, grace: float = 10.0) -> None:
        self._stopping = True
        await asyncio.gather(*(client.stop(grace) for client in self.clients))

    @property
    def ready(self) -> bool:
        """Whether an engine accepts requests and none is still starting for the first time."""
        return any(client.ready for client in self.clients) and all(client.was_ready for client in self.clients)

    @property
    def phase(self) -> str:
        """ "ready" if there is a ready engine; otherwise the phase of the engine that is waited for."""
        return "ready" if self.ready else self._awaited.phase

    @property
    def state(self) -> EngineState | None:
        """The state of the engine that is waited for, or of the first one."""
        return self.clients[0].state if self.ready else self._awaited.state

    @property
    def states(self) -> list[EngineState]:
        """The newest state of each engine that has sent one since its start."""
        return [client.state for client in self.clients if client.state is not None]

    @property
    def _awaited(self) -> EngineClient:
        new = next((client for client in self.clients if not client.was_ready), None)
        return new or next((client for client in self.clients if not client.ready), self.clients[0])

    @property
    def alive(self) -> bool:
        """Whether an engine runs and its last heartbeat is recent."""
        return any(client.alive for client in self.clients)

    @property
    def restarts(self) -> int:
        return sum(client.restarts for client in self.clients)

    @property
    def in_flight(self) -> int:
        return sum(len(client.requests) for client in self.clients)

    # Requests

    def submit(self, request: Request, group: RequestGroup | None = None) -> RequestStream:
        """Send a request to an engine, one of a group or one alone; EngineError (503) when none is ready."""
        if len(self.clients) == 1:
            stream = self.clients[0].submit(request, group)
            stream.note_sent(0)
            return stream
        loads = self._loads()
        if not loads or self._stopping:
            return self._awaited.submit(request)  # raises EngineError with the reason
        group = RequestGroup() if group is None else group
        if not (loads := _allowed(loads, group)):
            raise unavailable(STOPPED)
        index, reason = choose(request, loads)
        stream = self.clients[index].submit(request, group)
        stream.note_sent(index)
        self._count("moved" if group.closed else reason)
        return stream

    def send(self, command: Command) -> None:
        """Send a command about a request that was submitted (SpeechAppend, Pause)."""
        for client in self.clients:
            if (stream := client.requests.find(getattr(command, "request_id", ""))) is not None:
                if isinstance(command, SpeechAppend):
                    stream.request = _with_text(stream.request, command)
                client.send(command)

    def _loads(self) -> dict[int, Load]:
        others = {} if self._others is None else self._others.requests()
        return {
            index: Load(len(client.requests) + others.get(str(index), 0), _slack(client.state))
            for index, client in enumerate(self.clients)
            if client.ready
        }

    def _move(self, stream: RequestStream, error: EngineError) -> bool:
        """Give a request to an engine that has not had it. False if there is none, or if that would not help."""
        assert stream.engine is not None
        if isinstance(error, EngineLost):
            stream.group.closed.add(stream.engine)
        elif error.code in MOVABLE:
            stream.group.note_refused(stream.engine)
        else:
            return False
        loads = _allowed(self._loads(), stream.group)
        if self._stopping or not loads:
            return False
        index, _ = choose(stream.request, loads)
        stream.note_sent(index)
        self._count("moved")
        self.clients[index].adopt(stream)
        return True

    def _count(self, reason: str) -> None:
        self._metrics.observe("engine_choices_total", reason=reason)


def _allowed(loads: dict[int, Load], group: RequestGroup) -> dict[int, Load]:
    return {index: load for index, load in loads.items() if group.may_have(index)}


def _slack(state: EngineState | None) -> float | None:
    found = [model.slack for model in state.models if model.slack is not None] if state is not None else []
    return min(found, default=None)


def _with_text(request: Request, more: SpeechAppend) -> Request:
    """The request with the text that was added later, all of which another engine would have to speak."""
    assert isinstance(request, SpeechRequest)
    return msgspec.structs.replace(request, segments=request.segments + more.segments, open=not more.last)
