"""Free-running speech of many prompts at once by the networks as they are trained: the server's loop and noise without
its cache. A test holds the two equal; this one is for thousands of sentences on one GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.embedded.voices.losses import causal_mask
from models.embedded.voices.network import Network
from models.layers.random import philox_normal
from models.voxcpm2.solver import guided_euler_step, schedule, sinusoid


@dataclass(frozen=True, eq=False)
class Prompt:
    """token_ids and is_patch [n], patches float32 [patch positions, P, D]: the server's layout; continued: the last of
    the patches is the one before the speech."""

    token_ids: Tensor
    is_patch: Tensor
    patches: Tensor
    seed: int
    max_patches: int
    continued: bool = False


@dataclass(frozen=True)
class Settings:
    cfg: float = 2.0
    steps: int = 10
    temperature: float = 1.0
    min_patches: int = 2


class Sampler:
    def __init__(self, network: Network, settings: Settings | None = None) -> None:
        self._network = network
        self._settings = settings = settings or Settings()
        self._shape = (network.config["patch_size"], network.config["feat_dim"])
        self._schedule = schedule(settings.steps, torch.float32)
        estimator = network.feat_decoder.estimator
        self._device = estimator.in_proj.weight.device
        width = network.config["dit_config"]["hidden_dim"]
        times = torch.tensor(self._schedule.times)
        waves, still = (sinusoid(t, width).to(self._device) for t in (times, torch.zeros_like(times)))
        with torch.no_grad():
            self._times = estimator.time_embedding(waves, still)

    @torch.no_grad()
    def speak(self, prompts: list[Prompt]) -> list[tuple[Tensor, bool]]:
        """-> of each prompt its patches [n, P, D] and whether it stopped by itself."""
        rows = _Rows(self._network, prompts, self._device)
        made: list[list[Tensor]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        alive = list(range(len(prompts)))
        seeds = torch.tensor([prompt.seed for prompt in prompts], device=self._device)
        step = 0
        while alive:
            patches, stop = self._next(rows, seeds[alive], step)
            going = []
            for place, number in enumerate(alive):
                made[number].append(patches[place])
                stopped[number] = bool(stop[place]) and step > self._settings.min_patches
                if not stopped[number] and step + 1 < prompts[number].max_patches:
                    going.append(place)
            rows.go_on(patches, going)
            alive = [alive[place] for place in going]
            step += 1
        return [(torch.stack(patches), end) for patches, end in zip(made, stopped, strict=True)]

    def _next(self, rows: _Rows, seeds: Tensor, step: int) -> tuple[Tensor, Tensor]:
        network, (frames, channels) = self._network, self._shape
        lm, residual = rows.last_hidden()
        logits = network.stop_logits(lm).float()
        noise = philox_normal(seeds, torch.full_like(seeds, step, dtype=torch.int32), frames * channels)
        x = noise.unflatten(1, (channels, frames)).transpose(1, 2).float() * self._settings.temperature
        mu = network.condition(lm, residual)
        mu, before = torch.cat((mu, torch.zeros_like(mu))), rows.previous.repeat(2, 1, 1)
        cfg = torch.full((len(seeds),), self._settings.cfg, device=self._device)
        for time, step_size in zip(self._times, self._schedule.step_sizes, strict=True):
            velocity = network.velocity(x.repeat(2, 1, 1), mu, time.expand(2 * len(x), -1), before).float()
            x = guided_euler_step(x, velocity, cfg, step_size)
        return x, logits[:, 1] > logits[:, 0]


class _Rows:
    """The sequences so far, computed anew for every patch: there are no caches to keep."""

    def __init__(self, network: Network, prompts: list[Prompt], device: torch.device) -> None:
        self._network = network
        self._lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
        length, frames, channels = int(self._lengths.max()), network.config["patch_size"], network.config["feat_dim"]
        width = network.config["lm_config"]["hidden_size"]
        self._ids = torch.zeros(len(prompts), length, dtype=torch.int64, device=device)
        self._is_patch = torch.zeros(len(prompts), length, dtype=torch.bool, device=device)
        self._embeds = torch.zeros(len(prompts), length, width, device=device)
        self.previous = torch.zeros(len(prompts), frames, channels, device=device)
        for row, prompt in enumerate(prompts):
            count = len(prompt.token_ids)
            self._ids[row, :count] = prompt.token_ids.to(device)
            self._is_patch[row, :count] = prompt.is_patch.to(device)
            if len(prompt.patches):
                embeds = network.embed_patches(prompt.patches.to(device)).float()
                self._embeds[row, :count][self._is_patch[row, :count]] = embeds
            if prompt.continued:
                self.previous[row] = prompt.patches[-1].to(device)

    def last_hidden(self) -> tuple[Tensor, Tensor]:
        places = torch.arange(self._ids.shape[1], device=self._ids.device).expand_as(self._ids)
        mask = causal_mask(torch.zeros_like(places))
        hidden, residual, _ = self._network.backbone(self._ids, self._is_patch, self._embeds, places, mask)
        rows = torch.arange(len(self._ids), device=self._ids.device)
        return hidden[rows, self._lengths - 1].float(), residual[rows, self._lengths - 1].float()

    def go_on(self, patches: Tensor, kept: list[int]) -> None:
        """Appends the patches of the rows that go on; the others leave."""
        index = torch.tensor(kept, dtype=torch.int64, device=patches.device)
        self.previous, self._lengths = patches[index], self._lengths[index]
        values = (self._ids[index], self._is_patch[index], self._embeds[index])
        if not kept:
            return
        if int(self._lengths.max()) == values[0].shape[1]:
            values = tuple(torch.cat((value, torch.zeros_like(value[:, :1])), dim=1) for value in values)  # type: ignore[assignment]
        self._ids, self._is_patch, self._embeds = values
        rows = torch.arange(len(kept), device=patches.device)
        self._is_patch[rows, self._lengths] = True
        self._embeds[rows, self._lengths] = self._network.embed_patches(self.previous).float()
        self._lengths = self._lengths + 1
