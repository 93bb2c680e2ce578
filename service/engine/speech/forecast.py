"""Predicts seconds: those of steps from the measured costs of their parts, those of streams from the patches they have
left. It knows neither the queue nor the clock; the scheduler uses it and decides.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from models.protocol import Bucket
from service.engine.speech.costs import SpeechCosts
from service.engine.speech.prefill import (
    FindCapturedBucket,
    PrefillChunk,
    eager_prefill,
    replayed_prefill,
    required_prefill,
)
from service.engine.speech.stream import Stream

_LEAST_IDLE = 0.1
"""Share of the GPU that prefills are assumed to get at least, however many streams are heard."""
_LEAST_RETRY = 1.0
_LENGTH_WEIGHT = 0.05
_FULL = 0.95
"""From this share of the most rows per second that any bucket gives, each row of a step costs its share of the time."""


class Forecast:
    """Seconds that steps and streams will take. buckets, prefill_tokens: batch sizes, and the limit of tokens of a
    prefill, as in the policy. patch_seconds: audio of a patch. codec_beside: the codec runs in parallel with the next
    step, not before it.
    """

    def __init__(
        self,
        costs: SpeechCosts,
        captured: FindCapturedBucket,
        *,
        buckets: tuple[int, ...],
        patch_seconds: float,
        prefill_tokens: int,
        codec_beside: bool,
    ) -> None:
        self.costs = costs
        self._captured = captured
        self.buckets = buckets
        self._patch_seconds = patch_seconds
        self._prefill_tokens = prefill_tokens
        self._codec_beside = codec_beside
        self._used_of_cap = 0.5
        """Running mean of generated patches over their cap: the expected length of a stream."""

    # Steps

    def decode(self, solver_steps: int, rows: int) -> float:
        """Expected seconds from one decode step of `rows` to the next."""
        bucket = self._bucket(rows)
        return self._with_codec(self.costs.mean("decode", solver_steps, bucket), self.costs.mean("vae", 0, bucket))

    def decode_bound(self, solver_steps: int, rows: int) -> float:
        """Seconds until the audio of a decode step of `rows`; rarely exceeded."""
        bucket = self._bucket(rows)
        return self.costs.bound("decode", solver_steps, bucket) + self.costs.bound("vae", 0, bucket)

    def prefill(self, chunks: Sequence[PrefillChunk], decodes: Sequence[Stream] = ()) -> float:
        """Expected seconds until the next step, of a pass over chunks and decode rows with one tail for each number of
        solver steps."""
        return self._chunks(chunks, decodes, bound=False)

    def prompts(self, chunks: Sequence[PrefillChunk]) -> float:
        """Expected seconds of a pass over chunks alone, without a tail."""
        tokens = sum(chunk.length for chunk in chunks)
        return self._pass(tokens, self.captured_bucket(chunks), Counter(), bound=False)

    def prefill_bound(self, chunks: Sequence[PrefillChunk], decodes: Sequence[Stream] = ()) -> float:
        """Seconds until the audio of such a pass; rarely exceeded."""
        return self._chunks(chunks, decodes, bound=True)

    def captured_bucket(self, chunks: Sequence[PrefillChunk]) -> Bucket | None:
        """Bucket of the captured graph that would replay a pass over chunks alone."""
        required = required_prefill(chunks)
        return None if required is None else self._captured(required)

    def replayable(self, tokens: int, audio: int) -> bool:
        """Whether a whole prompt of these sizes in a pass of its own would be replayed."""
        required = {"tokens": tokens, "audio": audio, "sequences": 1}
        return tokens <= self._prefill_tokens and self._captured(required) is not None

    def joins(self, chunks: Sequence[PrefillChunk], chunk: PrefillChunk) -> bool:
        """Whether one pass over all of them costs less than two, which it does not if `chunk` makes a replayed pass an
        eager one."""
        if len(chunks) >= self.buckets[-1] or sum(c.length for c in chunks) + chunk.length > self._prefill_tokens:
            return False
        return self.prefill([*chunks, chunk]) < self.prefill(chunks) + self.prefill([chunk])

    def tail_is_worse(self, solver_steps: int, count: int, rows: int) -> bool:
        """Whether `count` first patches cost less as rows of the next decode step, which has `rows` others, than as a
        tail before it. That is so where a step takes about as long as its rows together: then all streams gain more
        time than the first patches wait."""
        rates = {bucket: bucket / self.decode(solver_steps, bucket) for bucket in self.buckets}
        rate = rates.get(self._bucket(rows), 0.0)
        if rate < _FULL * max(rates.values()):
            return False
        return count / rate < self.costs.mean("tail", solver_steps, self._bucket(count))

    def _bucket(self, rows: int) -> int:
        """Smallest bucket that holds `rows`; 0 for none."""
        if rows == 0:
            return 0
        return next((bucket for bucket in self.buckets if bucket >= rows), self.buckets[-1])

    def _chunks(self, chunks: Sequence[PrefillChunk], decodes: Sequence[Stream], *, bound: bool) -> float:
        emitting = Counter(chunk.stream.solver_steps for chunk in chunks if chunk.last)
        emitting.update(stream.solver_steps for stream in decodes)
        tokens = sum(chunk.length for chunk in chunks) + len(decodes)
        return self._pass(tokens, None if decodes else self.captured_bucket(chunks), emitting, bound=bound)

    def _pass(self, tokens: int, capture: Bucket | None, emitting: Counter[int], *, bound: bool) -> float:
        of = self.costs.bound if bound else self.costs.mean
        kind, size = eager_prefill(tokens) if capture is None else replayed_prefill(capture)
        cost = of(kind, 0, size) + sum(
            of("tail", solver_steps, self._bucket(rows)) for solver_steps, rows in emitting.items()
        )
        codec = of("vae", 0, self._bucket(emitting.total()))
        return cost + codec if bound else self._with_codec(cost, codec)

    def _with_codec(self, step: float, codec: float) -> float:
        """Seconds from one step to the next in steady state, with a codec step of `codec` seconds."""
        return max(step, codec) if self._codec_beside else step + codec

    # Streams

    def load(self, live: Iterable[Stream]) -> float:
        """Seconds of decode steps that one second of playback of all live streams takes.

        Listeners at higher speed need more steps: some with the fastest rows alone, then with the next fastest, and so
        on.
        """
        speeds: defaultdict[int, Counter[float]] = defaultdict(Counter)
        for stream in live:
            speeds[stream.solver_steps][stream.playback.speed] += 1
        seconds = 0.0
        for solver_steps, counts in speeds.items():
            rows, falling = 0, sorted(counts, reverse=True)
            for speed, next_speed in pairwise([*falling, 0.0]):
                rows += counts[speed]
                seconds += (speed - next_speed) * self._round(solver_steps, rows)
        return seconds / self._patch_seconds

    def _round(self, solver_steps: int, rows: int) -> float:
        """Seconds in which each of `rows` streams advances a patch."""
        full, rest = divmod(rows, self.buckets[-1])
        return full * self.decode(solver_steps, self.buckets[-1]) + self.decode(solver_steps, rest)

    def first_audio(self, stream: Stream, ahead: Sequence[Stream], running: int, load: float) -> float:
        """Seconds until the first audio of a stream that has a slot: the running step, then the prefills `ahead` and
        its own in the share of time that `load` leaves, then the codec."""
        largest = min(max(1, running), self.buckets[-1])
        under_way = self.decode(stream.solver_steps, largest) if running else 0.0
        codec = self.costs.mean("vae", 0, self.buckets[0]) if self._codec_beside else 0.0
        return under_way + self._prompts([*ahead, stream]) / max(_LEAST_IDLE, 1.0 - load) + codec

    def _prompts(self, streams: Sequence[Stream]) -> float:
        """Expected seconds to prefill what is left of their prompts, grouped about as the scheduler groups them."""
        total = 0.0
        tokens, audio, emitting = 0, 0, Counter[int]()
        capture: Bucket | None = None
        for stream in streams:
            count = emitting.total()
            left, patches = stream.prompt_left, stream.prompt_audio
            more = {"tokens": tokens + left, "audio": audio + patches, "sequences": count + 1}
            joint = self._captured(more)
            if count and (more["tokens"] > self._prefill_tokens or (joint is None and capture is not None)):
                total += self._pass(tokens, capture, emitting, bound=False)
                tokens, audio, emitting = 0, 0, Counter()
                joint = self._captured({"tokens": left, "audio": patches, "sequences": 1})
            tokens, audio, capture = tokens + left, audio + patches, joint
            emitting[stream.solver_steps] += 1
        return total + self._pass(tokens, capture, emitting, bound=False)

    def room(self, running: Sequence[Stream], slots: int, pages: int) -> float:
        """Seconds until enough of the running streams are expected to have ended for `slots` and `pages` more."""
        wait = 0.0
        if slots <= 0 and pages <= 0:
            return wait
        for finish, freed in sorted((seconds, len(other.pages)) for other, seconds in self._remaining(running)):
            if slots <= 0 and pages <= 0:
                break
            wait, slots, pages = finish, slots - 1, pages - freed
        return wait

    def next_finish(self, running: Sequence[Stream]) -> float:
        """Retry-After: seconds until one of them is expected to end, at least one second."""
        return max(_LEAST_RETRY, min((seconds for _, seconds in self._remaining(running)), default=_LEAST_RETRY))

    def _remaining(self, running: Sequence[Stream]) -> list[tuple[Stream, float]]:
        """Expected seconds until each running stream has launched its last patch."""
        rows = len(running)
        rounds = math.ceil(rows / self.buckets[-1])
        a_patch = {
            solver_steps: rounds * self.decode(solver_steps, math.ceil(rows / rounds))
            for solver_steps in {stream.solver_steps for stream in running}
        }
        return [(stream, self.patches_left(stream) * a_patch[stream.solver_steps]) for stream in running]

    def patches_left(self, stream: Stream) -> float:
        """Expected patches of the current segment that are still to be launched."""
        return max(1.0, self._used_of_cap * stream.max_patches - stream.launched)

    def learn_length(self, used_of_cap: float) -> None:
        """Records that a segment ended after this share of its length cap."""
        self._used_of_cap += _LENGTH_WEIGHT * (used_of_cap - self._used_of_cap)
