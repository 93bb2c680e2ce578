"""Many prompts through the server's own model, stepped as its engine would, by the tests' miniature of that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from models.protocol import SpeechModel
from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.processor import load_processor
from tests.support.speech import SpeechRig, Utterance
from training.loop import device

_PAGE = 16


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
    """patches [n, P, D], samples [n * samples per patch], and whether it stopped before its limit."""

    patches: Tensor
    samples: Tensor
    stopped: bool


class Served:
    """A few hundred prompts are stepped together, on a GPU in its servers' precision. What comes back is on the CPU."""

    def __init__(self, directory: Path, *, cfg: float = 2.0, temperature: float = 1.0) -> None:
        self._device, self._cfg, self._temperature = device(), cfg, temperature
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self.model: VoxCPM2 = load_model(directory, self._device, dtype)
        self.processor = load_processor(directory)

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
        utterances = dict(enumerate(map(self._utterance, prompts), 1))
        pages = [-(-(len(each.layout.token_ids) + each.max_patches) // _PAGE) for each in utterances.values()]
        rig = SpeechRig(
            cast(SpeechModel, self.model),
            num_slots=1 + len(prompts),
            num_pages=1 + sum(pages),
            device=str(self._device),
            page_size=_PAGE,
        )
        patches, samples = rig.speak(utterances)
        return [
            Speech(patches[slot].float().cpu(), samples[slot].float().cpu(), len(patches[slot]) < prompt.max_patches)
            for slot, prompt in enumerate(prompts, 1)
        ]

    def _utterance(self, prompt: Prompt) -> Utterance:
        count, ids = len(prompt.patches), self.processor.tokenize(prompt.text)
        before = count if prompt.continued else 0
        layout = self.processor.layout(ids, reference_patches=count - before, prompt_patches=before)
        return Utterance(
            layout,
            prompt.patches,
            prompt.seed,
            max_patches=prompt.max_patches,
            cfg=self._cfg,
            temperature=self._temperature,
            prompt_patches=before,
        )
