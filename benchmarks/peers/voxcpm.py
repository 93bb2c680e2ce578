"""The published implementation: one stream, eager and with its own torch.compile."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  (before the stub, which it would take for the real thing)

from benchmarks.checkpoints.published import GOLDEN, make
from benchmarks.checkpoints.weights import write_weights
from benchmarks.peers.streams import closed

SOLVER_STEPS, CFG = 10, 2.0
SECONDS, TINY_SECONDS = 10.08, 0.96


def make_checkpoint(folder: Path) -> Path:
    """Random weights at full size."""
    directory = make("voxcpm2", folder)
    write_weights(directory)
    return directory


def measure(folder: Path, tiny: bool) -> list[dict[str, Any]]:
    _stub("torchaudio")
    from voxcpm.model.voxcpm2 import VoxCPM2Model

    directory = GOLDEN / "voxcpm2" if tiny else make_checkpoint(folder)
    seconds = TINY_SECONDS if tiny else SECONDS
    rows = []
    for optimize in (False,) if tiny else (False, True):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = VoxCPM2Model.from_local(str(directory), optimize=optimize, device=device)
        model.stop_head.weight.data.zero_()  # never stops by itself

        async def speak(text: str, model: Any = model) -> AsyncGenerator[int]:
            patches = round(seconds / 0.16)
            chunks = model.generate_streaming(
                target_text=text, min_len=patches, max_len=patches, inference_timesteps=SOLVER_STEPS, cfg_value=CFG
            )
            for chunk in chunks:
                yield chunk.shape[-1]

        for row in asyncio.run(closed(speak, model.sample_rate, (1,), seconds)):
            rows.append({"mode": "compile" if optimize else "eager", **row})
    return rows


def _stub(name: str) -> None:
    """voxcpm imports it for training only."""
    if importlib.util.find_spec(name) is None:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
