"""Adapters made at random, and the weights that they would be merged into by hand."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.voxcpm2.config import load_config
from models.voxcpm2.lora import lora_places
from models.voxcpm2.model import VoxCPM2

GROUPS = ("lm", "dit", "enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj", "fusion_concat_proj")


def random_adapter(checkpoint: Path, rank: int, seed: int, groups: Collection[str] = GROUPS) -> dict[str, Tensor]:
    """Tensors by published name. B A adds about a fifth to a layer's output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for place in lora_places(load_config(checkpoint)).values():
        for name, width in zip(place.names, place.widths, strict=True):
            if place.group in groups:
                a = torch.randn((rank, place.inputs), generator=generator) * place.inputs**-0.5
                b = torch.randn((width, rank), generator=generator) * 0.2 * rank**-0.5
                tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"] = a, b
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> None:
    """In the format of VoxCPM's fine-tuning."""
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "lora_weights.safetensors")
    lora = {"enable_lm": True, "enable_dit": True, "enable_proj": True, "r": rank, "alpha": alpha, "dropout": 0.0}
    (folder / "lora_config.json").write_text(json.dumps({"base_model": "somewhere", "lora_config": lora}))


def merge(model: VoxCPM2, tensors: Mapping[str, Tensor], scale: float) -> None:
    """W + scale B A, written by hand for each of the model's weights."""
    network = model.network

    def add(weight: Tensor, name: str, first: int = 0) -> int:
        if f"{name}.lora_A" not in tensors:
            return first
        delta = scale * tensors[f"{name}.lora_B"].double() @ tensors[f"{name}.lora_A"].double()
        end = first + delta.shape[0]
        rows = weight.data[first:end]
        rows.copy_((rows.double().cpu() + delta).to(rows.dtype))
        return end

    stacks = {
        "base_lm": network.base_lm,
        "residual_lm": network.residual_lm,
        "feat_decoder.estimator.decoder": network.feat_decoder.decoder.stack,
    }
    for prefix, stack in stacks.items():
        for index, block in enumerate(stack.blocks()):
            attention, first = f"{prefix}.layers.{index}.self_attn", 0
            for part in "qkv":
                first = add(block.attention.qkv.weight, f"{attention}.{part}_proj", first)
            add(block.attention.out.weight, f"{attention}.o_proj")
    for name in ("enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj", "fusion_concat_proj"):
        add(getattr(network, name).weight, name)
