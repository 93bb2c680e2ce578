"""Playback-aware scheduling: who may use the GPU next, decided by how long each listener can still wait.

A live stream's slack is the audio that its listener has and has not heard yet. Prefills are admitted while the least
slack covers their measured cost; streams ahead of playback give up their rows first to keep the batch inside a bucket
that costs less for each row, then to rows that nobody listens to live. A row is held back only when another needs its
place: as long as any stream can run, there is a step.

Pure Python on the caller's clock; times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from service.engine.pages import PagePool
from service.engine.slots import SlotPool
from service.engine.speech.costs import CostModel, Kind
from service.engine.speech.stream import Phase, Stream


@dataclass(frozen=True)
class Policy:
    """What an operator decides, with what the hardware offers.

    buckets: ascending batch sizes; the last is the largest batch.
    first_audio_target: seconds after which a listener without audio counts as waiting in silence.
    refuse_after: seconds; a request whose first audio is predicted to come later is refused.
    max_load: share of real time that the live streams' steps may take; a request that would exceed it is refused.
    guard: seconds of slack never spent (transport, jitter of the host).
    far_ahead: a stream with more slack than this gives its row to work that nobody listens to live.
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
class PrefillChunk:
    """Prompt positions [start, start + length) of a stream; `last` ends the prompt, so that the tail follows."""

    stream: Stream
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.stream.prompt_tokens

    @property
    def audio(self) -> int:
        """Most patches among its positions."""
        return min(self.length, self.stream.prompt_audio)


Capacity = Mapping[str, int]
Recorded = Callable[[Capacity], Capacity | None]
"""Capacity of the recording that would replay a prefill of these needs; None when it would run eagerly."""


def prefill_needs(chunks: Sequence[PrefillChunk]) -> Capacity | None:
    """What a recorded prefill must hold (models.protocol.SpeechModel.prefill_step); None where a chunk has a past."""
    if any(chunk.start for chunk in chunks):
        return None
    return {
        "tokens": sum(chunk.length for chunk in chunks),
        "audio": sum(chunk.audio for chunk in chunks),
        "sequences": len(chunks),
    }


def replayed_prefill(capacity: Capacity) -> tuple[Kind, int]:
    """Kind and size under which the cost of a recorded prefill is known."""
    return ("clip_prefill" if capacity["audio"] else "text_prefill", capacity["tokens"])


def eager_prefill(tokens: int) -> tuple[Kind, int]:
    return ("prefill", tokens)


@dataclass(frozen=True)
class Step:
    """One batch: prompt chunks, rows that advance one patch, or both (mixed). Decode-only rows share solver steps."""

    prefills: tuple[PrefillChunk, ...]
    decodes: tuple[Stream, ...]
    predicted: float
    """Expected seconds on the GPU."""

    @property
    def emitting(self) -> list[Stream]:
        """Streams that get a patch."""
        return [chunk.stream for chunk in self.prefills if chunk.last] + list(self.decodes)


@dataclass(frozen=True)
class Refusal:
    reason: Literal["queue_full", "first_audio", "load", "too_long"]
    message: str
    retry_after: float | None


