"""The worker of a chat model: from requests to tokens.

A tick launches an encoder pass or a step. While it runs, the results of the previous launch are read. If a row of the
step is guided, sampling is held until the mask servers have computed masks from those results.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import msgspec
import numpy as np
from torch import Tensor, nn

from models.layers.kv_cache import STATE_INTERVAL
from models.protocol import ChatModel
from models.text.processor import ChatProcessor
from service.engine.chat.drafts import NOT_DRAFTED, DraftLength
from service.engine.chat.encoder import Encoded, EncodeError, VisionStage
from service.engine.chat.guided.guidance import Guidance, MaskJob, Unread, hosts_of
from service.engine.chat.pacing import ITL_TARGET, ChunkBudget, Pacing
from service.engine.chat.requests import ChatLimits, ChatRequests, Outbox, token_infos
from service.engine.chat.runner import ChatRunner, PendingSampling, StepOutput
from service.engine.chat.scheduler import Scheduler
from service.engine.chat.sequence import ChatSequence, Chunk, Step
from service.engine.chat.slot_state import row_bytes
from service.engine.chat.states import MOST_EACH, ROWS_EACH, StatePool
from service.engine.core.faults import LaunchError, launch_errors
from service.engine.core.pages import PagePool, SlotPool, pages_for
from service.engine.core.readback import Readback
from service.engine.core.worker import UNNOTICED, MemoryRequirements, WorkerContext
from service.engine.memory import state_bytes
from service.graphs.runner import GraphRunner
from service.link.config import ConfigurationError
from service.link.messages import Abort, ChatRequest, Control, ModelState, Outputs, Request, TokenInfo

_MAX_IN_FLIGHT = 2
"""Launches in flight: one runs and the next is queued behind it, so that the GPU does not wait for Python."""
_MIN_CONTEXT = 512
"""The engine does not start if its pages hold fewer positions than this, or than the context of a shorter model."""


@dataclass(eq=False)
class Launch:
    """A step or an encoder pass whose results have not been read."""

    kind: str
    """StepKind of a step, or "encoder"."""
    size: int
    """Decode rows, tokens of chunks or patches of an encoder pass."""
    route: str
    launched_at: float
    """On the worker's clock."""
    predicted: float
    """Seconds that it was predicted to take."""
    host_seconds: float = 0.0
    """Time that Python spent on it so far."""
    readback: Readback | None = None
    """None while the step is held."""
    sequences: tuple[ChatSequence, ...] = ()
    """Sequences of the rows of the results: decode rows, or prompts whose last chunks these are."""
    drafts: int = 0
    """Of each row; the results then have 1 + drafts rows for each of `sequences`."""
    chunks: tuple[Chunk, ...] = ()
    budget: ChunkBudget | None = None
    """What its chunks spent, if there are any."""
    encoded: Encoded | None = None
    """Set for an encoder pass."""
    pending_sampling: PendingSampling | None = None
    """Set while the step is held: until its sampling is launched."""
    masks: MaskJob | None = None
    """The masks that a held step waits for."""
    timing_valid: bool = True
    """False if its duration says nothing about its cost: for a held step with an encoder pass between its layers and
    its sampling, and behind a launch of another model."""

    @property
    def rows(self) -> int:
        """Number of sequences that it computes for: decode rows or chunks."""
        return len(self.sequences) + sum(not chunk.is_last for chunk in self.chunks)

    @property
    def arrived(self) -> bool:
        return self.readback is not None and self.readback.ready()

    def wait(self) -> None:
        """Blocks until its results, or the masks of a held step, have arrived."""
        if self.readback is not None:
            self.readback.wait()
        elif self.masks is not None:
            self.masks.wait()


