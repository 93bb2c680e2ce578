"""Chat and speech on one GPU in virtual time: the engine's loop, the arbiter, the chat worker and speech's scheduler
are real. Launches take as long as those of Qwen2-VL-2B and VoxCPM2 on an H100, one after the other, and compute
nothing.

Results arrive while later launches run, as on a GPU, so two of each model may be in flight. The clock moves when the
engine waits, and by HOST for each launch and each reading of results. The miniature's context is short, so that a token
of a prompt stands for four.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from service.engine.arbiter import Arbiter
from service.engine.chat import pacing
from service.engine.chat import worker as chat_worker
from service.engine.chat.encoder import Encoded, Part
from service.engine.chat.runner import ChatRunner, StepOutput
from service.engine.chat.scheduler_output import Step as ChatStep
from service.engine.core.pages import PagePool
from service.engine.core.worker import UNNOTICED, Control
from service.engine.speech.costs import Kind
from service.engine.speech.in_flight import LEAD, MAX_IN_FLIGHT
from service.engine.speech.policy import Policy
from service.engine.speech.prefill import PrefillSize, replayed_cost_key
from service.engine.speech.scheduler import SpeechScheduler, Step
from service.engine.speech.stream import Playback, Stream
from service.engine.speech.worker import POLL
from service.link.messages import ChatRequest, Command, ModelState, Outputs, SamplingParams
from tests.engine.speech.simulator import FUSED_BUCKETS, PATCH_SECONDS, forecast_of, measured_costs, replayed
from tests.support.inline_engine import InlineEngine
from tests.support.tiny_chat import tiny_item, tiny_prompt

HOST = 0.0003
"""Seconds of Python for a launch of chat, and for reading results."""
TOKENS_EACH = 4
PREFILLS = (32, 64, 96, 128, 192, 256, 384, 512)
"""Captured prefills, in tokens of the miniature."""
PICTURE = 128
"""Patches of the miniature's picture, for one of 448 x 448."""
ANSWER = 128
"""Tokens of an answer."""
SPEECH: dict[Kind, dict[int, float]] = {
    "decode": {1: 0.0049, 4: 0.006, 8: 0.0062, 16: 0.0079, 32: 0.0104, 64: 0.0150, 128: 0.027},
    "tail": {1: 0.0029, 4: 0.0037, 8: 0.0039, 16: 0.0056, 32: 0.0077, 64: 0.0113, 128: 0.022},
    "vae": {1: 0.0002, 8: 0.0003, 32: 0.0006, 64: 0.0011},
    "text_prefill": {32: 0.0027, 1024: 0.0086},
}


def decode_seconds(rows: int) -> float:
    return float(np.interp(rows, [1, 8, 32, 64, 128], [1.48e-3, 1.69e-3, 2.02e-3, 2.30e-3, 2.89e-3]))


def prefill_seconds(tokens: int) -> float:
    return 0.9e-3 + 4.9e-6 * TOKENS_EACH * tokens


def encoder_seconds(patches: int) -> float:
    return 0.6e-3 + 2.9e-3 * patches / PICTURE


@dataclass
class World:
    """The clock, the GPU's queue, and what clients will do. Times in seconds."""

    now: float = 0.0
    free_at: float = 0.0
    """When everything launched so far has run."""
    commands: list[Command] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def launch(self, seconds: float) -> float:
        """Queues a launch; returns when it will have run."""
        self.free_at = max(self.free_at, self.now) + seconds
        return self.free_at

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), act))

    def until(self, time: float) -> None:
        """Moves the clock. Clients act at the next `receive`, as commands wait in a socket."""
        self.now = max(self.now, time)

    # The engine's channel

    def receive(self, timeout: float | None) -> list[Command]:
        self._act()
        if timeout and not self.commands:
            self.until(min(self.now + timeout, self._events[0][0] if self._events else math.inf))
            self._act()
        commands, self.commands = self.commands, []
        return commands

    def _act(self) -> None:
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()


