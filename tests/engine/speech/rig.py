"""Drives a speech worker as the engine loop does: one thread, two launches in flight, results read one step late."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from models.protocol import SpeechModel
from service.engine.core.worker import WorkerContext
from service.engine.speech.runner import Launch, Outcome
from service.engine.speech.worker import SpeechWorker
from service.graphs.observations import Observation, Observations
from service.graphs.pool import GraphPool
from service.link.config import EngineConfig, ModelConfig
from service.link.messages import Control, Failed, ReferenceEncoded, Request, SpeechDelta, SpeechRequest
from tests.models.voxcpm2 import golden
from tests.support.poison import poison_replays

HIDDEN, AUDIO = 1e-4, 2e-4
"""Differences that patches and audio may have by the order of sums."""


@dataclass
class Heard:
    """What came for one request."""

    deltas: list[SpeechDelta] = field(default_factory=list)
    patches: list[np.ndarray] = field(default_factory=list)
    failed: Failed | None = None
    encoded: ReferenceEncoded | None = None

    @property
    def audio(self) -> np.ndarray:
        return np.concatenate([delta.audio for delta in self.deltas])

    @property
    def latents(self) -> np.ndarray:
        return np.stack(self.patches)


def same_patches(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=HIDDEN, rtol=0)


def same_audio(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=AUDIO, rtol=0)


def same(heard: Heard, expected: Heard) -> None:
    same_patches(heard.latents, expected.latents)
    same_audio(heard.audio, expected.audio)


class WorkerRig:
    def __init__(
        self,
        model: SpeechModel,
        *,
        graphs: bool = True,
        max_running: int = 4,
        max_waiting: int = 256,
        buckets: Sequence[int] = (1, 2, 4),
        tokens: int = 2048,
        step_tokens: int = 512,
        target: float | None = None,
        device: str = "cpu",
        capture_all: bool = False,
        lora_voices: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = EngineConfig(
            models=(ModelConfig("tts", "unused"),),
            max_running=max_running,
            max_waiting=max_waiting,
            decode_buckets=tuple(buckets),
            # A GPU that other tests share is slow: nothing is refused for that.
            first_audio_target=target or (1e6 if device == "cuda" else None),
            max_speech_load=1e9,
            max_step_tokens=step_tokens,
            graphs=graphs,
            lora_voices=lora_voices,
        )
        where = torch.device(device)
        dtype = model.state_specs()["last_patch"].dtype
        self.observations = Observations()
        self.pool = GraphPool(where, 1 << 30)
        context = WorkerContext(config, where, dtype, self.pool, self.observations, clock)
        self._clock = clock
        self.worker = SpeechWorker("tts", golden.processor(), model, context)
        self.worker.allocate(1 + tokens // config.page_size)
        if capture_all:
            for runner in self.worker.graph_runners:
                runner.on_demand.clear()
        while any(runner.capture_next(idle=capture_all) for runner in self.worker.graph_runners):
            pass
        self.worker.calibrate()
        self.heard: dict[str, Heard] = defaultdict(Heard)
        self.ticks = 0
        self._record_patches()
        for runner in self.worker.graph_runners:
            poison_replays(runner)

    def first_patches_in_rows(self, chosen: Callable[[], bool]) -> None:
        """Where `chosen` says so, first patches of replayed prompts are rows of the next decode steps, whatever the
        costs."""
        scheduler: Any = self.worker._scheduler
        scheduler._tail_costs_more = lambda chunks: chosen()

    def _record_patches(self) -> None:
        runner = self.worker._runner
        outcomes = runner.outcomes

        def spy(launch: Launch) -> list[Outcome]:
            results = outcomes(launch)
            for outcome in results:
                sequence = outcome.sequence
                alive = self.worker._requests.get(sequence.request.request_id) is sequence
                if alive and outcome.segment == sequence.segment and not sequence.idle:
                    self.heard[sequence.request.request_id].patches.append(outcome.patch)
            return results

        runner.outcomes = spy  # type: ignore[method-assign]

    def turn(self) -> bool:
        """One turn of the engine loop; False when there was nothing to do."""
        now = self._clock()
        launched = self.worker.has_work() and self.worker.tick(now, float("inf"))
        self.ticks += launched
        waiting = not launched and self.worker.oldest_launch() is not None
        if waiting:
            self.worker.wait()
        outputs = self.worker.collect()
        for delta in outputs.speech:
            self.heard[delta.request_id].deltas.append(delta)
        for failed in outputs.failed:
            self.heard[failed.request_id].failed = failed
        for encoded in outputs.encoded:
            self.heard[encoded.request_id].encoded = encoded
        return launched or waiting or bool(outputs.failed)

    def run(self, script: Mapping[int, Sequence[Request | Control]]) -> dict[str, Heard]:
        """Hands out commands at the given numbers of turns, then turns until nothing is left to do."""
        script = dict(script)
        turn = 0
        while True:
            for command in script.pop(turn, ()):
                if hasattr(command, "model"):
                    self.worker.submit(command)  # type: ignore[arg-type]
                else:
                    self.worker.control(command)  # type: ignore[arg-type]
            if not self.turn() and not script:
                return self.heard
            turn += 1

    def events(self, name: str) -> list[Observation]:
        """Those of a metric since the last call, which forgets all others."""
        return [event for event in self.observations.drain() if event.name == name]

    def routes(self) -> set[tuple[str, str]]:
        """Kind and route of the steps since the last call."""
        return {(event.labels["kind"], event.labels["route"]) for event in self.events("steps_total")}

    def alone(self, request: SpeechRequest) -> Heard:
        return self.run({0: [request]})[request.request_id]

    def assert_clean(self) -> None:
        """Nothing is left of any request."""
        state = self.worker.state()
        assert (state.running, state.waiting, state.pages_used) == (0, 0, 0)
        assert not self.worker._requests._sequences and not self.worker._in_flight
        self.worker._pages.check()
