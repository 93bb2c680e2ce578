"""What a chat worker has to say, in its order, and that nothing stays behind."""

from __future__ import annotations

from service.engine.chat.outbox import Outbox
from service.link.messages import ChatDelta, Failed


def test_tokens_go_out_with_the_failure_behind_them_and_once() -> None:
    outbox = Outbox()
    outbox.deltas.append(ChatDelta("one", (1,), (), None))
    outbox.failed.append(Failed("one", 400, "grammar_failed", "no token can follow"))
    outputs = outbox.take()
    assert len(outputs.chat) == len(outputs.failed) == 1
    assert outbox.take().chat == outbox.take().failed == ()
