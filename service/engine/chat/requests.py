"""The requests of a chat worker: their sequences, from the request to whatever ends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.engine.chat.encoder import EncodeError, VisionStage
from service.engine.chat.guided.guidance import Guidance
from service.engine.chat.guided.mask_server import BROKEN, COMPLETE
from service.engine.chat.scheduler import Scheduler
from service.engine.chat.sequence import ChatSequence, Chunk
from service.engine.core.faults import LaunchError, corrupted, launch_failure, queue_timeout
from service.engine.core.request_stats import RequestStats
from service.engine.core.worker import WorkerContext
from service.link.messages import ChatDelta, ChatRequest, Failed, Outputs, TokenInfo
from service.link.sampling import sampling_problem


def token_infos(results: dict[str, np.ndarray], row: int, count: int | None) -> tuple[TokenInfo, ...]:
    """Log probabilities of a row of StepOutput.results, with `count` alternatives; none if it asked for none."""
    if count is None:
        return ()
    ids, values = results["top_ids"][row, :count].tolist(), results["top_values"][row, :count].tolist()
    return (TokenInfo(float(results["logprobs"][row]), tuple(zip(ids, values, strict=True))),)


_NOTHING = Outputs()


class Outbox:
    """What is to be sent, in order.

    When the masks of a guided step have arrived, its sampling and the next layers are launched before anything is sent:
    output that was not sent while the engine waited for the masks is held back until then.
    """

    def __init__(self, *, keeps: bool) -> None:
        """keeps: whether output may be held back; on a CPU it is not."""
        self._keeps = keeps
        self.deltas: list[ChatDelta] = []
        self.failed: list[Failed] = []
        self._due = _NOTHING
        """What the next `take` returns in any case."""

    def release(self) -> None:
        """Makes the next `take` return the current output, even if it holds back what comes later."""
        if self.deltas or self.failed:
            chat, failed = (*self._due.chat, *self.deltas), (*self._due.failed, *self.failed)
            self._due = Outputs(chat=chat, failed=failed)
            self.deltas, self.failed = [], []

    def take(self, *, keep_back: bool) -> Outputs:
        """All output or, with `keep_back`, what was released."""
        if not (keep_back and self._keeps):
            self.release()
        due, self._due = self._due, _NOTHING
        return due


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatLimits:
    """The limits of one model."""

    max_context: int
    """Positions of one sequence."""
    cache_positions: int
    """Positions that all pages hold."""
    vocab_limit: int
    """Ids that can be sampled."""
    max_waiting: int
    """Requests in the queue."""

    def length_cap(self, request: ChatRequest) -> int:
        """Maximum number of tokens to generate: as requested, but not beyond the context or the pages of the cache."""
        prompt = len(request.prompt.token_ids)
        return min(request.sampling.max_tokens, self.max_context - prompt, self.cache_positions - prompt + 1)

    def refusal(self, request: ChatRequest, num_waiting: int, retry_after: float) -> Failed | None:
        """Why the request is refused; None if it is accepted. retry_after: seconds after which a place in the queue is
        expected to be free."""
        name, length = request.request_id, len(request.prompt.token_ids)
        if num_waiting >= self.max_waiting:
            return Failed(name, 503, "overloaded", "too many requests are waiting", retry_after=retry_after)
        if not length:
            return Failed(name, 400, "invalid_prompt", "the prompt is empty", "messages")
        if (problem := sampling_problem(request.sampling, self.vocab_limit)) is not None:
            return Failed(name, 400, "invalid_value", problem[1], problem[0])
        if request.grammar and request.sampling.min_tokens:
            message = "cannot be combined with tools or a format, whose grammar says where the answer ends"
            return Failed(name, 400, "invalid_value", message, "min_tokens")
        if self.length_cap(request) < 1:
            longest = min(self.max_context - 1, self.cache_positions)
            message = f"the prompt is too long: {length} positions, at most {longest} allowed"
            return Failed(name, 400, "context_length_exceeded", message, "messages")
        return None


class ChatRequests:
    """Waiting and running requests by id. However a request ends, what it holds is released here: its slot and pages,
    its items in the encoder cache, and its guide."""

    def __init__(
        self,
        name: str,
        limits: ChatLimits,
        scheduler: Scheduler,
        vision: VisionStage,
        guidance: Guidance,
        outbox: Outbox,
        context: WorkerContext,
    ) -> None:
        """name: the model's."""
        self._name = name
        self._limits = limits
        self._scheduler = scheduler
        self._vision = vision
        self._guidance = guidance
        self._outbox = outbox
        self._context = context
        self._sequences: dict[str, ChatSequence] = {}
        self._seconds = 1.0
        """Mean time from the first step of a request to its end."""

    def submit(self, request: ChatRequest) -> None:
        """Queues a request or fails it; a bad one never raises."""
        waiting, running = len(self._scheduler.waiting), max(1, len(self._scheduler.running))
        retry_after = min(60.0, max(1.0, self._seconds * waiting / running))
        if (failure := self._limits.refusal(request, waiting, retry_after)) is not None:
            self._outbox.failed.append(failure)
            return
        cap, page_size = self._limits.length_cap(request), self._context.config.page_size
        sequence = ChatSequence(request, cap, page_size, stats=RequestStats(self._context.clock()))
        if request.grammar:
            sequence.guide = self._guidance.begin(request.grammar, slow=request.slow_grammar)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        self._vision.request_all(self._scheduler.waiting)

    def note_chunk(self, chunk: Chunk, now: float) -> None:
        """Records that a chunk was launched, and releases the items that it was the last to read."""
        sequence, observations = chunk.sequence, self._context.observations
        if sequence.stats.scheduled is None:
            positions, cached = sequence.num_prompt_tokens, sequence.cached_tokens
            sequence.stats.start(now, observations, model=self._name, positions=positions, cached=cached)
            if sequence.state_rows and cached:
                observations.count("state_snapshot_hits_total", model=self._name)
        if sequence.pinned:
            self._vision.release(sequence, chunk.end)

    # Ends

    def abort(self, request_id: str) -> None:
        """Abort silently; unknown and finished ids are ignored."""
        if (sequence := self._sequences.get(request_id)) is not None:
            self.finish(sequence)

    def fail_timed_out(self, limit: float) -> None:
        """Fails requests that were submitted before `limit` and have had no step."""
        for sequence in self._scheduler.never_scheduled(submitted_before=limit):
            self._outbox.failed.append(queue_timeout(sequence.request_id))
            self.finish(sequence)

    def fail(self, sequences: Sequence[ChatSequence], error: LaunchError) -> None:
        """Fails the requests of a failed launch."""
        log.error("%d requests of %s fail", len(sequences), self._name, exc_info=error)
        for sequence in sequences:
            self._outbox.failed.append(launch_failure(sequence.request_id, error))
            self.finish(sequence, failed=True)

    def fail_corrupt(self, sequence: ChatSequence) -> None:
        """Fails a request whose logits are not finite."""
        self._outbox.failed.append(corrupted(sequence.request_id, self._name, self._context.observations))
        self.finish(sequence, failed=True)

    def fail_unencoded(self, error: EncodeError) -> None:
        """Fails the requests that wait for items that cannot be encoded."""
        self.fail([one for one in self._sequences.values() if error.digests & one.pinned.keys()], error.cause)

    def end_guided(self, sequence: ChatSequence, verdict: str) -> None:
        """Ends an answer because of its grammar. verdict: see service.engine.chat.guided.mask_server."""
        name, failed = sequence.request_id, self._outbox.failed
        if verdict == COMPLETE:
            self._outbox.deltas.append(sequence.delta((), (), "stop"))
        elif verdict == BROKEN:
            message = "the process that follows the grammar of this answer failed"
            failed.append(Failed(name, 503, "engine_error", message, retry_after=1.0))
        else:
            failed.append(Failed(name, 400, "grammar_failed", f"the answer cannot match its grammar: {verdict}"))
        self.finish(sequence)

    def finish(self, sequence: ChatSequence, *, failed: bool = False) -> None:
        """Forgets a request. Its slot and pages may be given away at once. failed: as Scheduler.finish."""
        del self._sequences[sequence.request_id]
        if sequence.stats.scheduled is not None:
            self._seconds += 0.1 * (self._context.clock() - sequence.stats.scheduled - self._seconds)
        if sequence.guide is not None:
            self._guidance.forget(sequence.guide)
        self._scheduler.finish(sequence, failed=failed)
        if sequence.pinned:
            self._vision.release(sequence)
