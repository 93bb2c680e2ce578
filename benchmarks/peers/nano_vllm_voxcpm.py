"""nano-vllm-voxcpm, in its own process without HTTP. Needs CUDA and flash-attn."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.streams import closed
from benchmarks.peers.voxcpm import CFG, SECONDS, SOLVER_STEPS, make_checkpoint

STREAMS = (1, 8, 32, 64)


def measure(folder: Path, tiny: bool) -> list[dict[str, Any]]:
    if tiny:
        raise SystemExit("nano-vllm-voxcpm has no miniature: its attention needs CUDA and heads of 128")
    directory = make_checkpoint(folder)
    _as_it_reads(directory)
    return asyncio.run(_measure(directory))


async def _measure(directory: Path) -> list[dict[str, Any]]:
    from nanovllm_voxcpm import VoxCPM

    began = time.perf_counter()
    pool = VoxCPM.from_pretrained(
        str(directory),
        inference_timesteps=SOLVER_STEPS,
        max_num_batched_tokens=8192,
        max_num_seqs=max(STREAMS),
        max_model_len=1024,
        gpu_memory_utilization=0.7,
        devices=[0],
    )
    await pool.wait_for_ready()
    start = time.perf_counter() - began
    sample_rate = json.loads((directory / "config.json").read_text())["audio_vae_config"]["out_sample_rate"]

    async def speak(text: str) -> AsyncGenerator[int]:
        async for chunk in pool.generate(text, max_generate_length=round(SECONDS / 0.16), cfg_value=CFG):
            yield len(chunk)

    try:
        rows = await closed(speak, sample_rate, STREAMS, SECONDS)
    finally:
        await pool.stop()
    return [{**row, "start_s": start} for row in rows]


def _as_it_reads(directory: Path) -> None:
    """Writes the codec to audiovae.pth, with a stop head that never stops, since a minimum length cannot be set."""
    tensors = load_file(directory / "model.safetensors")
    tensors["stop_head.weight"].zero_()
    save_file(tensors, directory / "model.safetensors")
    torch.save({"state_dict": load_file(directory / "audiovae.safetensors")}, directory / "audiovae.pth")
