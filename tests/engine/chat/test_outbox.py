"""What a chat worker keeps back while the GPU waits for the host, and that nothing stays behind."""

from __future__ import annotations

from service.engine.chat.guided.mask_server import BROKEN
from service.engine.chat.outbox import Outbox
from service.engine.chat.sequence import ChatSequence
from service.link.messages import ChatDelta, ChatRequest, Failed, SamplingParams
from tests.support.tiny_chat import tiny_prompt


def delta(token: int) -> ChatDelta:
    return ChatDelta("one", (token,), (), None)


def test_what_is_kept_back_goes_out_once_the_next_step_is_launched() -> None:
    outbox = Outbox(keeps=True)
    outbox.deltas.append(delta(1))
    assert outbox.take(keep_back=True).chat == ()
    outbox.release()
    outbox.deltas.append(delta(2))
    assert [d.token_ids for d in outbox.take(keep_back=True).chat] == [(1,)]
    assert [d.token_ids for d in outbox.take(keep_back=False).chat] == [(2,)]
    assert outbox.take(keep_back=False).chat == ()


def test_tokens_go_out_before_the_failure_behind_them() -> None:
    outbox = Outbox(keeps=True)
    outbox.deltas.append(delta(1))
    outbox.take(keep_back=True)
    outbox.failed.append(Failed("one", 400, "grammar_failed", "no token can follow"))
    outputs = outbox.take(keep_back=False)
    assert len(outputs.chat) == len(outputs.failed) == 1


def test_a_cpu_keeps_nothing_back() -> None:
    outbox = Outbox(keeps=False)
    outbox.deltas.append(delta(1))
    assert len(outbox.take(keep_back=True).chat) == 1


def test_a_mask_server_that_failed_is_no_fault_of_the_client() -> None:
    request = ChatRequest("one", "tiny", tiny_prompt([[1]]), SamplingParams(max_tokens=1), 0.0)
    outbox, sequence = Outbox(keeps=False), ChatSequence(request, 1, 4)
    outbox.end_guided(sequence, BROKEN)
    outbox.end_guided(sequence, "no token can follow")
    failed = outbox.take(keep_back=False).failed
    assert [(one.status, one.code) for one in failed] == [(503, "engine_error"), (400, "grammar_failed")]
    assert failed[0].retry_after and not failed[1].retry_after
