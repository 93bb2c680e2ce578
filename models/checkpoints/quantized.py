"""Quantised checkpoints: from the tensors of a layer, in any published format, to its Codes.

| format | codes | scale | zeros | groups |
|---|---|---|---|---|
| AWQ (gemm) | X.qweight [K, N / 8] | X.scales [G, N] | X.qzeros [G, N / 8] | |
| GPTQ | X.qweight [K bits / 32, N] | X.scales [G, N] | X.qzeros [G, N bits / 32] | X.g_idx [K] |
| compressed-tensors | X.weight_packed [N, K bits / 32] | X.weight_scale [N, G] | X.weight_zero_point | X.weight_g_idx |
| float-quantized | X.weight e4m3 [N, K] | X.weight_scale | | |
| FP8 of Qwen and DeepSeek | X.weight, or X, e4m3 [..., N, K] | the name and _scale_inv | | |

A scale multiplies, whatever its name says. A layer is quantised if its codes are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoints.published import read_optional_json
from models.checkpoints.quantization_config import QuantizationConfig, quantization_of
from models.checkpoints.weight_files import PublishedTensor, listed
from models.interfaces.errors import CheckpointError
from models.layers.quantized import Codes, CodeType, Scheme

_E4M3 = "F8_E4M3"
_PARTS = {
    ".qweight": "codes",
    ".qzeros": "zeros",
    ".scales": "scale",
    ".g_idx": "groups",
    ".weight_packed": "codes",
    ".weight_scale": "scale",
    ".weight_zero_point": "zeros",
    ".weight_shape": "shape",
    ".weight_g_idx": "groups",
    "_scale_inv": "scale",
}
_UNUSED = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")
"""Scales of activations and of caches in 8 bits: activations and caches stay in 16 bits."""
_NEEDED = {
    "awq": (".scales", ".qzeros"),
    "gptq": (".scales", ".qzeros"),
    "compressed-tensors": (".weight_scale",),
    "fp8": ("_scale_inv",),
}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Field of a word that holds its j-th output."""
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(eq=False)
class _Layer:
    """The tensors of a quantised weight. Its codes are read when they are used, what is beside them at once."""

    beside: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    codes: PublishedTensor | None = None
    scale: torch.dtype = torch.float32


