"""The messages between API process and engine process. Typed structs, no pickle.

Arrays inside a message (prompts, pixels, audio) travel as separate raw frames; see service/link/wire.py.
"""

from __future__ import annotations

import msgspec
import numpy as np

from models.media import Prompt
from service.graphs.observations import Observation


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name."""


class SamplingParams(Struct, frozen=True):
    """How tokens are chosen. Neutral values switch a filter off: temperature 0 is greedy, top_p 1, top_k 0, min_p 0."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of top alternatives to report for each token; 0 reports the chosen token alone."""


# API -> engine


class ChatRequest(Struct, frozen=True):
    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    arrival: float
    """time.monotonic() when the request was accepted."""
    grammar: str = ""
    """The grammar that the answer must match, in llguidance's JSON form, checked by the API process (see
    service/api/chat/grammar.py); empty: none."""
    slow_grammar: bool = False
    """Whether checking the grammar took longer than SLOW_SECONDS, so that building it will, too."""


class SpeechSegment(Struct, frozen=True):
    """A text to speak in one go; `max_patches` caps its length."""

    text_ids: tuple[int, ...]
    min_patches: int
    max_patches: int


class SpeechRequest(Struct, frozen=True):
    """Segments are spoken one after the other in one voice. While `open`, SpeechAppend may add segments."""

    request_id: str
    model: str
    segments: tuple[SpeechSegment, ...]
    seed: int
    cfg_value: float
    solver_steps: int
    live: bool
    """Whether a listener plays the audio while it is generated: then the stream has a playback clock."""
    arrival: float
    temperature: float = 1.0
    open: bool = False
    transcript_ids: tuple[int, ...] = ()
    """Ids of the transcript of `prompt` + the first segment's text, tokenized together. Only with `prompt`."""
    reference: np.ndarray | None = None
    """Patches float32 [n, frames, channels] of the reference audio."""
    prompt: np.ndarray | None = None
    """Patches of the audio to continue."""
    speed: float = 1.0
    """Seconds of the audio that a live listener hears in a second."""
    retries: int = 0
    """How often a segment that runs to its cap may be generated again with another seed, if none of it has been
    sent."""
    adapter: str = ""
    """Folder name of the low-rank adapter that is the voice; empty: none."""


class SpeechAppend(Struct, frozen=True):
    request_id: str
    segments: tuple[SpeechSegment, ...]
    last: bool


class EncodeReference(Struct, frozen=True):
    """Encode reference audio to patches; answered by ReferenceEncoded. wave: float32 [samples] at the rate
    of SpeechModel.reference_sample_rate."""

    request_id: str
    model: str
    wave: np.ndarray
    pad: str
    arrival: float


class Abort(Struct, frozen=True):
    request_id: str


class Pause(Struct, frozen=True):
    """The transport cannot accept more of a live stream (paused), or can again."""

    request_id: str
    paused: bool


class Drain(Struct, frozen=True):
    """Accept no new requests; running ones finish."""


class Stop(Struct, frozen=True):
    """Leave the loop and exit."""


class Attach(Struct, frozen=True):
    """The sender wants the engine's state from now on. Handled by the shared channel (shared.py), not by the engine."""


class Detach(Struct, frozen=True):
    """A peer of a shared channel has ended: its requests are aborted. The engine itself gets only those Aborts."""

    peer: str


Command = ChatRequest | SpeechRequest | SpeechAppend | EncodeReference | Abort | Pause | Drain | Stop | Attach | Detach

# engine -> API


class TokenInfo(Struct, frozen=True):
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepCounts(Struct, frozen=True):
    """How a request was computed: number of steps that included it, how many of them were replayed, rows of all of
    them, and number of its media that had to be encoded."""

    steps: int
    replayed: int
    rows: int
    encoded_media: int


class PhaseTimes(Struct, frozen=True):
    """When the engine computed the first parts of a request, by time.monotonic(), which all processes of a machine
    share.

    scheduled: its first step was launched. computed: the first token, or the first audio, was read. encoder: begin of
    the first pass over its media and end of the last one; None if every item was cached, or there were none.
    """

    scheduled: float
    computed: float
    encoder: tuple[float, float] | None = None


class ChatDelta(Struct, frozen=True):
    """New tokens of a request. finish_reason ("stop", "length") ends it; the stop token itself is not delivered. steps:
    with the last delta; times: with the first."""

    request_id: str
    token_ids: tuple[int, ...]
    infos: tuple[TokenInfo, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int = 0
    steps: StepCounts | None = None
    times: PhaseTimes | None = None


class SpeechDelta(Struct, frozen=True):
    """New audio, float32 [samples]. segment_done: this is the segment's last audio. finished: nothing follows, and
    `steps` has the counts of the whole request. times: with the first audio."""

    request_id: str
    audio: np.ndarray
    segment: int
    segment_done: bool = False
    finished: bool = False
    truncated: bool = False
    steps: StepCounts | None = None
    times: PhaseTimes | None = None


class ReferenceEncoded(Struct, frozen=True):
    request_id: str
    patches: np.ndarray


class Failed(Struct, frozen=True):
    """A request ended without an answer. status is the HTTP status that fits; field names the request field."""

    request_id: str
    status: int
    code: str
    message: str
    field: str | None = None
    retry_after: float | None = None


class ModelState(Struct, frozen=True):
    """Load of one model at the end of a tick. pages_used does not include pages_cached. slack: smallest number of
    seconds of audio that a live listener has left; None without listeners."""

    model: str
    running: int
    waiting: int
    slots_used: int
    pages_total: int
    pages_used: int
    pages_cached: int
    encoder_cache_bytes: int = 0
    slack: float | None = None


class ProcessUsage(Struct, frozen=True):
    """Usage of the engine process: processor seconds of all threads since its start, bytes in memory, number of
    threads."""

    cpu_seconds: float
    resident_bytes: int
    threads: int


class EngineState(Struct, frozen=True):
    """Sent at least once a second: the heartbeat. phase: "loading", "capturing", "ready", "draining".
    device_memory: bytes by state, see memory.py; empty on a CPU. device: name of the device that the engine runs on.
    occupied: a capture is running, during which there is no heartbeat; this is not a hang. process: None if the system
    does not provide it."""

    phase: str
    detail: str
    models: tuple[ModelState, ...]
    graph_bytes: int
    device_memory: dict[str, int] = {}
    device: str = ""
    occupied: bool = False
    process: ProcessUsage | None = None


class Outputs(Struct, frozen=True):
    """Everything that one tick produced."""

    chat: tuple[ChatDelta, ...] = ()
    speech: tuple[SpeechDelta, ...] = ()
    encoded: tuple[ReferenceEncoded, ...] = ()
    failed: tuple[Failed, ...] = ()
    observations: tuple[Observation, ...] = ()
    state: EngineState | None = None
