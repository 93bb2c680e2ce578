"""The SigLIP NaViT tower over packed patches: full attention inside a slice, none across slices."""

from __future__ import annotations

from torch import Tensor, nn

from models.interfaces.rule import Rule, qkv_rules, renamed
from models.layers.packed import widen_inputs
from models.layers.tower import TowerBlock, run_tower
from models.minicpmv.config import VisionConfig


class Tower(nn.Module):
    """Patches [P, patch_embedding.in_features] (y, x, channel), ids into the learned table int32 [P] -> [P,
    hidden_size]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.table_side**2, config.hidden_size)
        sizes = config.hidden_size, config.intermediate_size, config.num_heads
        self.layers = nn.ModuleList(TowerBlock(*sizes, "gelu_tanh", config.norm_eps) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def embed(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        return self.patch_embedding(patches) + self.position_embedding(position_ids)

    def forward(self, patches: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = self.embed(patches, position_ids)
        return run_tower(self.layers, x, self.final_norm, None, cu_seqlens, max_seqlen)

    def prepare(self) -> None:
        """Orders and pads the columns of the loaded patch embedding: published kernels read (channel, y, x), pictures
        lie as (y, x, channel)."""
        size = self.config.patch_size
        weight = self.patch_embedding.weight
        weight.copy_(weight.unflatten(1, (3, size, size)).permute(0, 2, 3, 1).flatten(1))
        widen_inputs(self.patch_embedding)


def tower_rules(config: VisionConfig, ours: str, published: str = "vpm.") -> list[Rule]:
    """Names under the prefix `published` to a Tower under the prefix `ours`; both end in "."."""
    hidden_size, patch = config.hidden_size, config.patch_size
    layer, our_layer = f"{published}encoder.layers.{{i}}.", f"{ours}layers.{{i}}."
    return [
        *qkv_rules(f"{layer}self_attn.", f"{our_layer}qkv", (hidden_size, hidden_size, hidden_size)),
        Rule(
            f"{published}embeddings.patch_embedding.weight",
            f"{ours}patch_embedding.weight",
            shape=(hidden_size, 3, patch, patch),
        ),
        Rule(f"{published}embeddings.patch_embedding.bias", f"{ours}patch_embedding.bias"),
        Rule(f"{published}embeddings.position_embedding.weight", f"{ours}position_embedding.weight"),
        *renamed(layer, our_layer, {"self_attn.out_proj": "out", "mlp": "mlp"}),
        *renamed(layer, our_layer, {"layer_norm1": "attention_norm", "layer_norm2": "mlp_norm"}),
        *renamed(published, ours, {"post_layernorm": "final_norm"}),
    ]
