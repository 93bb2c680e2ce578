"""quantization_config of a published checkpoint: what its tensors do not tell, and which formats are refused.

Torch-free. Which layers are quantised, their bits and their groups are read from the tensors
(models.checkpoints.quantized): the lists of exceptions in these files are often wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.interfaces.errors import CheckpointError

_HOSTED = "hosted are AWQ (gemm), GPTQ, compressed-tensors (pack-quantized, float-quantized) and FP8 (e4m3)"
_PACKED = ("pack-quantized", "mixed-precision")
_FLOATS = (*_PACKED, "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class QuantizationConfig:
    """method: "awq", "gptq", "compressed-tensors" or "fp8". floats: codes are e4m3. group: inputs that share a scale,
    0: all. symmetric: zeros are the middle of the codes, whatever the file stores. offset: what is added to stored
    zeros. block: rows and columns that share a factor. reordered: inputs of a group are not adjacent."""

    method: str
    bits: int = 8
    floats: bool = False
    group: int = 0
    symmetric: bool = True
    offset: int = 0
    block: tuple[int, int] = (128, 128)
    reordered: bool = False


def quantization_of(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Of a config.json; None without quantization_config. CheckpointError names what is not hosted."""
    sections = {"": config, **{f"{key}.": value for key, value in config.items() if isinstance(value, dict)}}
    found = []
    for prefix, section in sections.items():
        given = section.get("quantization_config")
        if given is None or given == {}:
            continue
        try:
            found.append(_read(given))
        except CheckpointError as error:
            method = f" ({given['quant_method']})" if isinstance(given, dict) and "quant_method" in given else ""
            raise CheckpointError(f"{prefix}quantization_config{method}: {error}") from error
    if len(set(found)) > 1:
        raise CheckpointError("quantization_config: several sections with different formats are not hosted")
    experts = any(section.get(name) for section in sections.values() for name in ("num_experts", "n_routed_experts"))
    if found and found[0].reordered and experts:
        raise CheckpointError("quantization_config: experts whose inputs are reordered (desc_act) are not hosted")
    return found[0] if found else None


def _read(given: Any) -> QuantizationConfig:
    if not isinstance(given, dict):
        raise CheckpointError(f"{given!r} is not hosted; {_HOSTED}")
    method = given.get("quant_method", "unknown")
    if method == "auto-round":
        method = str(given.get("packing_format")).removeprefix("auto_round:auto_")
    reader = _READERS.get(method)
    if reader is None:
        raise CheckpointError(f"quant_method {given.get('quant_method', 'unknown')!r} is not hosted; {_HOSTED}")
    return reader(given)


def _require(given: Mapping[str, Any], name: str, *hosted: Any, default: Any = None) -> Any:
    value = given.get(name, default)
    if value not in hosted:
        raise CheckpointError(f"{name} {value!r} is not hosted, expected {' or '.join(map(repr, hosted))}; {_HOSTED}")
    return value


def _group(size: Any) -> int:
    if size is None or size == -1:
        return 0
    if type(size) is not int or size <= 0:
        raise CheckpointError(f"group_size {size!r} is not hosted, expected a positive integer or -1")
    return size


def _block(sizes: Any) -> tuple[int, int]:
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"a block of {sizes!r} is not hosted, expected two positive integers")
    return sizes[0], sizes[1]


def _awq(given: Mapping[str, Any]) -> QuantizationConfig:
    _require({"version": str(given.get("version", "gemm")).lower()}, "version", "gemm")
    bits = _require(given, "bits", 4, default=given.get("w_bit"))
    _require(given, "zero_point", True, default=True)
    group = _group(given.get("group_size", given.get("q_group_size")))
    return QuantizationConfig("awq", bits, group=group, symmetric=False)


def _gptq(given: Mapping[str, Any]) -> QuantizationConfig:
    bits = _require(given, "bits", 4, 8)
    version = _require(given, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    _require(given, "pack_dtype", "int32", default="int32")
    _require(given, "is_marlin_format", False, default=False)
    symmetric = bool(given.get("sym", True))
    group, reordered = _group(given.get("group_size")), bool(given.get("desc_act"))
    offset = 1 if version == "gptq" else 0
    return QuantizationConfig(
        "gptq", bits, group=group, symmetric=symmetric, offset=offset, reordered=reordered and group > 0
    )


def _compressed(given: Mapping[str, Any]) -> QuantizationConfig:
    if given.get("transform_config"):
        raise CheckpointError("transform_config (rotations of activations) is not hosted")
    if (given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise CheckpointError("sparsity_config (sparse weights) is not hosted")
    groups = given.get("config_groups") or {}
    found = []
    for name, group in groups.items():
        weights = group.get("weights") or {}
        floats = _require(weights, "type", "int", "float", default="int") == "float"
        _require({"format": group.get("format") or given.get("format")}, "format", *(_FLOATS if floats else _PACKED))
        try:
            bits = _require(weights, "num_bits", *((8,) if floats else (4, 8)))
            by = _require(weights, "strategy", *(("tensor", "channel", "block") if floats else ("channel", "group")))
        except CheckpointError as error:
            raise CheckpointError(f"config_groups.{name}.weights: {error}") from error
        block = _block(weights.get("block_structure")) if by == "block" else (128, 128)
        size = block[1] if by == "block" else _group(weights.get("group_size")) if by == "group" else 0
        symmetric = bool(weights.get("symmetric", True))
        reordered = weights.get("actorder") in (True, "group", "dynamic")
        found.append(QuantizationConfig("compressed-tensors", bits, floats, size, symmetric, 0, block, reordered))
    if not found:
        raise CheckpointError("config_groups is missing")
    if len({made.block for made in found}) > 1:
        raise CheckpointError("config_groups with different block_structure are not hosted")
    symmetric, reordered = any(one.symmetric for one in found), any(one.reordered for one in found)
    return replace(found[0], symmetric=symmetric, reordered=reordered)


def _fp8(given: Mapping[str, Any]) -> QuantizationConfig:
    _require(given, "fmt", "e4m3", default="e4m3")
    sizes = given.get("weight_block_size")
    block = (128, 128) if sizes is None else _block(sizes)
    return QuantizationConfig("fp8", floats=True, group=0 if sizes is None else block[1], block=block)


_READERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8}
