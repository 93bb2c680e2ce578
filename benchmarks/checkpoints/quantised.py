"""Quantised checkpoints in the published layouts, made of ones in 16 bits by rounding to the nearest code: no
calibration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.block_fp8 import in_fp8

_LANGUAGE = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.", "llm.model.layers.")
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each field of a word."""


def _gptq(group: int, *, sym: bool) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": sym, "desc_act": False}


def _awq(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


FORMS: dict[str, dict[str, Any]] = {
    "awq": _awq(128),
    "awq, groups of 64": _awq(64),
    "gptq": _gptq(128, sym=True),
    "gptq, asymmetric": _gptq(128, sym=False),
    "gptq, groups of 64": _gptq(64, sym=True),
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""quantization_config as it is published."""


def quantised(directory: Path, target: Path, form: str) -> Path:
    """Writes a copy of `directory` at `target`, quantised in a form of FORMS."""
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    set_form(target, form)
    for path in directory.glob("*.safetensors"):
        made: dict[str, Tensor] = {}
        for name, value in load_file(path).items():
            made |= packed(name, value, FORMS[form])
        save_file(made, target / path.name)
    return target


def set_form(directory: Path, form: str) -> None:
    """Names a form of FORMS in config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": FORMS[form]}, indent=2))


def packed(name: str, weight: Tensor, config: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The tensors of a published weight [N, K]: quantised in the linear layers and single experts of the language
    model, itself elsewhere. config: quantization_config."""
    if not config or not name.startswith(_LANGUAGE) or not name.endswith("_proj.weight"):
        return {name: weight}
    if config["quant_method"] == "fp8":
        values, factors = in_fp8(weight, config["weight_block_size"])
        return {name: values, f"{name}_scale_inv": factors}
    inputs, group, stem = weight.shape[-1], config["group_size"], name.removesuffix(".weight")
    codes, scale, zeros = _rounded(weight.float(), group, symmetric=config.get("sym", False))
    if config["quant_method"] == "awq":
        if inputs % group:
            return {name: weight}
        return {
            f"{stem}.qweight": _words(_awq_fields(codes.T)),
            f"{stem}.qzeros": _words(_awq_fields(zeros.T)),
            f"{stem}.scales": scale.T.contiguous(),
        }
    return {
        f"{stem}.qweight": _words(codes).T.contiguous(),
        f"{stem}.qzeros": _words(zeros.T - 1 & 15),
        f"{stem}.scales": scale.T.contiguous(),
        f"{stem}.g_idx": torch.arange(inputs, dtype=torch.int32) // group,
    }


def _rounded(weight: Tensor, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K], scale float16 [N, G], zeros uint8 [N, G]; the last group may be shorter."""
    inputs = weight.shape[-1]
    groups = torch.nn.functional.pad(weight, (0, -inputs % group)).unflatten(-1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
    codes = ((groups / scale.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.byte().flatten(-2)[:, :inputs], scale, zeros.byte()


def _words(codes: Tensor) -> Tensor:
    """uint8 [..., K] -> int32 [..., K / 8], the first code in the lowest bits."""
    pairs = codes.contiguous().unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)


def _awq_fields(codes: Tensor) -> Tensor:
    return codes.unflatten(-1, (-1, 8))[..., _AWQ_OUTPUTS].flatten(-2)
