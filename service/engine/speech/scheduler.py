"""Playback-aware scheduling: which streams run next, decided by how long each listener can still wait.

A live stream's slack is the audio that its listener has received and not heard yet. Prefills are admitted while the
least slack covers their measured cost. Streams far ahead of playback are the first to leave a decode batch, to keep it
in a bucket that costs less per row or to make room for streams without a live listener. There is always a step while
any stream can run, and streams without a live listener get a share of all of them (BackgroundShare). Slots and pages of
streams that have no text to speak yet are taken when others wait for them.

Pure Python on the caller's clock; times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from service.engine.core.pages import PagePool
from service.engine.speech.capacity import Room
from service.engine.speech.forecast import Forecast, Policy, Prompts
from service.engine.speech.stream import Phase, PrefillChunk, PrefillSize, Stream

GUARD = 0.02
"""Seconds of slack never spent (transport, jitter of the host)."""
FAR_AHEAD = 2.0
"""Streams with more seconds of slack than this come after streams without a live listener."""
MIN_CHUNK = 64
"""Positions of a chunk at least, where the prompt has more left and cannot be replayed whole."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not admitted. retry_after: seconds, None where trying again would not help."""

    reason: Literal["queue_full", "first_audio", "load", "too_long"]
    message: str
    retry_after: float | None


# The share of a model's time that work without a live listener is guaranteed: speech that is not heard while it is
# made, and reference audio. It usually gets more, while listeners have audio in hand.

SHARE = 0.2
"""Share of the time of steps beside live streams."""
LAG = 0.25
"""Seconds of it that may be lacking before listeners have to wait."""


class BackgroundShare:
    """Counts the seconds of its share that one kind of such work lacks."""

    def __init__(self) -> None:
        self._lacking = 0.0

    @property
    def overdue(self) -> bool:
        return self._lacking >= LAG

    def owes(self, seconds: float) -> bool:
        """Whether a launch of so many predicted seconds is due."""
        return self._lacking >= max(LAG, (1 - SHARE) * seconds)

    def count(self, seconds: float, *, served: float, waits: bool) -> None:
        """Counts a launch. served: the part of it that was such work. waits: whether more of it could have run."""
        self._lacking = max(0.0, self._lacking + (SHARE - served) * seconds) if waits else 0.0


@dataclass(frozen=True)
class Step:
    """One batch: prompt chunks, or decode rows (one patch each), which share the number of solver steps."""

    prefills: tuple[PrefillChunk, ...]
    decodes: tuple[Stream, ...]
    predicted: float
    """Expected seconds on the GPU until the next step can begin."""
    tail: bool = True
    """Whether the tail makes the first patches of prompts that end. Otherwise they are rows of the next decode step."""

    @property
    def emitting(self) -> list[Stream]:
        """Streams that get a patch."""
        return [chunk.stream for chunk in self.prefills if chunk.is_last and self.tail] + list(self.decodes)


