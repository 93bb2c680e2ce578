"""What the operator and the hardware allow the scheduler of a speech model, and its answer to what goes beyond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policy:
    """Limits set by the operator and by the hardware.

    buckets: ascending batch sizes; the last is the largest batch.
    max_streams: request slots. max_waiting: requests that may wait for one.
    patch_seconds: seconds of audio of a patch.
    first_audio_target: seconds after which a listener without audio counts as waiting in silence.
    refuse_after: seconds; a request whose first audio is predicted to come later is refused.
    max_load: share of real time that the live streams' steps may take; a request that would exceed it is refused.
    guard: seconds of slack never spent (transport, jitter of the host).
    far_ahead: seconds; streams with more slack than this come after streams without a live listener.
    prefill_tokens: prompt positions that one step computes at most. min_chunk: and of a chunk at least, where the
        prompt has more left and cannot be replayed whole.
    """

    buckets: tuple[int, ...]
    max_streams: int
    patch_seconds: float
    max_waiting: int = 256
    first_audio_target: float = 2.0
    refuse_after: float = 2.0
    max_load: float = 0.8
    guard: float = 0.02
    far_ahead: float = 2.0
    prefill_tokens: int = 2048
    min_chunk: int = 64


@dataclass(frozen=True)
class Refusal:
    """Why a request is not admitted. retry_after: seconds, None where trying again would not help."""

    reason: Literal["queue_full", "first_audio", "load", "too_long"]
    message: str
    retry_after: float | None
