"""Sizes of Kimi-VL's pictures, and the settings of its preprocessor. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from models.checkpoints.published import of_channels, preprocessor_fields, require_fields
from models.interfaces.errors import CheckpointError, InputError
from models.kimi_vl.config import VisionConfig

_MAX_SIDE = 512
"""Sides of at least this many patches are outside the rotary table of the published tower."""


@dataclass(frozen=True)
class ImageSettings:
    """preprocessor_config.json: at most in_token_limit patches before padding to whole merge blocks."""

    patch_size: int
    in_token_limit: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def most_patches(self) -> int:
        """No picture has more patches; padding can exceed in_token_limit.

        x times y whole patches are at most the limit. The rest of a patch and the padding to even numbers add less than
        three to either side, so c columns leave less than limit / (c - 3) + 3 rows.
        """
        sides = [(columns, self.in_token_limit / max(1, columns - 3) + 3) for columns in range(2, _MAX_SIDE, 2)]
        return max(columns * min(_MAX_SIDE - 2, 2 * math.ceil(rows / 2) - 2) for columns, rows in sides)


def load_image_settings(directory: Path, vision: VisionConfig) -> ImageSettings:
    """Mean and standard deviation must be in the file, since the class defaults of the published code differ from its
    files."""
    where, values = preprocessor_fields(directory, "image_processor", "preprocessor_config.json")
    for name in ("patch_size", "in_token_limit", "image_mean", "image_std"):
        if name not in values:
            raise CheckpointError(f"{directory}: {where} lacks {name}")
    place, merge = f"{directory}: {where}: ", list(vision.merge_kernel_size)
    require_fields(place, values, {"pad_input": True, "patch_size": vision.patch_size}, needed=True)
    require_fields(place, values, {"merge_kernel_size": merge})
    mean, std = (of_channels(values, name, f"{directory}: {where}") for name in ("image_mean", "image_std"))
    return ImageSettings(values["patch_size"], values["in_token_limit"], mean, std)


def checked_size(size: tuple[int, int], patch: int, limit: int, field: str) -> tuple[int, int]:
    """Width and height of a picture that was shrunk (never enlarged) to the limit. InputError names `field`."""
    (width, height), padded_size = fitted_size(size, patch, limit)
    if max(padded_size) // patch >= _MAX_SIDE:
        most = (_MAX_SIDE - 2) * patch
        raise InputError(field, f"a picture of {width} x {height} pixels (after resizing) is over {most} on a side")
    return width, height


def fitted_size(size: tuple[int, int], patch: int, limit: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Width and height of a picture that was shrunk to at most `limit` whole patches of `patch` x `patch` pixels, and
    height and width once it is padded to blocks of 2 x 2 patches, which can lift them over the limit again."""
    width, height = size
    patches = (width // patch) * (height // patch)
    if patches > limit:
        scale = math.sqrt(limit / patches)
        width, height = max(1, int(width * scale)), max(1, int(height * scale))
    block = 2 * patch
    return (width, height), (block * math.ceil(height / block), block * math.ceil(width / block))
