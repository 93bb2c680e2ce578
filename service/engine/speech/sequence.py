"""A speech request in the engine: its segments, their prompts, and the patches received."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechProcessor
from models.protocol import SpeechModel
from service.engine.core.request_stats import RequestStats
from service.engine.speech.stream import Phase, Playback, Stream, VoicePage
from service.link.messages import SpeechRequest, SpeechSegment

MAX_SEED = 2**63 - 1
CONTINUITY_PATCHES = 64
"""Number of patches of the first segment (10 s) that condition the voice of later segments."""


@dataclass(frozen=True, eq=False)
class SegmentPrompt:
    """One segment laid out on the time axis.

    token_ids int64 [n], audio_mask bool [n], patches float32 [audio positions, frames, channels] in order of the
    masked positions; priming: patches that initialise the codec's streaming state, which goes on from the segment
    before if there are none.
    """

    token_ids: np.ndarray
    audio_mask: np.ndarray
    patches: np.ndarray
    priming: np.ndarray
    min_patches: int
    max_patches: int

    @property
    def positions(self) -> int:
        return len(self.token_ids) + self.max_patches

    def common_prefix(self, other: SegmentPrompt) -> int:
        """Leading positions whose keys are the same in both: equal ids, and equal patches where there is audio. Patches
        are compared by their bits, as by voice_pages: a NaN differs from itself."""
        shortest = min(len(self.token_ids), len(other.token_ids))
        same = (self.token_ids[:shortest] == other.token_ids[:shortest]) & (
            self.audio_mask[:shortest] == other.audio_mask[:shortest]
        )
        index = np.cumsum(self.audio_mask[:shortest]) - 1
        at_audio = np.flatnonzero(self.audio_mask[:shortest] & same)
        at_audio = at_audio[index[at_audio] < min(len(self.patches), len(other.patches))]
        mine, others = (one.patches[index[at_audio]].view(np.uint32) for one in (self, other))
        differing = (mine != others).any(axis=(1, 2))
        same[at_audio[differing]] = False
        return int(shortest if same.all() else np.argmin(same))


# The prefix cache of speech: pages with the keys of a voice's reference, which the streams of that voice share.
#
# A prompt begins with its reference, so the keys at its front depend on the reference alone. The last page of a
# reference goes on with the text of its stream: other streams get a copy of it. Pages stay in the cache until they are
# needed.


def voice_pages(token_ids: np.ndarray, reference: np.ndarray, adapter: str, page_size: int) -> tuple[VoicePage, ...]:
    """The leading pages of a prompt, as far as they hold the token that begins a reference, and its patches: what all
    segments of a stream have at their front.

    token_ids int64 [n]: the prompt; reference float32 [patches, frames, channels], at positions 1 and later. adapter:
    its name, since it changes keys; "" for none.
    """
    if not len(reference):
        return ()
    digest = hashlib.blake2b(adapter.encode(), digest_size=16).digest()
    pages = []
    for start in range(0, 1 + len(reference), page_size):
        end = min(start + page_size, 1 + len(reference))
        patches = reference[max(0, start - 1) : end - 1]
        content = hashlib.blake2b(digest, digest_size=16)
        content.update(token_ids[start:end].tobytes())
        content.update(np.ascontiguousarray(patches).tobytes())
        digest = content.digest()
        pages.append(VoicePage(digest, end - start, len(patches)))
    return tuple(pages)


class SpeechSequence:
    """Speaks the segments of a request one after the other.

    The first segment's prompt is that of the request. To keep the voice, later segments use as their reference the
    request's reference audio (or else the audio to continue) and up to CONTINUITY_PATCHES patches of the first segment.
    """

    def __init__(self, request: SpeechRequest, processor: SpeechProcessor, model: SpeechModel, page_size: int) -> None:
        """Raises InputError when the first segment does not fit the context, or for a reference of another shape."""
        self.request = request
        self.open = request.open
        self.stats = RequestStats()
        self.segment = 0
        self.attempt = 0
        """Number of attempts at the current segment that were discarded."""
        self.heard = False
        """Whether audio of the current segment has been sent."""
        self.begins = True
        """Whether no step of the current attempt has been launched yet. The runner sets it to False."""
        self.segments: deque[SpeechSegment] = deque(request.segments[1:])
        self.patches = 0
        """Patches of the current segment that were received."""
        self._processor = processor
        self._none = np.zeros((0, *model.patch_shape), dtype=np.float32)
        self._reference = self._none if request.reference is None else request.reference
        continued = self._none if request.prompt is None else request.prompt
        for patches in (self._reference, continued):
            if patches.shape[1:] != model.patch_shape:
                raise InputError("voice", "was kept for another checkpoint than this one; upload it again")
        self._voice = self._reference if len(self._reference) else continued
        self._opening: list[np.ndarray] = []
        first = request.segments[0]
        text_ids = request.transcript_ids if len(continued) else first.text_ids
        self.prompt = self._lay_out(first, text_ids, self._reference, continued, model.priming_patches)
        self._last = deque[np.ndarray](self.prompt.priming, model.codec_memory_patches)
        """What the codec has decoded last, from which its streaming state can be made again."""
        self._last_before = self._last.copy()
        """The same before the current attempt."""
        self.stream = Stream(
            request_id=request.request_id,
            live=request.live,
            arrival=request.arrival,
            solver_steps=request.solver_steps,
            prompt_tokens=len(self.prompt.token_ids),
            max_patches=self.prompt.max_patches,
            prompt_audio=len(self.prompt.patches),
            playback=Playback(request.speed),
            voice=voice_pages(self.prompt.token_ids, self._reference, request.adapter, page_size),
            positions=max([self.prompt.positions, *map(self.later_positions, self.segments)]),
        )

    @property
    def seed(self) -> int:
        """Noise seed of the current segment: the request's own for the first, derived from it for the others. Each
        retry uses the next seed."""
        seed = (self.request.seed + self.attempt) & MAX_SEED
        if self.segment == 0:
            return seed
        digest = hashlib.blake2b(f"{seed}/{self.segment}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    @property
    def idle(self) -> bool:
        """Whether the current segment has ended and there is no next one yet."""
        return not self.stream.has_text

    @property
    def may_continue(self) -> bool:
        """Whether segments follow, or may still come."""
        return bool(self.segments) or self.open

    def keep(self, patch: np.ndarray) -> None:
        """Counts a patch float32 [frames, channels] of the current segment, and keeps it where later ones need it."""
        self.patches += 1
        self._last.append(patch)
        if self.segment == 0 and self.may_continue and len(self._opening) < CONTINUITY_PATCHES:
            self._opening.append(patch)

    def next_segment(self) -> None:
        """Makes the next segment the current one. The codec's state is gone with the slot if the stream was
        preempted."""
        segment = self.segments.popleft()
        self.segment += 1
        self.patches = self.attempt = 0
        self.heard, self.begins = False, True
        reference = np.concatenate([self._voice, np.stack(self._opening)])
        self.prompt = self._lay_out(segment, segment.text_ids, reference, self._none, 0)
        self._last_before = self._last.copy()
        if self.stream.phase is Phase.PREEMPTED:
            self.prompt = replace(self.prompt, priming=np.array(self._last))

    @property
    def may_retry(self) -> bool:
        """Whether the current segment may be generated again and may then end sooner, and none of it has been
        heard."""
        may_stop = self.prompt.min_patches < self.prompt.max_patches
        return may_stop and not self.heard and self.attempt < self.request.retries

    def retry(self) -> None:
        """Discards the patches of the current segment, which is generated again with another seed."""
        self.attempt += 1
        self.patches = 0
        self.begins = True
        self._last = self._last_before.copy()
        if self.segment == 0:
            self._opening.clear()

    def later_positions(self, segment: SpeechSegment) -> int:
        """Number of positions of a segment after the first at most; InputError if the context has no room for it."""
        reference = len(self._voice) + CONTINUITY_PATCHES
        layout = self._processor.layout(segment.text_ids, reference_patches=reference)
        self._room(segment, len(layout.token_ids))
        return min(len(layout.token_ids) + segment.max_patches, self._processor.context_length)

    def _room(self, segment: SpeechSegment, prompt_tokens: int) -> int:
        """Patches that the context has left for speech; InputError when the segment needs more."""
        room = self._processor.context_length - prompt_tokens
        if segment.min_patches >= room:
            left = max(0, room)
            raise InputError(
                "input", f"too long: text and reference audio leave {left} patches of the context for speech"
            )
        return room

    def _lay_out(
        self,
        segment: SpeechSegment,
        text_ids: tuple[int, ...],
        reference: np.ndarray,
        continued: np.ndarray,
        priming_patches: int,
    ) -> SegmentPrompt:
        layout = self._processor.layout(text_ids, reference_patches=len(reference), prompt_patches=len(continued))
        room = self._room(segment, len(layout.token_ids))
        patches = np.concatenate([reference, continued]).astype(np.float32, copy=False)
        return SegmentPrompt(
            token_ids=layout.token_ids.astype(np.int64),
            audio_mask=layout.audio_mask,
            patches=patches,
            priming=patches[-priming_patches:] if len(continued) and priming_patches else self._none,
            min_patches=segment.min_patches,
            max_patches=min(segment.max_patches, room),
        )
