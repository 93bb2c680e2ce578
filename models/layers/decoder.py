"""The causal decoder of Llama, Qwen2, Qwen3 and MiniCPM4 (Llama form) checkpoints: one class, driven by config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from models.interfaces.capturable import BufferSpec
from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.attention import cached_attention
from models.layers.block import Block, BlockConfig, ExpertLayout, ExpertsConfig, block_rules, run_blocks
from models.layers.gemm import gemm
from models.layers.kv_cache import CacheSpec, PagedBatch
from models.layers.norms import RMSNorm
from models.layers.quantized import COLUMNS, QuantizedWeight, Weight, hold_in_e4m3
from models.layers.rope_field import rope_field
from models.layers.rope_scaling import LongRope, Rotary, Yarn, read_rope_scaling

_QWEN3_HEAD_DIM = 128
_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}
"""Fields that have one value in all published files."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a CausalDecoder."""

    vocab_size: int
    num_layers: int
    block: BlockConfig
    max_positions: int
    rope_theta: float
    tied: bool
    """Whether the embedding table is also the weight of the head."""
    mrope_section: tuple[int, ...] = ()
    """Number of frequencies of each position axis (time, height, width); empty for one-dimensional positions."""
    mrope_interleaved: bool = False
    """Whether the axes take turns along the frequencies, instead of having one range each."""
    scaling: LongRope | Yarn | None = None
    feature_levels: int = 0
    """models.protocol.Decoder.feature_levels."""

    @classmethod
    def from_published(
        cls,
        config: Mapping[str, Any],
        *,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        experts: ExpertsConfig | None = None,
        feature_levels: int = 0,
    ) -> DecoderConfig:
        """Reads the text fields of a config.json, published (rope_scaling, rope_theta) or as transformers 5 writes them
        (rope_parameters).

        Raises CheckpointError that names the field that is missing or not supported.
        """
        for name, value in _FIXED.items():
            if (found := config.get(name)) not in (None, value):
                raise CheckpointError(f"config.json: {name} is {found!r}, expected {value!r}")
        try:
            block = _block_config(config, qkv_bias, qk_norm, experts)
            _, rope = rope_field(config)
            theta = rope.get("rope_theta") or config["rope_theta"]
            max_positions = int(config["max_position_embeddings"])
            mrope_section, scaling = read_rope_scaling(rope, block.head_dim, max_positions)
            return cls(
                vocab_size=int(config["vocab_size"]),
                num_layers=int(config["num_hidden_layers"]),
                block=block,
                max_positions=max_positions,
                rope_theta=float(theta),
                tied=bool(config.get("tie_word_embeddings", False)),
                mrope_section=mrope_section,
                mrope_interleaved=bool(rope.get("mrope_interleaved", False)),
                scaling=scaling,
                feature_levels=feature_levels,
            )
        except KeyError as error:
            raise CheckpointError(f"config.json: field {error} is missing") from error


def _block_config(
    config: Mapping[str, Any], qkv_bias: bool, qk_norm: bool, experts: ExpertsConfig | None
) -> BlockConfig:
    hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    # The default of the published class does not depend on the width; mixtures of experts have no such default.
    default = _QWEN3_HEAD_DIM if qk_norm and experts is None else hidden_size // num_heads
    return BlockConfig(
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or default),
        norm_eps=float(config["rms_norm_eps"]),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        experts=experts,
    )


