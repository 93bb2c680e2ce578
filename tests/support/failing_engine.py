"""The engine itself, whose launches fail or wait when they are told to. `serve` is an EngineEntry.

Faults are files of the directory REPRISE_TEST_FAULTS, each taken by one launch: KIND-oom runs out of memory, KIND-bug
raises another error, with KIND one of chat, speech_prefill, speech, encoder. KIND-oom may hold the number of launches
that take it. KIND-hold holds a number, which counts
launches down; at 0 the next one writes HELD and waits until the file is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from service.engine import start
from service.engine.chat.runner import ChatRunner
from service.engine.speech import runner as speech_runner
from service.engine.speech.runner import SpeechRunner
from service.graphs.runner import GraphRunner
from service.link.config import Channel, EngineConfig

HELD = "held"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 GiB"
ERRORS = {
    "oom": torch.OutOfMemoryError(OUT_OF_MEMORY),
    "host-oom": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
    "bug": ValueError("a bug"),
}


def serve(config: EngineConfig, channel: Channel) -> None:
    faults = Path(os.environ["REPRISE_TEST_FAULTS"])
    launches = (
        (ChatRunner, "_launch_decode", "chat"),
        (ChatRunner, "_backbone", "chat"),
        (SpeechRunner, "launch_decode", "speech"),
        (speech_runner, "prompt_arrays", "speech_prefill"),
        (GraphRunner, "run", "encoder"),
    )
    with ExitStack() as stack:
        for owner, method, kind in launches:
            stack.enter_context(patch.object(owner, method, _failing(getattr(owner, method), kind, faults)))
        start.serve(config, channel)


def _failing(launch: Callable[..., Any], kind: str, faults: Path) -> Callable[..., Any]:
    def wrapped(runner: Any, *arguments: Any, **options: Any) -> Any:
        if kind != "encoder" or runner._labels["kind"] == "encoder":
            for name, error in ERRORS.items():
                if (fault := faults / f"{kind}-{name}").exists():
                    if (left := int(fault.read_text() or "1") - 1) > 0:
                        fault.write_text(str(left))
                    else:
                        fault.unlink()
                    raise error
            _hold(faults / f"{kind}-hold")
        return launch(runner, *arguments, **options)

    return wrapped


def _hold(file: Path) -> None:
    if file.exists() and (left := int(file.read_text())):
        file.write_text(str(left - 1))
        return
    if file.exists():
        file.write_text(HELD)
    while file.exists():
        time.sleep(0.005)
