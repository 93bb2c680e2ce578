"""What goes up to the device for a step of a chat model: host arrays from scheduled chunks and sequences."""

from __future__ import annotations

import numpy as np

from models.protocol import Capacity
from service.engine.sampling_params import MAX_BIASES, MAX_STOP_IDS
from service.engine.scheduler import Chunk
from service.engine.sequence import Sequence
from service.engine.slot_state import Float, Int


def prefill_needs(chunks: tuple[Chunk, ...]) -> Capacity:
    """What a recorded prefill must hold (service.engine.decode_step.PrefillStep)."""
    return {"tokens": sum(chunk.length for chunk in chunks), "sequences": len(chunks)}


def chunk_arrays(chunks: tuple[Chunk, ...], num_decode_rows: int, page_size: int) -> dict[str, np.ndarray]:
    """The prefill rows of a packed batch; n are the chunks' tokens together.

    tokens int64 [n], positions int64 [axes, n], cache_rows int64 [n]; cu_seqlens_q and cu_seqlens_k int32 [chunks + 1].
    sampled_rows int64: the packed rows that end in a token, decode rows first. key_rows int64 [keys], only where a
    chunk has a past; media_rows int64, only where positions take embeddings of media. The last three count the decode
    rows, which are packed before the prefill rows.
    """
    lengths = np.array([chunk.length for chunk in chunks])
    starts = num_decode_rows + np.cumsum(lengths) - lengths
    key_rows = [cache_rows(chunk.sequence, chunk.end, page_size) for chunk in chunks]
    lasts = [start + chunk.length - 1 for start, chunk in zip(starts, chunks, strict=True) if chunk.is_last]
    arrays = {
        "tokens": np.concatenate([chunk.sequence.token_ids(chunk.start, chunk.end) for chunk in chunks]),
        "positions": np.concatenate([c.sequence.positions(c.start, c.end) for c in chunks], axis=1),
        "cache_rows": np.concatenate([rows[c.start :] for rows, c in zip(key_rows, chunks, strict=True)]),
        "cu_seqlens_q": cu_seqlens(lengths),
        "cu_seqlens_k": cu_seqlens(np.array([chunk.end for chunk in chunks])),
        "sampled_rows": np.concatenate((np.arange(num_decode_rows), np.array(lasts, dtype=np.int64))),
    }
    if any(chunk.start for chunk in chunks):
        arrays["key_rows"] = np.concatenate(key_rows)
    media = [
        np.arange(rows.start, rows.end) - chunk.start + start
        for start, chunk in zip(starts, chunks, strict=True)
        for rows in chunk.sequence.media_rows(chunk.start, chunk.end)
    ]
    if media:
        arrays["media_rows"] = np.concatenate(media)
    return arrays


def cache_rows(sequence: Sequence, end: int, page_size: int) -> np.ndarray:
    """Cache row of each of the first `end` positions, int64."""
    positions = np.arange(end)
    pages = np.asarray(sequence.pages, dtype=np.int64)
    return pages[positions // page_size] * page_size + positions % page_size


def cu_seqlens(lengths: np.ndarray) -> np.ndarray:
    """Bounds of consecutive segments, int32 [segments + 1]."""
    return np.concatenate((np.zeros(1), np.cumsum(lengths))).astype(np.int32)


def admission_arrays(sequences: list[Sequence], max_pages: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Slot-state rows by name: as if the last known token were fed by a decode step, which sampling then ends.

    vocab_size: ids from there on cannot be sampled; the tables of the full sampler have no column for them.
    """
    count = len(sequences)
    ints = np.zeros((count, len(Int)), dtype=np.int64)
    floats = np.zeros((count, len(Float)), dtype=np.float32)
    stop_ids = np.full((count, MAX_STOP_IDS), -1, dtype=np.int64)
    tables = np.zeros((count, max_pages), dtype=np.int32)
    bias_ids = np.zeros((count, MAX_BIASES), dtype=np.int64)
    bias_values = np.zeros((count, MAX_BIASES), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        s = sequence.sampling
        ints[row, Int.LENGTH] = sequence.num_tokens - 1
        ints[row, Int.POSITION] = sequence.prompt.next_position + len(sequence.generated) - 1
        ints[row, Int.GENERATED] = len(sequence.generated)
        ints[row, Int.ACTIVE] = 1
        ints[row, Int.SEED] = (s.seed + 2**63) % 2**64 - 2**63
        ints[row, Int.MIN_TOKENS] = s.min_tokens
        ints[row, Int.TOP_K] = s.top_k
        floats[row, Float.TEMPERATURE] = 0.0 if s.top_k == 1 else s.temperature
        floats[row, Float.TOP_P] = s.top_p
        floats[row, Float.MIN_P] = s.min_p
        floats[row, Float.REPETITION] = s.repetition_penalty
        floats[row, Float.PRESENCE] = s.presence_penalty
        floats[row, Float.FREQUENCY] = s.frequency_penalty
        stops = [token for token in s.stop_token_ids if token < vocab_size]
        stop_ids[row, : len(stops)] = stops
        tables[row, : len(sequence.pages)] = sequence.pages
        bias_ids[row, : len(s.logit_bias)] = list(s.logit_bias)
        bias_values[row, : len(s.logit_bias)] = list(s.logit_bias.values())
    arrays: dict[str, np.ndarray] = {
        "new_slots": np.array([sequence.slot for sequence in sequences], dtype=np.int64),
        "new_ints": ints,
        "new_floats": floats,
        "new_stop_ids": stop_ids,
        "new_block_tables": tables,
        "new_bias_ids": bias_ids,
        "new_bias_values": bias_values,
    }
    full = [sequence for sequence in sequences if sequence.needs_full_sampler]
    if full:
        prompts = [np.unique(s.prompt.token_ids[s.prompt.token_ids < vocab_size]).astype(np.int64) for s in full]
        outputs = [np.array(s.generated, dtype=np.int64) for s in full]
        slots = np.array([s.slot for s in full], dtype=np.int64)
        arrays |= {
            "full_slots": slots,
            "prompt_slots": np.repeat(slots, [len(ids) for ids in prompts]),
            "prompt_ids": np.concatenate(prompts),
            "output_slots": np.repeat(slots, [len(ids) for ids in outputs]),
            "output_ids": np.concatenate(outputs),
        }
    return arrays