class TokenDecoder(nn.Module):
    """The embedding table and the head of a decoder, and the parts of models.protocol.Decoder that all have in common.
    The head, None where it is tied to the table, is made behind the layers: random values are drawn in this order."""

    feature_levels = 0
    head: nn.Linear | None

    def __init__(self, vocab_size: int, hidden_size: int, max_positions: int) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.max_positions = vocab_size, hidden_size, max_positions
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.tied_head: QuantizedWeight | None = None

    def state_specs(self) -> list[Mapping[str, BufferSpec]]:
        return []

    def pending_specs(self, tokens: int) -> list[Mapping[str, BufferSpec]]:
        return []

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [n] -> [n, hidden_size]."""
        return self.embed_tokens(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
        weight: Weight = self.embed_tokens.weight if self.head is None else self.head.weight
        return gemm(hidden, weight if self.tied_head is None else self.tied_head)

    def hold_in_e4m3(self) -> None:
        """Replaces the weights of the linear layers with e4m3 ones; called on the meta device. The embedding table
        stays in 16 bits, so a tied head becomes a copy. A head whose size the kernels do not support stays in 16
        bits."""
        whole = self.vocab_size % COLUMNS == 0
        self.sixteen_bit_layers = frozenset() if whole else frozenset({"head"})
        hold_in_e4m3(self)
        if self.head is None and whole:
            self.tied_head = QuantizedWeight(*self.embed_tokens.weight.shape)


class CausalDecoder(TokenDecoder):
    """Runs packed rows through all layers over a paged cache. Implements models.protocol.Decoder; can be captured."""

    drafter = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.vocab_size, config.block.hidden_size, config.max_positions)
        self.config = config
        self.position_axes = len(config.mrope_section) or 1
        self.feature_levels = config.feature_levels
        self.layers = nn.ModuleList(Block(config.block) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.block.hidden_size, config.block.norm_eps)
        self.head = None if config.tied else nn.Linear(config.block.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(
            config.block.head_dim,
            config.rope_theta,
            config.scaling,
            config.mrope_section,
            interleaved=config.mrope_interleaved,
        )

    def cache_specs(self) -> list[CacheSpec]:
        block = self.config.block
        row = (block.num_kv_heads, block.head_dim)
        return [CacheSpec({"k": row, "v": row}) for _ in self.layers]

    def forward(self, hidden: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        """hidden [n, hidden_size * (1 + levels)] (embeddings, followed by the features of `levels` first layers),
        positions int64 [position_axes, n] -> normed hidden states [n, hidden_size]."""
        rotary = self.rotary(positions)
        layers, width = cast("Sequence[Block]", self.layers), self.config.block.hidden_size

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return cached_attention(q, k, v, layer, batch, rotary, layers[layer].attention.qk_norm)

        if hidden.shape[-1] == width:
            return run_blocks(layers, hidden, self.norm, attend)
        x, *features = hidden.unflatten(-1, (-1, width)).unbind(-2)
        return run_blocks(layers, x.contiguous(), self.norm, attend, features=features)


def decoder_rules(
    config: DecoderConfig,
    *,
    published: str = "model.",
    head: str = "lm_head.weight",
    experts: ExpertLayout = "published",
) -> list[Rule]:
    """Rules for a causal language model: names of its stack start with `published`, its head's is `head`."""
    blocks = block_rules(config.block, f"{published}layers.{{i}}.", "decoder.layers.{i}.", experts=experts)
    return [*token_rules(published, head), *blocks]


def token_rules(published: str, head: str) -> list[Rule]:
    """Rules for a TokenDecoder without its layers, whose last norm is `norm`."""
    return [
        Rule(f"{published}embed_tokens.weight", "decoder.embed_tokens.weight"),
        Rule(f"{published}embed_tokens.weight", "decoder.tied_head", shared=True),
        Rule(f"{published}norm.weight", "decoder.norm.weight"),
        Rule(head, "decoder.head.weight"),
    ]


def decoder_ignored(config: DecoderConfig, *, published: str = "model.", head: str = "lm_head.weight") -> list[str]:
    """Patterns of published tensors that are not needed: rotary tables, which old tools wrote, and the copy of a tied
    head, which some tools write."""
    tables = [f"{published}{part}rotary_emb.inv_freq" for part in ("layers.{i}.self_attn.", "")]
    return [*tables, *([head] if config.tied else [])]
