"""Host arrays of a chat model's step, made from scheduled chunks and sequences, to be uploaded."""

from __future__ import annotations

import numpy as np

from models.interfaces.capturable import Bucket
from service.engine.chat.sequence import ChatSequence, Chunk
from service.engine.chat.slot_state import SAMPLED_INTS, IntColumn
from service.engine.core.pages import block_tables, packed_chunks
from service.link.sampling import MAX_BIASES, MAX_STOP_IDS, FloatColumn

STATE_BUFFERS = ("state_read", "state_write", "snapshot_rows", "snapshot_ends")
"""Buffers of chunks of models with recurrent state, each int64 [sequences]."""


def required_prefill(chunks: tuple[Chunk, ...], feature_levels: int) -> Bucket:
    """The smallest bucket that holds the chunks, for PrefillStep (service.engine.chat.steps)."""
    required = {"tokens": sum(chunk.length for chunk in chunks), "sequences": len(chunks)}
    if not feature_levels:
        return required
    media = any(True for chunk in chunks for _ in chunk.sequence.media_rows(chunk.start, chunk.end))
    return required | {"levels": feature_levels if media else 0}


def chunk_arrays(chunks: tuple[Chunk, ...], page_size: int, max_pages: int) -> dict[str, np.ndarray]:
    """Chunks packed one behind the other; n is the number of their tokens.

    tokens int64 [n], positions int64 [axes, n], and packed_chunks; chunk_slots int64 [chunks] and their block_tables
    int32 [chunks, max_pages]. last_rows int64: the rows where prompts end. media_rows int64, only where positions take
    embeddings of media; mark_rows int64, only where there are marks. For models with recurrent state also state_arrays.
    """
    lengths = np.array([chunk.length for chunk in chunks])
    starts = np.cumsum(lengths) - lengths
    lasts = [start + chunk.length - 1 for start, chunk in zip(starts, chunks, strict=True) if chunk.is_last]
    arrays = {
        "tokens": np.concatenate([chunk.sequence.token_ids(chunk.start, chunk.end) for chunk in chunks]),
        "positions": np.concatenate([c.sequence.positions(c.start, c.end) for c in chunks], axis=1),
        "chunk_slots": np.array([chunk.sequence.slot for chunk in chunks], dtype=np.int64),
        "block_tables": block_tables([chunk.sequence.pages for chunk in chunks], max_pages),
        "last_rows": np.array(lasts, dtype=np.int64),
    } | packed_chunks([(chunk.sequence.pages, chunk.start, chunk.end) for chunk in chunks], page_size)
    media = [
        np.arange(rows.start, rows.end) - chunk.start + start
        for start, chunk in zip(starts, chunks, strict=True)
        for rows in chunk.sequence.media_rows(chunk.start, chunk.end)
    ]
    if media:
        arrays["media_rows"] = np.concatenate(media)
    marks = [
        chunk.sequence.prompt.marks[chunk.sequence.marks(chunk.start, chunk.end)] - chunk.start + start
        for start, chunk in zip(starts, chunks, strict=True)
        if chunk.sequence.prompt.marks is not None
    ]
    if any(map(len, marks)):
        arrays["mark_rows"] = np.concatenate(marks)
    if chunks[0].sequence.state_rows:
        arrays |= state_arrays(chunks)
    return arrays


def next_tokens(chunks: tuple[Chunk, ...]) -> np.ndarray:
    """For each token of the chunks the id of the next one, int64 [n]: 0 if that is not known, -1 where it takes an
    embedding of media."""
    parts = []
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start + 1, chunk.end + 1
        ids = sequence.token_ids(start, end)
        for rows in sequence.media_rows(start, end):
            ids[rows.start - start : rows.end - start] = -1
        parts += [ids, np.zeros(chunk.length - len(ids), np.int64)]
    return np.concatenate(parts)


def state_arrays(chunks: tuple[Chunk, ...]) -> dict[str, np.ndarray]:
    """The rows of recurrent state that chunks read and write, as the fields of StateRows, each int64 [chunks]."""
    rows = [
        (s.state_read, s.state_rows[1], s.snapshot_row, max(0, chunk.snapshot_end - chunk.start))
        for chunk in chunks
        for s in (chunk.sequence,)
    ]
    return dict(zip(STATE_BUFFERS, np.array(rows, dtype=np.int64).T, strict=True))