class InFlight:
    """Launches in the order in which their results arrive."""

    def __init__(self) -> None:
        self._launches: deque[Launch] = deque()
        self._last_read_at = -math.inf
        self._behind_others = False
        """Whether another model launched after the last step or pass here."""

    def __len__(self) -> int:
        return len(self._launches)

    def __getitem__(self, index: int) -> Launch:
        return self._launches[index]

    @property
    def held(self) -> Launch | None:
        """The step whose sampling waits for masks: always the last one."""
        last = self._launches[-1] if self._launches else None
        return last if last is not None and last.pending_sampling is not None else None

    def unread(self, sequences: Sequence[ChatSequence]) -> list[Unread]:
        """Where tokens of these sequences that were launched but not read yet will arrive. When a step is launched, at
        most one other has not been read."""
        launch = next((launch for launch in self._launches if launch.readback and launch.sequences), None)
        if launch is None or launch.readback is None:
            return [()] * len(sequences)
        rows = {sequence: row for row, sequence in enumerate(launch.sequences)}
        return [((launch.readback, rows[one]),) if one in rows else () for one in sequences]

    def holds(self, readbacks: Sequence[Readback]) -> bool:
        """Whether the results of a launch with one of these have not been read."""
        return any(launch.readback is readback for launch in self._launches for readback in readbacks)

    def add(self, launch: Launch) -> None:
        """Adds a step, or an encoder pass, whose results arrive before those of a held step."""
        launch.timing_valid, self._behind_others = not self._behind_others, False
        if (held := self.held) is None:
            self._launches.append(launch)
        else:
            held.timing_valid = False
            self._launches.insert(len(self._launches) - 1, launch)

    def others_launched(self) -> None:
        """Another model launched: behind the last step here, or between the layers of a held one and its sampling."""
        self._behind_others = True
        if (held := self.held) is not None:
            held.timing_valid = False

    def pop(self, now: float) -> tuple[Launch, float]:
        """Removes the oldest launch, which has arrived. Returns it with its seconds: since it was launched, or since
        the previous one was read, if that was later."""
        launch, before = self._launches.popleft(), self._last_read_at
        self._last_read_at = now
        return launch, now - max(launch.launched_at, before)

    def backlog(self, now: float) -> float:
        """Predicted seconds until the launches have finished."""
        if not self._launches:
            return 0.0
        started = max(self._launches[0].launched_at, self._last_read_at)
        return max(0.0, sum(launch.predicted for launch in self._launches) - (now - started))

    def wait(self) -> None:
        """Waits for the oldest results. With a held step: for the tokens that its masks depend on or, once these are
        there, for the masks, but only for a while."""
        (self.held or self._launches[0]).wait()


