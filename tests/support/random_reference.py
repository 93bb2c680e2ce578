"""Checkpoints of the Qwen-VL families with random weights, compared with the model of transformers that saved them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from models.interfaces.media import Prompt
from models.qwen_vl.encoder import patch_rows
from tests.support.chat_golden import generate
from tests.support.golden import copy_checkpoint

CPU = torch.device("cpu")
TOLERANCE = 3e-5


def without_weights(golden: Path, target: Path) -> Path:
    """A copy of a golden checkpoint without its tensors."""
    directory = copy_checkpoint(golden, target)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    return directory


def change_json(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def save_random(directory: Path) -> torch.nn.Module:
    """The published code's model of these files, with random weights that it saves beside them."""
    import transformers

    published = (directory / "config.json").read_text()
    (name,) = json.loads(published)["architectures"]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(directory)).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.2)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.tie_weights()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(published)
    return model


@torch.inference_mode()
def check_pictures(reference: torch.nn.Module, model: Any, prompt: Prompt, placeholder: int) -> None:
    """Logits of a prompt with pictures. placeholder: the id that stands for their rows."""
    ids = torch.from_numpy(prompt.token_ids).long()[None]
    encoder = model.encoder
    expected = reference(
        input_ids=ids,
        pixel_values=torch.cat([encoder.normalise(patch_rows(item, encoder.config, CPU)) for item in prompt.items]),
        image_grid_thw=torch.stack([torch.from_numpy(item.arrays["grid_thw"]).long() for item in prompt.items]),
        mm_token_type_ids=(ids == placeholder).long(),
    ).logits[0]
    logits, _, _ = generate(model, prompt, 1)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