class QuantizedTensors:
    """The quantised weights of a checkpoint by canonical name, such as "model.layers.0.mlp.up_proj.weight"."""

    def __init__(self, directory: Path, tensors: Iterable[tuple[str, PublishedTensor]], device: torch.device) -> None:
        """tensors: canonical name and tensor of all entries of all files. device: where weights are unpacked; if it is
        meta, only small tensors are read."""
        self._directory = directory
        self._device = device
        self._config = quantization_of(read_optional_json(directory, "config.json")) or QuantizationConfig("none")
        self.layers: dict[str, _Layer] = {}
        if self._config.method == "none":
            return
        for name, tensor in tensors:
            found = self._part(name, tensor)
            if found is None or found[1] == "unused":
                continue
            layer = self.layers.setdefault(found[0], _Layer())
            layer.names[found[1]] = tensor.name
            if found[1] == "codes":
                layer.codes = tensor
            else:
                if found[1] == "scale":
                    layer.scale = _SCALES.get(tensor.dtype, torch.float32)
                whole = device.type != "meta" or found[1] in ("groups", "shape")
                layer.beside[found[1]] = tensor.read() if whole else torch.empty(tensor.shape, device="meta")
        for layer in self.layers.values():
            self._check(layer)

    def _part(self, name: str, tensor: PublishedTensor) -> tuple[str, str] | None:
        """The weight that a tensor belongs to, and its part; None for a tensor that is not quantised."""
        if self._config.method == "none":
            return None
        if name.endswith(_UNUSED):
            return name, "unused"
        if tensor.dtype == _E4M3:
            return name, "codes"
        for suffix, part in _PARTS.items():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + (".weight" if suffix[0] == "." else ""), part
        return None

    def _check(self, layer: _Layer) -> None:
        if layer.codes is None:
            raise CheckpointError(f"{self._directory}: unexpected tensors: {listed(list(layer.names.values()))}")
        zeros = self._config.method == "compressed-tensors" and not self._config.symmetric
        for suffix in (*_NEEDED[self._config.method], *((".weight_zero_point",) if zeros else ())):
            if _PARTS[suffix] not in layer.beside:
                stem = layer.codes.name.rpartition(".")[0] if suffix[0] == "." else layer.codes.name
                raise CheckpointError(f"{layer.codes.file}: missing tensor: {stem}{suffix}")

    def logical(self, name: str, tensor: PublishedTensor) -> tuple[str, PublishedTensor] | None:
        """The weight that a tensor of the files holds, as a tensor of float32 with `codes`; the tensor itself if it is
        not quantised; None for what stands beside codes."""
        found = self._part(name, tensor)
        if found is None:
            return name, tensor
        weight, part = found
        if part != "codes":
            return None
        codes = partial(self._read, self.layers[weight], tensor)

        def dequantised() -> Tensor:
            return codes().dequantised()

        shape = self._shape(self.layers[weight])
        return weight, replace(tensor, shape=shape, dtype="F32", read=dequantised, codes=codes)

    def scheme_of(self, name: str) -> Scheme | None:
        """How a weight with these codes is held; None if it is not quantised, or has groups of different sizes."""
        layer = self.layers.get(name)
        if layer is None:
            return None
        groups = self._groups(layer)
        inputs = self._shape(layer)[-1]
        count, group = self._group(layer)
        if groups is not None and (inputs % count or (groups.bincount(minlength=count) != inputs // count).any()):
            return None
        kind = self._code_type(layer)
        zeros = "zeros" in layer.beside and not self._symmetric
        return Scheme(kind, 0 if count == 1 else group, layer.scale, zeros, groups is not None)

    def order_of(self, name: str) -> Tensor | None:
        """Inputs of a weight sorted by group, if they are not in that order."""
        groups = self._groups(self.layers[name])
        return None if groups is None else groups.argsort(stable=True)

    def zero_bias(self, name: str, tensor: PublishedTensor) -> bool:
        """Whether this is the bias of zeros that AutoGPTQ adds to every quantised layer."""
        beside = name.removesuffix(".bias") + ".weight" in self.layers and name.endswith(".bias")
        return beside and not tensor.read().any()

    @property
    def _symmetric(self) -> bool:
        return self._config.method == "gptq" and self._config.symmetric

    def _code_type(self, layer: _Layer) -> CodeType:
        assert layer.codes is not None
        return "e4m3" if layer.codes.dtype == _E4M3 else "u8" if self._bits(layer) == 8 else "u4"

    def _bits(self, layer: _Layer) -> int:
        config, codes = self._config, layer.codes
        assert codes is not None
        width = 32 * codes.shape[0 if config.method == "gptq" else -1]
        inputs = self._published_inputs(layer)
        if config.method == "awq" or inputs is None:
            return config.bits
        for bits in (4, 8):
            if -(-inputs * bits // 32) * 32 == width:
                return bits
        raise CheckpointError(
            f"{codes.file}: tensor {codes.name} has shape {codes.shape}, no {inputs} codes of 4 or 8 bits"
        )

    def _published_inputs(self, layer: _Layer) -> int | None:
        """K, where a tensor beside the codes tells it."""
        if "shape" in layer.beside:
            return int(layer.beside["shape"][1])
        return len(layer.beside["groups"]) if "groups" in layer.beside else None

    def _shape(self, layer: _Layer) -> tuple[int, ...]:
        """The shape of the weight, [..., N, K]."""
        config, codes = self._config, layer.codes
        assert codes is not None
        if codes.dtype == _E4M3:
            return codes.shape
        if config.method == "awq":
            return codes.shape[1] * 8, codes.shape[0]
        if config.method == "gptq":
            return codes.shape[1], codes.shape[0] * 32 // self._bits(layer)
        return codes.shape[0], self._published_inputs(layer) or codes.shape[1] * 32 // config.bits

    def _group(self, layer: _Layer) -> tuple[int, int]:
        """Number of groups of an output's inputs, and inputs of each."""
        inputs, scale = self._shape(layer)[-1], layer.beside["scale"]
        if layer.codes is not None and layer.codes.dtype == _E4M3:
            return self._e4m3_block(layer)[1]
        count = scale.shape[0 if self._config.method in ("awq", "gptq") else -1]
        group = self._config.group
        # The last group may be shorter. Some layers may have groups of their own.
        return count, group if group and -(-inputs // group) == count else -(-inputs // count)

    def _e4m3_block(self, layer: _Layer) -> tuple[tuple[int, int], tuple[int, int]]:
        """Block of codes in e4m3, and its number of groups and their inputs."""
        assert layer.codes is not None
        scale, block = layer.beside["scale"], self._config.block
        if len(layer.codes.shape) < 2:
            raise CheckpointError(
                f"tensor {layer.codes.name} has shape {layer.codes.shape}; in FP8 only matrices are supported"
            )
        *leading, rows, columns = layer.codes.shape
        if scale.numel() == 1 and not leading and (scale.dim() < 2 or not self._config.group):
            return (rows, columns), (1, columns)
        if tuple(scale.shape) == (*leading, rows, 1):
            return (1, columns), (1, columns)
        expected = (*leading, -(-rows // block[0]), -(-columns // block[1]))
        if tuple(scale.shape) != expected:
            raise CheckpointError(f"tensor {layer.names['scale']} has shape {tuple(scale.shape)}, expected {expected}")
        return block, (expected[-1], block[1])

    def _groups(self, layer: _Layer) -> Tensor | None:
        """Group of each input where it is not the usual one."""
        groups = layer.beside.get("groups")
        if groups is None:
            return None
        count, group = self._group(layer)
        if len(groups) != self._shape(layer)[-1] or not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise CheckpointError(f"{self._directory}: tensor {layer.names['groups']} must name {count} groups")
        usual = torch.arange(len(groups)) // group
        return None if torch.equal(groups.long(), usual) else groups.long()

    def _read(self, layer: _Layer, tensor: PublishedTensor) -> Codes:
        """Reads and unpacks the codes, on the device."""
        config = self._config
        words = tensor.read().to(self._device)
        scale = layer.beside["scale"].to(self._device)
        if tensor.dtype == _E4M3:
            block, _ = self._e4m3_block(layer)
            return Codes(words, scale.reshape(1, 1) if scale.numel() == 1 else scale, block)
        bits, (outputs, inputs) = self._bits(layer), self._shape(layer)
        zeros = layer.beside.get("zeros")
        zeros = None if zeros is None or self._symmetric else zeros.to(self._device)
        if config.method == "awq":
            values, scale = _awq_fields(words).mT, scale.mT
            zeros = None if zeros is None else _awq_fields(zeros).mT
        elif config.method == "gptq":
            values, scale = _fields(words.mT, bits), scale.mT
            if zeros is not None:
                zeros = (_fields(zeros, bits) + config.offset & (1 << bits) - 1).mT
        else:
            values = _fields(words, bits)[:, :inputs]
            if zeros is not None and zeros.dtype == torch.int32:
                zeros = _fields(zeros.mT, bits).mT[:outputs]
            elif zeros is not None:
                zeros = (zeros.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
        count, group = self._group(layer)
        for part, values_of in (("scale", scale), ("zeros", zeros)):
            if values_of is not None and tuple(values_of.shape) != (outputs, count):
                shape = tuple(layer.beside[part].shape)
                raise CheckpointError(
                    f"{tensor.file}: tensor {layer.names[part]} has shape {shape}: it is {outputs} x {inputs}"
                )
        groups = self._groups(layer)
        groups = None if groups is None else groups.to(self._device)
        return Codes(values, scale, (1, group), bits, zeros, groups)


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] -> uint8 [..., W * 32 / bits], from the low end of each word."""
    values = words.contiguous().view(torch.uint8)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), -1).flatten(-2)


def _awq_fields(words: Tensor) -> Tensor:
    return _fields(words, 4).unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2)


def scheme_of_config(config: Mapping[str, object]) -> Scheme | None:
    """How most linear layers of a checkpoint with this config.json are held, without its tensors."""
    if (found := quantization_of(config)) is None:
        return None
    codes: CodeType = "e4m3" if found.floats else "u8" if found.bits == 8 else "u4"
    scale = torch.float16 if found.method in ("awq", "gptq") else torch.bfloat16
    return Scheme(codes, found.group, scale, not found.symmetric, found.reordered)