class Talker:
    """A speech worker without a model (service.engine.core.worker.ModelWorker). `streams` clients, each of whom sends
    the next utterance of `patches` patches when one ends."""

    name = "speech"

    def __init__(self, world: World, streams: int, patches: int) -> None:
        self._world, self._patches = world, patches
        policy = Policy(FUSED_BUCKETS, 128, PATCH_SECONDS, max_waiting=1000, refuse_after=math.inf, max_load=math.inf)
        self._costs = measured_costs(measured=SPEECH)
        forecast = forecast_of(policy, measured_costs(measured=SPEECH), replayed)
        self.scheduler = SpeechScheduler(policy, forecast, PagePool(20_000, page_size=16))
        self._in_flight: list[tuple[Step, float, float]] = []
        """Step, when it was launched, and when its audio arrives."""
        self._free_at = -math.inf
        self._planned: Step | None = None
        self._received: dict[Stream, int] = defaultdict(int)
        self.first: list[float] = []
        self.underruns = 0
        self.patches = 0
        for number in range(streams):
            world.at(0.001 * number / streams, self._submit)

    def _submit(self) -> None:
        self._planned, most = None, 2 * self._patches
        stream = Stream(str(self._world.now), True, self._world.now, 10, 40, most, 40 + most, playback=Playback())
        assert self.scheduler.submit(stream, self._world.now) is None

    def _plan(self) -> Step | None:
        if self._planned is None:
            self._planned = self.scheduler.next_step(max(self._world.now, self._free_at))
        return self._planned

    def has_work(self) -> bool:
        if not self._has_room or (self._in_flight and self.backlog(self._world.now) > LEAD):
            return False
        return self._plan() is not None

    def slack(self, now: float) -> float:
        return self.scheduler.least_slack(now) - self.scheduler.forecast.decode_bound(10, len(self.scheduler.running))

    @property
    def _has_room(self) -> bool:
        """As service.engine.speech.in_flight.InFlight.has_room."""
        with_results = sum(bool(step.emitting) for step, _, _ in self._in_flight)
        return len(self._in_flight) <= MAX_IN_FLIGHT and with_results < MAX_IN_FLIGHT

    def backlog(self, now: float) -> float:
        return max(0.0, self._free_at - now) if self._in_flight else 0.0

    def smallest_launch(self) -> float:
        return self._planned.predicted if self._planned is not None else 0.0

    def due(self) -> bool:
        return False

    def can_wait(self, now: float, seconds: float) -> bool:
        if seconds > UNNOTICED and not self.scheduler.all_playing:
            return False
        step = self._plan()
        streams = () if step is None else step.emitting
        return not any(stream.waits_for_first_audio for stream in streams) and self.slack(now) > seconds

    def others_launched(self, seconds: float) -> None: ...

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        step, self._planned = self._plan(), None
        if step is None or (step.predicted > allowance and not must):
            return False
        self.scheduler.launch(step, max(now, self._free_at))
        self._world.until(now + 2 * HOST)
        rows = next(bucket for bucket in FUSED_BUCKETS if bucket >= len(step.emitting))
        if step.prefills:
            bucket = replayed(PrefillSize.of(step.prefills).required or {})
            assert bucket is not None and step.tail
            kind, size = replayed_cost_key(bucket)
            seconds = self._costs.mean(kind, 0, size) + self._costs.mean("tail", 10, rows)
        else:
            seconds = self._costs.mean("decode", 10, rows)
        self._in_flight.append((step, now, self._world.launch(seconds) + self._costs.mean("vae", 0, rows)))
        self._free_at = max(now, self._free_at) + step.predicted
        return True

    def oldest_launch(self) -> float | None:
        return self._in_flight[0][1] if self._in_flight else None

    def wait(self) -> None:
        arrives, world = self._in_flight[0][2], self._world
        if self._has_room:
            while world.now < arrives and self.backlog(world.now) > LEAD:
                world.until(min(arrives, world.now + POLL))
            if world.now < arrives and self.has_work():
                world.until(world.now + POLL)
                return
        world.until(arrives)

    def building(self) -> bool:
        return False

    def collect(self) -> Outputs:
        world = self._world
        while self._in_flight and world.now >= self._in_flight[0][2]:
            self._planned = None
            step, _, _ = self._in_flight.pop(0)
            world.until(world.now + HOST)
            for stream in step.emitting:
                if stream in self.scheduler.running:  # Otherwise it is an overrun row.
                    self._take(stream)
        if self._in_flight:
            ahead = sum(step.predicted for step, _, _ in self._in_flight)
            self._free_at = min(self._free_at, world.now + ahead)
        return Outputs()

    def _take(self, stream: Stream) -> None:
        world = self._world
        if stream.playback.started is None:
            self.first.append(world.now - stream.arrival)
        self.underruns += stream.playback.deliver(world.now, PATCH_SECONDS) > 0
        stream.playback.send()
        self.patches += 1
        self._received[stream] += 1
        if self._received[stream] == self._patches:
            self.scheduler.end_segment(stream, self._patches)
            self.scheduler.release(stream)
            world.at(world.now + 0.008, self._submit)

    def state(self) -> ModelState:
        return ModelState("speech", running=1, waiting=0, slots_used=1, pages_total=1, pages_used=1, pages_cached=0)

    def fail_timed_out(self, now: float) -> None: ...

    def control(self, command: Control) -> None: ...


