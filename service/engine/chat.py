"""The worker of a chat model: from requests to tokens.

A tick launches one unit of work, an encoder pass or a step; results of the launch before it are read meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from models.processor import ChatProcessor
from models.protocol import ChatModel
from service.engine.arrival import Arrival
from service.engine.chat_runner import ChatRunner
from service.engine.costs import LaunchCosts
from service.engine.faults import LAUNCH_ERRORS, PrefillError, launch_failure
from service.engine.messages import (
    Abort,
    ChatDelta,
    ChatRequest,
    Failed,
    ModelState,
    Outputs,
    TokenInfo,
)
from service.engine.pages import PagePool
from service.engine.sampling_params import sampling_problem
from service.engine.scheduler import Chunk, Scheduler
from service.engine.sequence import Sequence
from service.engine.slots import SlotPool
from service.engine.vision import EncodeError, VisionStage
from service.engine.worker import QUEUE_RETRY_AFTER, Control, MemoryNeeds, Request, WorkerContext
from service.graphs.runner import GraphRunner

log = logging.getLogger(__name__)

_IN_FLIGHT = 2
"""Launches: one runs while the next is queued behind it, so that the GPU does not wait for Python."""
_LEAST_CONTEXT = 512
"""Positions of the shortest context with which serving begins, where the model's own is longer."""
_LEAST_TOKENS = 128
"""Prefilled in a step that has to be made although nothing fits."""


@dataclass(eq=False)
class InFlight:
    """A launch whose results were not read. Rows of the results: decode rows, then last chunks."""

    kind: str
    size: int
    route: str
    launched: float
    host_seconds: float
    predicted: float
    arrival: Arrival
    sequences: tuple[Sequence, ...] = ()
    chunks: tuple[Chunk, ...] = ()