class ChatWorker:
    """Implements service.engine.core.worker.ModelWorker."""

    def __init__(self, name: str, processor: ChatProcessor, model: ChatModel, context: WorkerContext) -> None:
        self.state_row_bytes = row_bytes(model.decoder.state_specs())
        self.state_rows = self._num_state_rows(name, model, context) if self.state_row_bytes else 0
        if self.state_rows:
            slots = min(context.config.slots, (self.state_rows - 1) // ROWS_EACH)
            tokens = max(context.config.max_step_tokens, STATE_INTERVAL)
            config = msgspec.structs.replace(context.config, max_running=slots, max_step_tokens=tokens)
            context = replace(context, config=config)
        config = context.config
        self.name, self.slots = name, config.slots
        self._context = context
        self._observations = context.observations
        self._max_context = min(processor.context_length, model.decoder.max_positions)
        self._vocab_limit = min(processor.vocab_size, model.decoder.vocab_size)
        self._runner = ChatRunner(name, model, self._vocab_limit, self._max_context, context)
        self._vision = VisionStage(name, model.encoder, self._runner.embeds_width, context)
        itl_target = config.itl_target or (None if context.device.type == "cpu" else ITL_TARGET)
        self._pacing = Pacing(itl_target, config.max_step_tokens)
        self.page_bytes = self._runner.page_bytes
        pages_each = pages_for(self._max_context, config.page_size)
        self.max_pages = 1 + config.slots * pages_each
        self.min_pages = 1 + min(pages_each, _MIN_CONTEXT // config.page_size)
        self._masks, hosts = hosts_of(name, processor, self._vocab_limit, context.config, context.device.type)
        self._guidance = Guidance(hosts)
        self._in_flight = InFlight()
        self._draft_length = DraftLength(self._runner.drafts)
        self._encoded_last = False
        self._chunks_put_off = False
        """Whether the last step had only decode rows, because the gap between their tokens had no room for chunks."""
        self._rows_wait = False
        """Whether the last step left the decode rows out, so that the next one is theirs."""
        self._outbox = Outbox(keeps=context.device.type == "cuda")

    def _num_state_rows(self, name: str, model: ChatModel, context: WorkerContext) -> int:
        """Number of rows of recurrent state that fit."""
        config = context.config
        if STATE_INTERVAL % config.page_size:
            raise ConfigurationError(f"page_size: for {name} it must divide {STATE_INTERVAL}, not {config.page_size}")
        parts = [cast("nn.Module", part) for part in (model.encoder, model.decoder)]
        weights = sum(tensor.nbytes for part in parts for tensor in chain(part.parameters(), part.buffers()))
        return 1 + max(ROWS_EACH, min(MOST_EACH * config.slots, state_bytes(config, weights) // self.state_row_bytes))

    # Start

    def measure(self) -> MemoryRequirements:
        return self._runner.measure(self.state_rows).beside(self._vision.measure())

    def allocate(self, num_pages: int) -> None:
        config = self._context.config
        self._guidance.start()
        self._runner.allocate(num_pages, self._masks, self.state_rows)
        self._pages = PagePool(num_pages, config.page_size)
        positions = (num_pages - 1) * config.page_size
        limits = ChatLimits(self._max_context, positions, self._vocab_limit, config.max_waiting)
        pending = self._runner.drafts > 0
        states = StatePool(self.state_rows, self._pages, pending=pending) if self.state_rows else None
        self._scheduler = Scheduler(self._pages, SlotPool(config.slots), states, self._runner.keys_ahead)
        self._requests = ChatRequests(
            self.name, limits, self._scheduler, self._vision, self._guidance, self._outbox, self._context
        )

    @property
    def graph_runners(self) -> list[GraphRunner]:
        """Where graphs have little room, the encoder's large ones would take all of it, and they gain the least: the
        GPU computes longer than the launches take. So they come last. They can use the memory of prefills."""
        return [*self._runner.graphs.runners, self._vision.runner]

    def calibrate(self) -> None:
        if self._context.device.type == "cuda":
            self._runner.calibrate(self._pacing, self._vision.runner)

    def warm_up(self) -> Iterator[None]:
        return chain(self._runner.graphs.warm_up(), self._vision.warm_up())

    # Commands

    def submit(self, request: Request) -> None:
        assert isinstance(request, ChatRequest), "speech was sent to a chat model"
        self._requests.submit(request)

    def control(self, command: Control) -> None:
        if isinstance(command, Abort):
            self._requests.abort(command.request_id)

    def fail_timed_out(self, now: float) -> None:
        self._requests.fail_timed_out(now - self._context.config.queue_timeout)

    # Stepping

    def has_work(self) -> bool:
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            return False
        return self._vision.has_work() or (self._scheduler.has_work() and self._in_flight.held is None)

    def slack(self, now: float) -> float:
        return math.inf

    def backlog(self, now: float) -> float:
        return self._in_flight.backlog(now)

    def smallest_launch(self) -> float:
        if self._vision.has_work() and not self._encoded_last:
            return self._pacing.costs.mean("encoder", self._vision.oldest_patches)
        return self._pacing.smallest_step(len(self._scheduler.rows.slots), prefills=self._scheduler.has_prefills())

    def can_wait(self, now: float, seconds: float) -> bool:
        return seconds <= UNNOTICED

    def others_launched(self, seconds: float) -> None:
        self._in_flight.others_launched()
        self._pacing.others_launched(len(self._scheduler.rows.slots), seconds)

    def due(self) -> bool:
        return self._pacing.due and len(self._scheduler.rows.slots) > 0 and self._in_flight.held is None

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        """Launches an encoder pass or a step; behind a held step only an encoder pass. They alternate while both have
        work, so that neither starves. A step whose chunks were put off does not count as the steps' turn."""
        self._vision.request_all(self._scheduler.waiting)
        if self._in_flight.held is not None:
            return self._launch_encode(now, allowance, must)
        if not self._encoded_last and self._launch_encode(now, allowance, must):
            self._encoded_last = True
        elif self._launch_step(now, allowance, must):
            self._encoded_last &= self._chunks_put_off
        else:
            return self._encoded_last and self._launch_encode(now, allowance, must)
        return True

    def _launch_encode(self, now: float, allowance: float, must: bool) -> bool:
        rows = len(self._scheduler.rows.slots)
        if not self._vision.has_work() or (rows and not self._pacing.free):
            return False
        costs, room = self._pacing.costs, self._pacing.encoder_room(rows, shared=self._scheduler.prefilling)
        parts = self._vision.next_group(lambda patches: costs.mean("encoder", patches) <= min(allowance, room))
        patches = self._vision.patches(parts)
        predicted = costs.mean("encoder", patches)
        if predicted > allowance and not must:
            return False
        started = time.perf_counter()
        try:
            encoded = self._vision.launch(parts)
        except EncodeError as error:
            self._requests.fail_unencoded(error)
            return True
        self._pacing.spend(rows, predicted)
        if encoded is not None:
            readback = Readback({}, self._context.device, encoded.begun)
            launch = Launch("encoder", patches, encoded.route, now, predicted, readback=readback, encoded=encoded)
            launch.host_seconds = time.perf_counter() - started
            self._in_flight.add(launch)
        return True

    def _launch_step(self, now: float, allowance: float, must: bool) -> bool:
        started = time.perf_counter()
        preemptions, rows = self._scheduler.num_preemptions, len(self._scheduler.rows.slots)
        drafts = self._draft_length.choose(rows, self._pacing.costs)
        if not must and self._pacing.decode_seconds(rows) > allowance:
            return False
        if not must and self._pacing.decode_seconds(rows, verifies=True) > allowance:
            drafts = 0
        budget = None
        if self._scheduler.has_prefills() and not (rows and self._rows_wait):
            budget = self._pacing.chunk_budget(rows, allowance, self._runner.prefill_sizes, must=must)
        step = self._scheduler.schedule(self._can_start, budget, drafts)
        if preempted := self._scheduler.num_preemptions - preemptions:
            self._observations.count("preemptions_total", preempted, model=self.name)
        if step is None:
            return False
        self._rows_wait = bool(step.chunks and rows)
        if (output := self._run(step)) is None:
            return True
        self._outbox.release()
        self._scheduler.launched(step)
        for chunk in step.chunks:
            self._requests.note_chunk(chunk, now)
        spent = budget if step.chunks else None
        decode_seconds = self._pacing.decode_seconds(len(step.slots), verifies=step.drafts > 0)
        launch = Launch(
            kind=output.kind,
            size=len(step.slots) if spent is None else spent.used,
            route=output.route,
            launched_at=now,
            predicted=decode_seconds if spent is None else spent.predicted,
            sequences=step.sampled,
            drafts=step.drafts,
            chunks=step.chunks,
            budget=spent,
            pending_sampling=output.pending_sampling,
        )
        self._chunks_put_off = False
        if spent is not None:
            self._pacing.spend(rows, spent.predicted)
        elif budget is not None:
            self._chunks_put_off = budget.crowded and self._scheduler.has_chunks(self._can_start)
        if launch.pending_sampling is None:
            self._close_gap(decode_seconds)
            launch.readback = Readback(output.results, self._context.device)
        else:
            launch.masks = self._guidance.masks(launch.sequences, self._in_flight.unread(launch.sequences))
        launch.host_seconds = time.perf_counter() - started
        self._in_flight.add(launch)
        return True

    def _run(self, step: Step) -> StepOutput | None:
        """Launches a step; None if that failed, in which case its requests have failed, too."""
        try:
            with launch_errors():
                return self._runner.launch(step, self._vision.embeds)
        except LaunchError as error:
            self._requests.fail([*step.sequences, *(chunk.sequence for chunk in step.chunks)], error)
        return None

    def _close_gap(self, decode_seconds: float) -> None:
        if not self._rows_wait:
            self._pacing.close(decode_seconds, put_off=self._chunks_put_off or self._vision.has_work())

    def _can_start(self, sequence: ChatSequence) -> bool:
        return sequence.has_guide and self._vision.has_embeddings(sequence)

    def oldest_launch(self) -> float | None:
        return self._in_flight[0].launched_at if self._in_flight else None

    def wait(self) -> None:
        self._in_flight.wait()

    def building(self) -> bool:
        return self._guidance.building

    def collect(self) -> Outputs:
        masks = held.masks if (held := self._in_flight.held) is not None else None
        if masks is not None:
            masks.ask_when_ready()  # Before the tokens are read, so that masks are computed meanwhile.
        seen = True
        while self._in_flight and self._in_flight[0].arrived:
            self._read(timed=seen)
            seen = False  # The next ones arrived while nobody looked, so their durations are unknown.
        for guide in self._guidance.take_built():
            self._observations.observe("grammar_build_duration_seconds", guide.seconds, model=self.name)
        if held is None or masks is None or not masks.done:
            return self._outbox.take(keep_back=False)  # There is nothing else to do until the masks come.
        self._sample_held(held, masks)
        return self._outbox.take(keep_back=self._scheduler.has_work())

    def _sample_held(self, launch: Launch, masks: MaskJob) -> None:
        """Samples a held step, whose masks have arrived. That comes first, since the GPU is idle until then."""
        self._observations.observe("guided_mask_duration_seconds", masks.seconds, model=self.name)
        problem = self._launch_sampling(launch, masks)
        while self._in_flight.holds(masks.awaited):
            self._in_flight[0].wait()
            self._read()
        for row, verdict in masks.verdicts.items():
            if not launch.sequences[row].finished:
                self._requests.end_guided(launch.sequences[row], verdict)
        if problem is not None:
            self._requests.fail([sequence for sequence in launch.sequences if not sequence.finished], problem)
            launch.sequences = ()

    def _launch_sampling(self, launch: Launch, masks: MaskJob) -> LaunchError | None:
        """Launches the sampling of a held step; returns the error if that failed."""
        assert launch.pending_sampling is not None
        self._close_gap(self._pacing.decode_seconds(len(launch.sequences)))
        problem, results = None, dict[str, Tensor]()
        try:
            with launch_errors():
                results = self._runner.sample(launch.pending_sampling, masks)
        except LaunchError as error:
            problem = error
        launch.readback, launch.pending_sampling = Readback(results, self._context.device), None
        return problem

    def _read(self, *, timed: bool = True) -> None:
        now, started = self._context.clock(), time.perf_counter()
        launch, seconds = self._in_flight.pop(now)
        if launch.encoded is not None and launch.readback is not None:
            seconds = launch.readback.seconds() or seconds
            self._vision.observe(launch.encoded, seconds, now)
        if launch.timing_valid and timed:
            self._learn(launch, seconds)
        for chunk in launch.chunks:
            if not chunk.is_last:
                chunk.sequence.stats.add(launch.route == "replay", launch.rows)
        if any(chunk.sequence.classes is not None for chunk in launch.chunks):
            self._read_classes(launch)
        if launch.sequences:
            self._read_tokens(launch, now)
        labels = {"model": self.name, "kind": launch.kind}
        self._observations.observe("step_duration_seconds", seconds, **labels, route=launch.route)
        host_seconds = launch.host_seconds + time.perf_counter() - started
        self._observations.observe("step_host_duration_seconds", host_seconds, **labels)

    def _learn(self, launch: Launch, seconds: float) -> None:
        """Records how long a launch took."""
        costs, chunks = self._pacing.costs, launch.budget
        if chunks is None:
            costs.observe(launch.kind, launch.size, seconds)
        else:
            costs.prefill.observe(chunks.padded(chunks.used), chunks.pairs, seconds)

    def _read_tokens(self, launch: Launch, now: float) -> None:
        assert launch.readback is not None
        results = launch.readback.read()
        tokens, stops = results["results"].T.tolist()
        page_size, ended, hidden = self._pages.page_size, list[ChatSequence](), results.get("hidden")
        with_logprobs, replayed, rows = "logprobs" in results, launch.route == "replay", launch.rows
        width = 1 + launch.drafts
        for number, sequence in enumerate(launch.sequences):
            if sequence.finished:
                continue  # The overrun row of a sequence that had stopped or was aborted.
            if sequence.num_unread:
                sequence.num_unread -= 1
            sequence.stats.add(replayed, rows)
            row, count, stop = width * number, 0, 0
            while count < width and not (stop := stops[row + count]):
                count += 1
            if self._runner.drafts:
                sequence.num_stated = sequence.num_tokens - 1
            new = tuple(tokens[row : row + count])
            generated = sequence.generated
            times = sequence.stats.times(now) if launch.chunks and not generated else None
            if times is not None:
                self._observations.observe("prefill_duration_seconds", now - times.scheduled, model=self.name)
            generated.extend(new)
            infos: tuple[TokenInfo, ...] = ()
            if with_logprobs:
                places = range(row, row + count)
                infos = tuple(info for at in places for info in token_infos(results, at, sequence.sampling.logprobs))
            if launch.drafts:
                self._settle(sequence, launch.drafts, count, stops[row : row + width])
            num_keys = sequence.num_prompt_tokens + len(generated) - 1
            # Full pages become findable in the prefix index. The newest token has no key yet; those before it have.
            if num_keys // page_size > sequence.num_indexed:
                self._scheduler.index(sequence, num_keys)
            if stop < 0:
                self._requests.fail_corrupt(sequence)
                continue
            reason = "stop" if stop == 1 else "length" if len(generated) >= sequence.max_new_tokens else None
            vector = None if hidden is None else hidden[number].copy()
            self._outbox.deltas.append(sequence.delta(new, infos, reason, times, vector))
            if reason is not None:
                ended.append(sequence)
        for sequence in ended:
            self._requests.finish(sequence)
        if launch.drafts:
            self._scheduler.rows.leave()

    def _settle(self, sequence: ChatSequence, drafts: int, count: int, stops: list[int]) -> None:
        """Counts the drafts of a row that brought `count` tokens, beside one that stopped it. stops [1 + drafts]: as of
        VerifyStep."""
        ended = 1 in stops or -1 in stops
        accepted = count - 1 + ended
        drafted = drafts - stops.count(NOT_DRAFTED)
        sequence.stats.drafted += drafted
        sequence.stats.accepted += accepted
        self._observations.count("drafted_tokens_total", drafted, model=self.name)
        self._observations.count("accepted_tokens_total", accepted, model=self.name)
        if drafted or not self._runner.keys_ahead:  # A model's own drafter has none behind a step without drafts.
            self._draft_length.observe(accepted)
        self._scheduler.settle(sequence, drafts, accepted, ended=ended)

    def _read_classes(self, launch: Launch) -> None:
        """Keep the classes of the chunks' marks for the last delta."""
        assert launch.readback is not None
        classes, first = launch.readback.read().get("classes", np.empty(0, np.int64)), 0
        for chunk in launch.chunks:
            if chunk.sequence.classes is not None:
                marks = chunk.sequence.marks(chunk.start, chunk.end)
                chunk.sequence.classes[marks] = classes[first : first + marks.stop - marks.start]
                first += marks.stop - marks.start

    def state(self) -> ModelState:
        scheduler = self._scheduler
        snapshots = 0 if scheduler.states is None else scheduler.states.rows.num_cached
        return ModelState(
            self.name,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=self._pages.num_pages - 1,
            pages_used=self._pages.num_used,
            pages_cached=self._pages.num_cached,
            encoder_cache_bytes=self._vision.cache.num_bytes,
            snapshots=snapshots,
            snapshot_bytes=snapshots * self.state_row_bytes,
        )
