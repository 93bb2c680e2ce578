"""models/embedded/qwen2_vl around trained weights: the same bytes come out every time.

python -m training.vision.checkpoint build/vision/average.safetensors
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.vision.network import Network, Shape
from training.vision.vocabulary import PUBLISHED, tokenizer


def publish(directory: Path, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
    """Writes all files of the checkpoint; tensors in any float type are stored as bf16, auxiliary ones are left out.

    Files that say nothing of the weights are those of the published one. Its rope_theta is small: a head of 32 values
    has few frequencies, and the published million would leave the columns of a picture alike."""
    directory.mkdir(parents=True, exist_ok=True)
    config, tokens = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8")), tokenizer()
    ids = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    generation = json.loads((PUBLISHED / "generation_config.json").read_text(encoding="utf-8"))
    end = ids["<|endoftext|>"]
    generation |= {"bos_token_id": end, "eos_token_id": [ids["<|im_end|>"], end], "pad_token_id": end}
    config |= {"bos_token_id": end, "eos_token_id": ids["<|im_end|>"], "vocab_size": shape.vocab_size}
    config |= {f"vision_{part}_token_id": ids[f"<|vision_{part}|>"] for part in ("start", "end")}
    config |= {"vision_token_id": ids["<|vision_pad|>"], "image_token_id": ids["<|image_pad|>"]}
    config |= {"video_token_id": ids["<|video_pad|>"], "num_hidden_layers": shape.layers}
    config["vision_config"]["depth"] = shape.vision_depth
    contents = {"config.json": config, "generation_config.json": generation, "tokenizer.json": tokens}
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for name in ("preprocessor_config.json", "tokenizer_config.json"):
        if directory != PUBLISHED:
            shutil.copyfile(PUBLISHED / name, directory / name)
    kept = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in sorted(tensors.items())
        if not name.startswith("auxiliary.")
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def make(directory: Path, weights: Path) -> None:
    """weights: a safetensors file in the published names."""
    tensors = load_file(weights)
    publish(directory, Shape(vocab_size=len(tensors["model.embed_tokens.weight"])), tensors)


def load(weights: Path, device: torch.device) -> Network:
    """The network with a checkpoint's weights in float32."""
    tensors = load_file(weights)
    network = Network(Shape(vocab_size=len(tensors["model.embed_tokens.weight"])))
    missing = network.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    if missing.unexpected_keys or any(not name.startswith("auxiliary.") for name in missing.missing_keys):
        raise ValueError(f"{weights}: not the tensors of this network: {missing}")
    return network.to(device)


if __name__ == "__main__":
    make(PUBLISHED, Path(sys.argv[1]))
