"""A checkpoint in 4 bits, as llm-compressor writes them (pack-quantized), made of one in 16 bits by rounding to the
nearest code: no calibration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_LANGUAGE = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.", "llm.model.layers.")


def in_four_bits(directory: Path, target: Path, group: int) -> Path:
    """Writes a copy of `directory` at `target`, in which the linear layers and single experts of the language model
    have codes with a scale and a zero for each `group` inputs."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    for path in directory.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, target / path.name)
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    for path in directory.glob("*.safetensors"):
        made: dict[str, Tensor] = {}
        for name, value in load_file(path).items():
            linear = name.startswith(_LANGUAGE) and name.endswith("_proj.weight") and value.shape[-1] % group == 0
            made |= packed(name.removesuffix(".weight"), value, group) if linear else {name: value}
        save_file(made, target / path.name)
    return target


def packed(name: str, weight: Tensor, group: int) -> dict[str, Tensor]:
    """The tensors of a layer: weight [N, K]."""
    outputs, inputs = weight.shape
    groups = weight.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
    zeros = (-low / scale.float()).round().clamp(0, 15)
    codes = ((groups / scale.float()[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(-2)
    return {
        f"{name}.weight_packed": _words(codes),
        f"{name}.weight_scale": scale,
        f"{name}.weight_zero_point": _words(torch.nn.functional.pad(zeros.T, (0, -outputs % 8))).T.contiguous(),
        f"{name}.weight_shape": torch.tensor([outputs, inputs]),
    }


def _words(codes: Tensor) -> Tensor:
    """[..., K] -> int32 [..., K / 8], the first code in the lowest bits."""
    shifts = 4 * torch.arange(8)
    words = (codes.to(torch.int64).unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
