"""A chat model that answers with the prompt's own bytes, and a speech model that says 0.1 s for each segment.

Neither has weights. `FakeTalker.serve` is an EngineEntry that keeps what it was asked to speak.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechLayout
from service.hub import Checkpoint
from service.hub.catalog import Catalog, HostedModel
from service.link.config import Channel, EngineConfig
from service.link.messages import (
    Abort,
    ChatRequest,
    EncodeReference,
    Failed,
    Outputs,
    Pause,
    PhaseTimes,
    ReferenceEncoded,
    SpeechAppend,
    SpeechDelta,
    SpeechRequest,
    SpeechSegment,
    Stop,
)
from tests.support import fake_engine
from tests.support.fake_chat import fake_catalog

PATCH = 4800
RATE = 48_000
MUTE, ENDLESS, LONG = "!mute", "!drone", "!long"
"""Words of a segment that fails, of one that goes on until it is aborted, and of one that the context cannot hold."""


class FakeSpeechProcessor:
    solver_steps = (10, 4)
    cfg_value = 2.0
    min_patches = 2
    context_length = 4096
    sample_rate = RATE
    samples_per_patch = PATCH
    reference_sample_rate = 16_000

    def tokenize(self, text: str) -> list[int]:
        if not text.strip():
            raise InputError("input", "the text holds nothing to speak")
        if "ж" in text:
            raise InputError("input", "the text holds no character that this model can speak")
        return list(text.encode())

    def unspoken(self, text: str) -> str:
        return "".join(dict.fromkeys(character for character in text if character in "世界"))

    def layout(self, text_ids: Sequence[int], *, reference_patches: int = 0, prompt_patches: int = 0) -> SpeechLayout:
        length = len(text_ids) + reference_patches + prompt_patches
        return SpeechLayout(np.zeros(length, np.int32), np.zeros(length, bool))

    def max_patches(self, text_ids: Sequence[int]) -> int:
        return 6 * len(text_ids) + 10


def talking_catalog(talkers: int = 1) -> Catalog:
    chat = fake_catalog().models
    speech = [
        HostedModel((name,), "speech", Checkpoint(name, Path("/", name)), FakeSpeechProcessor, 1)
        for name in ("talker", *(f"talker-{n}" for n in range(1, talkers)))
    ]
    return Catalog([*chat, *speech])


@dataclass
class Speech:
    request: SpeechRequest
    segments: list[SpeechSegment]
    open: bool
    segment: int = 0
    began: float = field(default_factory=time.monotonic)


@dataclass
class FakeTalker:
    """requests: every speech request. texts: of every segment, by request. chats, speeches: what is in progress."""

    requests: list[SpeechRequest] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    chats: dict[str, fake_engine.Answer] = field(default_factory=dict)
    speeches: dict[str, Speech] = field(default_factory=dict)
    runaways: int = 0
    """Number of coming segments that end at their cap."""

    @property
    def idle(self) -> bool:
        return not self.chats and not self.speeches

    def serve(self, config: EngineConfig, channel: Channel) -> None:
        channel.send(Outputs(state=fake_engine.state_of(config, "ready", 0)))
        while True:
            for command in channel.receive(0.02 if self.idle else fake_engine.TICK):
                if isinstance(command, Stop):
                    return
                self._obey(command, channel)
            outputs = self._tick()
            if any(outputs):
                chat, speech, failed = outputs
                channel.send(Outputs(chat=chat, speech=speech, failed=failed))
            channel.send(Outputs(state=fake_engine.state_of(config, "ready", len(self.chats))))

    def _obey(self, command: object, channel: Channel) -> None:
        match command:
            case ChatRequest():
                self.chats[command.request_id] = fake_engine.Answer(command)
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

    def _tick(self) -> tuple[tuple, tuple, tuple]:
        mood = fake_engine.mood_of
        failed = [Failed(n, 500, "fake_failure", "failed") for n, a in self.chats.items() if mood(a) == "!fail"]
        deltas = tuple(filter(None, map(fake_engine.next_delta, self.chats.values())))
        for ended in [delta.request_id for delta in deltas if delta.finish_reason] + [f.request_id for f in failed]:
            del self.chats[ended]
        audio = []
        for name, speech in list(self.speeches.items()):
            if speech.segments and MUTE in _text(speech.segments[0]):
                failed.append(Failed(name, 500, "fake_failure", "the voice failed"))
                del self.speeches[name]
            elif speech.segments and LONG in _text(speech.segments[0]):
                failed.append(Failed(name, 400, "invalid_value", "it takes too many positions", "input"))
                del self.speeches[name]
            elif (delta := self._speak(speech)) is not None:
                audio.append(delta)
                if delta.finished:
                    del self.speeches[name]
        return deltas, tuple(audio), tuple(failed)

    def _speak(self, speech: Speech) -> SpeechDelta | None:
        name = speech.request.request_id
        if not speech.segments:
            if speech.open:
                return None
            return SpeechDelta(name, np.zeros(0, np.float32), speech.segment, finished=True)
        tone = np.full(PATCH, 0.25 + 0.05 * (speech.segment % 8), np.float32)
        if ENDLESS in _text(speech.segments[0]):
            time.sleep(fake_engine.TICK)
            return SpeechDelta(name, tone, speech.segment)
        del speech.segments[0]
        finished = not speech.segments and not speech.open
        times = None if speech.segment else PhaseTimes(speech.began, time.monotonic())
        speech.segment += 1
        self.runaways -= (truncated := self.runaways > 0)
        return SpeechDelta(name, tone, speech.segment - 1, True, finished, truncated, times=times)


def _text(segment: SpeechSegment) -> str:
    return bytes(segment.text_ids).decode()
