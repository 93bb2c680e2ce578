"""M-RoPE positions (arXiv:2409.12191, section 2.1). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    num_tokens: int, items: Sequence[tuple[int, tuple[int, int, int]]], *, merge_size: int
) -> tuple[np.ndarray, int]:
    """Positions int32 [3, num_tokens] (time, height, width) and the position of the next token.

    items: (start, (t, h, w)) of every run of vision tokens, in order, the grid in patches. What follows a run goes on
    at 1 + the run's largest position over all three axes, time included: the rule that the models were trained with
    (transformers up to 4.57; transformers 5 leaves time out, which differs for long videos of few pixels).
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    token = offset = 0
    for start, (t, h, w) in items:
        text = start - token
        positions[:, token:start] = offset + np.arange(text)
        offset += text
        extent = (t, h // merge_size, w // merge_size)
        token = start + t * extent[1] * extent[2]
        positions[:, start:token] = offset + np.indices(extent).reshape(3, -1)
        offset += max(extent)
    positions[:, token:] = offset + np.arange(num_tokens - token)
    return positions, offset + num_tokens - token
