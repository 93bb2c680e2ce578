"""The networks against the golden tensors, through load_processor and load_model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from models.layers.packed import byte_lookup
from models.minicpmv.model import MiniCPMVModel, load_model
from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, expected, golden_prompt
from tests.support.chat_golden import encode, generate, largest_difference

CPU = torch.device("cpu")
EMBEDS_TOLERANCE = 3e-5
LOGITS_TOLERANCE = 1e-4


@cache
def model(version: str) -> MiniCPMVModel:
    return load_model(directory(version), CPU, torch.float32)


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_encoder(version: str, name: str) -> None:
    reference, items = expectations(version, name), golden_prompt(version, name).items
    encoder = model(version).encoder
    embeds = encode(encoder, items, CPU)
    assert largest_difference(embeds, reference["slice_embeds"].reshape(embeds.shape)) <= EMBEDS_TOLERANCE
    plan = encoder.plan(items)
    np.testing.assert_array_equal(plan.arrays["position_ids"], reference["tower_position_ids"])
    if "tower_hidden" in reference:
        buffers = {buffer: torch.from_numpy(array) for buffer, array in plan.arrays.items()}
        width = encoder.tower.patch_embedding.in_features
        patches = byte_lookup(buffers["pixels"], encoder.byte_values[None], width)
        with torch.inference_mode():
            hidden = encoder.tower(patches, buffers["position_ids"], buffers["cu_slices"], plan.required["max_seqlen"])
        assert largest_difference(hidden, reference["tower_hidden"]) <= EMBEDS_TOLERANCE


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_logits_and_greedy_tokens(version: str, name: str) -> None:
    reference, prompt = expectations(version, name), golden_prompt(version, name)
    generated = reference["generated_ids"].tolist()
    # Two chunks, so that the second one has cached context.
    chunk = len(prompt.token_ids) // 2 + 1
    logits, steps, ids = generate(model(version), prompt, len(generated), chunk=chunk)
    if "logits" in reference:
        assert largest_difference(logits, reference["logits"]) <= LOGITS_TOLERANCE
    else:
        assert largest_difference(logits[-8:], reference["logits_tail8"]) <= LOGITS_TOLERANCE
    assert ids == generated
    assert largest_difference(steps, reference["generated_logits"]) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_are_normalised_as_published(version: str) -> None:
    assert torch.equal(model(version).encoder.byte_values, torch.from_numpy(expected(version)["norm_table"]))
