"""The output of a chat worker, held back while the GPU waits for the host."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from service.engine.chat.guided.mask_server import BROKEN, COMPLETE
from service.engine.chat.scheduler_output import Chunk
from service.engine.chat.sequence import ChatSequence
from service.link.messages import ChatDelta, Failed, Outputs, PhaseTimes, TokenInfo


def token_infos(results: dict[str, np.ndarray], row: int, count: int | None) -> tuple[TokenInfo, ...]:
    """Log probabilities of a row of StepOutput.results, with `count` alternatives; none if it asked for none."""
    if count is None:
        return ()
    ids, values = results["top_ids"][row, :count].tolist(), results["top_values"][row, :count].tolist()
    return (TokenInfo(float(results["logprobs"][row]), tuple(zip(ids, values, strict=True))),)


def phase_times(chunks: Sequence[Chunk], now: float) -> dict[str, PhaseTimes]:
    """By request id, of those whose first token comes with the last of these chunks."""
    firsts = [chunk.sequence for chunk in chunks if chunk.is_last and not chunk.sequence.generated]
    times = {sequence.request_id: sequence.stats.times(now) for sequence in firsts}
    return {name: of_request for name, of_request in times.items() if of_request is not None}


def with_times(deltas: list[ChatDelta], first: dict[str, PhaseTimes]) -> list[ChatDelta]:
    """The deltas, with their times for the requests in `first`. This is not part of the loop over a step's rows, whose
    cost every token pays."""
    return [
        msgspec.structs.replace(delta, times=first[delta.request_id]) if delta.request_id in first else delta
        for delta in deltas
    ]


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

    def end_guided(self, sequence: ChatSequence, verdict: str) -> None:
        """Adds the output that ends an answer because of its grammar. verdict: see
        service.engine.chat.guided.mask_server."""
        if verdict == COMPLETE:
            self.deltas.append(sequence.delta((), (), "stop"))
        elif verdict == BROKEN:
            message = "the process that follows the grammar of this answer failed"
            self.failed.append(Failed(sequence.request_id, 503, "engine_error", message, retry_after=1.0))
        else:
            message = f"the answer cannot match its grammar: {verdict}"
            self.failed.append(Failed(sequence.request_id, 400, "grammar_failed", message))

    def take(self, *, keep_back: bool) -> Outputs:
        """All output or, with `keep_back`, what was released."""
        if not (keep_back and self._keeps):
            self.release()
        due, self._due = self._due, _NOTHING
        return due
