"""transformers, eager, in this process: Qwen2-VL-2B's encoder, time to first token and decode steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from benchmarks.checkpoints.published import make
from benchmarks.measure.timing import milliseconds

EMBEDDED = Path(__file__).parents[2] / "models/embedded/qwen2_vl"
TEXT_TOKENS = 128
BATCHES = (1, 8, 32)
MERGED = 4
"""Patches that become one position of the prompt."""


def measure(folder: Path, tiny: bool) -> list[dict[str, Any]]:
    """One picture of 448 x 448 (tiny: 112) and 128 text tokens; decode behind 384 text tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _model(EMBEDDED if tiny else make("qwen2_vl_2b", folder), device, random=not tiny)
    side = (112 if tiny else 448) // 14
    generator = torch.Generator(device).manual_seed(0)
    config = model.config
    grid = torch.tensor([[1, side, side]], device=device)
    text = torch.randint(0, 200, (1, TEXT_TOKENS), generator=generator, device=device)
    vision = [config.vision_start_token_id, *[config.image_token_id] * (side**2 // MERGED), config.vision_end_token_id]
    ids = torch.cat((torch.tensor([vision], device=device), text), 1)

    def pixels() -> torch.Tensor:
        """New in every call."""
        return torch.randn((side**2, 1176), generator=generator, device=device, dtype=model.dtype)

    def first_token() -> None:
        picture = {"pixel_values": pixels(), "image_grid_thw": grid, "mm_token_type_ids": _kinds(ids, config)}
        _generate(model, ids, 1, **picture)

    repeats = 5 if tiny else 20
    with torch.inference_mode():
        rows = [
            _row("encoder", milliseconds(lambda: model.model.visual(pixels(), grid_thw=grid), repeats=repeats)),
            _row("first token", milliseconds(first_token, repeats=repeats)),
        ]
        for batch in BATCHES[:1] if tiny else BATCHES:
            prompt = torch.randint(0, 200, (batch, 384), generator=generator, device=device)
            short, long = (_decoding(model, prompt, tokens) for tokens in (1, 33))
            # The first token comes from the prefill: 32 steps lie between the two.
            step = {name: (long[name] - short["median"]) / 32 for name in long}
            rows.append({"rows": batch, **_row("decode step", step)})
    return rows


def _decoding(model: Qwen2VLForConditionalGeneration, prompt: torch.Tensor, tokens: int) -> dict[str, float]:
    return milliseconds(lambda: _generate(model, prompt, tokens), repeats=3, warm_up=1)


def _row(what: str, timing: dict[str, float]) -> dict[str, Any]:
    return {"what": what, "ms": timing["median"], "p10_ms": timing["p10"], "p90_ms": timing["p90"]}


def _model(directory: Path, device: torch.device, *, random: bool) -> Qwen2VLForConditionalGeneration:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if not random:
        return Qwen2VLForConditionalGeneration.from_pretrained(directory, dtype=dtype).to(device).eval()
    with torch.device(device):
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_pretrained(directory)).to(dtype).eval()


def _kinds(ids: torch.Tensor, config: Qwen2VLConfig) -> torch.Tensor:
    """1 where a picture's embeddings go."""
    return (ids == config.image_token_id).int()


def _generate(model: Qwen2VLForConditionalGeneration, ids: torch.Tensor, tokens: int, **inputs: Any) -> None:
    """Greedy; exactly `tokens` tokens."""
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
    made = model.generate(input_ids=ids, attention_mask=mask, **inputs, **settings)
    assert made.shape[1] == ids.shape[1] + tokens
