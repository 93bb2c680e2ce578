"""Measured seconds of the launches of a speech model, and what they predict: the seconds of steps, and those of streams
from the patches they have left. It knows neither the queue nor the clock; the scheduler uses it and decides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from models.interfaces.capturable import Bucket
from service.engine.speech.stream import FindCapturedBucket, PrefillChunk, PrefillSize, Stream
from service.graphs.buckets import round_up

Kind = Literal["prefill", "text_prefill", "voice_prefill", "audio_prefill", "tail", "decode", "vae", "clip"]
"""prefill is the eager one. Replayed are text_prefill (text alone), voice_prefill (few patches: the rest of a voice's
reference) and audio_prefill (as many patches as tokens). clip: encoding a piece of reference audio."""
REPLAYED_PREFILLS: Sequence[Kind] = ("text_prefill", "voice_prefill", "audio_prefill")

_COST_WEIGHT = 0.2
_DEVIATIONS = 2.0
_PRIOR = 0.02
"""Seconds assumed while nothing of a kind was measured."""
_MAX_OVER_MEAN = 3.0
"""A measurement counts as at most this many times what was expected."""


class SpeechCosts:
    """Running means of seconds by (kind, solver steps, size), with deviations for safe bounds.

    Size is rounded tokens for "prefill" (eager_cost_key), the bucket's tokens for replayed prefills, the rows
    of the bucket for a step and 1 for a piece of reference audio; solver steps is 0 where a cost has none. Means and
    deviations are exponentially weighted, as TCP estimates a round trip (RFC 6298). A size without a measurement is
    interpolated between its neighbours; above the largest measured size cost grows in proportion, below the smallest it
    stays the same. A launch that was held up counts as one that took _MAX_OVER_MEAN times the estimate, also the first
    of a size: a rare size would keep it for long.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Kind, int], dict[int, tuple[float, float]]] = {}
        self._estimates: dict[tuple[Kind, int, int, float], float] = {}
        """Of what was measured so far: the next step is chosen from hundreds of them."""

    def observe(self, kind: Kind, solver_steps: int, size: int, seconds: float) -> None:
        sizes = self._seen.setdefault((kind, solver_steps), {})
        expected = self.mean(kind, solver_steps, size) if sizes else 0.0
        if expected > 0:
            seconds = min(seconds, _MAX_OVER_MEAN * expected)
        self._estimates.clear()
        if size not in sizes:
            sizes[size] = (seconds, seconds / 8)
            return
        mean, deviation = sizes[size]
        deviation += _COST_WEIGHT * (abs(seconds - mean) - deviation)
        sizes[size] = (mean + _COST_WEIGHT * (seconds - mean), deviation)

    def mean(self, kind: Kind, solver_steps: int, size: int) -> float:
        """Expected seconds; 0 for size 0, _PRIOR when nothing of this kind was measured."""
        return self._estimate(kind, solver_steps, size, 0.0)

    def bound(self, kind: Kind, solver_steps: int, size: int) -> float:
        """Seconds that are rarely exceeded: mean + 2 deviations."""
        return self._estimate(kind, solver_steps, size, _DEVIATIONS)

    def _estimate(self, kind: Kind, solver_steps: int, size: int, deviations: float) -> float:
        key = kind, solver_steps, size, deviations
        estimate = self._estimates.get(key)
        if estimate is None:
            estimate = self._estimates[key] = self._interpolated(*key)
        return estimate

    def _interpolated(self, kind: Kind, solver_steps: int, size: int, deviations: float) -> float:
        if size == 0:
            return 0.0
        seen = self._seen.get((kind, solver_steps)) or self._nearest_steps(kind, solver_steps)
        if not seen:
            return _PRIOR
        sizes = sorted(seen)
        index = bisect_left(sizes, size)

        def at(i: int) -> float:
            mean, deviation = seen[sizes[i]]
            return mean + deviations * deviation

        if index == len(sizes):
            return at(-1) * size / sizes[-1]
        if sizes[index] == size or index == 0:
            return at(index)
        share = (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        return at(index - 1) + share * (at(index) - at(index - 1))

    def _nearest_steps(self, kind: Kind, solver_steps: int) -> dict[int, tuple[float, float]] | None:
        """Costs at the nearest number of solver steps that was measured, if this number was not."""
        others = [key for key in self._seen if key[0] == kind]
        return self._seen[min(others, key=lambda key: abs(key[1] - solver_steps))] if others else None


def replayed_cost_key(bucket: Bucket) -> tuple[Kind, int]:
    """Kind and size under which the cost of a replayed prefill is kept."""
    tokens, audio = bucket["tokens"], bucket["audio"]
    if not audio:
        return "text_prefill", tokens
    return "voice_prefill" if audio < tokens else "audio_prefill", tokens


def eager_cost_key(tokens: int) -> tuple[Kind, int]:
    """Kind and size under which the cost of an eager prefill is kept: rounded up, so that each size is measured
    often."""
    return "prefill", round_up(tokens)


_LEAST_IDLE = 0.1
"""Share of the GPU that prefills are assumed to get at least, however many streams are heard."""
_LEAST_RETRY, _MOST_RETRY = 1.0, 60.0
_LENGTH_WEIGHT = 0.05
_SATURATED = 0.8
"""A step with this share of the seconds of two steps of half its rows gains little by its size."""


@dataclass(frozen=True)
class Prompts:
    """Prompts that wait, grouped about as the scheduler groups them. seconds: of all passes before the last; last: what
    that holds; captured: whether it would be replayed."""

    seconds: float = 0.0
    last: PrefillSize = field(default_factory=PrefillSize)
    captured: bool = False


@dataclass(frozen=True)
class Policy:
    """Limits set by the operator and by the hardware.

    buckets: ascending batch sizes; the last is the largest batch.
    max_streams: request slots. max_waiting: requests that may wait for one.
    patch_seconds: seconds of audio of a patch.
    first_audio_target: seconds after which a listener without audio counts as waiting in silence.
    refuse_after: seconds; a request whose first audio is predicted to come later is refused.
    max_load: share of real time that the live streams' steps may take; a request that would exceed it is refused.
    prefill_tokens: prompt positions that one step computes at most.
    """

    buckets: tuple[int, ...]
    max_streams: int
    patch_seconds: float
    max_waiting: int = 256
    first_audio_target: float = 2.0
    refuse_after: float = 2.0
    max_load: float = 0.8
    prefill_tokens: int = 2048


class Forecast:
    """Seconds that steps and streams will take. codec_beside: the codec runs in parallel with the next step, not before
    it."""

    def __init__(
        self, costs: SpeechCosts, captured: FindCapturedBucket, policy: Policy, *, codec_beside: bool = False
    ) -> None:
        self.costs = costs
        self.buckets = policy.buckets
        self.captured = captured
        self._policy = policy
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

    def round_bound(self, decoding: Iterable[Stream]) -> float:
        """Seconds that one decode step of each number of solver steps rarely exceeds."""
        groups = Counter(stream.solver_steps for stream in decoding)
        return sum(self.decode_bound(steps, min(count, self.buckets[-1])) for steps, count in groups.items())

    def prefill(self, size: PrefillSize) -> float:
        """Expected seconds until the next step, of a pass over prompt chunks with one tail for each number of solver
        steps."""
        return self._with_codec(*self._pass(size, self.costs.mean))

    def prefill_bound(self, size: PrefillSize) -> float:
        """Seconds until the audio of such a pass; rarely exceeded."""
        return sum(self._pass(size, self.costs.bound))

    def replayable(self, stream: Stream) -> bool:
        """Whether the rest of a prompt in a pass of its own would be replayed."""
        rest = PrefillChunk.next(stream, stream.prompt_left)
        return rest.length <= self._policy.prefill_tokens and self.captured(PrefillSize.of([rest]).required) is not None

    def joins(self, size: PrefillSize, chunk: PrefillChunk) -> bool:
        """Whether one pass over all of them costs less than two, which it does not if `chunk` makes a replayed pass an
        eager one."""
        if size.sequences >= self.buckets[-1] or size.tokens + chunk.length > self._policy.prefill_tokens:
            return False
        alone = self.prefill(PrefillSize.of([chunk]))
        return self.prefill(size.with_chunk(chunk)) < self.prefill(size) + alone

    def tail_costs_more(self, solver_steps: int, count: int, rows: int) -> bool:
        """Whether `count` first patches cost less as rows of the next decode step, which has `rows` others, than as a
        tail before it. That is so where a step takes about as long as its rows together: then all streams gain more
        time than the first patches wait."""
        bucket = self._bucket(rows)
        if bucket < 2:
            return False
        seconds = self.decode(solver_steps, bucket)
        if seconds < _SATURATED * 2 * self.decode(solver_steps, bucket // 2):
            return False
        a_row = seconds / bucket
        return count * a_row < self.costs.mean("tail", solver_steps, self._bucket(count))

    def _bucket(self, rows: int) -> int:
        """Smallest bucket that holds `rows`; 0 for none."""
        return self.buckets[min(bisect_left(self.buckets, rows), len(self.buckets) - 1)] if rows else 0

    def _pass(self, size: PrefillSize, cost: Callable[[Kind, int, int], float]) -> tuple[float, float]:
        """Seconds of a pass and its tails, and of the codec step behind it."""
        capture = self.captured(size.required)
        kind, length = eager_cost_key(size.tokens) if capture is None else replayed_cost_key(capture)
        tails = (cost("tail", solver_steps, self._bucket(rows)) for solver_steps, rows in size.emitting.items())
        return cost(kind, 0, length) + sum(tails), cost("vae", 0, self._bucket(sum(size.emitting.values())))

    def _with_codec(self, step: float, codec: float) -> float:
        """Seconds from one step to the next in steady state, with a codec step of `codec` seconds."""
        return max(step, codec) if self._codec_beside else step + codec

    # Streams

    def load(self, live: Iterable[Stream]) -> float:
        """Seconds of decode steps that one second of playback of all live streams takes.

        Listeners at higher speed need more steps: some with the fastest rows alone, then with the next fastest, and so
        on.
        """
        speeds: defaultdict[int, dict[float, int]] = defaultdict(dict)
        for (solver_steps, speed), count in Counter((one.solver_steps, one.playback.speed) for one in live).items():
            speeds[solver_steps][speed] = count
        seconds = 0.0
        for solver_steps, counts in speeds.items():
            rows, falling = 0, sorted(counts, reverse=True)
            for speed, next_speed in pairwise([*falling, 0.0]):
                rows += counts[speed]
                seconds += (speed - next_speed) * self._round(solver_steps, rows)
        return seconds / self._policy.patch_seconds

    def _round(self, solver_steps: int, rows: int) -> float:
        """Seconds in which each of `rows` streams advances a patch."""
        full, rest = divmod(rows, self.buckets[-1])
        return full * self.decode(solver_steps, self.buckets[-1]) + self.decode(solver_steps, rest)

    def first_audio(self, solver_steps: int, prompts: Prompts, running: int, load: float) -> float:
        """Seconds until the first audio of a stream that has a slot: the running step, then the prefills of `prompts`,
        its own among them, in the share of time that `load` leaves, then the codec."""
        largest = min(max(1, running), self.buckets[-1])
        under_way = self.decode(solver_steps, largest) if running else 0.0
        codec = self.costs.mean("vae", 0, self.buckets[0]) if self._codec_beside else 0.0
        return under_way + self.seconds_of(prompts) / max(_LEAST_IDLE, 1.0 - load) + codec

    def with_prompt(self, prompts: Prompts, stream: Stream) -> Prompts:
        """The prompts and, behind them, what is left of a stream's."""
        last = prompts.last.with_chunk(PrefillChunk.next(stream, stream.prompt_left))
        captured = self.captured(last.required) is not None
        if prompts.last.sequences and (
            last.tokens > self._policy.prefill_tokens or (prompts.captured and not captured)
        ):
            return self.with_prompt(Prompts(self.seconds_of(prompts)), stream)
        return Prompts(prompts.seconds, last, captured)

    def seconds_of(self, prompts: Prompts) -> float:
        """Expected seconds to prefill them."""
        return prompts.seconds + (self.prefill(prompts.last) if prompts.last.sequences else 0.0)

    def wait_for_room(self, running: Sequence[Stream], slots: int, pages: int) -> float:
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

    def queue_seconds(self, running: Sequence[Stream], waiting: int) -> float:
        """Retry-After: seconds until so many streams that wait are expected to have begun, from one to 60. What is left
        of a running stream is half of it in the mean."""
        left = [seconds for _, seconds in self._remaining(running)] or [_LEAST_RETRY]
        return min(_MOST_RETRY, max(_LEAST_RETRY, 2 * sum(left) / len(left) ** 2 * waiting))

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
