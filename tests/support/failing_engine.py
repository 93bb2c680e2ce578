"""The engine itself, whose launches fail when they are told to. `serve` is an EngineEntry.

Faults are files of the directory REPRISE_TEST_FAULTS, each taken by one launch: KIND-oom runs out of memory, KIND-bug
raises another error, with KIND one of chat, speech_prefill, speech, encoder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from service.engine import engine
from service.engine.chat_runner import ChatRunner
from service.engine.config import Channel, EngineConfig
from service.engine.speech.runner import SpeechRunner
from service.graphs.runner import GraphRunner

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB"


def serve(config: EngineConfig, channel: Channel) -> None:
    faults = Path(os.environ["REPRISE_TEST_FAULTS"])
    for owner, method, kind in (
        (ChatRunner, "_decode_rows", "chat"),
        (ChatRunner, "_backbone", "chat"),
        (SpeechRunner, "launch_decode", "speech"),
        (SpeechRunner, "_backbone", "speech_prefill"),
        (SpeechRunner, "_replay_prompts", "speech_prefill"),
        (GraphRunner, "run", "encoder"),
    ):
        setattr(owner, method, _failing(getattr(owner, method), kind, faults))
    engine.serve(config, channel)


def _failing(launch: Callable[..., Any], kind: str, faults: Path) -> Callable[..., Any]:
    def wrapped(runner: Any, *arguments: Any, **options: Any) -> Any:
        if kind != "encoder" or runner._labels["kind"] == "encoder":
            if (fault := faults / f"{kind}-oom").exists():
                fault.unlink()
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            if (fault := faults / f"{kind}-bug").exists():
                fault.unlink()
                raise ValueError("a bug")
        return launch(runner, *arguments, **options)

    return wrapped
