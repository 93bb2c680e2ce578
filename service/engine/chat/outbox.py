"""What a chat worker has to say."""

from __future__ import annotations

from service.engine.chat.masks import COMPLETE
from service.engine.chat.sequence import ChatSequence
from service.link.messages import ChatDelta, Failed, Outputs


class Outbox:
    """deltas and failed: of requests, in the order in which they go out."""

    def __init__(self) -> None:
        self.deltas: list[ChatDelta] = []
        self.failed: list[Failed] = []

    def end_guided(self, sequence: ChatSequence, verdict: str) -> None:
        """The end of an answer that its grammar ends (service.engine.chat.masks)."""
        if verdict == COMPLETE:
            self.deltas.append(sequence.delta((), (), "stop"))
        else:
            message = f"the answer cannot match its grammar: {verdict}"
            self.failed.append(Failed(sequence.request_id, 400, "grammar_failed", message))

    def take(self) -> Outputs:
        outputs = Outputs(chat=tuple(self.deltas), failed=tuple(self.failed))
        self.deltas, self.failed = [], []
        return outputs
