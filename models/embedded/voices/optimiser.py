"""Muon for the stacks' matrices, AdamW for everything else, and a moving average of the weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.embedded.voices.training import Average

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(updates: Tensor) -> Tensor:
    """Matrices [n, rows, columns] -> nearly their nearest orthogonal ones, by five Newton-Schulz steps (Muon, K.
    Jordan, 2024)."""
    a, b, c = _COEFFICIENTS
    x = updates.bfloat16() if updates.is_cuda else updates
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Momentum 0.95 with a look ahead; the step has the size of an AdamW step (Moonlight, arXiv:2502.16982)."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self._groups = list(groups.values())
        self.momentum = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]
        self._decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, momentum in zip(self._groups, self.momentum, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])  # type: ignore[misc]
            momentum.lerp_(gradient, 0.05)
            update = orthogonalise(gradient.lerp(momentum, 0.95))
            size = 0.2 * max(update.shape[1:]) ** 0.5
            weights: list[Tensor] = list(group)
            torch._foreach_mul_(weights, 1.0 - rate * self._decay)
            torch._foreach_add_(weights, list(update.to(group[0].dtype).unbind(0)), alpha=-rate * size)


class Optimiser:
    """Both of them over a network. rate: of AdamW; Muon takes it, too."""

    def __init__(self, network: nn.Module, *, muon: bool = True, decay: float = 0.05, average: float = 0.999) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in network.named_parameters():
            (matrices if muon and ".layers." in name and parameter.dim() == 2 else others).append(parameter)
        self.muon = Muon(matrices, decay)
        device = others[0].device
        plain = [parameter for parameter in others if parameter.dim() < 2]
        wide = [parameter for parameter in others if parameter.dim() >= 2]
        groups = [{"params": wide, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-9, fused=device.type == "cuda")
        self._parameters = list(network.parameters())
        self.average = Average(network, average)

    def step(self, rate: float) -> Tensor:
        """-> the norm of the gradients, which are cut to 1 and forgotten."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (1.0 / norm.clamp(min=1.0)).nan_to_num(0.0))
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.muon.step(rate)
        self.adam.step()
        self.adam.zero_grad()
        for parameter in self._parameters:
            parameter.grad = None
        self.average.step()
        return norm
