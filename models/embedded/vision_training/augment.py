"""Pictures that come again come a little different: moved by some pixels, lighter or darker, with noise."""

from __future__ import annotations

import torch
from torch import Tensor

from models.embedded.vision_training import blocks as B

_MOST_PIXELS = 5
_GAIN, _OFFSET, _NOISE = 0.06, 8.0, 5.0
_SIDE = 14


def draw(number: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For `number` blocks: shifts int64 [n, pictures, 2]; gains, offsets, noise float32 [n, pictures, 3]; which blocks
    are moved, bool [n]: two of three, for the targets of cells hold only where nothing moves."""
    moved = torch.rand(number, device=device) < 2 / 3
    shifts = torch.randint(-_MOST_PIXELS, _MOST_PIXELS + 1, (number, B.SEGMENTS, 2), device=device)
    gain, offset, noise = torch.rand(3, number, B.SEGMENTS, device=device).unbind(0)
    light = torch.stack((1 - _GAIN + 2 * _GAIN * gain, 2 * _OFFSET * offset - _OFFSET, _NOISE * noise), dim=-1)
    return shifts * moved[:, None, None], light, moved


def shifted(
    frames: Tensor, starts: Tensor, grids: Tensor, pictures: Tensor, shifts: Tensor, light: Tensor, noise: Tensor
) -> Tensor:
    """Patches uint8 [n, F, 588] of pictures moved by their shifts, their borders repeated, and changed in light; noise
    [n, F, 588] of deviation 1."""
    n, rows, columns = frames.shape
    block = torch.arange(n, device=frames.device)[:, None]
    own = shifts[block, pictures.long()]
    height, width, row, column = grids.long().unbind(-1)
    side = torch.arange(_SIDE, device=frames.device)
    y = torch.minimum((_SIDE * row + own[..., 0])[..., None] + side, (_SIDE * height - 1)[..., None]).clamp(min=0)
    x = torch.minimum((_SIDE * column + own[..., 1])[..., None] + side, (_SIDE * width - 1)[..., None]).clamp(min=0)
    r, c = (y // _SIDE)[..., :, None], (x // _SIDE)[..., None, :]
    patch = ((r // 2) * (width // 2)[..., None, None] + c // 2) * 4 + (r % 2) * 2 + c % 2
    patch = patch + (block * rows + starts.long())[..., None, None]
    inside = (y % _SIDE)[..., :, None] * _SIDE + (x % _SIDE)[..., None, :]
    channels = torch.arange(3, device=frames.device)[:, None, None] * _SIDE**2
    found = frames.reshape(-1)[(patch * columns + inside)[:, :, None] + channels].flatten(2).float()
    gain, offset, spread = light[block, pictures.long()].unsqueeze(2).unbind(-1)
    found = found * gain + offset + spread * noise.float()
    return found.round().clamp(0, 255).to(torch.uint8)
