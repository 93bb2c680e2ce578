"""Many prompts through the server's own model, as its engine would step them: slots, cache pages, streamed samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.layers.kv_cache import PagedBatch
from models.protocol import RESULT_FLAGS
from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.processor import load_processor
from training.loop import device

_PAGE, _STEPS = 16, 10


@dataclass(frozen=True, eq=False)
class Prompt:
    """text with the words of what is continued, patches float32 [n, P, D] of that or of the reference."""

    text: str
    patches: Tensor
    seed: int
    max_patches: int
    continued: bool = False


@dataclass(frozen=True, eq=False)
class Speech:
    """patches [n, P, D], samples [n * samples per patch], and whether it stopped by itself."""

    patches: Tensor
    samples: Tensor
    stopped: bool


class Served:
    """A few hundred prompts are stepped together, on a GPU in its servers' precision. What comes back is on the CPU."""

    def __init__(self, directory: Path, *, cfg: float = 2.0, temperature: float = 1.0) -> None:
        self._device = device()
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self.model: VoxCPM2 = load_model(directory, self._device, self._dtype)
        self.processor = load_processor(directory)
        self._settings = {"active": True, "cfg": cfg, "temperature": temperature, "min_patches": 2}

    @torch.no_grad()
    def encode(self, wave: np.ndarray) -> Tensor:
        """int16 [n] at 16 kHz, a whole number of patches -> [patches, P, D]."""
        latents = self.model.vae.encoder(torch.from_numpy(wave).to(self._device).float()[None, None] / 32768.0)
        frames, channels = self.model.patch_shape
        return latents[0].T.reshape(-1, frames, channels).float().cpu()

    @torch.no_grad()
    def sound(self, patches: Tensor) -> Tensor:
        """[n, P, D] -> samples at 48 kHz."""
        return self.model.vae.decoder(patches.to(self._device).flatten(0, 1).T[None])[0, 0].float().cpu()

    @torch.inference_mode()
    def speak(self, prompts: list[Prompt]) -> list[Speech]:
        with self._device:
            return self._speak([replace(prompt, patches=prompt.patches.to(self._device)) for prompt in prompts])

    def _speak(self, prompts: list[Prompt]) -> list[Speech]:
        layouts = [
            self.processor.layout(
                self.processor.tokenize(prompt.text),
                reference_patches=0 if prompt.continued else len(prompt.patches),
                prompt_patches=len(prompt.patches) if prompt.continued else 0,
            )
            for prompt in prompts
        ]
        ids = [torch.from_numpy(layout.token_ids.astype(np.int64)).to(self._device) for layout in layouts]
        lengths = torch.tensor([len(each) for each in ids])
        pages = -(-max(len(each) + prompt.max_patches for each, prompt in zip(ids, prompts, strict=True)) // _PAGE)
        caches = [
            spec.allocate(1 + pages * len(prompts), _PAGE, self._device, self._dtype)
            for spec in self.model.cache_specs()
        ]
        state = self._state(prompts, lengths, pages)
        positions = [torch.arange(len(each)) for each in ids]
        is_patch = torch.cat([torch.from_numpy(layout.audio_mask).to(self._device) for layout in layouts])
        ends = lengths.cumsum(0)
        inputs = {
            "token_ids": torch.cat(ids),
            "positions": torch.cat(positions),
            "patches": torch.cat([prompt.patches for prompt in prompts]),
            "patch_index": torch.where(is_patch, is_patch.cumsum(0) - 1, -1),
            "last": ends - 1,
        }
        places = torch.cat([(1 + pages * row) * _PAGE + place for row, place in enumerate(positions)])
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32)
        batch = PagedBatch(caches, _PAGE, places, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        state["conditioning"][1:] = self.model.prefill(inputs, batch)
        return self._generate(prompts, state, caches)

    def _state(self, prompts: list[Prompt], lengths: Tensor, pages: int) -> dict[str, Tensor]:
        rows = 1 + len(prompts)
        state = {
            name: torch.zeros((rows, *spec.shape), dtype=spec.dtype) for name, spec in self.model.state_specs().items()
        }
        state["block_table"] = torch.zeros((rows, pages), dtype=torch.int32)
        state["block_table"][1:] = torch.arange(1, 1 + pages * len(prompts)).view(-1, pages)
        state["length"][1:] = lengths
        for name, value in self._settings.items():
            state[name][1:] = value
        for slot, prompt in enumerate(prompts, 1):
            state["seed"][slot], state["max_patches"][slot] = prompt.seed, prompt.max_patches
            if prompt.continued:
                state["last_patch"][slot] = prompt.patches[-1]
        return state

    def _generate(
        self, prompts: list[Prompt], state: dict[str, Tensor], caches: list[dict[str, Tensor]]
    ) -> list[Speech]:
        tail, codec = self.model.tail(_STEPS, state), self.model.vae_step(state)
        decode = self.model.decode_step(_STEPS, state, caches, _PAGE)
        for slot, prompt in enumerate(prompts, 1):
            # The codec's memory of what is continued.
            for patch in prompt.patches[-self.model.priming_patches :] if prompt.continued else []:
                results = torch.cat((patch.flatten(), torch.ones(len(RESULT_FLAGS))))[None]
                codec.forward({"slots": torch.tensor([slot]), "results": results}, {"rows": 1})
        slots = torch.arange(1, 1 + len(prompts))
        made: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        results = tail.forward({"slots": slots}, {"rows": len(slots)})["results"]
        while len(slots):
            audio = codec.forward({"slots": slots, "results": results}, {"rows": len(slots)})["audio"]
            flags = dict(zip(RESULT_FLAGS, (results[:, -len(RESULT_FLAGS) :] != 0).unbind(1), strict=True))
            patches, sounds, ends = results.float().cpu(), audio.float().cpu(), flags["stopped"].tolist()
            for row, slot in enumerate(slots.tolist()):
                patch = patches[row, : -len(RESULT_FLAGS)].view(self.model.patch_shape)
                made[slot - 1].append((patch.clone(), sounds[row].clone()))
                stopped[slot - 1] = ends[row]
            slots = slots[~flags["finished"]]
            if len(slots):
                results = decode.forward({"slots": slots}, {"rows": len(slots)})["results"]
        return [
            Speech(torch.stack([patch for patch, _ in steps]), torch.cat([audio for _, audio in steps]), end)
            for steps, end in zip(made, stopped, strict=True)
        ]