class SpeechScheduler:
    """Holds every stream of one model from submission to release. forecast: of the same policy."""

    def __init__(self, policy: Policy, forecast: Forecast, pages: PagePool) -> None:
        self.policy = policy
        self.forecast = forecast
        self.room = Room(policy.max_streams, pages)
        self.waiting: list[Stream] = []
        self._prefill_before = 0.0
        """Expected seconds of the step that was launched last if it held prompts, else 0."""
        self._background = BackgroundShare()
        self._prompts_ahead: Prompts | None = None
        """Prompts of all live streams, until one of them changes otherwise than by a new one behind them."""

    @property
    def running(self) -> Sequence[Stream]:
        return self.room.running

    @property
    def all_playing(self) -> bool:
        """Whether every stream has a listener who has begun to hear it."""
        return all(stream.live and not stream.waits_for_first_audio for stream in (*self.room.running, *self.waiting))

    # Admission

    def submit(self, stream: Stream, now: float) -> Refusal | None:
        """Queues a stream, or returns why it is refused."""
        policy = self.policy
        if not self.room.fits_cache(stream.positions):
            return Refusal("too_long", "text and reference audio need more positions than the cache holds", None)
        if len(self.waiting) >= policy.max_waiting:
            message = f"{policy.max_waiting} requests are waiting already"
            return Refusal("queue_full", message, self.forecast.queue_seconds(self.room.speaking, policy.max_waiting))
        self.room.look_up_voice(stream)
        if stream.live:
            heard, load = self._heard(now), self.load(now, extra=stream)
            if heard and load > policy.max_load:
                return Refusal(
                    "load",
                    f"with this one, {len(heard) + 1} streams would use {load:.0%} of real time",
                    self.forecast.next_finish(self.room.speaking),
                )
            prompts = self._prompts_with(stream)
            predicted = self._first_audio(stream, prompts, now)
            if (self.room.speaking or self.waiting) and predicted > policy.refuse_after:
                return Refusal(
                    "first_audio",
                    f"first audio is predicted after {predicted:.2f} s, the target is {policy.refuse_after:g} s",
                    max(1.0, predicted - policy.refuse_after),
                )
            self._prompts_ahead = prompts
        self.waiting.append(stream)
        return None

    def _heard(self, now: float) -> list[Stream]:
        """Live streams. Of those without text only the ones whose audio is still heard: if more text comes by then, as
        from a chat model, they take as many steps a second as the others."""
        streams = (*self.room.running, *self.waiting, *self.room.preempted)
        return [one for one in streams if one.live and (one.has_text or one.playback.end(now) > now)]

    def load(self, now: float, extra: Stream | None = None) -> float:
        """Share of real time that the steps of every live stream that is heard take, `extra` included."""
        heard = self._heard(now)
        return self.forecast.load(heard if extra is None else [*heard, extra])

    def _prompts_with(self, stream: Stream) -> Prompts:
        """Prompts of the live streams, and that of a new one behind them."""
        prompts = self._prompts_ahead
        if prompts is None:
            live = (one for one in (*self.room.running, *self.waiting) if one.live and one.prompt_left)
            prompts = reduce(self.forecast.with_prompt, live, Prompts())
            self._prompts_ahead = prompts
        return self.forecast.with_prompt(prompts, stream)

    def _first_audio(self, stream: Stream, prompts: Prompts, now: float) -> float:
        """Seconds from now to the first audio of a live stream submitted now, the last of `prompts`. It waits for a
        slot and pages after the live streams that wait."""
        delay = self.forecast.first_audio(stream.solver_steps, prompts, len(self.room.speaking), self.load(now))
        slots, pages = self.room.missing([*(other for other in self.waiting if other.live), stream])
        return delay + self.forecast.wait_for_room(self.room.speaking, slots, pages)

    # The next step

    def least_slack(self, start: float) -> float:
        """Seconds that other work may take from `start` on before a listener runs out of audio; infinity if none."""
        return min((slack for _, slack in self._slacks(start)), default=math.inf) - GUARD

    def _slacks(self, start: float) -> list[tuple[Stream, float]]:
        """Slack of every live stream that has begun to play and can run."""
        return [
            (stream, stream.playback.end(start) - start)
            for stream in self.room.running
            if stream.live
            and not stream.paused
            and not stream.waits_for_first_audio
            and stream.phase in (Phase.PREFILL, Phase.DECODE)
        ]

    def next_step(self, start: float) -> Step | None:
        """The best batch to launch for a GPU that is free at `start`; None when no stream can run."""
        slacks = dict(self._slacks(start))
        if any(stream.waits_for_first_patch for stream in self.room.running):
            return self._decode_step(slacks, cheapest=False)
        if (step := self._owed_step(slacks, start)) is not None:
            return step
        everyone = self._candidates(start, slacks)
        candidates = [stream for stream in everyone if stream.live] or everyone
        step = self._prefill_step(candidates, slacks, start) if candidates else None
        if step is None:
            step = self._decode_step(slacks, cheapest=any(stream.live for stream in candidates))
        if step is None and candidates:
            step = self._prefill_step(candidates, {}, start)
        return step

    def _owed_step(self, slacks: dict[Stream, float], start: float) -> Step | None:
        """A step for streams without a live listener, if they are owed one."""
        if not self._background.overdue:
            return None
        prompts = [stream for stream in self._candidates(start, dict(slacks), background=True) if not stream.live]
        step = self._prefill_step(prompts, {}, start) if prompts else self._decode_step(slacks, background=True)
        return step if step is not None and self._background.owes(step.predicted) else None

    def launch(self, step: Step, start: float) -> None:
        """Updates the streams of a step that is launched on a GPU free at `start`."""
        streams = [chunk.stream for chunk in step.prefills] + list(step.decodes)
        background = {one for one in (*self.room.running, *self.waiting) if one.in_background}
        served = sum(stream in background for stream in streams) / len(streams)
        self._background.count(step.predicted, served=served, waits=bool(background.difference(streams)))
        self._prefill_before = step.predicted if step.prefills else 0.0
        if step.prefills:
            self._prompts_ahead = None
        admitted = [chunk.stream for chunk in step.prefills if chunk.stream.phase is Phase.WAITING]
        self.room.admit(admitted)
        for stream in admitted:
            self.waiting.remove(stream)
        for chunk in step.prefills:
            chunk.stream.prefilled += chunk.length
            if chunk.is_last:
                chunk.stream.phase = Phase.DECODE
        for stream in step.emitting:
            stream.launched += 1
            stream.last_launch = start
            stream.playback.launch(self.policy.patch_seconds)
            if stream.launched >= stream.max_patches:
                stream.phase = Phase.LAUNCHED

    def index_voice_pages(self, step: Step) -> None:
        """After `launch`, when the step is on the GPU: later steps may read the keys that it computes, and other
        streams share what its chunks add to the pages of their voices."""
        for chunk in step.prefills:
            end = 0
            for page, shared in zip(chunk.stream.pages, chunk.stream.voice, strict=False):
                end += shared.positions
                if chunk.start < end <= chunk.start + chunk.length:
                    self.room.pages.index(page, shared.digest)

    def _candidates(self, start: float, slacks: dict[Stream, float], *, background: bool = False) -> list[Stream]:
        """Streams with prompt positions to compute, most urgent first.

        Waiting streams follow, live ones first, in order of arrival while slots and pages (to the length cap) suffice.
        A quarter of the slots is reserved for live streams. background: the others go first, up to a quarter. Idle
        streams are preempted for those that wait; one that goes on is as urgent as if it had stayed.
        """
        begun = [s for s in self.room.running if s.phase is Phase.PREFILL and not s.paused]
        quarter = self.policy.max_streams // 4
        background = background and sum(not s.live for s in self.room.running) < max(1, quarter)
        waiting = sorted(self.waiting, key=lambda s: (s.live == background, s.arrival))
        new: list[Stream] = []
        slots = pages = 0
        for stream in waiting:
            self.room.look_up_voice(stream)
            least_slots = slots + (1 if stream.live or background else 1 + quarter)
            least_pages = pages + self.room.pages_for(stream.positions)
            if not self.room.make_room(least_slots, least_pages):
                break
            slots, pages = slots + 1, least_pages
            if stream.live and stream.playback.started is not None:
                slacks[stream] = stream.playback.end(start) - start
                begun.append(stream)
            else:
                new.append(stream)
        begun.sort(key=lambda s: (not s.live, slacks.get(s, s.arrival + self.policy.first_audio_target - start)))
        return [*begun, *new]

    def _prefill_step(self, candidates: Iterable[Stream], slacks: dict[Stream, float], start: float) -> Step | None:
        """As many prompt chunks as the smallest slack covers.

        A live stream between two segments has slack itself, which does not delay its own prefill. A listener whose
        audio has run out delays only prefills of streams that are less late.
        """
        policy = self.policy
        chunks, size = list[PrefillChunk](), PrefillSize()
        # After the prefill, each listener's next patch is a step away.
        rounds = self.forecast.round_bound(stream for stream in slacks if stream.phase is Phase.DECODE)
        for stream in candidates:
            own = slacks.get(stream, stream.arrival + policy.first_audio_target - start)
            others = [slack for other, slack in slacks.items() if other is not stream and (slack >= 0 or slack < own)]
            budget = min(others, default=math.inf) - GUARD
            if len(chunks) >= policy.buckets[-1]:
                break
            # Two launches cost more than one, so a prompt that can be replayed whole is not split.
            whole = self.forecast.replayable(stream)
            least = stream.prompt_left if whole else MIN_CHUNK
            length = min(stream.prompt_left, policy.prefill_tokens - size.tokens)
            if length < stream.prompt_left and whole:
                break
            forced = stream in slacks and own <= budget + GUARD
            while length > 0 and not forced:
                grown = size.with_chunk(PrefillChunk.next(stream, length))
                if self.forecast.prefill_bound(grown) + rounds <= budget:
                    break
                length = length // 2 if length // 2 >= least else 0
            chunk = PrefillChunk.next(stream, length)
            if length <= 0 or (chunks and not self.forecast.joins(size, chunk)):
                break
            chunks, size = [*chunks, chunk], size.with_chunk(chunk)
        if not chunks:
            return None
        if self.forecast.captured(size.required) is not None and self._tail_costs_more(chunks):
            return Step(tuple(chunks), (), self.forecast.prefill(replace(size, emitting={})), tail=False)
        return Step(tuple(chunks), (), self.forecast.prefill(size))

    def _tail_costs_more(self, chunks: Sequence[PrefillChunk]) -> bool:
        """Whether the first patches of these prompts cost less as rows of the next decode step."""
        ready = [stream for stream in self.room.running if stream.decodable]
        solver_steps = {stream.solver_steps for stream in (*ready, *(chunk.stream for chunk in chunks))}
        if len(solver_steps) > 1 or not all(chunk.is_last for chunk in chunks):
            return False
        rows = min(len(ready), self.policy.buckets[-1] - len(chunks))
        return self.forecast.tail_costs_more(solver_steps.pop(), len(chunks), rows)

    def _decode_step(
        self, slacks: dict[Stream, float], *, cheapest: bool = False, background: bool = False
    ) -> Step | None:
        """The most urgent stream with others of its number of solver steps. cheapest: new streams wait for slack, so
        only rows that need the step take part. background: streams without a live listener go first."""
        ready = [stream for stream in self.room.running if stream.decodable]
        first = [stream for stream in ready if not stream.live] if background else ready
        if not first:
            return None
        urgent = min(first, key=lambda s: (not s.waits_for_first_patch, slacks.get(s, math.inf), s.last_launch))
        group = [stream for stream in ready if stream.solver_steps == urgent.solver_steps]
        rows = self._choose_rows(group, slacks, cheapest=cheapest, background=background)
        return Step((), rows, self.forecast.decode(urgent.solver_steps, len(rows)))

    def _choose_rows(
        self, group: Sequence[Stream], slacks: Mapping[Stream, float], *, cheapest: bool, background: bool
    ) -> tuple[Stream, ...]:
        """Streams of one number of solver steps, in the bucket with most rows per second. First patches and streams
        with little slack are always among them, as far as the largest bucket holds them.

        While live streams wait, those with enough slack are ordered by the patches they have left, so that one ends
        soon. A prefill right before this step counts with it: prompts come between decode steps however large these
        are.
        """
        policy, forecast, solver_steps = self.policy, self.forecast, group[0].solver_steps
        most = min(len(group), policy.buckets[-1])
        horizon = 2 * forecast.decode_bound(solver_steps, most) + GUARD
        room_wanted = not cheapest and any(stream.live for stream in self.waiting)

        def rank(stream: Stream) -> tuple[int, float]:
            if stream.waits_for_first_patch:
                return (0, -math.inf)
            slack = slacks.get(stream, 0.0) if stream.live else math.inf
            if background and not stream.live:
                return (-1, stream.last_launch)
            if slack < horizon:
                return (0, slack)
            if room_wanted:
                return (1, forecast.patches_left(stream))
            if stream.live:
                return (3 if slack > FAR_AHEAD else 1, slack)
            return (2, stream.last_launch)

        def rows_per_second(count: int) -> float:
            return count / (self._prefill_before + forecast.decode(solver_steps, count))

        ranked = sorted(group, key=rank)
        urgent = min(most, max(1, sum(rank(stream)[0] <= 0 for stream in group)))
        counts = sorted({*(bucket for bucket in policy.buckets if urgent <= bucket <= most), most})
        return tuple(ranked[: counts[0] if cheapest else max(counts, key=rows_per_second)])

    # Life of a stream

    def begin_segment(
        self,
        stream: Stream,
        prompt_tokens: int,
        prompt_audio: int,
        max_patches: int,
        *,
        cached: int = 0,
        patches_before: int = 0,
    ) -> None:
        """Starts the next segment of a stream; its `cached` leading positions, among them so many patches, have keys
        already."""
        stream.prompt_tokens, stream.prompt_audio, stream.max_patches = prompt_tokens, prompt_audio, max_patches
        stream.prefilled, stream.patches_before = cached, patches_before
        stream.launched = 0
        if stream.phase is Phase.PREEMPTED:
            self.room.release(stream)
            self.waiting.append(stream)
            stream.phase = Phase.WAITING
        else:
            stream.phase = Phase.PREFILL
        self._prompts_ahead = None

    def end_segment(self, stream: Stream, patches: int) -> None:
        """Ends the current segment after `patches` patches; rows launched later were overrun rows."""
        overrun = stream.launched - patches
        if overrun:
            stream.playback.drop(overrun * self.policy.patch_seconds)
        self.forecast.learn_length(patches / stream.max_patches)
        stream.phase = Phase.IDLE

    def release(self, stream: Stream) -> None:
        """Forgets a stream. Its slot and pages may be given away at once."""
        if stream.prompt_left:
            self._prompts_ahead = None
        if stream.phase is Phase.WAITING:
            self.waiting.remove(stream)
        else:
            self.room.release(stream)
