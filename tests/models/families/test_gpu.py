"""The golden prompts of every chat family through the CUDA kernels and real graphs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.checkpoints.published import make
from models.interfaces.media import MediaItem
from service.graphs.buckets import fits
from tests.models.families.family import ALL, FAMILIES, Family, families, kimi_frames
from tests.support.chat_golden import encode, generate, largest_difference, rounding_error
from tests.support.encoder_replay import CapturedEncoder
from tests.support.golden import change_json, copy_checkpoint
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFERENCE_FACTOR = 1.5
FULL_SIZE_TOWER = {"num_attention_heads": 16, "hidden_size": 1152, "intermediate_size": 4304}
FULL_SIZE_TOWER |= {"init_pos_emb_height": 64, "init_pos_emb_width": 64}
PROMPTS = [
    pytest.param(family, name, id=f"{family.name}-{name}") for family in FAMILIES.values() for name in family.prompts
]
PICTURED = [case for case in PROMPTS if case.values[1] in case.values[0].pictured]


def forced(
    family: Family, name: str, device: str, dtype: torch.dtype, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of the prompt, and of the reference's tokens fed one by one."""
    ids = family.golden_tokens(name)
    model = family.on(device, dtype)
    logits, steps, _ = generate(model, family.prompt(name), len(ids), chunk=chunk, forced=ids)
    return logits.float().cpu(), steps.float().cpu()


def logits_of(family: Family, name: str) -> dict[str, Tensor]:
    """The recorded ones: of the prompt, or of its last tokens, and of the answer."""
    tail = f"prompt.{name}.logits_tail8"
    prompt = family.expected[tail] if tail in family.expected else family.of(name, "logits")
    return {"prompt": prompt, "answer": family.of(name, "generated_logits")}


@pytest.mark.parametrize("chunk", [None, 1], ids=["whole", "rows one by one"])
@pytest.mark.parametrize(("family", "name"), PROMPTS)
def test_float32(family: Family, name: str, chunk: int | None) -> None:
    """A chunk of one row, a picture's too, takes the route of vectors."""
    found = forced(family, name, "cuda", torch.float32, chunk)
    for mine, expected in zip(found, logits_of(family, name).values(), strict=True):
        assert largest_difference(mine[-len(expected) :], expected) <= 1e-4


def reference_embeds(family: Family, name: str) -> Tensor:
    return torch.cat([family.embeds(pack) for pack in family.packs_of(name)])


@pytest.mark.parametrize(("family", "name"), PICTURED)
def test_embeddings(family: Family, name: str) -> None:
    """In float32 those of the reference; in bfloat16 as close to them as the CPU's."""
    items, reference = family.prompt(name).items, reference_embeds(family, name)
    assert largest_difference(encode(family.on("cuda").encoder, items, CUDA), reference) <= family.embeds_tolerance
    ours, host = (
        rounding_error(encode(family.on(device, torch.bfloat16).encoder, items, torch.device(device)), reference)
        for device in ("cuda", "cpu")
    )
    assert ours <= REFERENCE_FACTOR * host


@pytest.mark.parametrize("family", families(quick=ALL))
def test_bfloat16_logits_are_as_close_as_their_reference(family: Family) -> None:
    """By the median token of all prompts. One prompt tells little: noise of 1e-6 in the sums of linear layers, which
    moves a few roundings, changes its error on a CPU by up to a factor of 2, and the median of all by 1.14."""
    ours, host = (bfloat16_errors(family, device) for device in ("cuda", "cpu"))
    for part, mine, plain in zip(("prompt", "answer"), ours, host, strict=True):
        assert mine.median() <= REFERENCE_FACTOR * plain.median(), part


def bfloat16_errors(family: Family, device: str) -> tuple[Tensor, Tensor]:
    """Distances from the recorded logits [tokens], of the tokens of all prompts and of all answers."""
    errors: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name in family.prompts:
        found = forced(family, name, device, torch.bfloat16)
        for part, logits, reference in zip(errors, found, logits_of(family, name).values(), strict=True):
            part.append((logits[-len(reference) :] - reference).norm(dim=-1))
    return torch.cat(errors[0]), torch.cat(errors[1])


