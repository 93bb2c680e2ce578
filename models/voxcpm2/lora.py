"""Which layers of VoxCPM2 an adapter may change, by their published names."""

from __future__ import annotations

from models.layers.adapters import LoraPlace
from models.layers.block import BlockConfig
from models.voxcpm2.config import VoxCPM2Config
from models.voxcpm2.stack import language_block, local_block

PROJECTIONS = ("enc_to_lm_proj", "lm_to_dit_proj", "res_to_dit_proj", "fusion_concat_proj")


def lora_places(config: VoxCPM2Config) -> dict[str, LoraPlace]:
    """Every place that an adapter may change, by our name."""
    language, hidden_size, local = language_block(config.lm), config.lm.hidden_size, config.dit.hidden_dim
    stacks: tuple[tuple[str, str, str, BlockConfig, int], ...] = (
        ("lm", "base_lm", "base_lm", language, config.lm.num_hidden_layers),
        ("lm", "residual_lm", "residual_lm", language, config.residual_lm_num_layers),
        (
            "dit",
            "feat_decoder",
            "feat_decoder.estimator.decoder",
            local_block(config.dit, config.lm),
            config.dit.num_layers,
        ),
    )
    places = {}
    for group, ours, published, block, layers in stacks:
        q_rows, kv_rows = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        for layer in range(layers):
            attention = f"{published}.layers.{layer}.self_attn."
            qkv = tuple(f"{attention}{part}_proj" for part in "qkv")
            places[f"{ours}.{layer}.qkv"] = LoraPlace(group, qkv, block.hidden_size, (q_rows, kv_rows, kv_rows))
            places[f"{ours}.{layer}.out"] = LoraPlace(group, (f"{attention}o_proj",), q_rows, (block.hidden_size,))
    shapes = {
        "enc_to_lm_proj": (config.encoder.hidden_dim, hidden_size),
        "lm_to_dit_proj": (hidden_size, local),
        "res_to_dit_proj": (hidden_size, local),
        "fusion_concat_proj": (2 * hidden_size, hidden_size),
    }
    for name in PROJECTIONS:
        inputs, outputs = shapes[name]
        places[name] = LoraPlace(name, (name,), inputs, (outputs,))
    return places
