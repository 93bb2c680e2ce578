"""The pre-norm transformer block of Llama, Qwen2, Qwen3, MiniCPM4 and the stacks of VoxCPM2: RMSNorm, grouped-query
attention, SwiGLU. The caller brings the attention and the rotation, so the block serves caches and short dense
sequences alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from models.checkpoint import Rule
from models.layers.fused import Unscaled, linear, linear_add_norm_for_product, linear_add_rms_norm, linear_silu_mul
from models.layers.mlp import SwiGLU
from models.layers.norms import RMSNorm

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q [..., n, heads, head_dim], k and v [..., n, kv_heads, head_dim], layer number -> like q."""


@dataclass(frozen=True)
class BlockConfig:
    """heads * head_dim need not equal width."""

    width: int
    inner_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False


class SelfAttention(nn.Module):
    """Projections around an attention; qkv holds the rows of q, then k, then v, each head by head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.width, heads * config.head_dim, bias=config.qkv_bias)
        self.out = nn.Linear(config.num_heads * config.head_dim, config.width, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def project(self, x: Tensor | Unscaled) -> tuple[Tensor, Tensor, Tensor]:
        """[..., n, width] -> q [..., n, heads, head_dim], k and v [..., n, kv_heads, head_dim]: views of one tensor."""
        return self.split(linear(x, self.qkv.weight, self.qkv.bias))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=-2)
        return *self._normed(q, k), v

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class Block(nn.Module):
    """Parameters of x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = SelfAttention(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config.width, config.inner_width)


def run_blocks(blocks: Iterable[Block], x: Tensor, final_norm: RMSNorm, attend: Attend) -> Tensor:
    """[..., n, width] through all blocks -> their final norm; `attend` rotates and keeps the cache."""
    layers = list(blocks)
    if x.is_cuda and x.shape.numel() == x.shape[-1]:
        return _run_vector(layers, x, final_norm, attend)
    return run_rows(layers, x, final_norm, attend)


def run_rows(
    layers: Sequence[Block],
    x: Tensor,
    final_norm: RMSNorm,
    attend: Attend,
    keep: slice | None = None,
    *,
    first_norm: Tensor | None = None,
) -> Tensor:
    """run_blocks for any number of rows. Every residual sum is made together with the norm that reads it.

    keep: the rows of the result; the last layer computes queries for every row, all else behind them for these only.
    first_norm: the first layer's attention_norm of x, from a caller that has it.
    """
    last = len(layers) - 1
    normed: Tensor | Unscaled = layers[0].attention_norm(x) if first_norm is None else first_norm
    for index, block in enumerate(layers):
        q, k, v = block.attention.project(normed)
        if keep is not None and index == last:
            q, x = q[..., keep, :, :], x[..., keep, :]
        attended = attend(q, k, v, index).flatten(-2)
        normed, x = add_norm_for_product(block.attention.out, attended, x, block.mlp_norm)
        hidden = linear_silu_mul(normed, block.mlp.gate_up.weight)
        if index < last:
            normed, x = add_norm_for_product(block.mlp.down, hidden, x, layers[index + 1].attention_norm)
    return add_norm(layers[-1].mlp.down, hidden, x, final_norm)[0]


def _run_vector(layers: list[Block], x: Tensor, final_norm: RMSNorm, attend: Attend) -> Tensor:
    """One position on a GPU: norms, SwiGLU and residual sums inside the products."""
    from models.layers.kernels.gemv import gemv_cuda

    shape, x = x.shape, x.reshape(1, -1)
    for index, block in enumerate(layers):
        attention, mlp, norms = block.attention, block.mlp, (block.attention_norm, block.mlp_norm)
        before_attention, before_mlp = ((norm.weight, norm.eps) for norm in norms)
        qkv = gemv_cuda(x, attention.qkv.weight, attention.qkv.bias, norm=before_attention)
        attended = attend(*attention.split(qkv.view(*shape[:-1], -1)), index).reshape(1, -1)
        x = gemv_cuda(attended, attention.out.weight, attention.out.bias, residual=x)
        hidden = gemv_cuda(x, mlp.gate_up.weight, norm=before_mlp, silu_mul=True)
        x = gemv_cuda(hidden, mlp.down.weight, residual=x)
    return final_norm(x.view(shape))


def add_norm(layer: nn.Linear, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) of residual and layer(x)."""
    return linear_add_rms_norm(x, layer.weight, layer.bias, residual, norm.weight, norm.eps)


def add_norm_for_product(
    layer: nn.Linear, x: Tensor, residual: Tensor, norm: RMSNorm
) -> tuple[Tensor | Unscaled, Tensor]:
    """add_norm whose norm is read by `linear` or `linear_silu_mul` alone."""
    return linear_add_norm_for_product(x, layer.weight, layer.bias, residual, norm.weight, norm.eps)


def block_rules(config: BlockConfig, published: str, ours: str) -> list[Rule]:
    """Published Llama-style names under the prefix `published` to a Block under `ours`, both ending in "."."""
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q": (0, q_rows), "k": (q_rows, q_rows + kv_rows), "v": (q_rows + kv_rows, q_rows + 2 * kv_rows)}
    inner = config.inner_width
    rules = [
        Rule(f"{published}self_attn.{name}_proj.{kind}", f"{ours}attention.qkv.{kind}", rows=span)
        for name, span in rows.items()
        for kind in ("weight", "bias")
    ]
    return [
        *rules,
        Rule(f"{published}self_attn.o_proj.{{rest}}", f"{ours}attention.out.{{rest}}"),
        Rule(f"{published}self_attn.q_norm.weight", f"{ours}attention.q_norm.weight"),
        Rule(f"{published}self_attn.k_norm.weight", f"{ours}attention.k_norm.weight"),
        Rule(f"{published}input_layernorm.weight", f"{ours}attention_norm.weight"),
        Rule(f"{published}post_attention_layernorm.weight", f"{ours}mlp_norm.weight"),
        Rule(f"{published}mlp.gate_proj.weight", f"{ours}mlp.gate_up.weight", rows=(0, inner)),
        Rule(f"{published}mlp.up_proj.weight", f"{ours}mlp.gate_up.weight", rows=(inner, 2 * inner)),
        Rule(f"{published}mlp.down_proj.weight", f"{ours}mlp.down.weight"),
    ]