SHAPES = [
    [(1, 2, 3, 0), (2, 4, 1, 1), (1, 1, 1, 2)],
    [(1, 8, 8, 3)],
    [(1, 1, 5, 4)],
    [(1, 2, 1, seed) for seed in range(8)],
    [(1, 16, 8, 5)],
    [(16, 1, 2, 6)],
]


def mixes_of(family: Family, encoder: Any) -> list[list[MediaItem]]:
    """The fixture's items by prompt and alone, and random ones, as far as the largest bucket holds them."""
    mixes = [list(family.prompt(name).items) for name in family.pictured]
    mixes += [list(family.items(pack)) for pack in family.packs]
    mixes += [[family.random(*shape) for shape in shapes] for shapes in SHAPES]
    held = [mix for mix in mixes if fits(family.largest, encoder.required(mix))]
    assert len(held) > 4
    return held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", families(quick=ALL))
def test_replay_equals_eager_on_a_poisoned_pool(family: Family, dtype: torch.dtype) -> None:
    encoder = family.fresh("cuda", dtype).encoder
    captured = CapturedEncoder(encoder, [family.smaller, family.largest], CUDA)
    tolerance = family.embeds_tolerance if dtype == torch.float32 else 0.05
    for rows, plain in captured.replays_on_a_poisoned_pool(mixes_of(family, encoder), partial(family.nan_run, encoder)):
        assert rows[: len(plain)].isfinite().all()
        torch.testing.assert_close(rows[: len(plain)], plain, atol=tolerance, rtol=0)


def tower_of_kimi_vl(tmp_path: Path, layers: int, limit: int, dtype: torch.dtype, device: str = "cuda") -> Any:
    """Random weights of the published width."""
    family = FAMILIES["kimi_vl"]
    directory = tmp_path / f"{dtype}"
    copy_checkpoint(family.directory, directory)
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    sizes = vision | FULL_SIZE_TOWER | {"num_hidden_layers": layers}
    change_json(directory / "config.json", {"vision_config": sizes})
    change_json(directory / "preprocessor_config.json", {"in_token_limit": limit})
    return family.fresh(device, dtype, directory, "random").encoder


def test_one_picture_of_kimi_vl_thinking_2506_fills_the_largest_captured_graph(tmp_path: Path) -> None:
    """17856 patches, the most that padding makes of the limit of 16384. A largest sequence length that is baked too
    small would leave the last rows unwritten."""
    encoder = tower_of_kimi_vl(tmp_path, 2, 16384, torch.bfloat16)
    largest = encoder.default_buckets()[-1]
    captured = CapturedEncoder(encoder, [largest], CUDA, 4 << 30)
    for items in ([kimi_frames([(36, 496)])], [kimi_frames([(128, 128)], 1)]):
        replayed, plain = captured.replayed(items).float(), captured.eager(items).float()
        cosine = torch.nn.functional.cosine_similarity(replayed, plain, dim=-1)
        assert float(cosine.min()) > 0.999


def test_the_full_tower_of_kimi_vl_in_bfloat16_follows_float32(tmp_path: Path) -> None:
    exact, rounded = (tower_of_kimi_vl(tmp_path, 4, 4096, dtype) for dtype in (torch.float32, torch.bfloat16))
    for ours, reference in zip(rounded.parameters(), exact.parameters(), strict=True):
        ours.copy_(reference)
    items = [kimi_frames([(16, 16)]), kimi_frames([(46, 36)], 1)]
    wide, narrow = (encode(encoder, items, CUDA).float() for encoder in (exact, rounded))
    assert float(torch.nn.functional.cosine_similarity(wide, narrow, dim=-1).min()) > 0.999


def test_random_weights_of_full_size_are_made_on_the_device(tmp_path: Path) -> None:
    """Without a file of tensors and without a copy on the host."""
    family = FAMILIES["qwen2_vl"]
    made = family.fresh("cuda", torch.bfloat16, make("qwen2_vl_2b", tmp_path), "random")
    assert sum(parameter.numel() for parameter in made.parameters()) == 2_208_985_600
    logits, _, _ = generate(made, family.prompt(family.video_prompt), 2)
    assert logits.isfinite().all()
