"""A start of the embedded models on a GPU: which kernels the rehearsal compiles, and which come after it.

    python -m tests.support.cold_start     -> a line of JSON: {"rehearsed": [name ...], "later": [name ...]}

In a process of its own, since a process keeps the kernels that it has compiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from service.engine import engine
from service.engine.config import EngineConfig, ModelConfig
from service.graphs.accounting import Observations
from tests.support.inline_engine import ListChannel
from tests.support.processes import ROOT


def main() -> None:
    compiled: list[str] = []
    rehearsed = 0

    def listen(*, src: Any, **rest: Any) -> None:
        compiled.append(src.name)

    def rehearse(worker: Any, mark: Path) -> None:
        nonlocal rehearsed
        start = len(compiled)
        original(worker, mark)
        rehearsed += len(compiled) - start

    original, engine.rehearse = engine.rehearse, rehearse
    knobs.compilation.listener = listen
    models = tuple(ModelConfig(name, str(ROOT / "models/embedded" / name)) for name in ("qwen2_vl", "voxcpm2"))
    config = EngineConfig(models=models, device="cuda", kv_cache_tokens=16384, max_running=12, max_step_tokens=192)
    device = engine.resolve_device(config)
    with torch.inference_mode(), engine.engine_stream(device):
        engine.build_engine(config, ListChannel(), device, Observations()).capture_first()
    print(json.dumps({"rehearsed": compiled[:rehearsed], "later": compiled[rehearsed:]}))


if __name__ == "__main__":
    main()
