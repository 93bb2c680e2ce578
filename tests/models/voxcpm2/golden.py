"""The golden checkpoint and its recorded values."""

from __future__ import annotations

import re
import wave
from functools import cache

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.processor import VoxCPM2Processor, load_processor
from tests.support.golden import GOLDEN, inputs, read_json
from tests.support.speech import Utterance

DIRECTORY = GOLDEN / "voxcpm2"
INPUTS = inputs(DIRECTORY)
MODES = tuple(INPUTS["modes"])
CONFIG = read_json(DIRECTORY, "config.json")
PATCH_SHAPE = CONFIG["patch_size"], CONFIG["feat_dim"]


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


@cache
def processor() -> VoxCPM2Processor:
    return load_processor(DIRECTORY)


@cache
def model(dtype: torch.dtype = torch.float32, device: str = "cpu") -> VoxCPM2:
    """Noise of `seed` s is the captured graph of mode s."""
    loaded = load_model(DIRECTORY, torch.device(device), dtype)
    table = torch.stack([expected()[f"{mode}.noise"] for mode in MODES]).to(device)
    loaded.noise = lambda seeds, steps: table[seeds.clamp(0, len(MODES) - 1), steps.long().clamp(0, table.shape[1] - 1)]
    return loaded


def never_stopping(device: str = "cpu") -> VoxCPM2:
    """A model of its own, with its own noise and a stop head that never fires: lengths are those asked for."""
    loaded = load_model(DIRECTORY, torch.device(device), torch.float32)
    loaded.network.stop_head.weight.data.zero_()
    return loaded


def captured(pattern: str) -> list[re.Match[str]]:
    """Names of recorded values that match as a whole."""
    return [match for name in sorted(expected()) if (match := re.fullmatch(pattern, name))]


def clip(name: str) -> Tensor:
    with wave.open(str(DIRECTORY / name)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype=np.int16)
    return torch.from_numpy(samples.astype(np.float32) / 32768)


def utterance(mode: str, **changes: int) -> Utterance:
    """The request of a golden mode, from text and clips through the processor and the codec."""
    options = INPUTS["modes"][mode]
    nothing = torch.zeros(0, *PATCH_SHAPE)
    reference, prompt = (
        torch.cat(list(model().encode_reference_pieces(clip(options[key]), pad))) if key in options else nothing
        for key, pad in (("reference_wav", "right"), ("prompt_wav", "left"))
    )
    text = options.get("prompt_text", "") + INPUTS["target_text"]
    layout = processor().layout(
        processor().tokenize(text), reference_patches=len(reference), prompt_patches=len(prompt)
    )
    return Utterance(
        layout,
        torch.cat((reference, prompt)),
        seed=MODES.index(mode),
        prompt_patches=len(prompt),
        **{"min_patches": INPUTS["min_len"], "max_patches": INPUTS["max_len"], **changes},
    )
