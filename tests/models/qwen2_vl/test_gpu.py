"""The golden prompts through the CUDA kernels and real graphs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from models.qwen2_vl.model import load_model
from tests.models.qwen2_vl.golden import DIRECTORY, PROMPTS, VIDEO_PROMPT, expected, golden_tokens, model, prompt
from tests.support.chat_golden import encode, generate, rounding_error
from tests.support.encoder_replay import CapturedEncoder, bytes_of_nan
from tests.support.golden import golden_parts, media_files
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFERENCE_FACTOR = 1.5
LARGEST: Bucket = {"patches": 512, "sequences": 16, "max_seqlen": 512}
SMALLER: Bucket = {"patches": 256, "sequences": 8, "max_seqlen": 256}


def forced(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the prompt, and of the reference's tokens fed one by one."""
    ids = golden_tokens(name)
    logits, steps, _ = generate(model(device, dtype), prompt(name), len(ids), forced=ids)
    return logits.cpu(), steps.cpu()


@pytest.mark.parametrize("name", PROMPTS)
def test_float32(name: str) -> None:
    logits, steps = forced(name, CUDA, torch.float32)
    torch.testing.assert_close(logits, expected()[f"prompt.{name}.logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(steps, expected()[f"prompt.{name}.generated_logits"], atol=1e-4, rtol=0)


ITEMS = [name for name in PROMPTS if media_files(DIRECTORY, name) or media_files(DIRECTORY, name, "video")]


def reference_embeds(name: str) -> Tensor:
    """Of a prompt's items: recorded by the names of their files."""
    files = [part.get("video", [part.get("image")])[0] for part in golden_parts(DIRECTORY, name)]
    stems = [Path(file).stem for file in files]
    names = [f"video.{s.split('_video_')[0]}" if "_video_" in s else s.replace("image", "image.") for s in stems]
    return torch.cat([expected()[f"{item}.embeds"] for item in names])


@pytest.mark.parametrize("name", ITEMS)
def test_bfloat16_embeddings_are_as_close_as_their_reference(name: str) -> None:
    reference = reference_embeds(name)
    ours, host = (
        rounding_error(encode(model(device, torch.bfloat16).encoder, prompt(name).items, device), reference)
        for device in (CUDA, CPU)
    )
    assert ours <= REFERENCE_FACTOR * host


@pytest.mark.parametrize("name", PROMPTS)
def test_bfloat16_logits_are_as_close_as_their_reference(name: str) -> None:
    ours, host = (forced(name, device, torch.bfloat16) for device in (CUDA, CPU))
    for part, mine, plain in zip(("logits", "generated_logits"), ours, host, strict=True):
        reference = expected()[f"prompt.{name}.{part}"]
        assert rounding_error(mine, reference) <= REFERENCE_FACTOR * rounding_error(plain, reference), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager_on_a_poisoned_pool(dtype: torch.dtype) -> None:
    captured = CapturedEncoder(load_model(DIRECTORY, CUDA, dtype).encoder, [SMALLER, LARGEST], CUDA)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    mixes = [prompt(name).items for name in ITEMS]
    for rows, plain in captured.replays_on_a_poisoned_pool(mixes, partial(bytes_of_nan, captured.encoder, LARGEST)):
        assert rows.isfinite().all()
        torch.testing.assert_close(rows[: len(plain)], plain, atol=tolerance, rtol=0)


def test_random_weights_of_full_size_are_made_on_the_device(tmp_path: Path) -> None:
    """The 2B shapes, without a file of tensors and without a copy on the host."""
    for file in ("tokenizer.json", "preprocessor_config.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((DIRECTORY / file).read_bytes())
    config = json.loads((DIRECTORY / "config.json").read_text())
    config |= {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    config["vision_config"] |= {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = load_model(tmp_path, CUDA, torch.bfloat16, "random")
    assert sum(parameter.numel() for parameter in made.parameters()) == 2_208_985_600
    logits, _, _ = generate(made, prompt(VIDEO_PROMPT), 2)
    assert logits.isfinite().all()
