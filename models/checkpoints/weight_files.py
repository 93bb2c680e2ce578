"""The safetensors files of a checkpoint: which there are, the headers of their tensors, and readers of the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.interfaces.errors import CheckpointError
from models.layers.quantized import Codes

_INDEX = "model.safetensors.index.json"
WEIGHT_NAMES = ("weight", "qweight", "weight_packed")
"""What the tensor of a linear layer is called, in any format."""
_MOST_LISTED = 8
_CODEC = "audiovae.safetensors"  # read by models.voxcpm2


@dataclass(frozen=True, eq=False)
class PublishedTensor:
    """The header of a tensor in an open file, and a reader of its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As the file format names it, such as "BF16"."""
    file: Path
    """The open file, which errors name."""
    read: Callable[[], Tensor]
    codes: Callable[[], Codes] | None = None
    """Reads the codes of a quantised weight, which `read` dequantises."""


def shard_paths(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files: the single one, those that the index names, or all in the directory."""
    single, index = directory / "model.safetensors", directory / _INDEX
    if single.exists():
        return [single]
    if index.exists():
        paths = [directory / name for name in sorted(set(_read_index(index).values()))]
        for path in paths:
            if path.parent != directory or not path.is_file():
                raise CheckpointError(f"{index} names {path.name}, which is not a file of the checkpoint")
        return paths
    paths = sorted(path for path in directory.glob("*.safetensors") if path.name != _CODEC)
    if not paths:
        raise CheckpointError(f"{directory}: no safetensors file ({single.name}); other weight formats are not read")
    return paths


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """The open file. CheckpointError for errors of opening and of reading inside the context."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def tensors(path: Path) -> Iterator[PublishedTensor]:
    """The tensors of a file. Their values can be read until the iteration ends."""
    with opened(path) as file:
        for name in list(file.keys()):
            header = file.get_slice(name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            yield PublishedTensor(name, shape, dtype, path, partial(file.get_tensor, name))


def tensor_shape(directory: Path, *names: str) -> tuple[int, ...] | None:
    """Shape of the first tensor with one of these names in the checkpoint's files; None if there is none."""
    found = (tensor.shape for path in shard_paths(directory) for tensor in tensors(path) if tensor.name in names)
    return next(found, None)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must give a file name for every tensor")
    return weight_map


def listed(names: Sequence[str]) -> str:
    """The first of these names in alphabetical order, and how many more there are, for an error."""
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(sorted(names)[:_MOST_LISTED]) + more
