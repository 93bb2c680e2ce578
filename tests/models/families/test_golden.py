"""Every chat family against the published implementation: preprocessing, embeddings, prompts, logits, tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.interfaces.media import VideoFrames, VideoMetadata
from models.qwen_vl.encoder import patch_rows
from models.qwen_vl.positions import frame_pair_seconds, time_positions
from tests.models.families.family import ALL, CPU, FAMILIES, IN_FULL, QWEN, Family, families
from tests.support.chat_golden import encode, generate, largest_difference
from tests.support.golden import with_most
from tests.support.inference import no_gradients as no_gradients

LOGITS_TOLERANCE = 1e-4


@pytest.mark.parametrize("family", families(*QWEN, quick=QWEN))
def test_pixels_of_the_qwen_families_are_exact(family: Family) -> None:
    encoder, expected = family.model.encoder, family.expected
    # The newer reference normalises some bytes in another order, by one unit in the last place.
    rounding = 1.2e-7 if "qwen3_5" in family.name else 0.0
    assert largest_difference(encoder.byte_values.view(3, 256), expected["norm_table"]) <= rounding
    for name in family.packs:
        (item,) = family.items(name)
        assert [item.arrays["grid_thw"].tolist()] == expected[f"{name}.grid_thw"].tolist()
        rows = patch_rows(item, encoder.config, CPU)
        if f"{name}.pixel_sha256" in expected:
            assert hashlib.sha256(rows.numpy().tobytes()).digest() == bytes(expected[f"{name}.pixel_sha256"].tolist())
        if f"{name}.pixel_u8" in expected:
            assert torch.equal(rows, expected[f"{name}.pixel_u8"])
        if f"{name}.pixel_values" in expected:
            assert torch.equal(encoder.normalise(rows), expected[f"{name}.pixel_values"])


def test_windows_of_several_items_of_qwen2_5_vl_are_exact() -> None:
    """The fixture packs its items in an order that their embeddings tell."""
    family = FAMILIES["qwen2_5_vl"]
    together, left, order = family.expected["pack.embeds"], list(family.packs), []
    while len(together):
        rows = {name: family.embeds(name) for name in left}
        order += [next(n for n, own in rows.items() if torch.allclose(together[: len(own)], own, atol=2e-5, rtol=0))]
        left.remove(order[-1])
        together = together[len(rows[order[-1]]) :]
    plan = family.model.encoder.plan([item for name in order for item in family.items(name)])
    for field in ("window_index", "reverse_index", "cu_window_seqlens", "cu_seqlens"):
        assert plan.arrays[field].tolist() == family.expected[f"pack.{field}"].tolist()


def test_pixels_of_kimi_vl_are_exact() -> None:
    family = FAMILIES["kimi_vl"]
    table, expected = family.expected["norm_table"], family.expected
    assert torch.equal(family.model.encoder.byte_values.view(3, 256), table)
    for name in family.packs:
        (item,) = family.items(name)
        rows = family.model.encoder.plan([item]).tensors["pixels"][0].view(-1, 3, 14, 14)
        if f"{name}.pixel_u8" in expected:
            assert torch.equal(rows, expected[f"{name}.pixel_u8"])
        else:
            values = torch.stack([table[channel][rows[:, channel].long()] for channel in range(3)], dim=1)
            assert torch.equal(values, expected[f"{name}.pixel_values"])


@pytest.mark.parametrize("family", families(quick=ALL))
def test_embeddings(family: Family) -> None:
    for name in family.packs:
        embeds = encode(family.model.encoder, family.items(name), CPU)
        assert largest_difference(embeds, family.embeds(name)) <= family.embeds_tolerance, name


@pytest.mark.parametrize("family", families(*QWEN))
def test_a_video_is_encoded_in_parts_of_whole_frame_pairs(family: Family) -> None:
    encoder = family.model.encoder
    assert family.videos
    for name in family.videos:
        (video,) = family.items(name)
        pairs, required = video.num_sequences, encoder.required([video])
        room = dict.fromkeys(required, 9999)
        assert pairs > 1, "a video of the fixture has frames for two parts"
        for size in required.keys() & {"patches", "windows"}:
            parts = encoder.split(video, room | {size: required[size] // pairs * (pairs - 1)})
            assert [part.num_sequences for part in parts] == [pairs - 1, 1]
            assert len({part.digest for part in (*parts, video)}) == len(parts) + 1
        pieces = torch.cat([encode(encoder, [part], CPU) for part in parts])
        assert largest_difference(pieces, family.embeds(name)) <= family.embeds_tolerance
        assert [part.num_sequences for part in encoder.split(video, room | {"sequences": 1})] == [1] * pairs
        assert encoder.split(video, room) == [video]


@pytest.mark.slow
def test_a_video_of_kimi_vl_is_encoded_in_parts_of_whole_frames() -> None:
    family = FAMILIES["kimi_vl"]
    encoder, frames = family.model.encoder, np.random.default_rng(0).integers(0, 256, (5, 56, 84, 3), dtype=np.uint8)
    times = (0.5, 1.5, 2.5, 3.5, 4.5)
    item = family.processor.video(
        VideoFrames(tuple(frames), (5, 15, 25, 35, 45), times, VideoMetadata(50, 10.0, 5.0, 56, 84))
    )
    two = 2 * item.num_patches // 5
    parts = encoder.split(item, {"patches": two, "sequences": 9, "max_seqlen": two})
    assert [part.num_sequences for part in parts] == [2, 2, 1]
    assert len({part.digest for part in (*parts, item)}) == 4
    pieces = torch.cat([encode(encoder, [part], CPU) for part in parts])
    assert largest_difference(pieces, encode(encoder, [item], CPU)) <= family.embeds_tolerance


@pytest.mark.parametrize("family", families(quick=ALL))
def test_ids_and_positions_are_exact(family: Family) -> None:
    for name in family.prompts:
        prompt = family.prompt(name)
        length = len(prompt.token_ids)
        assert prompt.token_ids.tolist() == family.of(name, "input_ids").tolist()
        if f"prompt.{name}.position_ids" in family.expected:
            assert prompt.positions.tolist() == family.of(name, "position_ids").tolist()
            assert prompt.next_position - length == family.of(name, "rope_delta").item()
        else:
            axes = family.model.decoder.position_axes
            assert prompt.positions.tolist() == [list(range(length))] * axes and prompt.next_position == length
        if family.version:
            bounds = [[run.start, run.start + run.length] for run in prompt.placeholders]
            assert bounds == family.of(name, "image_bound").tolist()


def names_of(family: Family) -> list[str]:
    """The shortest prompt with a picture is the quick one; IN_FULL has all of them quick."""
    return sorted(family.prompts, key=lambda name: len(family.of(name, "input_ids")))


def prompt_cases() -> list[Any]:
    cases = []
    for family in FAMILIES.values():
        quick = next(name for name in names_of(family) if name in family.pictured)
        for name in names_of(family):
            slow = [] if family.name == IN_FULL or name == quick else [pytest.mark.slow]
            cases.append(pytest.param(family, name, id=f"{family.name}-{name}", marks=slow))
    return cases


@pytest.mark.parametrize(("family", "name"), prompt_cases())
def test_logits_and_greedy_tokens(family: Family, name: str) -> None:
    """In chunks that cut pictures: all but the first have cached context."""
    logits, steps, ids = generate(family.model, family.prompt(name), family.tokens, chunk=family.chunk)
    tail = f"prompt.{name}.logits_tail8"
    expected = family.expected[tail] if tail in family.expected else family.of(name, "logits")
    assert largest_difference(logits[-len(expected) :], expected) <= LOGITS_TOLERANCE
    assert ids == family.golden_tokens(name)
    assert largest_difference(steps, family.of(name, "generated_logits")) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("family", families())
def test_logits_of_one_chunk_and_of_single_rows(family: Family, chunk: int | None) -> None:
    name = with_most(family.directory)
    logits, _, _ = generate(family.model, family.prompt(name), 1, chunk=chunk)
    expected = family.of(name, "logits")
    assert largest_difference(logits[-len(expected) :], expected) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("family", families("qwen3_vl_moe", "qwen3_5_moe", quick=("qwen3_vl_moe", "qwen3_5_moe")))
def test_the_routers_choice_is_the_references(family: Family) -> None:
    expected = {key: value for key, value in family.expected.items() if ".expert_ids" in key}
    assert expected
    for key, experts in expected.items():
        name = key.split(".")[1]
        chosen: list[tuple[Tensor, Tensor]] = []
        routers = [layer.mlp.router for layer in family.model.decoder.layers]
        hooks = [router.register_forward_hook(lambda _m, _i, choice: chosen.append(choice)) for router in routers]  # noqa: B023
        generate(family.model, family.prompt(name), 1)
        for hook in hooks:
            hook.remove()
        for layer, (found, indices) in enumerate(chosen):
            order = found.argsort(dim=-1, descending=True)
            assert torch.equal(indices.gather(1, order).int(), experts[layer])
            assert largest_difference(found.gather(1, order), family.of(name, "expert_weights")[layer]) <= 1e-5


def test_time_of_qwen2_5_vl_is_multiplied_before_it_is_cut() -> None:
    table = FAMILIES["qwen2_5_vl"].expected
    for seconds, index in zip(table["time.second_per_grid"].tolist(), table["time.index"].tolist(), strict=True):
        assert time_positions(frame_pair_seconds(len(index), seconds), 2).tolist() == index