class ChatWorker:
    """service.engine.worker.ModelWorker."""

    def __init__(self, name: str, processor: ChatProcessor, model: ChatModel, context: WorkerContext) -> None:
        config = context.config
        self.name = name
        self._context = context
        self._observations = context.observations
        self._max_context = min(processor.context_length, model.decoder.max_positions)
        self._runner = ChatRunner(name, model, processor.vocab_size, self._max_context, context)
        self._vocab_limit = min(processor.vocab_size, model.decoder.vocab_size)
        self._vision = VisionStage(name, model.encoder, self._runner.width, context)
        self._costs = LaunchCosts()
        self.page_bytes = self._runner.page_bytes
        pages_each = -(-self._max_context // config.page_size)
        self.max_pages = 1 + config.max_running * pages_each
        self.min_pages = 1 + min(pages_each, _LEAST_CONTEXT // config.page_size)
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[InFlight] = deque()
        self._last_arrival = -math.inf
        self._encoded_last = False
        self._deltas: list[ChatDelta] = []
        self._failed: list[Failed] = []

    # Start

    def measure(self) -> MemoryNeeds:
        needs = self._runner.measure()
        encoder = self._vision.measure()
        return MemoryNeeds(
            workspace=max(needs.workspace, encoder.workspace),
            graphs=max(needs.graphs, encoder.graphs),
            state=needs.state + encoder.state,
        )

    def allocate(self, num_pages: int) -> None:
        config = self._context.config
        self._runner.allocate(num_pages)
        self._pages = PagePool(num_pages, config.page_size)
        self._scheduler = Scheduler(self._pages, SlotPool(config.max_running), config.max_step_tokens)

    @property
    def graph_runners(self) -> list[GraphRunner]:
        return [self._vision.runner, *self._runner.graph_runners]

    def capture_next(self, *, idle: bool) -> bool:
        return any(runner.capture_next(idle=idle) for runner in self.graph_runners)

    def warm_up(self) -> None:
        self._runner.warm_up()
        self._vision.warm_up()

    # Commands

    def submit(self, request: Request) -> None:
        assert isinstance(request, ChatRequest), "speech was sent to a chat model"
        failure = self._refusal(request)
        if failure is not None:
            self._failed.append(failure)
            return
        sequence = Sequence(request, self._length_cap(request), self._context.config.page_size)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        self._observations.count("prefix_cache_query_tokens_total", sequence.num_tokens, model=self.name)

    def _length_cap(self, request: ChatRequest) -> int:
        """Tokens to generate at most: as asked, up to the context's end and to what all pages hold."""
        prompt = len(request.prompt.token_ids)
        pool = (self._pages.num_pages - 1) * self._pages.page_size
        return min(request.sampling.max_tokens, self._max_context - prompt, pool - prompt + 1)

    def _refusal(self, request: ChatRequest) -> Failed | None:
        name, length = request.request_id, len(request.prompt.token_ids)
        if len(self._scheduler.waiting) >= self._context.config.max_waiting:
            return Failed(name, 503, "overloaded", "too many requests are waiting", retry_after=1.0)
        if not length:
            return Failed(name, 400, "invalid_prompt", "the prompt is empty", "messages")
        if (problem := sampling_problem(request.sampling, self._vocab_limit)) is not None:
            return Failed(name, 400, "invalid_value", problem[1], problem[0])
        if self._length_cap(request) < 1:
            most = min(self._max_context - 1, (self._pages.num_pages - 1) * self._pages.page_size)
            message = f"the prompt has {length} positions; this server takes at most {most}"
            return Failed(name, 400, "context_length_exceeded", message, "messages")
        return None

    def control(self, command: Control) -> None:
        if isinstance(command, Abort) and (sequence := self._sequences.get(command.request_id)) is not None:
            self._finish(sequence)

    def end_waits(self, now: float) -> None:
        limit = now - self._context.config.queue_timeout
        waiting = self._scheduler.waiting
        for sequence in [s for s in waiting if s.first_scheduled is None and s.request.arrival < limit]:
            message = "the request waited too long for its turn"
            self._failed.append(
                Failed(sequence.request.request_id, 503, "queue_timeout", message, retry_after=QUEUE_RETRY_AFTER)
            )
            self._finish(sequence)

    # Stepping

    def has_work(self) -> bool:
        return len(self._in_flight) < _IN_FLIGHT and (self._scheduler.has_work() or self._vision.has_work())

    def slack(self, now: float) -> float:
        return math.inf

    def backlog(self, now: float) -> float:
        if not self._in_flight:
            return 0.0
        started = max(self._in_flight[0].launched, self._last_arrival)
        return max(0.0, sum(launch.predicted for launch in self._in_flight) - (now - started))

    def least(self) -> float:
        if self._vision.has_work() and not self._encoded_last:
            return self._costs.predict("encoder", self._vision.oldest_patches)
        rows = len(self._scheduler.rows.slots)
        if self._scheduler.has_prefills():
            return self._costs.predict("mixed" if rows else "prefill", rows + _LEAST_TOKENS)
        return self._costs.predict("decode", rows)

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        """One encoder pass or one step. They take turns while both have work, so that neither stops the other."""
        self._request_embeddings()
        turns = (self._launch_step, self._launch_encode)
        for launch in turns if self._encoded_last else turns[::-1]:
            if launch(now, allowance, must):
                self._encoded_last = launch == self._launch_encode
                return True
        return False

    def _request_embeddings(self) -> None:
        for sequence in self._scheduler.waiting:
            if sequence.prompt.items and not self._vision.request(sequence):
                break

    def _launch_encode(self, now: float, allowance: float, must: bool) -> bool:
        if not self._vision.has_work():
            return False
        parts = self._vision.next_group()
        patches = sum(part.item.num_patches for part in parts)
        while (predicted := self._costs.predict("encoder", patches)) > allowance and len(parts) > 1:
            patches -= parts.pop().item.num_patches
        if predicted > allowance and not must:
            return False
        started = time.perf_counter()
        try:
            encoded = self._vision.launch(parts)
        except EncodeError as error:
            self._fail([s for s in self._sequences.values() if error.digests & s.pinned.keys()], error.cause)
            return True
        if encoded is not None:
            arrival = Arrival({}, self._context.device)
            host_seconds = time.perf_counter() - started
            self._in_flight.append(InFlight("encoder", patches, encoded.route, now, host_seconds, predicted, arrival))
        return True

    def _launch_step(self, now: float, allowance: float, must: bool) -> bool:
        started = time.perf_counter()
        preemptions = self._scheduler.num_preemptions
        rows = len(self._scheduler.rows.slots)
        decode = self._costs.predict("decode", rows) if rows else 0.0
        if decode > allowance and not must:
            return False
        tokens = max(self._affordable_tokens(allowance - decode), _LEAST_TOKENS if must else 0)
        step = self._scheduler.schedule(self._vision.has_embeddings, tokens)
        if self._scheduler.num_preemptions > preemptions:
            count = self._scheduler.num_preemptions - preemptions
            self._observations.count("preemptions_total", count, model=self.name)
        if step is None:
            return False
        try:
            launched = self._runner.launch(step, self._vision.embeds)
        except torch.AcceleratorError:
            raise
        except PrefillError as error:
            self._fail([chunk.sequence for chunk in step.chunks], error)
            return True
        except LAUNCH_ERRORS as error:
            self._fail([*(chunk.sequence for chunk in step.chunks), *step.sequences], error)
            return True
        self._scheduler.launched(step)
        ends = tuple(chunk.sequence for chunk in step.chunks if chunk.is_last)
        for chunk in step.chunks:
            self._after_chunk(chunk, now)
        tokens = len(step.slots) + sum(chunk.length for chunk in step.chunks)
        self._in_flight.append(
            InFlight(
                kind=launched.kind,
                size=tokens,
                route=launched.route,
                launched=now,
                host_seconds=time.perf_counter() - started,
                predicted=self._costs.predict(launched.kind, tokens),
                arrival=Arrival(launched.results, self._context.device),
                sequences=(*step.sequences, *ends) if ends else step.sequences,
                chunks=step.chunks,
            )
        )
        return True

    def _affordable_tokens(self, seconds: float) -> int:
        """Prefill tokens that fit into `seconds`; chunks are cut to them."""
        most = self._context.config.max_step_tokens
        if math.isinf(seconds):
            return most
        if seconds <= 0:
            return 0
        whole = max(self._costs.predict("prefill", most), self._costs.predict("mixed", most))
        return most if whole <= seconds else int(most * seconds / whole)

    def _after_chunk(self, chunk: Chunk, now: float) -> None:
        sequence = chunk.sequence
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            self._observations.observe("queue_duration_seconds", now - sequence.request.arrival, model=self.name)
            self._observations.count("prefix_cache_hit_tokens_total", sequence.cached_tokens, model=self.name)
        if sequence.pinned:
            self._vision.release(sequence, chunk.end)

    def _fail(self, sequences: Seq[Sequence], error: Exception) -> None:
        log.error("%d requests of %s fail", len(sequences), self.name, exc_info=error)
        for sequence in sequences:
            self._failed.append(launch_failure(sequence.request.request_id, error))
            self._finish(sequence)

    def oldest_launch(self) -> float | None:
        return self._in_flight[0].launched if self._in_flight else None

    def wait(self) -> None:
        self._in_flight[0].arrival.wait()

    def collect(self) -> Outputs:
        while self._in_flight and self._in_flight[0].arrival.ready():
            self._read(self._in_flight.popleft())
        if not self._deltas and not self._failed:
            return _NOTHING
        outputs = Outputs(chat=tuple(self._deltas), failed=tuple(self._failed))
        self._deltas, self._failed = [], []
        return outputs

    def _read(self, launch: InFlight) -> None:
        now = self._context.clock()
        started = time.perf_counter()
        seconds = now - max(launch.launched, self._last_arrival)
        self._last_arrival = now
        self._costs.learn(launch.kind, launch.size, seconds)
        if launch.kind == "encoder":
            self._observations.observe("vision_encode_duration_seconds", seconds, model=self.name, route=launch.route)
        for chunk in launch.chunks:
            self._scheduler.computed(chunk.sequence, chunk.end)
            if chunk.is_last and not chunk.sequence.generated and chunk.sequence.first_scheduled is not None:
                seconds_since = now - chunk.sequence.first_scheduled
                self._observations.observe("prefill_duration_seconds", seconds_since, model=self.name)
        if launch.sequences:
            self._read_tokens(launch)
        labels = {"model": self.name, "kind": launch.kind}
        self._observations.observe("step_duration_seconds", seconds, **labels, route=launch.route)
        host = launch.host_seconds + time.perf_counter() - started
        self._observations.observe("step_host_duration_seconds", host, **labels)

    def _read_tokens(self, launch: InFlight) -> None:
        results = launch.arrival.read()
        tokens, stops = results["results"].T.tolist()
        page_size, deltas = self._pages.page_size, self._deltas
        with_logprobs = "logprobs" in results
        for row, sequence in enumerate(launch.sequences):
            if sequence.finished:
                continue  # The surplus row of a sequence that had stopped or was aborted.
            if sequence.num_unread:
                sequence.num_unread -= 1
            name = sequence.request.request_id
            if stops[row]:
                deltas.append(ChatDelta(name, (), (), "stop", sequence.cached_tokens))
                self._finish(sequence)
                continue
            generated = sequence.generated
            generated.append(tokens[row])
            infos = _token_infos(results, row, sequence.sampling.logprobs) if with_logprobs else ()
            done = len(generated) >= sequence.max_new_tokens
            reason = "length" if done else None
            deltas.append(ChatDelta(name, (tokens[row],), infos, reason, sequence.cached_tokens))
            num_keys = sequence.num_prompt_tokens + len(generated) - 1
            if not num_keys % page_size:
                self._index(sequence, num_keys)
            if done:
                self._finish(sequence)

    def _index(self, sequence: Sequence, num_keys: int) -> None:
        """The newest token has no key yet; those before it have."""
        if not sequence.num_unread:
            self._scheduler.computed(sequence, num_keys)

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self._scheduler.finish(sequence)
        if sequence.pinned:
            self._vision.release(sequence)

    def state(self) -> ModelState:
        scheduler = self._scheduler
        return ModelState(
            self.name,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots_used=scheduler.slots.num_used,
            pages_total=self._pages.num_pages - 1,
            pages_used=self._pages.num_used,
            pages_cached=self._pages.num_cached,
            encoder_cache_bytes=self._vision.cache.num_bytes,
        )


_NOTHING = Outputs()


def _token_infos(results: dict[str, np.ndarray], row: int, count: int | None) -> tuple[TokenInfo, ...]:
    if count is None:
        return ()
    ids, values = results["top_ids"][row, :count].tolist(), results["top_values"][row, :count].tolist()
    return (TokenInfo(float(results["logprobs"][row]), tuple(zip(ids, values, strict=True))),)


def create_worker(name: str, processor: ChatProcessor, model: ChatModel, context: WorkerContext) -> ChatWorker:
    return ChatWorker(name, processor, model, context)
