"""What a chat worker has to say, kept back while the GPU waits for the host."""

from __future__ import annotations

from service.engine.chat.mask_server import COMPLETE
from service.engine.chat.sequence import ChatSequence
from service.link.messages import ChatDelta, Failed, Outputs

_NOTHING = Outputs()


class Outbox:
    """deltas and failed: of requests, in the order in which they go out.

    Behind the layers of a guided step the GPU has nothing to do until its sampling and the next step are launched.
    Sending tokens in between would make it wait, so they are kept back until that step is launched.
    """

    def __init__(self, *, keeps: bool) -> None:
        """keeps: something may be kept back, as nothing is on a CPU."""
        self._keeps = keeps
        self.deltas: list[ChatDelta] = []
        self.failed: list[Failed] = []
        self._due = _NOTHING

    def release(self) -> None:
        """What is there goes out with the next `take`, whatever is kept back then."""
        if self.deltas or self.failed:
            chat, failed = (*self._due.chat, *self.deltas), (*self._due.failed, *self.failed)
            self._due = Outputs(chat=chat, failed=failed)
            self.deltas, self.failed = [], []

    def end_guided(self, sequence: ChatSequence, verdict: str) -> None:
        """The end of an answer that its grammar ends (service.engine.chat.mask_server)."""
        if verdict == COMPLETE:
            self.deltas.append(sequence.delta((), (), "stop"))
        else:
            message = f"the answer cannot match its grammar: {verdict}"
            self.failed.append(Failed(sequence.request_id, 400, "grammar_failed", message))

    def take(self, *, keep_back: bool) -> Outputs:
        if not (keep_back and self._keeps):
            self.release()
        due, self._due = self._due, _NOTHING
        return due
