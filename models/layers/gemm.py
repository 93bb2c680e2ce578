"""All GEMMs of the networks: x times a weight, together with the operations that follow.

On a GPU models.layers.kernels.gemm chooses for each shape between a GEMV, a tiled GEMM with the epilogue inside, and
cuBLAS with kernels around it. Weights are [N, K], rows of outputs, as in torch.nn.Linear.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.fused import silu_mul
from models.layers.lora import GemmLora, add_lora
from models.layers.norms import Normed, add_rms_norm, rms_norm
from models.layers.op import op
from models.layers.quantized import QuantizedWeight, Weight, kernels_take

Epilogue = Literal["", "silu_mul", "quick_gelu"]
"""What is applied to x times weight plus bias. "": nothing; "silu_mul": silu(gate) * up, where the weight has the rows
of gate first, then those of up; "quick_gelu": y * sigmoid(1.702 y)."""


def lay_out_for_host(module: nn.Module) -> None:
    """Lays out the weights of all float32 linear layers with outputs innermost in memory, which makes a GEMM of a few
    rows faster on a CPU."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32:
            layer.weight.data = layer.weight.data.T.contiguous().T


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """F.linear; codes are dequantised to x's dtype first."""
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantised(x.dtype, x.numel() // x.shape[-1])
    return F.linear(x, weight, bias)


@op(cuda="models.layers.kernels.gemm:gemm")
def gemm(
    x: Normed, weight: Weight, bias: Tensor | None = None, epilogue: Epilogue = "", lora: GemmLora | None = None
) -> Tensor:
    """x [..., K] -> [..., N], with "silu_mul" [..., N / 2]. lora: adapters, of a GEMM without an epilogue."""
    y = linear(x if isinstance(x, Tensor) else x.normed(), weight, bias)
    if lora is not None:
        return add_lora(y, x, lora.pair, lora.rows)
    match epilogue:
        case "silu_mul":
            return silu_mul(y)
        case "quick_gelu":
            return y * torch.sigmoid(1.702 * y)
    return y


@op(cuda="models.layers.kernels.gemm:narrow_gemm")
def narrow_gemm(x: Normed, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """gemm to few outputs, which is bound by reading the inputs, so that many thread blocks share the rows."""
    return gemm.reference(x, weight, bias)


@op(cuda="models.layers.kernels.gemm:gemm_add_norm")
def gemm_add_norm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    lora: GemmLora | None = None,
    *,
    deferrable: bool = False,
) -> tuple[Normed, Tensor]:
    """(RMSNorm of the sum, the sum) of residual [..., N] and gemm(x, weight, bias, lora=lora). deferrable: only `gemm`
    and `narrow_gemm` read the norm, so that they may finish it."""
    return add_rms_norm(gemm(x, weight, bias, lora=lora), residual, norm_weight, eps)


@op(cuda="models.layers.kernels.gemv:gemv", takes=lambda x, weight, *_, **__: kernels_take(weight))
def gemv(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    index: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    fan_out: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + linear(rms_norm(x)) of each row, with silu_mul residual + silu(gate) * up.

    x [v, K], weight [N, K], with silu_mul [2 N, K] -> [v, N].

    Each row reads the weight on its own. index int64 [v * fan_out]: weight is [experts, N or 2 N, K], and row i of the
    result is row i // fan_out of x times weight index[i]. norm: its weight [K] and eps. residual [v, N], contiguous.
    """
    kind = out_dtype or x.dtype
    rows = rms_norm(x, *norm) if norm is not None else x
    rows = rows.to(kind)
    weight = weight.dequantised(kind) if isinstance(weight, QuantizedWeight) else weight.to(kind)
    if index is None:
        out = F.linear(rows, weight)
    else:
        out = torch.bmm(weight[index], rows.repeat_interleave(fan_out, 0)[..., None]).squeeze(-1)
    if bias is not None:
        out = out + bias
    if silu_mul:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    return out if residual is None else out + residual
