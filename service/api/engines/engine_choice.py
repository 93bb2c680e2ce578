"""Which of several engines gets a request: the one that has its pictures or its prefix cached, unless that is full.

Every API process makes the same choice on its own. Keys are hashes of a request's contents, and each key orders the
engines by rendezvous hashing (Thaler & Ravishankar 1998), so that an engine that ends moves only its own keys. The
choice is bounded by load (as in consistent hashing with bounded loads, Mirrokni et al. 2016): an engine with clearly
more work than the mean is skipped, so a very frequent key spreads over all engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from service.api.engines.request_stream import Request
from service.link.messages import ChatRequest, SpeechRequest

KEY_BYTES = 16
PREFIXES = (256, 1024, 4096)
"""Numbers of leading tokens that are hashed. A shorter prompt is computed too quickly to be worth a detour."""
HEAD_START = 8
"""Up to this many requests in flight an engine is never full: their rows hardly lengthen a step."""
EXCESS = 1.25
"""An engine with more than this many times the mean number of requests in flight is full."""
LITTLE_SLACK = 0.25
"""Seconds of audio. An engine gets no more speech while one of its listeners has less audio left than this."""

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

    def order(engine: int) -> tuple[bool, int]:
        slack = loads[engine].slack
        return speech and slack is not None and slack < LITTLE_SLACK, loads[engine].in_flight

    return min(lots, key=order)
