"""An engine without a model: it answers a chat request with the request's own prompt ids, one token a tick, and says
0.1 s for each segment of a speech request.

Prompts that start with a word of MOODS misbehave as the word says; "!endless" ends at no length, "!poison" ends each
process that gets it. `serve` is an EngineEntry, as is `FakeEngine.serve`, which keeps what it was asked to speak.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from service.graphs.observations import Observation
from service.link.config import Channel, ConfigurationError, EngineConfig
from service.link.messages import (
    Abort,
    ChatDelta,
    ChatRequest,
    EncodeReference,
    EngineState,
    Failed,
    ModelState,
    Outputs,
    Pause,
    PhaseTimes,
    ReferenceEncoded,
    SpeechAppend,
    SpeechDelta,
    SpeechRequest,
    SpeechSegment,
    StepCounts,
    Stop,
    TokenInfo,
)

TICK = 0.0005
MOODS = ("!full", "!crash", "!fail", "!slow", "!endless", "!silent", "!poison")
LONGEST_MOOD = max(map(len, MOODS))
PAGES = 1000
"""Of each model's KV cache."""
PATCH = 4800
RATE = 48_000
MUTE, ENDLESS, LONG = "!mute", "!drone", "!long"
"""Words of a segment that fails, of one that goes on until it is aborted, and of one that the context cannot hold."""


@dataclass
class Answer:
    request: ChatRequest
    produced: int = 0
    began: float = field(default_factory=time.monotonic)
    fatal: int | None = None
    """Tokens after which it ends the process."""


@dataclass
class Speech:
    request: SpeechRequest
    segments: list[SpeechSegment]
    open: bool
    segment: int = 0
    began: float = field(default_factory=time.monotonic)


@dataclass
class FakeEngine:
    """requests: every speech request. texts: of every segment, by request. chats, speeches: what is in progress."""

    requests: list[SpeechRequest] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    chats: dict[str, Answer] = field(default_factory=dict)
    speeches: dict[str, Speech] = field(default_factory=dict)
    runaways: int = 0
    """Number of coming segments that end at their cap."""

    @property
    def idle(self) -> bool:
        return not self.chats and not self.speeches

    def serve(self, config: EngineConfig, channel: Channel) -> None:
        channel.send(Outputs(state=state_of(config, "loading", 0)))
        if any(model.directory == "/broken" for model in config.models):
            raise RuntimeError("broken by request")
        if any(model.directory == "/unfit" for model in config.models):
            raise ConfigurationError("unfit by request")
        channel.send(Outputs(state=state_of(config, "ready", 0)))
        heartbeat = time.monotonic()
        while True:
            for command in channel.receive(0.05 if self.idle else TICK):
                if isinstance(command, Stop):
                    return
                self._obey(command, channel)
            failed = self._failed()
            deltas = tuple(delta for answer in self.chats.values() if (delta := next_delta(answer)) is not None)
            audio = tuple(delta for speech in self.speeches.values() if (delta := self._speak(speech)) is not None)
            for delta in deltas:
                if delta.finish_reason:
                    del self.chats[delta.request_id]
            for spoken in audio:
                if spoken.finished:
                    del self.speeches[spoken.request_id]
            state = None
            if time.monotonic() - heartbeat > 0.1 or deltas:
                heartbeat = time.monotonic()
                state = state_of(config, "ready", len(self.chats))
            if deltas or failed or state or audio:
                labels = {"model": config.models[0].name, "kind": "decode", "route": "replay", "reason": "captured"}
                observations = (Observation("steps_total", 1.0, labels),) if deltas else ()
                channel.send(Outputs(chat=deltas, speech=audio, failed=failed, observations=observations, state=state))

    def _obey(self, command: object, channel: Channel) -> None:
        match command:
            case ChatRequest():
                self.chats[command.request_id] = Answer(command)
                if command.sampling.hidden:
                    hidden = np.array([len(command.prompt.token_ids), 1, 2, 3], np.float32)
                    channel.send(Outputs(chat=(ChatDelta(command.request_id, (), hidden=hidden),)))
            case SpeechRequest():
                self.requests.append(command)
                self.speeches[command.request_id] = Speech(command, list(command.segments), command.open)
                self.texts[command.request_id] = [_text(segment) for segment in command.segments]
            case SpeechAppend() if command.request_id in self.speeches:
                speech = self.speeches[command.request_id]
                speech.segments.extend(command.segments)
                speech.open = speech.open and not command.last
                self.texts[command.request_id].extend(map(_text, command.segments))
            case EncodeReference():
                patches = np.full((3, 4, 2), 0.5, np.float32)
                channel.send(Outputs(encoded=(ReferenceEncoded(command.request_id, patches),)))
            case Abort():
                self.chats.pop(command.request_id, None)
                self.speeches.pop(command.request_id, None)
            case Pause():
                pass

    def _failed(self) -> tuple[Failed, ...]:
        """What fails in this turn; it is not in progress any more."""
        failed = []
        for name, answer in self.chats.items():
            if (mood := mood_of(answer)) == "!fail":
                failed.append(Failed(name, 500, "fake_failure", "failed by request"))
            elif mood == "!full":
                failed.append(Failed(name, 503, "overloaded", "refused by request", retry_after=1.0))
        for name, speech in self.speeches.items():
            text = _text(speech.segments[0]) if speech.segments else ""
            if MUTE in text:
                failed.append(Failed(name, 500, "fake_failure", "the voice failed"))
            elif LONG in text:
                failed.append(Failed(name, 400, "invalid_value", "it takes too many positions", "input"))
        for failure in failed:
            self.chats.pop(failure.request_id, None)
            self.speeches.pop(failure.request_id, None)
        return tuple(failed)

    def _speak(self, speech: Speech) -> SpeechDelta | None:
        name = speech.request.request_id
        if not speech.segments:
            if speech.open:
                return None
            return SpeechDelta(name, np.zeros(0, np.float32), speech.segment, finished=True)
        tone = np.full(PATCH, 0.25 + 0.05 * (speech.segment % 8), np.float32)
        if ENDLESS in _text(speech.segments[0]):
            time.sleep(TICK)
            return SpeechDelta(name, tone, speech.segment)
        del speech.segments[0]
        finished = not speech.segments and not speech.open
        times = None if speech.segment else PhaseTimes(speech.began, time.monotonic())
        speech.segment += 1
        self.runaways -= (truncated := self.runaways > 0)
        return SpeechDelta(name, tone, speech.segment - 1, True, finished, truncated, times=times)


