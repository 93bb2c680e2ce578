"""Inputs of a speech model's passes: host arrays from scheduled chunks and sequences, and the slot-state tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.protocol import RESULT_FLAGS, SpeechModel
from service.engine.core.pages import block_tables, kv_slots
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


def adapter_slots_of(
    rows: Sequence[SpeechSequence], chunks: Sequence[tuple[PrefillChunk, SpeechSequence]] = ()
) -> np.ndarray:
    """The adapter's slot of each row, then of each prompt position; -1 for none."""
    prompts = [np.full(chunk.length, sequence.stream.adapter_slot) for chunk, sequence in chunks]
    return np.concatenate([[sequence.stream.adapter_slot for sequence in rows], *prompts]).astype(np.int32)


def slots_plan(slots: np.ndarray) -> Plan:
    """The plan of a step with a row for each of these slots int64 [rows]."""
    return Plan(arrays={"slots": slots}, required={"rows": len(slots)})


@dataclass(frozen=True, eq=False)
class PromptArrays:
    """Host arrays of a pass over packed prompt chunks.

    inputs: those of SpeechModel.prefill. batch: slot_mapping int64 [tokens], cu_seqlens_q and cu_seqlens_k int32
    [chunks + 1] and, where a chunk has cached context, context_slots int64 [keys], as in PagedBatch.
    """

    inputs: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]

    @property
    def lengths_k(self) -> np.ndarray:
        """Keys that each prompt has after the pass, int32 [chunks]."""
        return np.diff(self.batch["cu_seqlens_k"])


def prompt_arrays(
    chunks: Sequence[tuple[PrefillChunk, SpeechSequence]], page_size: int, patch_shape: tuple[int, int]
) -> PromptArrays:
    """Packs chunks, one behind the other. patch_shape: (latent frames, channels) of a patch."""
    ids, positions, index, patches, last, rows, keys = [], [], [], [], [], [], []
    lengths_q, lengths_k = [], []
    packed = audio = 0
    for chunk, sequence in chunks:
        prompt = sequence.prompt
        stop = chunk.start + chunk.length
        mask = prompt.audio_mask[chunk.start : stop]
        before = int(prompt.audio_mask[: chunk.start].sum())
        context_slots = kv_slots(sequence.stream.pages, stop, page_size)
        ids.append(prompt.token_ids[chunk.start : stop])
        positions.append(np.arange(chunk.start, stop))
        index.append(np.where(mask, audio + np.cumsum(mask) - 1, -1))
        patches.append(prompt.patches[before : before + int(mask.sum())])
        rows.append(context_slots[chunk.start :])
        keys.append(context_slots)
        lengths_q.append(chunk.length)
        lengths_k.append(stop)
        packed += chunk.length
        audio += int(mask.sum())
        if chunk.is_last:
            last.append(packed - 1)
    inputs = {
        "token_ids": np.concatenate(ids),
        "positions": np.concatenate(positions),
        "patches": np.concatenate([np.zeros((0, *patch_shape), np.float32), *patches]),
        "patch_index": np.concatenate(index),
        "last": np.array(last, dtype=np.int64),
    }
    batch = {
        "slot_mapping": np.concatenate(rows),
        "cu_seqlens_q": np.cumsum([0, *lengths_q], dtype=np.int32),
        "cu_seqlens_k": np.cumsum([0, *lengths_k], dtype=np.int32),
    }
    if any(chunk.start for chunk, _ in chunks):
        batch["context_slots"] = np.concatenate(keys)
    return PromptArrays(inputs, batch)


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


def prefill_plan(arrays: PromptArrays, slots: np.ndarray, required: Bucket) -> Plan:
    """The plan of a captured prefill (models.protocol.SpeechModel.prefill_step) of the prompts in these slots int64
    [chunks]."""
    buffers = arrays.inputs | {
        "slot_mapping": arrays.batch["slot_mapping"],
        "cu_seqlens": arrays.batch["cu_seqlens_q"],
        "slots": slots,
        "seq_lens": arrays.lengths_k,
    }
    return Plan(buffers, required, fills={"patch_index": -1, "cu_seqlens": required["tokens"], "lora_slots": -1})
