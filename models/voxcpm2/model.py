"""VoxCPM2 as a models.protocol.SpeechModel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoints.checkpoint import LoadFormat, load_parameters, materialise, release_temporaries, without_memory
from models.interfaces.capturable import BufferSpec
from models.layers.adapters import LoraBank, LoraPlace
from models.layers.gemm import lay_out_for_host
from models.layers.kv_cache import Caches, CacheSpec, PagedBatch
from models.layers.random import Noise, philox_normal
from models.protocol import State
from models.voxcpm2.audio_vae import AudioVAE
from models.voxcpm2.config import SOLVER_STEPS, VoxCPM2Config, load_config
from models.voxcpm2.lora import lora_places
from models.voxcpm2.network import FlowSolver, VoxCPM2Network, network_rules
from models.voxcpm2.solver import schedule
from models.voxcpm2.steps import DecodeStep, PrefillStep, Tail, VAEStep, lora_of
from models.voxcpm2.vae_weights import load_audio_vae, randomise_audio_vae, round_product_weights


class VoxCPM2:
    """Parameters in `dtype`, the codec in float32. `noise` may be replaced before steps are made: seeds and steps
    [rows] -> float32 [rows, D, P]."""

    solver_steps = SOLVER_STEPS
    priming_patches = 3

    def __init__(self, config: VoxCPM2Config, network: VoxCPM2Network, vae: AudioVAE) -> None:
        self._config = config
        self.network = network
        self.vae = vae
        self.sample_rate = config.vae.out_sample_rate
        self.reference_sample_rate = config.vae.sample_rate
        self.patch_shape = (config.patch_size, config.feat_dim)
        self.samples_per_patch = config.patch_size * vae.decoder_hop
        self.codec_memory_patches = -(-vae.decoder.memory_frames // config.patch_size)
        self.max_positions = config.max_length
        self.dtype = network.enc_to_lm_proj.weight.dtype
        self.noise: Noise = self._philox_noise
        self.solver = cache(partial(FlowSolver, network.feat_decoder))
        """Of a number of solver steps."""

    def step_weight_bytes(self, solver_steps: int) -> int:
        solver = sum(weight.nbytes for weight in self.network.feat_decoder.parameters())
        every = sum(weight.nbytes for weight in self.network.parameters()) - self.network.embed_tokens.weight.nbytes
        return every + (len(schedule(solver_steps, self.dtype).times) - 1) * solver

    def lora_places(self) -> dict[str, LoraPlace]:
        return lora_places(self._config)

    def cache_specs(self) -> list[CacheSpec]:
        return self.network.cache_specs()

    def state_specs(self) -> dict[str, BufferSpec]:
        return {
            "last_patch": BufferSpec(self.patch_shape, self.dtype),
            "conditioning": BufferSpec((2 * self._config.lm.hidden_size,), self.dtype),
            "length": BufferSpec((), torch.int32),
            "step": BufferSpec((), torch.int32),
            "min_patches": BufferSpec((), torch.int32),
            "max_patches": BufferSpec((), torch.int32),
            "active": BufferSpec((), torch.bool),
            "seed": BufferSpec((), torch.int64),
            "cfg": BufferSpec((), torch.float32),
            "temperature": BufferSpec((), torch.float32),
            "vae": BufferSpec((self.vae.decoder.memory_size,), torch.float32),
        }

    def encode_reference_pieces(self, wave: Tensor, pad: Literal["left", "right"]) -> Iterator[Tensor]:
        frames, channels = self.patch_shape
        missing = -wave.shape[0] % (frames * self.vae.encoder_hop)
        wave = F.pad(wave, (missing, 0) if pad == "left" else (0, missing))
        for latent in self.vae.encode_pieces(wave, frames):
            yield latent.T.reshape(-1, frames, channels)

    def prefill(self, inputs: Mapping[str, Tensor], batch: PagedBatch, bank: LoraBank | None = None) -> Tensor:
        lm, residual = self.network.prompt_backbone(
            inputs["token_ids"],
            inputs["patch_index"],
            inputs["patches"].to(self.dtype),
            inputs["positions"],
            batch,
            lora_of(bank, inputs),
        )
        last = inputs["last"]
        return torch.cat((lm.index_select(0, last), residual.index_select(0, last)), dim=-1)

    def prefill_step(self, state: State, caches: Caches, page_size: int, bank: LoraBank | None = None) -> PrefillStep:
        return PrefillStep(self.prefill, state, caches, page_size, self.patch_shape, bank)

    def tail(self, solver_steps: int, state: State, bank: LoraBank | None = None) -> Tail:
        return Tail(self.network, self.solver(solver_steps), self.noise, state, bank)

    def decode_step(
        self, solver_steps: int, state: State, caches: Caches, page_size: int, bank: LoraBank | None = None
    ) -> DecodeStep:
        solver = self.solver(solver_steps)
        return DecodeStep(self.network, solver, self.noise, state, caches, page_size, bank)

    def vae_step(self, state: State) -> VAEStep:
        return VAEStep(self.vae.decoder, state, self.patch_shape)

    def _philox_noise(self, seeds: Tensor, steps: Tensor) -> Tensor:
        frames, channels = self.patch_shape
        return philox_normal(seeds, steps, prod(self.patch_shape)).unflatten(1, (channels, frames))


def load_model(
    directory: Path, device: torch.device, dtype: torch.dtype, load_format: LoadFormat = "published"
) -> VoxCPM2:
    """Strict: raises CheckpointError that names a missing, unexpected or misshapen tensor."""
    config = load_config(directory)
    with without_memory():
        network, vae = VoxCPM2Network(config, dtype), AudioVAE(config.vae)
    load_parameters(network, directory, network_rules(config), device=device, dtype=dtype, load_format=load_format)
    materialise(vae, device, torch.float32)
    if device.type == "meta":
        return VoxCPM2(config, network, vae)
    if load_format == "random":
        randomise_audio_vae(vae, seed=0)
    else:
        load_audio_vae(vae, directory, config.vae)
    if device.type == "cpu":
        lay_out_for_host(network)
    if device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        round_product_weights(vae)
        release_temporaries(device)
        # As precise as TF32 (docs/numerics.md) with half the bytes.
        vae.decoder.set_precision("float16")
    return VoxCPM2(config, network, vae)
