"""A miniature engine for speech models: slots, pages, prefill, steps. Scratch (slot 0, page 0) holds NaN.

Steps run eagerly over buffers of `rows` rows; through captured graphs tests/engine/speech runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Capturable
from models.interfaces.processor import SpeechLayout
from models.protocol import RESULT_FLAGS, SpeechModel
from tests.support.paged import PagedCache, PagedSequence


@dataclass
class Utterance:
    """One stream's request; patches are those of its clips, in layout order."""

    layout: SpeechLayout
    patches: Tensor
    seed: int
    min_patches: int = 2
    max_patches: int = 6
    cfg: float = 2.0
    temperature: float = 1.0
    prompt_patches: int = 0


@dataclass
class SlotOwner:
    utterance: Utterance
    pages: PagedSequence
    done: int = 0
    """Prompt positions prefilled."""


class SpeechRig:
    def __init__(
        self, model: SpeechModel, *, num_slots: int = 8, num_pages: int = 128, device: str = "cpu", page_size: int = 16
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        dtype = model.state_specs()["last_patch"].dtype
        self.cache = PagedCache(model.cache_specs(), num_pages, page_size, self.device, dtype)
        self.max_pages = -(-model.max_positions // page_size)
        self.state: dict[str, Tensor] = {
            name: torch.zeros((num_slots, *spec.shape), dtype=spec.dtype, device=self.device)
            for name, spec in model.state_specs().items()
        }
        self.state["block_table"] = torch.zeros((num_slots, self.max_pages), dtype=torch.int32, device=self.device)
        for table in self.state.values():
            if table.is_floating_point():
                table[0] = float("nan")
        for layer in self.cache.caches:
            for values in layer.values():
                values[:page_size] = float("nan")
        self.owners: dict[int, SlotOwner] = {}

    def admit(self, slot: int, utterance: Utterance) -> None:
        """Take slot and pages; nothing is computed yet."""
        positions = len(utterance.layout.token_ids) + utterance.max_patches
        pages = self.cache.new_sequence(positions)
        self.owners[slot] = SlotOwner(utterance, pages)
        self.state["block_table"][slot] = 0
        self.state["block_table"][slot, : len(pages.pages)] = torch.tensor(pages.pages, dtype=torch.int32)
        self.state["vae"][slot] = 0.0
        for patch in utterance.patches[-self.model.priming_patches :] if utterance.prompt_patches else []:
            self.vae([slot], {"patch": patch[None], "emitted": torch.ones(1, dtype=torch.bool)})

    def prefill(self, chunks: Mapping[int, int]) -> tuple[list[int], Tensor]:
        """One backbone pass over `chunks` (slot -> positions; -1: all that are left). Returns the slots that now have
        conditioning, and the conditioning."""
        ids, positions, index, last, parts, ready = [], [], [], [], [], []
        patches: list[Tensor] = []
        for slot, count in chunks.items():
            owner = self.owners[slot]
            layout = owner.utterance.layout
            stop = len(layout.token_ids) if count < 0 else owner.done + count
            mask = layout.audio_mask[owner.done : stop]
            before = int(layout.audio_mask[: owner.done].sum())
            packed = sum(map(len, patches))
            index += list(np.where(mask, packed + np.cumsum(mask) - 1, -1))
            patches.append(owner.utterance.patches[before : before + int(mask.sum())])
            ids += list(layout.token_ids[owner.done : stop])
            positions += list(range(owner.done, stop))
            parts.append((owner.pages, stop - owner.done))
            owner.done = stop
            if stop == len(layout.token_ids):
                last.append(len(ids) - 1)
                ready.append(slot)
        inputs = {
            "token_ids": self._int64(ids),
            "positions": self._int64(positions),
            "patches": torch.cat(patches).to(self.device),
            "patch_index": self._int64(index),
            "last": self._int64(last),
        }
        batch = self.cache.batch(prefills=parts)
        conditioning = self.model.prefill(inputs, batch)
        for slot in ready:
            self._admit(slot)
        return ready, conditioning

    def tail(self, slots: Sequence[int], conditioning: Tensor, steps: int = 10) -> dict[str, Tensor]:
        self.state["conditioning"].index_copy_(0, self._int64(slots), conditioning)
        return self._unpacked(self._run(self.model.tail(steps, self.state), slots)["results"])

    def decode(self, slots: Sequence[int], steps: int = 10) -> dict[str, Tensor]:
        step = self.model.decode_step(steps, self.state, self.cache.caches, self.cache.page_size)
        return self._unpacked(self._run(step, slots)["results"])

    def _unpacked(self, results: Tensor) -> dict[str, Tensor]:
        """Views: "patch" [rows, frames, channels] and the flags, bool [rows]."""
        patch, flags = results.split((results.shape[1] - len(RESULT_FLAGS), len(RESULT_FLAGS)), dim=1)
        assert ((flags == 0) | (flags == 1)).all()
        columns = dict(zip(RESULT_FLAGS, (flags != 0).unbind(1), strict=True))
        return {"patch": patch.unflatten(1, self.model.patch_shape), **columns}

    def vae(self, slots: Sequence[int], out: Mapping[str, Tensor], rows: int = 0) -> Tensor:
        """Samples of the patches that `tail` or `decode` put out for these slots: "patch" and "emitted"."""
        patch, emitted = out["patch"].to(self.device), out["emitted"].to(self.device)
        unread = torch.zeros((len(patch), len(RESULT_FLAGS) - 1), device=self.device)
        results = torch.cat((patch.flatten(1), unread, emitted[:, None]), dim=1)
        return self._run(self.model.vae_step(self.state), slots, {"results": results}, rows)["audio"]

    def speak(self, utterances: Mapping[int, Utterance]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """All utterances together from prefill to their end: patches and samples by slot."""
        for slot, utterance in utterances.items():
            self.admit(slot, utterance)
        slots, conditioning = self.prefill(dict.fromkeys(utterances, -1))
        patches: dict[int, list[Tensor]] = {slot: [] for slot in slots}
        audio: dict[int, list[Tensor]] = {slot: [] for slot in slots}
        out = self.tail(slots, conditioning)
        while slots:
            samples = self.vae(slots, out)
            for row, slot in enumerate(slots):
                patches[slot].append(out["patch"][row].clone())
                audio[slot].append(samples[row].clone())
            slots = [slot for row, slot in enumerate(slots) if not out["finished"][row]]
            if slots:
                out = self.decode(slots)
        return {slot: torch.stack(p) for slot, p in patches.items()}, {slot: torch.cat(a) for slot, a in audio.items()}

    def buffers(self, step: Capturable, bucket: Mapping[str, int]) -> dict[str, Tensor]:
        return {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in step.buffer_specs(bucket).items()
        }

    def _run(
        self, step: Capturable, slots: Sequence[int], inputs: Mapping[str, Tensor] = MappingProxyType({}), rows: int = 0
    ) -> dict[str, Tensor]:
        bucket = {"rows": max(rows, len(slots))}
        buffers = self.buffers(step, bucket)
        buffers["slots"][: len(slots)] = self._int64(slots)
        for name, values in inputs.items():
            buffers[name][: len(slots)] = values
        return {name: value[: len(slots)] for name, value in step.forward(buffers, bucket).items()}

    def _admit(self, slot: int) -> None:
        utterance = self.owners[slot].utterance
        state, patches = self.state, utterance.patches
        state["last_patch"][slot] = patches[-1] if utterance.prompt_patches else 0.0
        state["length"][slot] = len(utterance.layout.token_ids)
        state["step"][slot] = 0
        state["active"][slot] = True
        for name, value in (
            ("seed", utterance.seed),
            ("cfg", utterance.cfg),
            ("temperature", utterance.temperature),
            ("min_patches", utterance.min_patches),
            ("max_patches", utterance.max_patches),
        ):
            state[name][slot] = value

    def _int64(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(map(int, values)), dtype=torch.int64, device=self.device)
