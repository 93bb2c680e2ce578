"""An engine without a model: it answers a chat request with the request's own prompt ids, one token a tick.

Prompts that start with a word of MOODS misbehave as the word says; "!endless" ends at no length, "!fault" ends the
process once, "!poison" each process that gets it. `serve` is an EngineEntry.
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
    PhaseTimes,
    ReferenceEncoded,
    SpeechDelta,
    SpeechRequest,
    StepCounts,
    Stop,
    TokenInfo,
)

TICK = 0.0005
MOODS = ("!full", "!crash", "!hang", "!fail", "!slow", "!endless", "!silent", "!fault", "!poison")
LONGEST_MOOD = max(map(len, MOODS))
SAMPLES_PER_TICK = 4800
PAGES = 1000
"""Of each model's KV cache."""


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
    patches: int = 0


def serve(config: EngineConfig, channel: Channel) -> None:
    channel.send(Outputs(state=state_of(config, "loading", 0)))
    if any(model.directory == "/broken" for model in config.models):
        raise RuntimeError("broken by request")
    if any(model.directory == "/unfit" for model in config.models):
        raise ConfigurationError("unfit by request")
    chats: dict[str, Answer] = {}
    speeches: dict[str, Speech] = {}
    channel.send(Outputs(state=state_of(config, "ready", 0)))
    heartbeat = time.monotonic()
    while True:
        for command in channel.receive(TICK if chats or speeches else 0.05):
            match command:
                case ChatRequest():
                    chats[command.request_id] = Answer(command)
                    if command.sampling.hidden:
                        hidden = np.array([len(command.prompt.token_ids), 1, 2, 3], np.float32)
                        channel.send(Outputs(chat=(ChatDelta(command.request_id, (), hidden=hidden),)))
                case SpeechRequest():
                    speeches[command.request_id] = Speech(command)
                case EncodeReference():
                    patches = np.zeros((3, 4, 2), np.float32)
                    channel.send(Outputs(encoded=(ReferenceEncoded(command.request_id, patches),)))
                case Abort():
                    chats.pop(command.request_id, None)
                    speeches.pop(command.request_id, None)
                case Stop():
                    return
        failed = tuple(
            Failed(name, 500, "fake_failure", "failed by request")
            if mood_of(answer) == "!fail"
            else Failed(name, 503, "overloaded", "refused by request", retry_after=1.0)
            for name, answer in chats.items()
            if mood_of(answer) in ("!fail", "!full")
        )
        for failure in failed:
            del chats[failure.request_id]
        deltas = tuple(delta for answer in list(chats.values()) if (delta := next_delta(answer)) is not None)
        for delta in deltas:
            if delta.finish_reason:
                del chats[delta.request_id]
        audio = tuple(_speak(speech) for speech in speeches.values())
        for chunk in audio:
            if chunk.finished:
                del speeches[chunk.request_id]
        now = time.monotonic()
        state = None
        if now - heartbeat > 0.1 or deltas:
            heartbeat = now
            state = state_of(config, "ready", len(chats))
        if deltas or failed or state or audio:
            labels = {"model": config.models[0].name, "kind": "decode", "route": "replay", "reason": "captured"}
            observations = (Observation("steps_total", 1.0, labels),) if deltas else ()
            channel.send(Outputs(chat=deltas, speech=audio, failed=failed, observations=observations, state=state))


def mood_of(answer: Answer) -> str | None:
    beginning = bytes(int(token) & 255 for token in answer.request.prompt.token_ids[:LONGEST_MOOD])
    return next((mood for mood in MOODS if beginning.startswith(mood.encode())), None)


def next_delta(answer: Answer) -> ChatDelta | None:
    mood = mood_of(answer)
    if mood == "!crash" and answer.produced == 2:
        _end()
    if mood == "!fault" and answer.produced == 2 and _take_fault():
        _end()
    if mood == "!poison":
        answer.fatal = _take_dose() if answer.fatal is None else answer.fatal
        if answer.produced == answer.fatal:
            _end()
    if mood == "!hang" and answer.produced == 2:
        time.sleep(3600)
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


def _take_fault() -> bool:
    """Whether there was a file `fault` in REPRISE_TEST_FAULTS, which is gone then: one engine of several falls."""
    try:
        (Path(os.environ["REPRISE_TEST_FAULTS"]) / "fault").unlink()
    except FileNotFoundError:
        return False
    return True


def _counts(steps: int) -> StepCounts:
    """Of a request that was alone: its first step ran eagerly."""
    return StepCounts(steps, steps - 1, steps, 0)


def _speak(speech: Speech) -> SpeechDelta:
    """A tenth of a second of a rising ramp per tick and patch, to the segment's longest length."""
    speech.patches += 1
    start = (speech.patches - 1) * SAMPLES_PER_TICK
    audio = (np.arange(start, start + SAMPLES_PER_TICK, dtype=np.float32) / 480_000) % 1.0 - 0.5
    limit = sum(segment.max_patches for segment in speech.request.segments)
    done = speech.patches >= limit
    counts = _counts(speech.patches) if done else None
    return SpeechDelta(speech.request.request_id, audio, 0, segment_done=done, finished=done, steps=counts)


def state_of(config: EngineConfig, phase: str, running: int) -> EngineState:
    models = tuple(ModelState(model.name, running, 0, PAGES, running, 0) for model in config.models)
    return EngineState(phase, "", models, 0)