class SpeechScheduler:
    """Holds every stream of one model from submission to release."""

    def __init__(self, policy: Policy, costs: CostModel, pages: PagePool, recorded: Recorded) -> None:
        self.policy = policy
        self.costs = costs
        self._recorded = recorded
        self._pages = pages
        self._slots = SlotPool(policy.max_streams)
        self._waiting: list[Stream] = []
        self._running: list[Stream] = []
        self._prefilled_last = False
        self._used_of_cap = 0.5
        """Running mean of generated patches over their cap: the expected length of a stream."""

    @property
    def waiting(self) -> Sequence[Stream]:
        return self._waiting

    @property
    def running(self) -> Sequence[Stream]:
        return self._running

    # Admission

    def submit(self, stream: Stream, now: float) -> Refusal | None:
        """Queues a stream, or says why it is refused."""
        policy = self.policy
        if self._pages_for(stream.positions) > self._pages.num_pages - 1:
            return Refusal("too_long", "the text and its clips need more positions than the cache holds", None)
        if len(self._waiting) >= policy.max_waiting:
            return Refusal("queue_full", f"{policy.max_waiting} requests are waiting already", 1.0)
        if stream.live:
            load = self.load(extra=stream)
            if self._live() and load > policy.max_load:
                return Refusal(
                    "load",
                    f"{len(self._live())} streams use {load:.0%} of real time with this one",
                    self._next_finish(),
                )
            predicted = self.predict_first_audio(stream)
            if (self._running or self._waiting) and predicted > policy.refuse_after:
                return Refusal(
                    "first_audio",
                    f"first audio is predicted after {predicted:.2f} s, the target is {policy.refuse_after:g} s",
                    max(1.0, predicted - policy.refuse_after),
                )
        self._waiting.append(stream)
        return None

    def _live(self) -> list[Stream]:
        return [stream for stream in (*self._running, *self._waiting) if stream.live]

    def load(self, extra: Stream | None = None) -> float:
        """Seconds of decode steps that one second of every live stream takes, `extra` included.

        Who listens faster needs more steps: those of the fastest alone, then together with the next, and so on.
        """
        live = self._live() if extra is None else [*self._live(), extra]
        speeds: defaultdict[int, Counter[float]] = defaultdict(Counter)
        for stream in live:
            speeds[stream.solver_steps][stream.playback.speed] += 1
        seconds = 0.0
        for steps, counts in speeds.items():
            rows, falling = 0, sorted(counts, reverse=True)
            for speed, next_speed in pairwise([*falling, 0.0]):
                rows += counts[speed]
                seconds += (speed - next_speed) * self._round_cost(steps, rows)
        return seconds / self.policy.patch_seconds

    def _round_cost(self, steps: int, rows: int) -> float:
        """Seconds in which each of `rows` streams advances a patch."""
        full, rest = divmod(rows, self.policy.buckets[-1])
        return full * self._decode_cost(steps, self.policy.buckets[-1]) + self._decode_cost(steps, rest)

    def predict_first_audio(self, stream: Stream) -> float:
        """Seconds from now to the first audio of a live stream submitted now.

        The step under way, then the prefills ahead of it and its own in the share of time that the live streams'
        steps leave, after the wait for a free slot and pages.
        """
        ahead = [other for other in (*self._running, *self._waiting) if other.live and other.prompt_left]
        largest = min(max(1, len(self._running)), self.policy.buckets[-1])
        under_way = self._decode_cost(stream.solver_steps, largest) if self._running else 0.0
        work = self._prompts_cost([*ahead, stream])
        idle_share = max(0.1, 1.0 - self.load())
        return under_way + work / idle_share + self._wait_for_room(stream)

    def _wait_for_room(self, stream: Stream) -> float:
        """Seconds until enough running streams are expected to have ended for this one to start."""
        waiting = [other for other in self._waiting if other.live]
        slots = self._slots.num_free - len(waiting)
        pages = self._pages.num_available - sum(self._pages_for(other.positions) for other in waiting)
        needed = self._pages_for(stream.positions)
        wait = 0.0
        if slots >= 1 and pages >= needed:
            return wait
        for finish, freed in sorted((seconds, len(other.pages)) for other, seconds in self._remaining()):
            if slots >= 1 and pages >= needed:
                break
            wait, slots, pages = finish, slots + 1, pages + freed
        return wait

    def _remaining(self) -> list[tuple[Stream, float]]:
        """Expected seconds until each running stream has launched its last patch."""
        rows = len(self._running)
        rounds = math.ceil(rows / self.policy.buckets[-1])
        a_patch = {
            steps: rounds * self._decode_cost(steps, math.ceil(rows / rounds))
            for steps in {stream.solver_steps for stream in self._running}
        }
        return [(stream, self._patches_left(stream) * a_patch[stream.solver_steps]) for stream in self._running]

    def _patches_left(self, stream: Stream) -> float:
        return max(1.0, self._used_of_cap * stream.max_patches - stream.launched)

    def _next_finish(self) -> float:
        return max(1.0, min((seconds for _, seconds in self._remaining()), default=1.0))

    # The next step

    def least_slack(self, start: float) -> float:
        """Seconds that other work may take from `start` on before a listener notices; infinite without listeners."""
        return min((slack for _, slack in self._slacks(start)), default=math.inf) - self.policy.guard

    def _slacks(self, start: float) -> list[tuple[Stream, float]]:
        """Slack of every live stream that has begun and can go on."""
        return [
            (stream, stream.playback.end(start) - start)
            for stream in self._running
            if stream.live
            and not stream.paused
            and not stream.waits_for_first_audio
            and stream.phase in (Phase.PREFILL, Phase.DECODE)
        ]

    def next_step(self, start: float) -> Step | None:
        """The best batch to launch for a GPU that is free at `start`; None when no stream can run."""
        slacks = dict(self._slacks(start))
        candidates = self._candidates(start, slacks)
        if self._gathers(candidates, slacks):
            return self._decode_step(slacks, cheapest=False)
        step = self._prefill_step(candidates, slacks, start) if candidates else None
        if step is None:
            step = self._decode_step(slacks, cheapest=any(stream.live for stream in candidates))
        if step is None and candidates:
            step = self._prefill_step(candidates, {}, start)
        return step

    def _gathers(self, candidates: Sequence[Stream], slacks: dict[Stream, float]) -> bool:
        """Where many rows wait, a decode step goes between two prefills: more prompts come together for the second.

        A prompt alone costs nearly as much as several, and under load that is what the decode rows then lack. An eager
        prefill takes rows along instead (`_with_riders`).
        """
        many = 2 * sum(stream.decodable for stream in self._running) >= self.policy.buckets[-1]
        return (
            self._prefilled_last
            and many
            and not any(stream in slacks for stream in candidates)
            and all(self.replayable(stream.prompt_tokens, stream.prompt_audio) for stream in candidates[:1])
        )

    def launch(self, step: Step, start: float) -> None:
        """Books a step as launched for a GPU that is free at `start`."""
        self._prefilled_last = bool(step.prefills)
        for chunk in step.prefills:
            if chunk.stream.phase is Phase.WAITING:
                self._admit(chunk.stream)
            chunk.stream.prefilled += chunk.length
            if chunk.last:
                chunk.stream.phase = Phase.DECODE
        for stream in step.emitting:
            stream.launched += 1
            stream.last_launch = start
            stream.playback.launch(self.policy.patch_seconds)
            if stream.launched >= stream.max_patches:
                stream.phase = Phase.IDLE

    def undo(self, stream: Stream) -> None:
        """A decode row of a launched step did not run after all."""
        stream.launched -= 1
        stream.playback.drop(self.policy.patch_seconds)
        stream.phase = Phase.DECODE

    def _candidates(self, start: float, slacks: dict[Stream, float]) -> list[Stream]:
        """Streams with prompt positions to compute, most urgent first; live ones alone if there are any.

        Waiting streams are admitted (slot, pages to the length cap) in order of arrival until one does not fit; a
        quarter of the slots is for listeners only.
        """
        begun = [s for s in self._running if s.phase is Phase.PREFILL and not s.paused]
        begun.sort(key=lambda s: (not s.live, slacks.get(s, s.arrival + self.policy.first_audio_target - start)))
        waiting = sorted(self._waiting, key=lambda s: (not s.live, s.arrival))
        candidates = begun
        slots, pages = self._slots.num_free, self._pages.num_available
        for stream in waiting:
            needed = self._pages_for(stream.positions)
            if slots < (1 if stream.live else 1 + self.policy.max_streams // 4) or pages < needed:
                break
            slots, pages = slots - 1, pages - needed
            candidates.append(stream)
        live = [s for s in candidates if s.live]
        return live or candidates

    def _prefill_step(self, candidates: Iterable[Stream], slacks: dict[Stream, float], start: float) -> Step | None:
        """As many prompt chunks as the least slack covers, with the rows that could not wait for them.

        A stream between two segments is itself a listener: its own slack does not hold its prefill back. A listener
        who waits in silence already holds back only those who are less late.
        """
        policy = self.policy
        chunks: list[PrefillChunk] = []
        # After the prefill, each listener's next patch is a step away.
        rounds = self._round_bound(slacks)
        for stream in candidates:
            own = slacks.get(stream, stream.arrival + policy.first_audio_target - start)
            others = [slack for other, slack in slacks.items() if other is not stream and (slack >= 0 or slack < own)]
            budget = min(others, default=math.inf) - policy.guard
            if len(chunks) >= policy.buckets[-1]:
                break
            whole = stream.prefilled == 0 and self.replayable(stream.prompt_tokens, stream.prompt_audio)
            # What is left of a prompt that was cut runs eagerly, so one that can be replayed is not cut.
            least = stream.prompt_left if whole else policy.min_chunk
            length = min(stream.prompt_left, policy.prefill_tokens - sum(chunk.length for chunk in chunks))
            if length < stream.prompt_left and whole:
                break
            forced = stream in slacks and own <= budget + policy.guard
            while length > 0 and not forced and self._grown_bound(chunks, stream, length) + rounds > budget:
                length = length // 2 if length // 2 >= least else 0
            if length <= 0 or (chunks and not self._joins(chunks, PrefillChunk(stream, stream.prefilled, length))):
                break
            chunks.append(PrefillChunk(stream, stream.prefilled, length))
        if not chunks:
            return None
        return self._with_riders(chunks, slacks)

    def _grown_bound(self, chunks: Sequence[PrefillChunk], stream: Stream, length: int) -> float:
        return self._chunks_cost([*chunks, PrefillChunk(stream, stream.prefilled, length)], (), bound=True)

    def _round_bound(self, slacks: dict[Stream, float]) -> float:
        """Seconds that one step of every listener who is decoding rarely exceeds."""
        decoding = Counter(stream.solver_steps for stream in slacks if stream.phase is Phase.DECODE)
        largest = self.policy.buckets[-1]
        return sum(self.decode_bound(steps, min(count, largest)) for steps, count in decoding.items())

    def _with_riders(self, chunks: list[PrefillChunk], slacks: dict[Stream, float]) -> Step:
        """Rows that would have to run right after an eager prefill anyway run inside it: the tail and the VAE are
        shared. A replayed one takes none: it is over before the rows would be, and they go in a full batch after it.
        """
        if self._recording(chunks) is not None:
            return Step(tuple(chunks), (), self._chunks_cost(chunks, (), bound=False))
        alone = self._chunks_cost(chunks, (), bound=True)
        ready = sorted((s for s in slacks if s.decodable), key=lambda s: slacks[s])
        room = self.policy.buckets[-1] - len(chunks)
        soon = [s for s in ready if slacks[s] < alone + 2 * self.decode_bound(s.solver_steps, len(ready))][:room]
        for count in range(len(soon), 0, -1):
            cost = self._chunks_cost(chunks, soon[:count], bound=True)
            if cost + self.policy.guard <= max(0.0, slacks[soon[0]]):
                riders = tuple(soon[:count])
                return Step(tuple(chunks), riders, self._chunks_cost(chunks, riders, bound=False))
        return Step(tuple(chunks), (), self._chunks_cost(chunks, (), bound=False))

    def _decode_step(self, slacks: dict[Stream, float], *, cheapest: bool) -> Step | None:
        """The group of one solver-step value whose listener is nearest to silence, in the bucket that pays best.

        While a listener waits for a slot or pages, rows that can spare the time go by what they have left to do, so
        that one ends soon. cheapest: new streams wait for slack, so take no more than the rows that need it.
        """
        policy = self.policy
        ready = [stream for stream in self._running if stream.decodable]
        if not ready:
            return None
        room_wanted = not cheapest and any(stream.live for stream in self._waiting)
        first = min(ready, key=lambda s: (slacks.get(s, math.inf), s.last_launch))
        group = [stream for stream in ready if stream.solver_steps == first.solver_steps]
        largest = policy.buckets[-1]
        horizon = 2 * self.decode_bound(first.solver_steps, min(len(group), largest)) + policy.guard

        def rank(stream: Stream) -> tuple[int, float]:
            slack = slacks.get(stream, 0.0) if stream.live else math.inf
            if slack < horizon:
                return (0, slack)
            if room_wanted:
                return (1, self._patches_left(stream))
            if stream.live:
                return (3 if slack > policy.far_ahead else 1, slack)
            return (2, stream.last_launch)

        group.sort(key=rank)
        urgent = min(largest, max(1, sum(rank(s)[0] == 0 for s in group)))
        most = min(len(group), largest)
        counts = sorted({*(edge for edge in policy.buckets if urgent <= edge <= most), most})

        def rows_per_second(count: int) -> float:
            return count / self._decode_cost(first.solver_steps, count)

        if cheapest:
            count = counts[0]
        else:
            count = max(counts, key=rows_per_second)
        rows = tuple(group[:count])
        return Step((), rows, self._decode_cost(first.solver_steps, count))

    # Costs

    def _bucket(self, rows: int) -> int:
        """Smallest bucket that holds `rows`; 0 for none."""
        if rows == 0:
            return 0
        return next((bucket for bucket in self.policy.buckets if bucket >= rows), self.policy.buckets[-1])

    def _decode_cost(self, steps: int, rows: int) -> float:
        bucket = self._bucket(rows)
        return self.costs.mean("decode", steps, bucket) + self.costs.mean("vae", 0, bucket)

    def decode_bound(self, steps: int, rows: int) -> float:
        """Seconds that a decode step of `rows` and its audio rarely exceed."""
        bucket = self._bucket(rows)
        return self.costs.bound("decode", steps, bucket) + self.costs.bound("vae", 0, bucket)

    def _recording(self, chunks: Sequence[PrefillChunk]) -> Capacity | None:
        """Capacity of what replays a pass over chunks alone."""
        needs = prefill_needs(chunks)
        return None if needs is None else self._recorded(needs)

    def _chunks_cost(self, chunks: Sequence[PrefillChunk], riders: Sequence[Stream], *, bound: bool) -> float:
        """Seconds of a pass over chunks and riders, one tail for each number of solver steps, and the audio of all."""
        emitting = Counter(chunk.stream.solver_steps for chunk in chunks if chunk.last)
        emitting.update(stream.solver_steps for stream in riders)
        tokens = sum(chunk.length for chunk in chunks) + len(riders)
        return self._pass_cost(tokens, None if riders else self._recording(chunks), emitting, bound=bound)

    def _pass_cost(self, tokens: int, recording: Capacity | None, emitting: Counter[int], *, bound: bool) -> float:
        of = self.costs.bound if bound else self.costs.mean
        kind, size = eager_prefill(tokens) if recording is None else replayed_prefill(recording)
        cost = of(kind, 0, size) + of("vae", 0, self._bucket(emitting.total()))
        return cost + sum(of("tail", steps, self._bucket(rows)) for steps, rows in emitting.items())

    def _prompts_cost(self, streams: Sequence[Stream]) -> float:
        """Expected seconds of what is left of their prompts, in about the passes that `_prefill_step` makes of them."""
        total = 0.0
        tokens, audio, emitting = 0, 0, Counter[int]()
        recording: Capacity | None = None
        for stream in streams:
            count = emitting.total()
            left, patches = stream.prompt_left, stream.prompt_audio
            more = {"tokens": tokens + left, "audio": audio + patches, "sequences": count + 1}
            joint = self._recorded(more)
            if count and (more["tokens"] > self.policy.prefill_tokens or (joint is None and recording is not None)):
                total += self._pass_cost(tokens, recording, emitting, bound=False)
                tokens, audio, emitting = 0, 0, Counter()
                joint = self._recorded({"tokens": left, "audio": patches, "sequences": 1})
            tokens, audio, recording = tokens + left, audio + patches, joint
            emitting[stream.solver_steps] += 1
        return total + self._pass_cost(tokens, recording, emitting, bound=False)

    def _joins(self, chunks: Sequence[PrefillChunk], chunk: PrefillChunk) -> bool:
        """A pass over all of them costs less than two: a prompt does not turn a replayed pass into an eager one."""
        policy = self.policy
        if len(chunks) >= policy.buckets[-1] or sum(c.length for c in chunks) + chunk.length > policy.prefill_tokens:
            return False
        apart = self._chunks_cost(chunks, (), bound=False) + self._chunks_cost([chunk], (), bound=False)
        return self._chunks_cost([*chunks, chunk], (), bound=False) < apart

    def replayable(self, tokens: int, audio: int) -> bool:
        """A prompt of these sizes, in a pass of its own and whole, is replayed."""
        needs = {"tokens": tokens, "audio": audio, "sequences": 1}
        return tokens <= self.policy.prefill_tokens and self._recorded(needs) is not None

    # Life of a stream

    def _admit(self, stream: Stream) -> None:
        """Takes a waiting stream in: a slot, and pages to its length cap."""
        self._waiting.remove(stream)
        self._running.append(stream)
        stream.slot = self._slots.take()
        stream.pages = self._pages.allocate(self._pages_for(stream.positions))
        stream.phase = Phase.PREFILL

    def reserve(self, stream: Stream, positions: int) -> bool:
        """Grows a stream's reservation for a longer segment that came later. False when there is no room."""
        if stream.phase is Phase.WAITING:
            stream.positions = max(stream.positions, positions)
            return self._pages_for(stream.positions) < self._pages.num_pages
        more = self._pages_for(positions) - len(stream.pages)
        if more > self._pages.num_available:
            return False
        if more > 0:
            stream.pages.extend(self._pages.allocate(more))
        stream.positions = max(stream.positions, positions)
        return True

    def begin_segment(
        self, stream: Stream, prompt_tokens: int, prompt_audio: int, max_patches: int, cached: int = 0
    ) -> None:
        """A stream whose segment has ended gets the next one; `cached` leading positions are in its cache already.

        They are computed again where the whole prompt is replayed: a pass behind a past is an eager one.
        """
        stream.prompt_tokens, stream.prompt_audio, stream.max_patches = prompt_tokens, prompt_audio, max_patches
        stream.prefilled = 0 if self.replayable(prompt_tokens, prompt_audio) else cached
        stream.launched = 0
        stream.phase = Phase.PREFILL

    def end_segment(self, stream: Stream, patches: int) -> None:
        """The model stopped after `patches` real patches of the current segment; later launches were surplus."""
        surplus = stream.launched - patches
        if surplus:
            stream.playback.drop(surplus * self.policy.patch_seconds)
        share = patches / stream.max_patches
        self._used_of_cap += 0.05 * (share - self._used_of_cap)
        stream.phase = Phase.IDLE

    def release(self, stream: Stream) -> None:
        """Forgets a stream; its slot and pages are free. The caller makes sure that no launched step uses them."""
        if stream.phase is Phase.WAITING:
            self._waiting.remove(stream)
            return
        self._running.remove(stream)
        self._slots.give_back(stream.slot)
        self._pages.release(stream.pages)
        stream.slot, stream.pages = 0, []

    def _pages_for(self, positions: int) -> int:
        return math.ceil(positions / self._pages.page_size)
