"""The processor against the golden prompts, and what untrusted text may not do."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.minicpmv.golden import PROMPTS, expectations, golden_prompt


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_golden_prompts(version: str, name: str) -> None:
    prompt, reference = golden_prompt(version, name), expectations(version, name)
    np.testing.assert_array_equal(prompt.token_ids, reference["input_ids"])
    bounds = [[span.start, span.start + span.length] for span in prompt.spans]
    np.testing.assert_array_equal(bounds, reference["image_bound"])
    assert [span.item for span in prompt.spans] == sorted(span.item for span in prompt.spans)
    assert prompt.positions.tolist() == [list(range(prompt.next_position))]


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_golden_slices(version: str, name: str) -> None:
    prompt, reference = golden_prompt(version, name), expectations(version, name)
    slices = [frame for item in prompt.items for frame in item.frames]
    sizes = [(frame.shape[0] // 14, frame.shape[1] // 14) for frame in slices]
    np.testing.assert_array_equal(sizes, reference["tgt_sizes"])
    groups = np.concatenate([item.arrays["group_sizes"] for item in prompt.items])
    np.testing.assert_array_equal(groups, reference["group_sizes"])
    times = np.concatenate([item.arrays["temporal_ids"] for item in prompt.items])
    np.testing.assert_array_equal(times, reference.get("slice_temporal_ids", np.full(len(times), -1)))
    assert sum(item.num_patches for item in prompt.items) == sum(rows * columns for rows, columns in sizes)
    assert sum(item.num_sequences for item in prompt.items) == len(slices)
    assert sum(item.num_embeds for item in prompt.items) == sum(span.length for span in prompt.spans)
    if "pixel_u8" in reference:
        patches = [
            frame.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 588)
            for frame, (rows, columns) in zip(slices, sizes, strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(patches), reference["pixel_u8"])
