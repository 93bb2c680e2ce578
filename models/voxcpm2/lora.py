"""Which layers of VoxCPM2 an adapter may change, by their published names."""

from __future__ import annotations

from models.layers.adapters import LoraPlace
from models.voxcpm2.config import VoxCPM2Config
from models.voxcpm2.stack import language_block, local_block


def lora_places(config: VoxCPM2Config) -> dict[str, LoraPlace]:
    """Every place that an adapter may change, by our name."""
    language, local = language_block(config.lm), local_block(config.dit, config.lm)
    stacks = (
        ("lm", "base_lm", "base_lm", language, config.lm.num_hidden_layers),
        ("lm", "residual_lm", "residual_lm", language, config.residual_lm_num_layers),
        ("dit", "feat_decoder", "feat_decoder.estimator.decoder", local, config.dit.num_layers),
    )
    places = {}
    for group, ours, published, block, layers in stacks:
        q_rows, kv_rows = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        for layer in range(layers):
            attention = f"{published}.layers.{layer}.self_attn."
            qkv = tuple(f"{attention}{part}_proj" for part in "qkv")
            places[f"{ours}.{layer}.qkv"] = LoraPlace(group, qkv, block.hidden_size, (q_rows, kv_rows, kv_rows))
            places[f"{ours}.{layer}.out"] = LoraPlace(group, (f"{attention}o_proj",), q_rows, (block.hidden_size,))
    width = language.hidden_size
    projections = (
        ("enc_to_lm_proj", config.encoder.hidden_dim, width),
        ("lm_to_dit_proj", width, local.hidden_size),
        ("res_to_dit_proj", width, local.hidden_size),
        ("fusion_concat_proj", 2 * width, width),
    )
    for name, inputs, outputs in projections:
        places[name] = LoraPlace(name, (name,), inputs, (outputs,))
    return places
