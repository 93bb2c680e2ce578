"""Checkpoints of random numbers in the published layout, to measure what reading weights costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checkpoints.codec_weights import Values, codec_tensors
from benchmarks.checkpoints.quantised import packed
from models.checkpoints.chat_model import VisionChatModel
from models.checkpoints.checkpoint import published_shapes
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_rules
from models.qwen_vl import config as qwen2_vl_config
from models.qwen_vl.model import vision_rules
from models.qwen_vl.v2_5 import config as qwen2_5_vl_config
from models.qwen_vl.v2_5 import model as qwen2_5_vl
from models.qwen_vl.v2_5.vision import Qwen25VLEncoder
from models.qwen_vl.vision import Qwen2VLEncoder
from models.voxcpm2 import config as voxcpm2_config
from models.voxcpm2.network import VoxCPM2Network, network_rules

Shapes = dict[str, tuple[int, ...]]


def write_weights(directory: Path) -> int:
    """Write the tensors that config.json in `directory` asks for, bfloat16 or quantised; the number of bytes written.

    Families: those of WRITERS. Raises KeyError for another.
    """
    config = json.loads((directory / "config.json").read_text())
    family = config.get("model_type") or config["architecture"]
    shapes = WRITERS[family](directory)
    save_file(_random(shapes, config.get("quantization_config")), directory / "model.safetensors")
    if family == "voxcpm2":
        save_file(codec_tensors(Values(0), config["audio_vae_config"]), directory / "audiovae.safetensors")
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _qwen2_vl(directory: Path) -> Shapes:
    config = qwen2_vl_config.load_config(directory)
    decoder = DecoderConfig.from_published(config.text, qkv_bias=True)
    with torch.device("meta"):
        model = VisionChatModel(Qwen2VLEncoder(config.vision, config.images), CausalDecoder(decoder))
    return published_shapes(model, [*vision_rules(config.vision), *decoder_rules(decoder)])


def _qwen2_5_vl(directory: Path) -> Shapes:
    config = qwen2_5_vl_config.load_config(directory)
    decoder = DecoderConfig.from_published(config.shared.text, qkv_bias=True)
    with torch.device("meta"):
        model = VisionChatModel(Qwen25VLEncoder(config), CausalDecoder(decoder))
    return published_shapes(model, [*qwen2_5_vl.vision_rules(config.shared.vision), *decoder_rules(decoder)])


def _voxcpm2(directory: Path) -> Shapes:
    config = voxcpm2_config.load_config(directory)
    with torch.device("meta"):
        network = VoxCPM2Network(config, torch.bfloat16)
    return published_shapes(network, network_rules(config))


WRITERS: dict[str, Callable[[Path], Shapes]] = {"qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl, "voxcpm2": _voxcpm2}


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
