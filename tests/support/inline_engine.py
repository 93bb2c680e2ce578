"""The engine stepped by hand: a channel of lists, a worker of the tiny chat family."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, cast

import numpy as np
import torch

from models.protocol import ChatModel
from service.engine.chat.worker import ChatWorker
from service.engine.core.worker import WorkerContext
from service.engine.engine import Engine
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.link.config import EngineConfig
from service.link.messages import Abort, ChatRequest, Command, Failed, Outputs
from service.link.sampling import SamplingParams
from tests.support.poison import poison_replays
from tests.support.tiny_chat import tiny_model, tiny_processor


class ListChannel:
    """Commands wait in a list; outputs are kept. A turn without any, which would wait for some, waits shortly: threads
    may be building something."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.outputs: list[Outputs] = []

    def receive(self, timeout: float | None) -> list[Command]:
        commands, self.commands = self.commands, []
        if timeout and not commands:
            time.sleep(min(timeout, 0.002))
        return commands

    def send(self, outputs: Outputs) -> None:
        self.outputs.append(outputs)


class InlineEngine:
    """One chat worker under an engine. Use inside torch.inference_mode()."""

    def __init__(
        self,
        model: ChatModel | None = None,
        processor: Any = None,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        num_pages: int = 64,
        overlapped: bool = True,
        poisoned: bool = True,
        **settings: Any,
    ) -> None:
        """poisoned: with poison_replays, unless what a replay costs is measured."""
        where = torch.device(device)
        settings = {"page_size": 4, "max_running": 4, "max_step_tokens": 24, **settings}
        self.config = EngineConfig(models=(), **settings)
        self.observations = Observations()
        self.pool = GraphPool(where, self.config.graph_bytes)
        context = WorkerContext(self.config, where, dtype, self.pool, self.observations, time.monotonic)
        self.model = model or cast("ChatModel", tiny_model(where, dtype))
        self.worker = ChatWorker("tiny", processor or tiny_processor(), self.model, context)
        self.worker.allocate(num_pages)
        for layer in self.worker._runner.graphs.caches:
            for values in layer.values():
                values.fill_(float("nan"))  # So that it shows if what was not written is read.
        self.channel = ListChannel()
        self.engine = Engine([self.worker], self.pool, self.observations, self.channel, overlapped=overlapped)
        self.engine.capture_first()
        for runner in self.worker.graph_runners if poisoned else ():
            poison_replays(runner)

    def submit(self, name: str, prompt: Any, *, grammar: str = "", slow_grammar: bool = False, **sampling: Any) -> None:
        live = sampling.pop("live", False)
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
        now = self.engine._clock()
        self.channel.commands.append(ChatRequest(name, "tiny", prompt, params, now, grammar, slow_grammar, live))

    def abort(self, name: str) -> None:
        self.channel.commands.append(Abort(name))

    def turn(self) -> bool:
        return self.engine.turn()

    def run(self, limit: int = 5000) -> None:
        """Runs turns until nothing is left to do."""
        for _ in range(limit):
            self.engine.turn()
            if not self.channel.commands and not self.worker._requests._sequences and not self.worker._in_flight:
                return
        raise AssertionError(f"not done after {limit} turns")

    def tokens(self, name: str) -> list[int]:
        return [
            t for outputs in self.channel.outputs for d in outputs.chat if d.request_id == name for t in d.token_ids
        ]

    def finish_reason(self, name: str) -> str | None:
        reasons = [d.finish_reason for o in self.channel.outputs for d in o.chat if d.request_id == name]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1] if reasons else None

    def log_probabilities(self, name: str) -> np.ndarray:
        """Log probabilities of a request's tokens, if it asked for them."""
        deltas = [d for outputs in self.channel.outputs for d in outputs.chat if d.request_id == name]
        return np.array([info.logprob for delta in deltas for info in delta.infos])

    def classes(self, name: str) -> np.ndarray:
        """The classes of a request's marks."""
        found = [d.classes for outputs in self.channel.outputs for d in outputs.chat if d.request_id == name]
        assert found[-1] is not None and all(one is None for one in found[:-1])
        return found[-1]

    def cached_tokens(self) -> dict[str, int]:
        """Prompt tokens of each request that the prefix cache held."""
        return {d.request_id: d.cached_tokens for outputs in self.channel.outputs for d in outputs.chat}

    def routes(self) -> set[tuple[str, str]]:
        """(kind, route) of all steps."""
        return {(kind, route) for kind, route, _ in self.steps()}

    def failures(self) -> dict[str, Failed]:
        return {failed.request_id: failed for outputs in self.channel.outputs for failed in outputs.failed}

    def steps(self) -> Counter[tuple[str, str, str]]:
        """steps_total by (kind, route, reason)."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for outputs in self.channel.outputs:
            for event in outputs.observations:
                if event.name == "steps_total":
                    counts[event.labels["kind"], event.labels["route"], event.labels["reason"]] += int(event.value)
        return counts

    def counter(self, name: str) -> float:
        return sum(e.value for outputs in self.channel.outputs for e in outputs.observations if e.name == name)

    def assert_nothing_left(self) -> None:
        worker = self.worker
        scheduler = worker._scheduler
        assert not worker._requests._sequences and not worker._in_flight
        assert not scheduler.waiting and not scheduler.running and not scheduler.rows.members
        assert not scheduler._prefilling
        assert scheduler.slots.num_free == scheduler.slots.num_slots
        assert worker._pages.num_used == 0
        worker._pages.check()
        assert worker._vision.cache.pinned_bytes == 0
        assert not worker._vision.has_work()
