"""models/embedded/qwen2_vl around trained weights: the same bytes come out every time.

python -m training.vision.checkpoint build/vision/average.safetensors
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.loop import publish
from training.vision.network import Network
from training.vision.vocabulary import CONFIG, PUBLISHED, tokenizer

_TOKENS = {"bos": "endoftext", "eos": "im_end", "vision_start": "vision_start", "vision_end": "vision_end"}
_TOKENS |= {"vision": "vision_pad", "image": "image_pad", "video": "video_pad"}


def write(directory: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes all files of the checkpoint.

    Files that say nothing of the weights are those of the published one. Its rope_theta is small: a head of 32 values
    has few frequencies, and the published million would leave the columns of a picture alike."""
    publish(PUBLISHED, directory, tensors)
    tokens = tokenizer()
    ids = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    generation = json.loads((PUBLISHED / "generation_config.json").read_text(encoding="utf-8"))
    end = ids["<|endoftext|>"]
    generation |= {"bos_token_id": end, "eos_token_id": [ids["<|im_end|>"], end], "pad_token_id": end}
    config = config | {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in _TOKENS.items()}
    contents = {"config.json": config, "generation_config.json": generation, "tokenizer.json": tokens}
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def config_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return CONFIG | {"vocab_size": len(tensors["model.embed_tokens.weight"])}


def make(directory: Path, weights: Path) -> None:
    """weights: a safetensors file in the published names."""
    tensors = load_file(weights)
    write(directory, config_of(tensors), tensors)


def load(weights: Path, device: torch.device) -> Network:
    """The network with a checkpoint's weights in float32."""
    tensors = load_file(weights)
    network = Network(config_of(tensors))
    missing = network.load_state_dict(tensors, strict=False)
    if missing.unexpected_keys or any(not name.startswith("auxiliary.") for name in missing.missing_keys):
        raise ValueError(f"{weights}: not the tensors of this network: {missing}")
    return network.to(device)


if __name__ == "__main__":
    make(PUBLISHED, Path(sys.argv[1]))