def admission_arrays(sequences: list[ChatSequence], vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of the slot state, by name, for sequences whose prefill ends in this step: the state of a decode step just
    before it samples the first token.

    vocab_size: larger ids cannot be sampled, and the tables of penalties have no column for them.
    """
    count = len(sequences)
    ints = np.zeros((count, len(IntColumn)), dtype=np.int64)
    floats = np.zeros((count, len(FloatColumn)), dtype=np.float32)
    stop_ids = np.full((count, MAX_STOP_IDS), -1, dtype=np.int64)
    bias_ids = np.zeros((count, MAX_BIASES), dtype=np.int64)
    bias_values = np.zeros((count, MAX_BIASES), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        ints[row], floats[row] = _int_row(sequence), sampling.floats()
        stops = [token for token in sampling.stop_token_ids if token < vocab_size]
        stop_ids[row, : len(stops)] = stops
        bias_ids[row, : len(sampling.logit_bias)] = list(sampling.logit_bias)
        bias_values[row, : len(sampling.logit_bias)] = list(sampling.logit_bias.values())
    arrays: dict[str, np.ndarray] = {
        "new_slots": np.array([sequence.slot for sequence in sequences], dtype=np.int64),
        "new_ints": ints,
        "new_floats": floats,
        "new_stop_ids": stop_ids,
        "new_bias_ids": bias_ids,
        "new_bias_values": bias_values,
    }
    full = [sequence for sequence in sequences if sequence.needs_penalties_or_filters]
    return arrays | (_penalty_arrays(full, vocab_size) if full else {})


def history_arrays(sequences: list[ChatSequence]) -> dict[str, np.ndarray]:
    """Entries of SlotState.history of newly admitted sequences: slots, positions and tokens, int64 [known tokens]."""
    lengths = [sequence.num_tokens for sequence in sequences]
    return {
        "history_slots": np.repeat([sequence.slot for sequence in sequences], lengths),
        "history_places": np.concatenate([np.arange(length) for length in lengths]),
        "history_ids": np.concatenate([sequence.token_ids(0, sequence.num_tokens) for sequence in sequences]),
    }


def _int_row(sequence: ChatSequence) -> np.ndarray:
    """A row of SlotState.ints."""
    sampling, row = sequence.sampling, np.zeros(len(IntColumn), dtype=np.int64)
    row[IntColumn.LENGTH] = sequence.num_tokens - 1
    row[IntColumn.POSITION] = sequence.prompt.next_position + len(sequence.generated) - 1
    row[IntColumn.GENERATED] = len(sequence.generated)
    row[IntColumn.ACTIVE] = 1
    row[IntColumn.SEED] = (sampling.seed + 2**63) % 2**64 - 2**63  # any integer, wrapped to 64 bits
    row[IntColumn.STATED] = sequence.num_tokens
    row[IntColumn.LIMIT] = sequence.max_new_tokens
    for column in SAMPLED_INTS:
        row[column] = getattr(sampling, column.name.lower())
    if sequence.state_rows:  # The last chunk, with which this is sent, writes the second of them.
        row[IntColumn.SPARE], row[IntColumn.STATE] = sequence.state_rows
    return row


def _penalty_arrays(sequences: list[ChatSequence], vocab_size: int) -> dict[str, np.ndarray]:
    """Slots and ids, int64, of the distinct tokens of the prompts and of all tokens of the outputs so far."""
    prompts = [np.unique(s.prompt.token_ids[s.prompt.token_ids < vocab_size]).astype(np.int64) for s in sequences]
    outputs = [np.array(sequence.generated, dtype=np.int64) for sequence in sequences]
    slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
    return {
        "full_slots": slots,
        "prompt_slots": np.repeat(slots, [len(ids) for ids in prompts]),
        "prompt_ids": np.concatenate(prompts),
        "output_slots": np.repeat(slots, [len(ids) for ids in outputs]),
        "output_ids": np.concatenate(outputs),
    }
