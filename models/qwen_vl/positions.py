"""M-RoPE positions (arXiv:2409.12191, section 2.1), with absolute time (arXiv:2502.13923, section 2.1). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_positions(
    num_tokens: int,
    items: Sequence[tuple[int, tuple[int, int, int]]],
    *,
    merge_size: int,
    times: Sequence[np.ndarray | None] | None = None,
) -> tuple[np.ndarray, int]:
    """Positions int32 [3, num_tokens] (time, height, width) and the position of the next token.

    items: (start, (t, h, w)) of every run of vision tokens, in order, with its grid in patches.
    times: for each run the positions of its t frame pairs on the time axis, relative to the start of the run, int [t]
        (time_positions); None: 0, 1, 2, ...

    Positions after a run continue at 1 + its largest position over all three axes, time included. The models were
    trained with this rule, and transformers up to 4.57 follows it; transformers 5 leaves time out, which makes a
    difference for long videos.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    token = offset = 0
    for (start, (t, h, w)), steps in zip(items, times or [None] * len(items), strict=True):
        text = start - token
        positions[:, token:start] = offset + np.arange(text)
        offset += text
        extent = (t, h // merge_size, w // merge_size)
        token = start + t * extent[1] * extent[2]
        positions[:, start:token] = offset + np.indices(extent).reshape(3, -1)
        if steps is not None:
            positions[0, start:token] = offset + np.repeat(steps, extent[1] * extent[2])
        offset = 1 + int(positions[:, start:token].max())
    positions[:, token:] = offset + np.arange(num_tokens - token)
    return positions, offset + num_tokens - token


def time_positions(seconds: np.ndarray, tokens_per_second: float) -> np.ndarray:
    """Positions on the time axis at `seconds` (float [t]): int32 [t], truncated towards zero. The product is computed
    in float32 before it is truncated, as in the code released with Qwen2.5-VL. (transformers 4.57 truncates the seconds
    first, so its time stands still above two frames per second.)
    """
    return (seconds.astype(np.float32) * np.float32(tokens_per_second)).astype(np.int32)


def frame_pair_seconds(num_pairs: int, seconds_per_pair: float) -> np.ndarray:
    """Start of each of evenly spaced frame pairs in seconds, float32 [num_pairs], multiplied in float32 as in the
    reference."""
    return np.arange(num_pairs, dtype=np.float32) * np.float32(seconds_per_pair)
