"""A chat worker that shares its GPU: what speech leaves of the gaps between tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from service.engine.arbiter import Arbiter
from service.engine.engine import FEW, GATHERING
from service.link.messages import Control, ModelState, Outputs
from tests.engine.chat.test_pacing import DECODE, PATCH, TARGET, PacedEngine, alone, until
from tests.engine.test_arbiter import FakeWorker
from tests.support.inference import no_gradients as no_gradients
from tests.support.tiny_chat import tiny_item, tiny_prompt

SPEECH = 0.009
"""Seconds of a step of speech: it fits a gap beside a decode step, and not beside an encoder pass."""
PASS = PATCH * 48


class EndlessSpeech(FakeWorker):
    """Has a step to launch at all times. Its listeners have audio for half a second, unless one waits in silence."""

    def __init__(self, engine: PacedEngine) -> None:
        super().__init__("speech", SPEECH, longest_wait=0.499)
        self._engine = engine
        self._until = 0.0

    def backlog(self, now: float) -> float:
        return max(0.0, self._until - now)

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        self._until = self._engine.now = self._engine.now + SPEECH
        self._engine.launched.append(("speech", 0, 0))
        return True

    def building(self) -> bool:
        return False

    def collect(self) -> Outputs:
        return Outputs()

    def state(self) -> ModelState:
        return ModelState("speech", running=1, waiting=0, pages_total=1, pages_used=1, pages_cached=0)

    def fail_timed_out(self, now: float) -> None: ...

    def control(self, command: Control) -> None: ...


class SharedEngine(PacedEngine):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.speech = EndlessSpeech(self)

    def share(self) -> None:
        workers: Any = {self.worker.name: self.worker, "speech": self.speech}
        self.engine.workers, self.engine._arbiter = workers, Arbiter(list(workers.values()))

    def kinds(self) -> list[str]:
        """Launches in order; a step with chunks is a prefill."""
        return ["prefill" if kind == "step" and tokens else kind for kind, _, tokens in self.launched]

    def between_tokens(self) -> list[list[str]]:
        """What ran in each gap, the step that ended it included."""
        gaps: list[list[str]] = [[]]
        for kind, (_, rows, _) in zip(self.kinds(), self.launched, strict=True):
            gaps[-1].append(kind)
            if kind in ("step", "prefill") and rows:
                gaps.append([])
        return gaps[:-1]


def pictures(engine: SharedEngine, count: int) -> Any:
    engine.streams(3)
    engine.share()
    prompt = tiny_prompt([[1], *(tiny_item(seed, [24, 24]) for seed in range(count)), [2]])
    engine.submit("pictures", prompt)
    until(engine, "pictures")
    return prompt


def test_speech_and_pictures_take_gaps_in_turn() -> None:
    engine = SharedEngine(max_step_tokens=200, num_pages=400, max_running=6)
    prompt = pictures(engine, 8)
    gaps = engine.between_tokens()
    assert sum("encode" in gap for gap in gaps) == 8
    assert not any("speech" in gap and ("encode" in gap or "prefill" in gap) for gap in gaps)
    with_speech = ["speech" in gap for gap in gaps]
    assert all(one or other for one, other in pairwise(with_speech))
    assert max(engine.gaps) <= TARGET < SPEECH + PASS + DECODE
    engine.engine._arbiter = Arbiter([engine.worker])
    engine.run()
    assert engine.tokens("pictures") == alone(prompt)


def test_speech_that_cannot_wait_delays_a_picture_by_three_gaps() -> None:
    engine = SharedEngine(max_step_tokens=200, num_pages=400, max_running=6)
    engine.speech.longest_wait = 0.0  # One waits in silence.
    pictures(engine, 8)
    gaps = engine.between_tokens()
    assert all("speech" in gap for gap in gaps)
    with_pass = [index for index, gap in enumerate(gaps) if "encode" in gap]
    assert len(with_pass) == 8 and with_pass[-1] - with_pass[0] <= 4 * 7


def test_rows_that_end_leave_nothing_due() -> None:
    engine = SharedEngine(max_step_tokens=200, num_pages=400)
    engine.streams(2)
    engine.share()
    engine.submit("picture", tiny_prompt([[1], tiny_item(1, [24, 24]), [2]]))
    while not engine.worker.due():
        engine.turn()
    for name in ("stream 0", "stream 1", "picture"):
        engine.abort(name)
    engine.launched = []
    for _ in range(6):
        engine.turn()
    assert not engine.worker.due() and "speech" in engine.kinds()[-3:]


def test_pieces_of_live_speech_begin_together_beside_another_model() -> None:
    """The first ones do not wait, nor does one behind which the other model stops; one that is aborted never begins."""
    engine = SharedEngine(max_step_tokens=200, num_pages=400, max_running=16)
    engine.streams(1)
    engine.share()
    prompts, begun = [tiny_prompt([[seed] * 6]) for seed in range(10)], engine.now
    for index in range(FEW):
        engine.submit(f"few {index}", prompts[index], live=True)
        until(engine, f"few {index}")
    assert engine.now - begun < GATHERING
    engine.launched, begun = [], engine.now
    for index in range(FEW, FEW + 3):
        engine.submit(f"piece {index}", prompts[index], live=True)
        engine.turn()
    engine.abort(f"piece {FEW + 1}")
    until(engine, f"piece {FEW}")
    assert GATHERING <= engine.now - begun < GATHERING + 2 * TARGET
    assert [tokens for kind, _, tokens in engine.launched if kind == "step" and tokens] == [12]
    engine.submit("last", prompts[9], live=True)
    engine.turn()
    begun = engine.now
    engine.engine.workers = {engine.worker.name: engine.worker}
    engine.engine._arbiter = Arbiter([engine.worker])
    engine.abort("stream 0")
    until(engine, "last")
    assert engine.now - begun < GATHERING
    engine.run()
    assert engine.tokens(f"piece {FEW + 2}") == alone(prompts[FEW + 2]) and not engine.tokens(f"piece {FEW + 1}")
