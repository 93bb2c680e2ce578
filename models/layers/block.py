"""The pre-norm transformer block of Llama, Qwen2, Qwen3, MiniCPM4 and the stacks of VoxCPM2: RMSNorm, grouped-query
attention, and a SwiGLU or a mixture of SwiGLU experts. The caller provides attention and rotation, so the block works
with caches and with short dense sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from models.interfaces.rule import Rule, qkv_rules, renamed
from models.layers.gemm import gemm, gemm_add_norm
from models.layers.lora import GemmLora, StackLora
from models.layers.mlp import SwiGLU
from models.layers.moe import Experts, MixtureOfExperts, SoftmaxRouter
from models.layers.norms import Normed, QKNorm, RMSNorm

ExpertLayout = Literal["published", "saved", "apart"]
"""How a checkpoint stores the matrices of experts: published: all in one tensor [expert, in, out]. saved: all in one
tensor [expert, out, in], as transformers 5 writes it. apart: each in a tensor of its own."""

NORM_NAMES = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
"""Published names of a layer's norms, and ours."""
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Attention of a layer: q [..., n, heads, head_dim], k and v [..., n, kv_heads, head_dim], number of the layer -> shape
of q. It applies SelfAttention.qk_norm, where a layer has one, before it rotates q and k."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of a mixture of experts: `count` SwiGLU experts of width `intermediate_size`, `top_k` of them for each
    row."""

    count: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and options of a Block. num_heads * head_dim need not equal hidden_size. intermediate_size is that of the
    dense MLP; `experts` take its place."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsConfig | None = None


class SelfAttention(nn.Module):
    """The projections of an attention. The caller applies `out` and adds its result to x.

    qkv holds the rows of q, then k, then v, each head by head.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, normed: Normed, attend: Attend, layer: int, keep: slice | None = None, lora: StackLora | None = None
    ) -> Tensor:
        """[..., n, hidden_size] -> the outputs of the heads [..., n, num_heads * head_dim], for all rows or for those
        in `keep`. lora: adapters of the projections."""
        qkv = gemm(normed, self.qkv.weight, self.qkv.bias, lora=None if lora is None else lora.qkv(layer))
        heads = (self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, self.config.head_dim)).split(heads, dim=-2)
        return attend(q if keep is None else q[..., keep, :, :], k, v, layer).flatten(-2)

    @property
    def qk_norm(self) -> QKNorm | None:
        """What the attention applies to q and k together with their rotation."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    `forward` says what is computed; run_blocks computes it with each sum and the norm behind it in one kernel.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: SwiGLU | MixtureOfExperts
        if config.experts is None:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        else:
            count, inner = config.experts.count, config.experts.intermediate_size
            router = SoftmaxRouter(config.hidden_size, count, config.experts.top_k)
            self.mlp = MixtureOfExperts(router, Experts(count, config.hidden_size, inner))

    def forward(self, x: Tensor, attend: Attend, layer: int) -> Tensor:
        """[..., n, hidden_size] -> like x."""
        x = x + self.attention.out(self.attention(self.attention_norm(x), attend, layer))
        return x + self.mlp(self.mlp_norm(x))

    def add_attention(self, x: Tensor, attended: Tensor, lora: GemmLora | None) -> tuple[Normed, Tensor]:
        """(mlp_norm of the sum, the sum) of x and the output projection of what the heads attended."""
        # A router reads the norm, too.
        deferrable = isinstance(self.mlp, SwiGLU)
        return add_and_norm(self.attention.out, attended, x, self.mlp_norm, lora, deferrable=deferrable)

    def add_mlp(self, x: Tensor, normed: Normed, norm: RMSNorm, *, deferrable: bool) -> tuple[Normed, Tensor]:
        """(norm of the sum, the sum) of x and mlp(normed). deferrable: as of add_and_norm."""
        if isinstance(self.mlp, MixtureOfExperts):
            assert isinstance(normed, Tensor)
            x = self.mlp(normed, x)
            return norm(x), x
        return add_and_norm(self.mlp.down, self.mlp.gated(normed), x, norm, deferrable=deferrable)


def run_blocks(
    layers: Sequence[Block],
    x: Tensor,
    final_norm: RMSNorm,
    attend: Attend,
    keep: slice | None = None,
    *,
    first_norm: Tensor | None = None,
    features: Sequence[Tensor] = (),
    lora: StackLora | None = None,
) -> Tensor:
    """Runs [..., n, hidden_size] through all blocks and the final norm. `attend` rotates q and k and writes the cache.

    keep: the rows of the result. The last layer computes q, k and v for all rows, but everything after them only for
        these.
    first_norm: attention_norm(x) of the first layer, if the caller has computed it.
    features: tensors of x's shape; the i-th is added to the output of block i (DeepStack, arXiv:2406.04334).
    lora: adapters of the attentions.
    """
    normed: Normed = layers[0].attention_norm(x) if first_norm is None else first_norm
    norms = [*(block.attention_norm for block in layers[1:]), final_norm]
    for index, (block, next_norm) in enumerate(zip(layers, norms, strict=True)):
        last = next_norm is final_norm
        attended = block.attention(normed, attend, index, keep if last else None, lora)
        if last and keep is not None:
            x = x[..., keep, :]
        normed, x = block.add_attention(x, attended, None if lora is None else lora.out(index))
        if index < len(features):
            x = x + features[index]  # the MLP does not read them
        normed, x = block.add_mlp(x, normed, next_norm, deferrable=not last)
    assert isinstance(normed, Tensor)
    return normed


def add_and_norm(
    layer: nn.Linear, y: Tensor, x: Tensor, norm: RMSNorm, lora: GemmLora | None = None, *, deferrable: bool = True
) -> tuple[Normed, Tensor]:
    """(norm(x + layer(y)), x + layer(y)). lora: adapters of the layer. deferrable: only a GEMM reads the norm,
    which may apply it itself."""
    return gemm_add_norm(y, layer.weight, layer.bias, x, norm.weight, norm.eps, lora, deferrable=deferrable)


def block_rules(config: BlockConfig, published: str, ours: str, *, experts: ExpertLayout = "published") -> list[Rule]:
    """Rules from published Llama-style names with the prefix `published` to those of a Block with the prefix `ours`;
    both end in ".". With experts in the configuration, they also hold for a block without."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = swiglu_rules(f"{published}mlp.", f"{ours}mlp.", config.intermediate_size)
    if config.experts is not None:
        mlp.append(Rule(f"{published}mlp.gate.weight", f"{ours}mlp.router.weight"))
        if experts == "apart":
            mlp += expert_rules(published, ours, config.experts.intermediate_size)
        else:
            mlp += _stacked_expert_rules(published, ours, transposed=experts == "published")
    return [
        *qkv_rules(f"{published}self_attn.", f"{ours}attention.qkv", (q_rows, kv_rows, kv_rows)),
        *renamed(
            f"{published}self_attn.", f"{ours}attention.", {"o_proj": "out", "q_norm": "q_norm", "k_norm": "k_norm"}
        ),
        *renamed(published, ours, NORM_NAMES),
        *mlp,
    ]


def swiglu_rules(published: str, ours: str, size: int, suffix: str = ".weight") -> list[Rule]:
    """Rules for a SwiGLU of width `size`. suffix: of our names."""
    return [
        Rule(f"{published}gate_proj.weight", f"{ours}gate_up{suffix}", rows=(0, size)),
        Rule(f"{published}up_proj.weight", f"{ours}gate_up{suffix}", rows=(size, 2 * size)),
        Rule(f"{published}down_proj.weight", f"{ours}down{suffix}"),
    ]


def expert_rules(published: str, ours: str, size: int) -> list[Rule]:
    """Rules for a block's Experts of width `size`, whose matrices are published one by one."""
    return swiglu_rules(f"{published}mlp.experts.{{e}}.", f"{ours}mlp.experts.", size, suffix="")


def _stacked_expert_rules(published: str, ours: str, *, transposed: bool) -> list[Rule]:
    return [
        Rule(f"{published}mlp.experts.gate_up_proj", f"{ours}mlp.experts.gate_up", transposed=transposed),
        Rule(f"{published}mlp.experts.down_proj", f"{ours}mlp.experts.down", transposed=transposed),
    ]
