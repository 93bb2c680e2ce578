"""The flow-matching solver: schedule, time embedding inputs and the guided Euler step.

CFG-Zero*: arXiv:2503.18886. Everything is evaluated op by op in the model's dtype as the published code does: in
bfloat16 the schedule and the sinusoid are other numbers than their float32 evaluation, and the weights expect them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """Network evaluations of one solve: times [evaluations] and step sizes, exact in the model's dtype."""

    times: tuple[float, ...]
    step_sizes: tuple[float, ...]


def time_span(solver_steps: int, dtype: torch.dtype) -> Tensor:
    """[solver_steps + 1] from 1 (noise) to 0 (data), with sway sampling (F5-TTS, arXiv:2410.06885) of coefficient 1."""
    u = torch.linspace(1, 0, solver_steps + 1, dtype=dtype)
    return u + 1.0 * (torch.cos(torch.pi / 2 * u) - 1 + u)


def euler_times(solver_steps: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Time and size of every Euler step, scalars; times accumulate the rounding of each subtraction."""
    span = time_span(solver_steps, dtype)
    time, size = span[0], span[0] - span[1]
    times, sizes = [], []
    for step in range(1, solver_steps + 1):
        times.append(time)
        sizes.append(size)
        time = time - size
        if step < solver_steps:
            size = time - span[step + 1]
    return times, sizes


def schedule(solver_steps: int, dtype: torch.dtype) -> Schedule:
    """The Euler steps behind the first ones, which leave the noise as it is (the zero init of CFG-Zero*)."""
    times, sizes = euler_times(solver_steps, dtype)
    first = max(1, int((solver_steps + 1) * 0.04))
    return Schedule(tuple(t.item() for t in times[first:]), tuple(size.item() for size in sizes[first:]))


def sinusoid(times: Tensor, size: int) -> Tensor:
    """[n] -> [n, size], sines then cosines of 1000 t, each operation rounded to the dtype of `times`."""
    half = size // 2
    frequencies = torch.exp(
        torch.arange(half, dtype=times.dtype, device=times.device) * -(math.log(10000) / (half - 1))
    )
    angles = 1000 * times[:, None] * frequencies[None, :]
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def guided_euler_step(x: Tensor, velocity: Tensor, cfg: Tensor, step_size: float) -> Tensor:
    """One Euler step along the guided velocity; x [rows, frames, channels] -> like x.

    velocity [2 * rows, frames, channels]: conditional rows a, then unconditional rows b. cfg [rows] in x's dtype.
    s = <a, b> / (<b, b> + 1e-8) per row; x - step_size * (b s + cfg (a - b s)), every operation rounded to x's dtype.
    """
    conditional, unconditional = velocity.chunk(2)
    dims = (1, 2)
    dot = (conditional * unconditional).sum(dims, keepdim=True)
    scaled = unconditional * (dot / (unconditional.square().sum(dims, keepdim=True) + 1e-8))
    return x - step_size * (scaled + cfg[:, None, None] * (conditional - scaled))
