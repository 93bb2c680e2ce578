"""An engine without a model that answers at a GPU's rate, and `reprise serve` with that engine.

    REPRISE_PACE=0.003 python -m benchmarks.servers.paced --port 8000 ...

A chat request has its first token at once; then every PACE seconds each running request has one more, up to max_tokens.
A speech request has its first patch at once and one more each PACE seconds, to its longest length. Reference audio has
as many patches as VoxCPM2 makes of it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.servers.own_engine import serve_with
from service.graphs.observations import Observation
from service.link.config import Channel, EngineConfig
from service.link.messages import (
    Abort,
    ChatDelta,
    ChatRequest,
    EncodeReference,
    EngineState,
    ModelState,
    Outputs,
    ReferenceEncoded,
    SpeechDelta,
    SpeechRequest,
    Stop,
)

PACE = float(os.environ.get("REPRISE_PACE", "0.003"))
ENTRY = "benchmarks.servers.paced:engine"
HEARTBEAT = 0.5
VOCABULARY = 64
"""Tokens are this many lowest ids in turn: letters and signs of a byte-level vocabulary."""
PATCH_SAMPLES = 7680
REFERENCE_SAMPLES = 2560
"""Of the audio of one patch, at the codec's input rate."""
PATCH_SHAPE = (4, 64)


@dataclass
class Running:
    """A chat request in its slot, or an utterance; `left` tokens or patches are to come."""

    request: ChatRequest | SpeechRequest
    left: int


def engine(config: EngineConfig, channel: Channel) -> None:
    """An EngineEntry."""
    running: dict[str, Running] = {}
    model = config.models[0].name
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, PATCH_SAMPLES).astype(np.float32)
    channel.send(Outputs(state=_state(config)))
    now = time.monotonic()
    due, beat = now + PACE, now + HEARTBEAT
    while True:
        fresh: list[Running] = []
        for command in channel.receive(max(0.0, (due if running else beat) - now)):
            match command:
                case ChatRequest():
                    fresh.append(Running(command, command.sampling.max_tokens))
                case SpeechRequest():
                    fresh.append(Running(command, sum(segment.max_patches for segment in command.segments)))
                case Abort():
                    running.pop(command.request_id, None)
                case EncodeReference():
                    shape = (-(-len(command.wave) // REFERENCE_SAMPLES), *PATCH_SHAPE)
                    answer = ReferenceEncoded(command.request_id, np.zeros(shape, np.float32))
                    channel.send(Outputs(encoded=(answer,)))
                case Stop():
                    return
        if fresh:
            channel.send(_step(fresh, noise, model))
            running |= {item.request.request_id: item for item in fresh if item.left}
        now = time.monotonic()
        if running and now >= due:
            channel.send(_step(list(running.values()), noise, model))
            running = {name: item for name, item in running.items() if item.left}
        if now >= due:
            due = max(due + PACE, now)
        if now >= beat:
            beat = now + HEARTBEAT
            channel.send(Outputs(state=_state(config)))


def _step(rows: list[Running], noise: np.ndarray, model: str) -> Outputs:
    """One more token or patch of each, with the observations that a step of the real engine sends."""
    chat, speech = [], []
    for row in rows:
        row.left -= 1
        request = row.request
        if isinstance(request, ChatRequest):
            chat.append(ChatDelta(request.request_id, (row.left % VOCABULARY,), (), None if row.left else "length"))
        else:
            done = not row.left
            speech.append(SpeechDelta(request.request_id, noise, 0, segment_done=done, finished=done))
    labels = {"model": model, "kind": "decode"}
    replay = {**labels, "route": "replay"}
    observations = (
        Observation("step_duration_seconds", PACE, replay),
        Observation("step_host_duration_seconds", PACE, labels),
        Observation("bucket_occupancy_ratio", 1, labels),
        Observation("steps_total", 1, {**replay, "reason": "captured"}),
        Observation("replayed_rows_total", len(rows), labels),
    )
    return Outputs(tuple(chat), tuple(speech), observations=observations)


def _state(config: EngineConfig) -> EngineState:
    return EngineState("ready", "", tuple(ModelState(model.name, 0, 0, 0, 100, 0, 0) for model in config.models), 0)


if __name__ == "__main__":
    serve_with(ENTRY, sys.argv[1:])
