"""Audio as media items. Torch-free.

An item has its samples float32 [n] at 16 kHz in the array `samples`. A part of one has all of them, too, because the
floor of its features depends on the whole item, and the chunks [start, stop) that it stands for in `chunks`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from models.interfaces.media import MediaItem, media_digest
from models.qwen3_asr.config import CHUNK_FRAMES, CHUNK_ROWS, HOP, MIN_SAMPLES, SAMPLE_RATE, AudioConfig

SEARCH_SECONDS = 5.0
"""How far from its planned end a piece may be cut."""


def audio_item(samples: np.ndarray, config: AudioConfig, settings: bytes) -> MediaItem:
    """samples: float32 [n], padded here if they are short. settings: passed to media_digest."""
    samples = np.pad(samples, (0, max(0, MIN_SAMPLES - len(samples))))
    frames = len(samples) // HOP
    chunks = -(-frames // CHUNK_FRAMES)
    arrays = {"samples": samples}
    return MediaItem(
        kind="audio",
        frames=(),
        arrays=arrays,
        num_patches=chunks * CHUNK_ROWS,
        num_sequences=-(-chunks // config.window_chunks),
        num_embeds=rows_of(frames),
        digest=media_digest("audio", (), arrays, settings),
    )


def rows_of(frames: int) -> int:
    """Embedding rows of so many frames: three convolutions of stride 2 halve each chunk and round up."""
    whole, rest = divmod(frames, CHUNK_FRAMES)
    return whole * CHUNK_ROWS + -(-rest // 8)


def chunks_of(item: MediaItem) -> tuple[int, int]:
    """The chunks [start, stop) of its samples that an item stands for."""
    if (part := item.arrays.get("chunks")) is not None:
        return int(part[0]), int(part[1])
    return 0, item.num_patches // CHUNK_ROWS


def part_of(item: MediaItem, start: int, stop: int, config: AudioConfig) -> MediaItem:
    """The chunks [start, stop) of the item's samples; start is at a window's begin."""
    frames = len(item.arrays["samples"]) // HOP
    return replace(
        item,
        arrays={**item.arrays, "chunks": np.array([start, stop], dtype=np.int32)},
        num_patches=(stop - start) * CHUNK_ROWS,
        num_sequences=-(-(stop - start) // config.window_chunks),
        num_embeds=rows_of(min(frames, stop * CHUNK_FRAMES)) - start * CHUNK_ROWS,
        digest=hashlib.sha256(item.digest + f"chunks {start}:{stop}".encode()).digest(),
    )


def quiet_pieces(
    samples: np.ndarray, seconds: float, *, search_seconds: float = SEARCH_SECONDS, window_ms: float = 100.0
) -> list[np.ndarray]:
    """Consecutive pieces of float32 [n] that are about as long as asked, by the rule of the makers' package: within
    search_seconds of the end of a piece it is cut at the quietest sample of the quietest window."""
    length, search = max(1, int(seconds * SAMPLE_RATE)), max(1, int(search_seconds * SAMPLE_RATE))
    window = max(4, int(window_ms / 1000 * SAMPLE_RATE))
    pieces, start = [], 0
    while len(samples) - start > length:
        first, end = max(start, start + length - search), min(len(samples), start + length + search)
        cut = start + length
        if end - first > window:
            loudness = np.abs(samples[first:end])
            sums = np.cumsum(np.concatenate(([0.0], loudness)), dtype=np.float64)
            quietest = int(np.argmin(sums[window:] - sums[:-window]))
            cut = first + quietest + int(np.argmin(loudness[quietest : quietest + window]))
        cut = max(cut, start + 1)
        pieces.append(samples[start:cut])
        start = cut
    return [*pieces, samples[start:]]