def serve(config: EngineConfig, channel: Channel) -> None:
    FakeEngine().serve(config, channel)


def _text(segment: SpeechSegment) -> str:
    return bytes(segment.text_ids).decode()


def mood_of(answer: Answer) -> str | None:
    beginning = bytes(int(token) & 255 for token in answer.request.prompt.token_ids[:LONGEST_MOOD])
    return next((mood for mood in MOODS if beginning.startswith(mood.encode())), None)


def next_delta(answer: Answer) -> ChatDelta | None:
    mood = mood_of(answer)
    if mood == "!crash" and answer.produced == 2:
        _end()
    if mood == "!poison":
        answer.fatal = _take_dose() if answer.fatal is None else answer.fatal
        if answer.produced == answer.fatal:
            _end()
    if mood == "!slow":
        time.sleep(0.02)
    if mood == "!silent":
        return None
    request, ids = answer.request, answer.request.prompt.token_ids
    index = answer.produced % len(ids) if mood == "!endless" else answer.produced
    if index >= len(ids):
        return ChatDelta(
            request.request_id, (), finish_reason="stop", cached_tokens=1, steps=_counts(answer.produced + 1)
        )
    answer.produced += 1
    token = int(ids[index])
    finish = "length" if answer.produced >= request.sampling.max_tokens and mood != "!endless" else None
    infos = ()
    if (count := request.sampling.logprobs) is not None:
        infos = (TokenInfo(-0.5, tuple((token ^ n, -0.5 - n) for n in range(count))),)
    counts = _counts(answer.produced) if finish else None
    times = PhaseTimes(answer.began, time.monotonic()) if answer.produced == 1 else None
    marks = request.prompt.marks
    classes = None if marks is None or not finish else np.arange(len(marks), dtype=np.int32)
    return ChatDelta(request.request_id, (token,), infos, finish, 1, counts, times, classes=classes)


def _end() -> NoReturn:
    """End the process once its messages are sent: the channel is closed on the way out."""
    raise SystemExit(9)


def _take_dose() -> int:
    """The first number of the file `poison` in REPRISE_TEST_FAULTS, which is taken out of it."""
    file = Path(os.environ["REPRISE_TEST_FAULTS"]) / "poison"
    dose, *others = file.read_text().split()
    file.write_text(" ".join(others))
    return int(dose)


def _counts(steps: int) -> StepCounts:
    """Of a request that was alone: its first step ran eagerly."""
    return StepCounts(steps, steps - 1, steps, 0)


def state_of(config: EngineConfig, phase: str, running: int) -> EngineState:
    models = tuple(ModelState(model.name, running, 0, PAGES, running, 0) for model in config.models)
    return EngineState(phase, "", models, 0)
