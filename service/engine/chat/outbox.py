"""The output of a chat worker, held back while the GPU waits for the host."""

from __future__ import annotations

from service.engine.chat.mask_server import COMPLETE
from service.engine.chat.sequence import ChatSequence
from service.link.messages import ChatDelta, Failed, Outputs

_NOTHING = Outputs()


class Outbox:
    """deltas, failed: in the order in which they are sent. When the masks of a guided step are there, its sampling and
    the next layers are launched first: output that was not sent while the masks were awaited is held back until then.
    """

    def __init__(self, *, keeps: bool) -> None:
        """keeps: output may be held back. On a CPU none is."""
        self._keeps = keeps
        self.deltas: list[ChatDelta] = []
        self.failed: list[Failed] = []
        self._due = _NOTHING

    def release(self) -> None:
        """The current output is returned by the next `take`, even while other output is held back."""
        if self.deltas or self.failed:
            chat, failed = (*self._due.chat, *self.deltas), (*self._due.failed, *self.failed)
            self._due = Outputs(chat=chat, failed=failed)
            self.deltas, self.failed = [], []

    def end_guided(self, sequence: ChatSequence, verdict: str) -> None:
        """Adds the output that ends an answer because of its grammar. verdict: see service.engine.chat.mask_server."""
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
