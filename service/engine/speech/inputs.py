"""Inputs of a speech model's passes: host arrays from scheduled chunks and sequences, and the slot-state tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.protocol import RESULT_FLAGS, SpeechModel
from service.engine.core.pages import block_tables, packed_chunks
from service.engine.speech.sequence import SpeechSequence
from service.engine.speech.stream import PrefillChunk


def slot_state(model: SpeechModel, max_streams: int, max_pages: int, device: torch.device) -> dict[str, Tensor]:
    """The model's tables and the block table, one row per slot and the scratch slot."""
    rows = max_streams + 1
    state = {
        name: torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device)
        for name, spec in model.state_specs().items()
    }
    state["block_table"] = torch.zeros((rows, max_pages), dtype=torch.int32, device=device)
    return state


def slots_of(sequences: Sequence[SpeechSequence]) -> np.ndarray:
    """Request slots int64 [rows]."""
    return np.array([sequence.stream.slot for sequence in sequences], dtype=np.int64)


def adapter_slot(sequence: SpeechSequence) -> int:
    """By which the rows of a step are sorted."""
    return sequence.stream.adapter_slot


def adapter_slots_of(sequences: Sequence[SpeechSequence], positions: int | Sequence[int] = 1) -> np.ndarray:
    """The adapter's slot int32 of each row, or of so many positions of each prompt; -1 for none."""
    return np.repeat(np.array([adapter_slot(sequence) for sequence in sequences], dtype=np.int32), positions)


def slots_plan(slots: np.ndarray) -> Plan:
    """The plan of a step with a row for each of these slots int64 [rows]."""
    return Plan(arrays={"slots": slots}, required={"rows": len(slots)})


def prompt_arrays(
    chunks: Sequence[tuple[PrefillChunk, SpeechSequence]], page_size: int, patch_shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Chunks packed one behind the other: the inputs of SpeechModel.prefill, and packed_chunks. patch_shape: (latent
    frames, channels) of a patch."""
    ids, positions, index, patches = [], [], [], [np.zeros((0, *patch_shape), np.float32)]
    audio = 0
    for chunk, sequence in chunks:
        prompt, stop = sequence.prompt, chunk.start + chunk.length
        mask = prompt.audio_mask[chunk.start : stop]
        before, count = int(prompt.audio_mask[: chunk.start].sum()), int(mask.sum())
        ids.append(prompt.token_ids[chunk.start : stop])
        positions.append(np.arange(chunk.start, stop))
        index.append(np.where(mask, audio + np.cumsum(mask) - 1, -1))
        patches.append(prompt.patches[before : before + count])
        audio += count
    ends = np.cumsum([chunk.length for chunk, _ in chunks])
    places = [(sequence.stream.pages, chunk.start, chunk.start + chunk.length) for chunk, sequence in chunks]
    return {
        "token_ids": np.concatenate(ids),
        "positions": np.concatenate(positions),
        "patches": np.concatenate(patches),
        "patch_index": np.concatenate(index),
        "last": ends[[chunk.is_last for chunk, _ in chunks]] - 1,
    } | packed_chunks(places, page_size)


def block_table_arrays(sequences: Sequence[SpeechSequence], max_pages: int) -> dict[str, np.ndarray]:
    """Rows of the block table, and their slots."""
    tables = block_tables([sequence.stream.pages for sequence in sequences], max_pages)
    return {"slots": slots_of(sequences), "block_table": tables}


def slot_state_arrays(sequences: Sequence[SpeechSequence], patch_shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Rows of the slot state after a prompt, block tables aside; models.protocol.SpeechModel describes them."""
    count = len(sequences)
    prompts = [sequence.prompt for sequence in sequences]
    last_patch = np.zeros((count, *patch_shape), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        if sequence.prompt.audio_mask[-1]:
            last_patch[row] = sequence.prompt.patches[-1]
    return {
        "slots": slots_of(sequences),
        "last_patch": last_patch,
        "length": np.array([len(prompt.token_ids) for prompt in prompts], np.int32),
        "step": np.zeros(count, dtype=np.int32),
        "active": np.ones(count, dtype=np.bool_),
        "min_patches": np.array([prompt.min_patches for prompt in prompts], np.int32),
        "max_patches": np.array([prompt.max_patches for prompt in prompts], np.int32),
        "seed": np.array([sequence.seed for sequence in sequences], np.int64),
        "cfg": np.array([sequence.request.cfg_value for sequence in sequences], np.float32),
        "temperature": np.array([sequence.request.temperature for sequence in sequences], np.float32),
    }


def emitted(patches: np.ndarray) -> np.ndarray:
    """Step results that hold these patches float32 [n, frames, channels] and did not stop."""
    flags = np.array([name == "emitted" for name in RESULT_FLAGS], dtype=np.float32)
    return np.hstack([patches.reshape(len(patches), -1), np.tile(flags, (len(patches), 1))])


def prefill_plan(arrays: Mapping[str, np.ndarray], slots: np.ndarray, required: Bucket) -> Plan:
    """The plan of a captured prefill (models.protocol.SpeechModel.prefill_step) of the prompts in these slots int64
    [chunks]."""
    buffers = dict(arrays) | {"slots": slots}
    buffers["cu_seqlens"], buffers["seq_lens"] = buffers.pop("cu_seqlens_q"), np.diff(buffers.pop("cu_seqlens_k"))
    buffers.pop("context_slots", None)
    return Plan(buffers, required, fills={"patch_index": -1, "cu_seqlens": required["tokens"], "lora_slots": -1})
