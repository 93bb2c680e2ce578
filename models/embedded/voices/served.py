"""Many prompts through the server's own model, as its engine would step them: slots, cache pages, streamed samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.embedded.voices.sampler import Prompt, Settings
from models.layers.kv_cache import PagedBatch
from models.protocol import RESULT_FLAGS
from models.voxcpm2.model import VoxCPM2, load_model

_PAGE = 16


@dataclass(frozen=True, eq=False)
class Speech:
    """patches [n, P, D], samples [n * samples per patch], and whether it stopped by itself."""

    patches: Tensor
    samples: Tensor
    stopped: bool


class Served:
    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.model: VoxCPM2 = load_model(directory, torch.device("cpu"), torch.float32)
        self._settings = settings or Settings()

    @torch.inference_mode()
    def speak(self, prompts: list[Prompt]) -> list[Speech]:
        room = max(len(prompt.token_ids) + prompt.max_patches for prompt in prompts)
        pages = -(-room // _PAGE)
        caches = [
            spec.allocate(1 + pages * len(prompts), _PAGE, torch.device("cpu"), torch.float32)
            for spec in self.model.cache_specs()
        ]
        state = self._state(prompts, pages)
        slots = torch.arange(1, 1 + len(prompts))
        state["conditioning"][1:] = self._prefill(prompts, pages, caches)
        tail, decode = (
            self.model.tail(self._settings.steps, state),
            self.model.decode_step(self._settings.steps, state, caches, _PAGE),
        )
        codec = self.model.vae_step(state)
        self._prime(prompts, state)
        made: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        results = tail.forward({"slots": slots}, {"rows": len(slots)})["results"]
        while len(slots):
            capacity = {"rows": len(slots)}
            audio = codec.forward({"slots": slots, "results": results}, capacity)["audio"]
            flags = dict(zip(RESULT_FLAGS, (results[:, -len(RESULT_FLAGS) :] != 0).unbind(1), strict=True))
            for row, slot in enumerate(slots.tolist()):
                patch = results[row, : -len(RESULT_FLAGS)].view(self.model.patch_shape)
                made[slot - 1].append((patch.clone(), audio[row].clone()))
                stopped[slot - 1] = bool(flags["stopped"][row])
            slots = slots[~flags["finished"]]
            if len(slots):
                results = decode.forward({"slots": slots}, {"rows": len(slots)})["results"]
        return [
            Speech(torch.stack([patch for patch, _ in steps]), torch.cat([audio for _, audio in steps]), end)
            for steps, end in zip(made, stopped, strict=True)
        ]

    def _state(self, prompts: list[Prompt], pages: int) -> dict[str, Tensor]:
        rows = 1 + len(prompts)
        state = {
            name: torch.zeros((rows, *spec.shape), dtype=spec.dtype) for name, spec in self.model.state_specs().items()
        }
        state["block_table"] = torch.zeros((rows, pages), dtype=torch.int32)
        state["block_table"][1:] = torch.arange(1, 1 + pages * len(prompts)).view(-1, pages)
        for name, values in (
            ("length", [len(prompt.token_ids) for prompt in prompts]),
            ("seed", [prompt.seed for prompt in prompts]),
            ("max_patches", [prompt.max_patches for prompt in prompts]),
        ):
            state[name][1:] = torch.tensor(values, dtype=state[name].dtype)
        for name, value in (
            ("active", True),
            ("cfg", self._settings.cfg),
            ("temperature", self._settings.temperature),
            ("min_patches", self._settings.min_patches),
        ):
            state[name][1:] = value
        for slot, prompt in enumerate(prompts, 1):
            if prompt.continued:
                state["last_patch"][slot] = prompt.patches[-1]
        return state

    def _prefill(self, prompts: list[Prompt], pages: int, caches: list[dict[str, Tensor]]) -> Tensor:
        lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts])
        positions = [torch.arange(int(length)) for length in lengths]
        first = (1 + pages * torch.arange(len(prompts))) * _PAGE
        is_patch = torch.cat([prompt.is_patch for prompt in prompts])
        ends = lengths.cumsum(0)
        bounds = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32)
        inputs = {
            "token_ids": torch.cat([prompt.token_ids for prompt in prompts]),
            "positions": torch.cat(positions),
            "patches": torch.cat([prompt.patches for prompt in prompts]),
            "patch_index": torch.where(is_patch, is_patch.cumsum(0) - 1, -1),
            "last": ends - 1,
        }
        slots = torch.cat([begin + place for begin, place in zip(first, positions, strict=True)])
        return self.model.prefill(inputs, PagedBatch.of_new_prompts(caches, _PAGE, slots, bounds))

    def _prime(self, prompts: list[Prompt], state: dict[str, Tensor]) -> None:
        """The codec's memory of what is continued."""
        codec = self.model.vae_step(state)
        for slot, prompt in enumerate(prompts, 1):
            for patch in prompt.patches[-self.model.priming_patches :] if prompt.continued else []:
                results = torch.cat((patch.flatten(), torch.ones(len(RESULT_FLAGS))))[None]
                codec.forward({"slots": torch.tensor([slot]), "results": results}, {"rows": 1})
