"""Muon (orthogonalised momentum) for the matrices of the blocks, AdamW for everything else.

Matrices of one shape are treated together, so that a step is some hundred launches. The update of a matrix is scaled
to the size that AdamW's would have (arXiv:2502.16982), so that both take one learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """Newton-Schulz iteration in bf16: [n, rows, columns] with singular values near 1."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    turned = x.shape[1] > x.shape[2]
    if turned:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if turned else x


class Muon:
    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], momentum: float, weight_decay: float) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for name, parameter in parameters:
            rows, columns = parameter.shape
            rows = rows // 3 if name.endswith("qkv.weight") else rows
            self.groups.setdefault((rows, columns), []).append(parameter)
        self.moments = {
            shape: torch.zeros(sum(p.shape[0] for p in group) // shape[0], *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: Tensor) -> None:
        for shape, group in self.groups.items():
            gradients = torch.cat([p.grad for p in group]).view(-1, *shape)  # type: ignore[misc]
            moment = self.moments[shape].lerp_(gradients, 1 - self.momentum)
            update = orthogonalised(gradients.lerp(moment, self.momentum)).float()
            update = update.reshape(-1, shape[1]) * (0.2 * max(shape) ** 0.5)
            parts = list(update.split([len(p) for p in group]))
            torch._foreach_mul_(list(group), 1 - rate * self.weight_decay)
            torch._foreach_add_(list(group), torch._foreach_mul(parts, -rate))


class Optimiser:
    """Both, with one state."""

    def __init__(self, network: nn.Module, weight_decay: float = 0.1) -> None:
        named = list(network.named_parameters())
        inner = [(n, p) for n, p in named if p.ndim == 2 and "embed_tokens" not in n and "auxiliary" not in n]
        chosen = {name for name, _ in inner}
        others = [p for n, p in named if n not in chosen]
        self.muon = Muon(inner, 0.95, weight_decay)
        device = others[0].device
        # A tensor, so that a captured step reads the rate of the day.
        self.rate = torch.zeros((), device=device)
        options = {"fused": True, "capturable": True} if device.type == "cuda" else {}
        self.adam = torch.optim.AdamW(others, self.rate, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, **options)

    def step(self) -> None:
        """With `rate` as it is."""
        self.adam.step()
        self.muon.step(self.rate)
