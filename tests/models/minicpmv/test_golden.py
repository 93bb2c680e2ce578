"""The networks against the golden tensors, through load_processor and load_model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from models.minicpmv.model import MiniCPMVModel, load_model
from models.protocol import Plan
from service.graphs.buffers import exact_buffers
from tests.models.minicpmv.golden import PROMPTS, directory, expectations, golden_prompt
from tests.support.paged import PagedCache

EMBEDS_TOLERANCE = 3e-5
LOGITS_TOLERANCE = 1e-4


@cache
def model(version: str) -> MiniCPMVModel:
    return load_model(directory(version), torch.device("cpu"), torch.float32)


def encode(version: str, plan: Plan) -> Tensor:
    """Embeddings by the eager route."""
    encoder = model(version).encoder
    buffers = exact_buffers(encoder.buffer_specs(plan.needs), plan, torch.device("cpu"))
    return encoder.forward(buffers, plan.needs)["embeds"]


def close(value: Tensor, reference: np.ndarray, tolerance: float) -> None:
    torch.testing.assert_close(value, torch.from_numpy(reference), atol=tolerance, rtol=0)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_encoder(version: str, name: str) -> None:
    reference = expectations(version, name)
    encoder = model(version).encoder
    plan = encoder.plan(golden_prompt(version, name).items)
    np.testing.assert_array_equal(plan.arrays["position_ids"], reference["tower_position_ids"])
    close(encode(version, plan), reference["slice_embeds"].reshape(-1, encoder.config.width), EMBEDS_TOLERANCE)
    if "tower_hidden" in reference:
        patches = encoder.pixel_table[torch.from_numpy(plan.arrays["pixels"]).int()]
        hidden = encoder.tower(
            patches,
            torch.from_numpy(plan.arrays["position_ids"]),
            torch.from_numpy(plan.arrays["cu_slices"]),
            plan.needs["max_seqlen"],
        )
        close(hidden, reference["tower_hidden"], EMBEDS_TOLERANCE)


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_logits_and_greedy_tokens(version: str, name: str) -> None:
    reference = expectations(version, name)
    prompt = golden_prompt(version, name)
    decoder = model(version).decoder
    hidden = decoder.embed(torch.from_numpy(prompt.token_ids).long())
    embeds = encode(version, model(version).encoder.plan(prompt.items))
    rows = np.concatenate([np.arange(span.start, span.start + span.length) for span in prompt.spans])
    hidden[torch.from_numpy(rows)] = embeds
    generated = reference["generated_ids"].tolist()
    cache = PagedCache(decoder.cache_specs())
    sequence = cache.new_sequence(len(prompt.token_ids) + len(generated))
    # Two chunks, so that the second one meets a past.
    half = len(prompt.token_ids) // 2
    outputs = []
    for start, stop in ((0, half), (half, len(prompt.token_ids))):
        batch = cache.batch(prefills=[(sequence, stop - start)])
        positions = torch.from_numpy(prompt.positions[:, start:stop])
        outputs.append(decoder.forward(hidden[start:stop], positions, batch))
    logits = decoder.logits(torch.cat(outputs))
    if "logits" in reference:
        close(logits, reference["logits"], LOGITS_TOLERANCE)
    else:
        close(logits[-8:], reference["logits_tail8"], LOGITS_TOLERANCE)
    tokens, steps = [], [logits[-1]]
    for step in range(len(generated)):
        tokens.append(int(steps[-1].argmax()))
        if step + 1 < len(generated):
            batch = cache.batch(decodes=[sequence])
            position = torch.tensor([[prompt.next_position + step]])
            out = decoder.forward(decoder.embed(torch.tensor(tokens[-1:])), position, batch)
            steps.append(decoder.logits(out)[0])
    assert tokens == generated
    close(torch.stack(steps), reference["generated_logits"], LOGITS_TOLERANCE)
