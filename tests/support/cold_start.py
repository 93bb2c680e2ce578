"""A start of the embedded models on a GPU: which kernels precompilation compiles, and which come after it.

    python -m tests.support.cold_start     -> a line of JSON: {"precompiled": [name ...], "later": [name ...]}

In a process of its own, since a process keeps the kernels that it has compiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from service.engine import start
from service.graphs.observations import Observations
from service.link.config import EngineConfig, ModelConfig
from tests.support.inline_engine import ListChannel
from tests.support.processes import ROOT


def main() -> None:
    compiled: list[str] = []
    precompiled = 0

    def listen(*, src: Any, **rest: Any) -> None:
        compiled.append(src.name)

    def precompile(worker: Any, stamp: Path) -> None:
        nonlocal precompiled
        before = len(compiled)
        original(worker, stamp)
        precompiled += len(compiled) - before

    original, start.precompile = start.precompile, precompile
    knobs.compilation.listener = listen
    models = tuple(ModelConfig(name, str(ROOT / "models/embedded" / name)) for name in ("qwen2_vl", "voxcpm2"))
    config = EngineConfig(models=models, device="cuda", kv_cache_tokens=16384, max_running=12, max_step_tokens=192)
    device = start.resolve_device(config)
    with torch.inference_mode(), start.engine_stream(device):
        start.build_engine(config, ListChannel(), device, Observations()).capture_first()
    print(json.dumps({"precompiled": compiled[:precompiled], "later": compiled[precompiled:]}))


if __name__ == "__main__":
    main()
