"""Checkpoints of random numbers in the published layout, to measure what reading weights costs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.checkpoints.codec_weights import Values, codec_tensors
from benchmarks.checkpoints.quantised import packed
from models.checkpoints import chat_model
from models.checkpoints.checkpoint import published_shapes
from models.checkpoints.registry import family_of, resolve
from models.interfaces.rule import Rule
from models.voxcpm2 import model as voxcpm2

Shapes = dict[str, tuple[int, ...]]


def write_weights(directory: Path) -> int:
    """Write the tensors that a model of `directory` is made of, bfloat16 or quantised; the number of bytes written."""
    config = json.loads((directory / "config.json").read_text())
    save_file(_random(asked_for(directory), config.get("quantization_config")), directory / "model.safetensors")
    if "audio_vae_config" in config:
        save_file(codec_tensors(Values(0), config["audio_vae_config"]), directory / "audiovae.safetensors")
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def asked_for(directory: Path) -> Shapes:
    """Names and shapes of the tensors that the family's loader asks for."""
    shapes: Shapes = {}

    def ask(module: nn.Module, directory: Path, rules: Sequence[Rule], **options: Any) -> None:
        shapes.update(published_shapes(module, rules))

    with patch.object(chat_model, "load_parameters", ask), patch.object(voxcpm2, "load_parameters", ask):
        resolve(family_of(directory).model)(directory, torch.device("meta"), torch.bfloat16, "random")
    return shapes


def _random(shapes: Shapes, quantization: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Matrices N(0, 1 / fan_in), norm weights one, biases zero."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    tensors = dict[str, Tensor]()
    for name, shape in shapes.items():
        if len(shape) > 1:
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            made = packed(name, values * torch.Size(shape[1:]).numel() ** -0.5, quantization)
            tensors |= {key: value.cpu() for key, value in made.items()}
        else:
            tensors[name] = torch.full(shape, float(name.endswith("weight")), dtype=torch.bfloat16)
    return tensors