class SharedGpu(InlineEngine):
    """`rate` chats a second about a new picture each, at random times, beside `streams` of speech. Use inside
    torch.inference_mode()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rate: float, streams: int, patches: int = 63) -> None:
        super().__init__(
            itl_target=pacing.ITL_TARGET, num_pages=20_000, max_running=128, max_waiting=1000, max_step_tokens=512,
            graphs=False, queue_timeout=1e9,
        )  # fmt: skip
        self.world = world = World()
        self.answers: dict[str, list[float]] = defaultdict(list)
        """Times of the tokens of each chat, after the time at which it was sent."""
        worker: Any = self.worker
        object.__setattr__(worker._context, "clock", lambda: world.now)
        self.engine._clock = lambda: world.now
        self.engine._channel = self.channel = self  # type: ignore[assignment]
        monkeypatch.setattr(pacing, "MIN_CHUNK_TOKENS", pacing.MIN_CHUNK_TOKENS // TOKENS_EACH)
        monkeypatch.setattr(ChatRunner, "prefill_sizes", property(lambda runner: PREFILLS))
        monkeypatch.setattr(chat_worker, "Readback", lambda *arguments: Readback(world, *arguments))
        self._encode = worker._vision.launch
        worker._runner.launch, worker._vision.launch = self._launch_step, self._launch_pass
        self._tell_costs(worker._pacing)
        self.talker = Talker(world, streams, patches)
        workers: Any = {worker.name: worker, "speech": self.talker}
        self.engine.workers, self.engine._arbiter = workers, Arbiter(list(workers.values()))
        self._lot, self._rate = random.Random(1), rate
        world.at(0.01, self._ask)

    def _tell_costs(self, paced: pacing.Pacing) -> None:
        for rows in (1, 8, 32, 64, 128):
            paced.costs.observe("decode", rows, decode_seconds(rows))
        for pictures in (1, 2, 4, 8):
            paced.costs.observe("encoder", pictures * PICTURE, encoder_seconds(pictures * PICTURE))
        a_token = prefill_seconds(1) - prefill_seconds(0)
        paced.costs.prefill.start(prefill_seconds(0), a_token, 0.0, {size: prefill_seconds(size) for size in PREFILLS})

    def _ask(self) -> None:
        number = len(self.answers)
        words = [[(7 * number + i) % 80 for i in range(10)], [(3 * number + i) % 80 for i in range(33)]]
        prompt = tiny_prompt([words[0], tiny_item(number, [PICTURE]), words[1]])
        params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
        self.answers[f"chat {number}"].append(self.world.now)
        self.world.commands.append(ChatRequest(f"chat {number}", "tiny", prompt, params, self.world.now))
        self.world.at(self.world.now + self._lot.expovariate(self._rate), self._ask)

    def _launch_step(self, step: ChatStep, embeds: Any) -> StepOutput:
        rows, tokens = len(step.slots), sum(chunk.length for chunk in step.chunks)
        seconds = decode_seconds(rows) if rows else 0.0
        seconds += prefill_seconds(next(size for size in PREFILLS if size >= tokens)) if tokens else 0.0
        self.world.until(self.world.now + HOST)
        self.world.launch(seconds)
        sampled = rows + sum(chunk.is_last for chunk in step.chunks)
        kind: Any = "mixed" if rows and tokens else "prefill" if tokens else "decode"
        return StepOutput({"results": torch.zeros((sampled, 2), dtype=torch.int32)}, "replay", kind)

    def _launch_pass(self, parts: list[Part]) -> Encoded | None:
        world, patches = self.world, self.worker._vision.patches(parts)
        world.until(world.now + 2 * HOST)
        begun: Any = max(world.free_at, world.now)
        world.launch(encoder_seconds(patches))
        made = self._encode(parts)
        return None if made is None else Encoded(made.route, made.bucket, begun, made.tallies)

    # The engine's channel

    def receive(self, timeout: float | None) -> list[Command]:
        return self.world.receive(timeout)

    def send(self, outputs: Outputs) -> None:
        for delta in outputs.chat:
            self.answers[delta.request_id] += [self.world.now] * len(delta.token_ids)

    def go_on(self, seconds: float) -> None:
        while self.world.now < seconds:
            self.turn()

    def first_tokens(self) -> list[float]:
        """Seconds from sending to the first token."""
        return [times[1] - times[0] for times in self.answers.values() if len(times) > 1]

    def gaps(self) -> list[float]:
        """Seconds between two tokens of an answer."""
        return [gap for times in self.answers.values() for gap in np.diff(times[1:]).tolist()]


class Readback:
    """service.engine.core.readback.Readback of the virtual GPU."""

    def __init__(
        self, world: World, tensors: Mapping[str, Tensor], device: torch.device, begun: float | None = None
    ) -> None:
        self._world, self._at = world, max(world.free_at, world.now)
        self._seconds = None if begun is None else self._at - begun
        self._host = {name: tensor.numpy() for name, tensor in tensors.items()}

    def ready(self) -> bool:
        return self._world.now >= self._at

    def wait(self) -> None:
        self._world.until(self._at)

    def seconds(self) -> float | None:
        return self._seconds

    def read(self) -> dict[str, np.ndarray]:
        return self._host
