"""audiovae.pth or audiovae.safetensors -> AudioVAE: weight norm folded, rate condition baked, strict."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from models.interfaces.errors import CheckpointError
from models.voxcpm2.audio_vae import AudioVAE, DecoderBlock, EncoderBlock
from models.voxcpm2.config import AudioVAEConfig
from models.voxcpm2.vae_layers import CausalConv, ResidualUnit, SnakeUpsample

_UNUSED = ("encoder.fc_logvar.",)


def load_audio_vae(vae: AudioVAE, directory: Path, config: AudioVAEConfig) -> None:
    """Fill `vae` (its parameters allocated, on any device) for the bandwidth of its output's sample rate.

    Raises CheckpointError that names a missing, unexpected or misshapen tensor.
    """
    file, tensors = _read(directory)
    source = _Source(file, tensors)
    boundaries = source.take("decoder.sr_bin_boundaries", (len(config.sr_bin_boundaries),))
    if tuple(boundaries.tolist()) != config.sr_bin_boundaries:
        raise CheckpointError(
            f"{file}: decoder.sr_bin_boundaries {boundaries.tolist()}, config.json has {config.sr_bin_boundaries}"
        )
    bucket = bisect_left(config.sr_bin_boundaries, config.out_sample_rate)  # The row of the decoder's condition tables.
    for module, name in published_names(vae):
        if isinstance(module, ResidualUnit):
            _copy_alpha(module.alpha_in, source, f"{name}.block.0.alpha")
            _copy_conv(module.depthwise_weight, module.depthwise_bias, source, f"{name}.block.1")
            _copy_alpha(module.alpha_out, source, f"{name}.block.2.alpha")
            _copy_conv(module.pointwise_weight, module.pointwise_bias, source, f"{name}.block.3")
        elif isinstance(module, SnakeUpsample):
            _copy_alpha(module.alpha, source, f"{name}.block.0.alpha")
            _copy_conv(module.weight, module.bias, source, f"{name}.block.1")
            condition = name.replace("decoder.model.", "decoder.sr_cond_model.")
            for parameter, kind in ((module.scale, "scale"), (module.shift, "bias")):
                shape = (len(config.sr_bin_boundaries) + 1, parameter.shape[0])
                parameter.data.copy_(source.take(f"{condition}.{kind}_embed.weight", shape)[bucket])
        elif isinstance(module, CausalConv):
            _copy_conv(module.weight, module.bias, source, name)
        else:
            _copy_alpha(module, source, name)
    source.check_all_taken()


def published_names(vae: AudioVAE) -> Iterator[tuple[CausalConv | SnakeUpsample | ResidualUnit | nn.Parameter, str]]:
    encoder, decoder = vae.encoder, vae.decoder
    yield encoder.first, "encoder.block.0"
    for index, down in enumerate(cast("Sequence[EncoderBlock]", encoder.blocks), start=1):
        for number, unit in enumerate(cast("Sequence[ResidualUnit]", down.units)):
            yield unit, f"encoder.block.{index}.block.{number}"
        yield down.alpha, f"encoder.block.{index}.block.3.alpha"
        yield down.down, f"encoder.block.{index}.block.4"
    yield encoder.mean, "encoder.fc_mu"
    yield decoder.first, "decoder.model.0"
    yield decoder.widen, "decoder.model.1"
    for index, up in enumerate(cast("Sequence[DecoderBlock]", decoder.blocks), start=2):
        yield up.up, f"decoder.model.{index}"
        for number, unit in enumerate(cast("Sequence[ResidualUnit]", up.units), start=2):
            yield unit, f"decoder.model.{index}.block.{number}"
    end = len(decoder.blocks) + 2
    yield decoder.alpha, f"decoder.model.{end}.alpha"
    yield decoder.last, f"decoder.model.{end + 1}"


def _copy_alpha(parameter: nn.Parameter, source: _Source, name: str) -> None:
    parameter.data.copy_(source.take(name, (1, parameter.shape[0], 1)).flatten())


def _copy_conv(weight: nn.Parameter, bias: nn.Parameter, source: _Source, name: str) -> None:
    """w = g * v / |v|, the norm over all dimensions but the first (of a transposed convolution: input channels)."""
    v = source.take(f"{name}.weight_v", tuple(weight.shape)).float()
    g = source.take(f"{name}.weight_g", (weight.shape[0], 1, 1)).float()
    weight.data.copy_(g * v / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True))
    bias.data.copy_(source.take(f"{name}.bias", tuple(bias.shape)))


class _Source:
    """Tensors of the file, each taken once."""

    def __init__(self, file: str, tensors: dict[str, Tensor]) -> None:
        self.file = file
        self.tensors = tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.file}: missing tensor {name}")
        tensor = self.tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{self.file}: tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{self.file}: NaN or infinite values in tensor {name}")
        return tensor

    def check_all_taken(self) -> None:
        unexpected = sorted(name for name in self.tensors if not name.startswith(_UNUSED))
        if unexpected:
            raise CheckpointError(f"{self.file}: unexpected tensors: {', '.join(unexpected[:8])}")


def _read(directory: Path) -> tuple[str, dict[str, Tensor]]:
    """Path and tensors of the codec, audiovae.safetensors before audiovae.pth."""
    safe, legacy = directory / "audiovae.safetensors", directory / "audiovae.pth"
    if safe.exists():
        try:
            return str(safe), load_file(safe)
        except SafetensorError as error:
            raise CheckpointError(f"{safe} cannot be read: {error}") from error
    if not legacy.exists():
        raise CheckpointError(f"{directory}: neither audiovae.safetensors nor audiovae.pth")
    try:
        content = torch.load(legacy, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{legacy} cannot be read: {error}") from error
    state = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{legacy}: expected a dict with tensors under state_dict")
    return str(legacy), state


def round_product_weights(vae: AudioVAE) -> None:
    """Rounds the weights that the kernels multiply on tensor cores to the nearest TF32 (10 bits of mantissa), ties away
    from zero. The hardware would truncate the other bits, which weakens the output of every layer."""
    for module in vae.modules():
        if isinstance(module, ResidualUnit):
            _round_to_tf32(module.pointwise_weight)
        elif isinstance(module, SnakeUpsample):
            _round_to_tf32(module.weight)


def _round_to_tf32(parameter: nn.Parameter) -> None:
    bits = parameter.data.view(torch.int32)
    bits.add_(0x1000).bitwise_and_(-0x2000)


def randomise_audio_vae(vae: AudioVAE, seed: int) -> None:
    """Fills the parameters with random values that keep a signal's scale through the codec; the output is quiet."""
    generator = torch.Generator(vae.decoder.alpha.device).manual_seed(seed)
    for module in vae.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                # A transposed convolution has its inputs first, and two of its taps reach each sample.
                fan_in = 2 * parameter.shape[0] if isinstance(module, SnakeUpsample) else parameter[0].numel()
                gain = 0.3 if name == "pointwise_weight" else 1.0
                parameter.data.normal_(0.0, gain * fan_in**-0.5, generator=generator)
            elif name in ("scale", "alpha", "alpha_in", "alpha_out"):
                parameter.data.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.data.normal_(0.0, 0.02, generator=generator)
    vae.decoder.last.weight.data.mul_(0.03)
