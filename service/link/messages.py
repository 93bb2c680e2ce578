"""The messages between an API process and the engine process. Typed structs, no pickle.

Arrays inside a message (prompts, pixels, audio) travel as separate raw frames; see service/link/wire.py.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from models.interfaces.media import Prompt
from service.graphs.observations import Observation
from service.link.sampling import SamplingParams

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
"""llguidance.LLParserLimits. A lexer's state takes 1 to 2 kB; fuel is burnt at about 14,000 units a millisecond."""


class Struct(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the class name."""


# API -> engine


class ChatRequest(Struct, frozen=True):
    """One answer to a prompt; a request with n choices is n of these. Answered by ChatDeltas or Failed."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    arrival: float
    """time.monotonic() when the request was accepted."""
    grammar: str = ""
    """The grammar that the answer must match, in llguidance's JSON form, checked by the API process (see
    service/api/structured/grammar.py); empty: none."""
    slow_grammar: bool = False
    """Whether its check took so long (SLOW_SECONDS) that the engine builds its matcher apart from others."""
    live: bool = False
    """Whether it is a piece of live speech, which may wait for those of other sessions (service.engine.engine)."""


class SpeechSegment(Struct, frozen=True):
    """A text to speak in one go. Its audio has between `min_patches` and `max_patches` patches."""

    text_ids: tuple[int, ...]
    min_patches: int
    max_patches: int


class SpeechRequest(Struct, frozen=True):
    """Segments to be spoken one after the other in one voice. Answered by SpeechDeltas or Failed."""

    request_id: str
    model: str
    segments: tuple[SpeechSegment, ...]
    seed: int
    cfg_value: float
    """Strength of classifier-free guidance."""
    solver_steps: int
    """Steps of the flow-matching solver for each patch."""
    live: bool
    """Whether a listener plays the audio while it is generated: then the stream has a playback clock."""
    arrival: float
    """time.monotonic() when the request was accepted."""
    temperature: float = 1.0
    open: bool = False
    """Whether SpeechAppend may add segments."""
    transcript_ids: tuple[int, ...] = ()
    """Ids of the transcript of `prompt` + the first segment's text, tokenized together. Only with `prompt`."""
    reference: np.ndarray | None = None
    """Patches float32 [n, frames, channels] of the reference audio."""
    prompt: np.ndarray | None = None
    """Patches of the audio to continue, in the same layout."""
    speed: float = 1.0
    """Seconds of audio that a live listener plays in a second."""
    retries: int = 0
    """How often a segment that reaches `max_patches` may be generated again with another seed, if none of it has been
    sent."""
    adapter: str = ""
    """Folder name of the low-rank adapter that is the voice; empty: none."""


class SpeechAppend(Struct, frozen=True):
    """More segments of an open SpeechRequest; `last` closes it."""

    request_id: str
    segments: tuple[SpeechSegment, ...]
    last: bool


class EncodeReference(Struct, frozen=True):
    """Encode reference audio to patches; answered by ReferenceEncoded or Failed. wave: float32 [samples] at the rate
    SpeechModel.reference_sample_rate."""

    request_id: str
    model: str
    wave: np.ndarray
    pad: Literal["left", "right"]
    """Side on which the last patch is filled up with silence."""
    arrival: float
    """time.monotonic() when the request was accepted."""


class Abort(Struct, frozen=True):
    """Forget a request: nothing more is sent for it."""

    request_id: str


class Pause(Struct, frozen=True):
    """The client's connection cannot take more audio of a live stream (paused), or can again."""

    request_id: str
    paused: bool


class Stop(Struct, frozen=True):
    """Leave the loop and exit."""


class Attach(Struct, frozen=True):
    """The sender wants the engine's state from now on. Handled by process.py, not by the engine."""


class Detach(Struct, frozen=True):
    """A peer of a shared channel has ended: its requests are aborted. The engine itself gets only those Aborts."""

    peer: str


Request = ChatRequest | SpeechRequest | EncodeReference
Control = SpeechAppend | Abort | Pause
"""What changes a request that was sent before."""
Command = Request | Control | Stop | Attach | Detach

# engine -> API


class TokenInfo(Struct, frozen=True):
    """Log probability of a token, and the most likely tokens in its place with theirs: (id, log probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepCounts(Struct, frozen=True):
    """How a request was computed."""

    steps: int
    """Number of steps that included it."""
    replayed: int
    """How many of them replayed a captured graph."""
    rows: int
    """Rows of all of them, those of other requests included."""
    encoded_media: int
    """Number of its pictures and videos that had to be encoded."""
    drafted: int = 0
    """Number of drafts of its tokens."""
    accepted: int = 0
    """How many of them were accepted."""


class PhaseTimes(Struct, frozen=True):
    """When the engine computed the first parts of a request, by time.monotonic(), which all processes of a machine
    share."""

    scheduled: float
    """Launch of its first step."""
    computed: float
    """When its first token, or its first audio, was read."""
    encoder: tuple[float, float] | None = None
    """Start of the first encoder pass over its media, and end of the last one; None if every item was cached or there
    were none."""


class ChatDelta(Struct, frozen=True):
    """New tokens of a request."""

    request_id: str
    token_ids: tuple[int, ...]
    """Without the stop token."""
    infos: tuple[TokenInfo, ...] = ()
    """One for each token, if log probabilities were requested."""
    finish_reason: str | None = None
    """With the last delta: "stop" or "length"."""
    cached_tokens: int = 0
    """Prompt positions found in the prefix cache."""
    steps: StepCounts | None = None
    """So far; with the last delta, and with every one of a request that had drafts."""
    times: PhaseTimes | None = None
    """With the first delta."""
    hidden: np.ndarray | None = None
    """float32 [hidden_size], after the final norm; with the first delta, if SamplingParams.hidden asked for it."""
    classes: np.ndarray | None = None
    """int32 [marks], the most likely class of each of Prompt.marks; with the last delta, if there are any."""


class SpeechDelta(Struct, frozen=True):
    """New audio of a request."""

    request_id: str
    audio: np.ndarray
    """float32 [samples]."""
    segment: int
    """Index of the segment that it belongs to."""
    segment_done: bool = False
    """Whether this is the last audio of the segment."""
    finished: bool = False
    """Whether nothing follows."""
    truncated: bool = False
    """Whether the segment ended because it had `max_patches` patches."""
    steps: StepCounts | None = None
    """With the last delta."""
    times: PhaseTimes | None = None
    """With the first audio."""


class ReferenceEncoded(Struct, frozen=True):
    """The answer to EncodeReference: patches float32 [n, frames, channels]."""

    request_id: str
    patches: np.ndarray


class Failed(Struct, frozen=True):
    """A request ended without an answer."""

    request_id: str
    status: int
    """HTTP status for the client."""
    code: str
    message: str
    field: str | None = None
    """The field of the request that is to blame, if one is."""
    retry_after: float | None = None
    """Seconds after which a retry may succeed."""


Answer = ChatDelta | SpeechDelta | ReferenceEncoded | Failed


class ModelState(Struct, frozen=True):
    """Load of one model at the end of a tick."""

    model: str
    running: int
    """Those that have a slot."""
    waiting: int
    pages_total: int
    pages_used: int
    """Without `pages_cached`."""
    pages_cached: int
    encoder_cache_bytes: int = 0
    snapshots: int = 0
    """Cached recurrent states; 0 for models without such state."""
    snapshot_bytes: int = 0
    slack: float | None = None
    """Seconds that other work may take before a live listener runs out of audio; None without listeners."""


class ProcessUsage(Struct, frozen=True):
    """What the engine process uses of the host."""

    cpu_seconds: float
    """Processor time of all threads since its start."""
    resident_bytes: int
    threads: int


class EngineState(Struct, frozen=True):
    """The heartbeat, sent at least once a second."""

    phase: str
    """One of "loading", "capturing" and "ready"."""
    detail: str
    """The model that is being loaded or captured."""
    models: tuple[ModelState, ...]
    graph_bytes: int
    """Bytes of captured graphs and of their static buffers."""
    device_memory: dict[str, int] = {}
    """Bytes by state (service.engine.memory.device_memory); empty on a CPU."""
    device: str = ""
    """Name of the device."""
    occupied: bool = False
    """Whether a capture has started, during which there is no heartbeat: that is no hang."""
    process: ProcessUsage | None = None
    """None if the system does not provide it."""
    captures_left: int = 0
    """Captures that the engine still makes while it is idle; a warm-up that is left counts as one."""


class Outputs(Struct, frozen=True):
    """Everything that one tick produced."""

    chat: tuple[ChatDelta, ...] = ()
    speech: tuple[SpeechDelta, ...] = ()
    encoded: tuple[ReferenceEncoded, ...] = ()
    failed: tuple[Failed, ...] = ()
    observations: tuple[Observation, ...] = ()
    state: EngineState | None = None
