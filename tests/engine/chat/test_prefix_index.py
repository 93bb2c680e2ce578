"""The prefix index names pages only for keys that were written to them."""

from __future__ import annotations

import pytest

from service.engine.chat.chunk_budget import ChunkBudget
from service.engine.chat.pacing import Pacing
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.tiny_chat import tiny_prompt


def test_a_chunk_of_before_a_preemption_does_not_index_pages_of_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts with one beginning are computed side by side; the second is preempted while its last chunk is in
    flight, and begins again with a shorter one. Then it is aborted, and the same prompt comes again."""
    budgets = iter([40, 2, 2, 36])
    monkeypatch.setattr(Pacing, "chunk_budget", lambda *_, **__: ChunkBudget(next(budgets, 3)))
    beginning, rest = [1 + i % 20 for i in range(32)], [20 - i % 20 for i in range(20)]
    engine = InlineEngine(num_pages=1 + 9 + 14, max_running=4, max_step_tokens=48)
    engine.submit("first", tiny_prompt([[*beginning, 5]]), max_tokens=40)
    engine.submit("second", tiny_prompt([[*beginning, *rest]]), max_tokens=8)
    scheduler = engine.worker._scheduler
    while not scheduler.num_preemptions:
        assert engine.turn()
    engine.turn()
    engine.abort("second")
    engine.abort("first")
    engine.turn()
    engine.run()
    engine.submit("again", tiny_prompt([[*beginning, *rest]]), max_tokens=8)
    engine.run()
    alone = InlineEngine(num_pages=64, max_step_tokens=48)
    alone.submit("again", tiny_prompt([[*beginning, *rest]]), max_tokens=8)
    alone.run()
    assert engine.tokens("again") == alone.tokens("again")
