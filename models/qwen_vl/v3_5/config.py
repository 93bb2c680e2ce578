"""The language model in the config.json of Qwen3.5, 3.6 and 3.8. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.checkpoints.published import require_fields, require_text_fields
from models.interfaces.errors import CheckpointError

QWEN3_5 = frozenset({"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"})
"""Architectures."""
LINEAR, FULL = "linear_attention", "full_attention"

_TEXT_FIELDS = (
    *("head_dim", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    "linear_value_head_dim",
)
_FIXED: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mtp_use_dedicated_embeddings": False,
    "layer_scale": False,
}
"""Fields that have one value in all published files; absent, they have it, too."""


def text_fields(directory: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """The checked text_config of a config.json, with layer_types, LINEAR or FULL for each layer, and intermediate_size.
    CheckpointError names the field."""
    named = {name: value for name, value in text.items() if value is not None}
    require_fields("config.json: text_config.", named, _FIXED)
    required = (*_TEXT_FIELDS, *(("shared_expert_intermediate_size",) if "num_experts" in named else ()))
    if missing := [name for name in required if name not in named]:
        raise CheckpointError(f"{directory}: config.json: fields of the language model are missing: {missing}")
    if text["linear_num_value_heads"] % text["linear_num_key_heads"]:
        raise CheckpointError(
            f"config.json: text_config.linear_num_value_heads {text['linear_num_value_heads']} is not a multiple of "
            f"linear_num_key_heads {text['linear_num_key_heads']}"
        )
    # A mixture has no dense MLP, and no field for its width.
    inner = text.get("intermediate_size") or text.get("shared_expert_intermediate_size")
    checked = {**text, "intermediate_size": inner}
    require_text_fields(directory, checked)
    return {**checked, "layer_types": _layer_types(checked)}


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    """The list of the file; without one, every full_attention_interval-th layer is FULL."""
    count, interval = int(text.get("num_hidden_layers") or 0), int(text.get("full_attention_interval") or 4)
    types = text.get("layer_types") or [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    if len(types) != count or not set(types) <= {LINEAR, FULL}:
        raise CheckpointError(
            f"config.json: text_config.layer_types has {len(types)} entries {sorted(set(types))}, expected {LINEAR} or "
            f"{FULL} for each of {count} layers"
        )
    return list(types)
