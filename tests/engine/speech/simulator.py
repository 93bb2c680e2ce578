"""A virtual GPU with measured costs, and a clock that only it moves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from models.interfaces.capturable import Bucket
from service.engine.core.pages import PagePool
from service.engine.speech.forecast import Forecast, Kind, Policy, SpeechCosts, replayed_cost_key
from service.engine.speech.scheduler import Refusal, SpeechScheduler, Step
from service.engine.speech.stream import FindCapturedBucket, Playback, PrefillSize, Stream

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
PATCH_SECONDS = 0.16

# Seconds on an H100 at 10 solver steps: a plain graph of the decode step, its tail, the VAE step, an eager backbone.
MEASURED: dict[Kind, dict[int, float]] = {
    "decode": {1: 0.0125, 8: 0.0164, 16: 0.0191, 32: 0.0245, 64: 0.0342},
    "tail": {1: 0.0096, 8: 0.0125, 16: 0.0145, 32: 0.0190, 64: 0.0270},
    "vae": {1: 0.0013, 8: 0.0022, 32: 0.0056, 64: 0.0113},
    "prefill": {1: 0.0120, 512: 0.0170, 2048: 0.0400},
}


# Seconds on an H100 with the fused kernels, and with prefills that are replayed.
FUSED: dict[Kind, dict[int, float]] = {
    "decode": {1: 0.0054, 8: 0.0072, 32: 0.011, 64: 0.015, 128: 0.03},
    "tail": {1: 0.0033, 8: 0.0047, 32: 0.0082, 64: 0.0121, 128: 0.0242},
    "vae": {1: 0.0004, 8: 0.0008, 32: 0.0025, 64: 0.0047, 128: 0.0094},
    "prefill": {1: 0.020, 512: 0.020, 2048: 0.040},
    "text_prefill": {32: 0.0027, 1024: 0.0086},
    "voice_prefill": {32: 0.0029, 1024: 0.0104},
    "audio_prefill": {32: 0.0037, 1024: 0.0156},
}
FUSED_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
PREFILL_BUCKETS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def measured_costs(scale: float = 1.0, measured: dict[Kind, dict[int, float]] = MEASURED) -> SpeechCosts:
    costs = SpeechCosts()
    for kind, sizes in measured.items():
        for size, seconds in sizes.items():
            costs.observe(kind, 10 if kind in ("decode", "tail") else 0, size, seconds * scale)
    return costs


def eager(required: Bucket) -> Bucket | None:
    """No prefill is captured."""
    return None


def replayed(required: Bucket) -> Bucket | None:
    """The captured graphs of a GPU: 16 prompts, for text alone, with few patches or with many."""
    tokens = next((bucket for bucket in PREFILL_BUCKETS if bucket >= required["tokens"]), None)
    if tokens is None or required["sequences"] > 16:
        return None
    audio = next(size for size in (0, tokens // 4, tokens) if size >= required["audio"])
    return {"tokens": tokens, "audio": audio, "sequences": 16}


@dataclass(eq=False)
class Arrival:
    """A request of a trace. patches: what the model will make of it, unknown to the scheduler until it stops."""

    time: float
    patches: int
    prompt_tokens: int = 40
    prompt_audio: int = 0
    live: bool = True
    solver_steps: int = 10
    cap_factor: float = 2.0
    speed: float = 1.0
    speed_known: bool = True

    def stream(self, number: int) -> Stream:
        cap = int(self.patches * self.cap_factor)
        return Stream(
            request_id=str(number),
            live=self.live,
            arrival=self.time,
            solver_steps=self.solver_steps,
            prompt_tokens=self.prompt_tokens,
            prompt_audio=self.prompt_audio,
            max_patches=cap,
            playback=Playback(self.speed if self.speed_known else 1.0),
            positions=self.prompt_tokens + cap,
        )


def predicted_first_audio(scheduler: SpeechScheduler, stream: Stream) -> float:
    """What `submit` would predict for a live stream now."""
    return scheduler._first_audio(stream, scheduler._prompts_with(stream), stream.arrival)


@dataclass
class Outcome:
    first_audio: list[float] = field(default_factory=list)
    underruns: list[float] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finished: int = 0

    def p95(self) -> float:
        return sorted(self.first_audio)[int(0.95 * (len(self.first_audio) - 1))]

    @property
    def underrun_seconds(self) -> float:
        return sum(self.underruns)


class Simulation:
    """Runs a trace to its end. Stops are known one step late, as results are read."""

    def __init__(
        self,
        trace: Sequence[Arrival],
        *,
        slots: int = 64,
        pages: int = 100_000,
        target: float = 1e9,
        max_load: float = 1e9,
        scale: float = 1.0,
        buckets: tuple[int, ...] = BUCKETS,
        costs: dict[Kind, dict[int, float]] = MEASURED,
        captured: FindCapturedBucket = eager,
    ) -> None:
        self.trace = sorted(trace, key=lambda arrival: arrival.time)
        policy = Policy(
            buckets=buckets,
            max_streams=slots,
            patch_seconds=PATCH_SECONDS,
            max_waiting=10_000,
            refuse_after=target,
            max_load=max_load,
        )
        self.pages = PagePool(pages + 1, page_size=16)
        self.buckets = buckets
        self.captured = captured
        self.true = measured_costs(scale, costs)
        self.scheduler = SpeechScheduler(policy, Forecast(measured_costs(scale, costs), captured, policy), self.pages)
        self.random = random.Random(0)
        self.outcome = Outcome()

    def seconds(self, step: Step) -> float:
        mean = self.true.mean
        rows = Counter(stream.solver_steps for stream in step.emitting)
        total = mean("vae", 0, self.bucket(rows.total()))
        if not step.prefills:
            total += sum(mean("decode", steps, self.bucket(count)) for steps, count in rows.items())
        else:
            required = PrefillSize.of(step.prefills).required
            bucket = self.captured(required)
            kind, size = ("prefill", required["tokens"]) if bucket is None else replayed_cost_key(bucket)
            total += mean(kind, 0, size)
            total += sum(mean("tail", steps, self.bucket(count)) for steps, count in rows.items())
        return total * (1 + self.random.uniform(-0.05, 0.05))

    def bucket(self, rows: int) -> int:
        return next((size for size in self.buckets if size >= rows), self.buckets[-1]) if rows else 0

    def run(self) -> Outcome:
        scheduler, outcome = self.scheduler, self.outcome
        lengths: dict[Stream, int] = {}
        listeners: dict[Stream, Playback] = {}
        arrivals = list(self.trace)
        ended: list[Stream] = []
        clock = 0.0
        while True:
            while arrivals and arrivals[0].time <= clock:
                arrival = arrivals.pop(0)
                stream = arrival.stream(len(lengths))
                lengths[stream] = arrival.patches
                listeners[stream] = Playback(arrival.speed)
                if refusal := scheduler.submit(stream, clock):
                    outcome.refused.append(refusal)
            step = scheduler.next_step(clock)
            late, ended = ended, []
            if step is not None:
                self.check(step)
                scheduler.launch(step, clock)
                scheduler.index_voice_pages(step)
                clock += self.seconds(step)
                outcome.steps.append(step)
                for stream in step.emitting:
                    if stream in late:
                        continue
                    if stream.playback.started is None and stream.live:
                        outcome.first_audio.append(clock - stream.arrival)
                    stream.playback.deliver(clock, PATCH_SECONDS)
                    listeners[stream].deliver(clock, PATCH_SECONDS)
                    if stream.launched == lengths[stream]:
                        ended.append(stream)
            for stream in late:
                scheduler.end_segment(stream, lengths[stream])
                scheduler.release(stream)
                outcome.finished += 1
                if stream.live:
                    outcome.underruns.append(listeners[stream].underrun)
                assert abs(stream.playback.pending) < 1e-9
            if step is None and not ended and not late:
                if not arrivals:
                    break
                clock = max(clock, arrivals[0].time)
        return outcome

    def check(self, step: Step) -> None:
        """What every step must be."""
        streams = [chunk.stream for chunk in step.prefills] + list(step.decodes)
        assert streams and len(set(streams)) == len(streams) and not (step.prefills and step.decodes)
        assert len(step.emitting) <= self.buckets[-1]
        assert all(stream.decodable and stream.launched < stream.max_patches for stream in step.decodes)
        for chunk in step.prefills:
            assert chunk.length > 0 and chunk.start == chunk.stream.prefilled
        if not step.prefills:
            assert len({stream.solver_steps for stream in step.decodes}) == 1
