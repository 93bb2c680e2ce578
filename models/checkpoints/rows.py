"""Rows of a published matrix, read without torch and without the rest of the file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.interfaces.errors import CheckpointError

_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def tensor_rows(directory: Path, names: Sequence[str], rows: Sequence[int]) -> np.ndarray:
    """Rows of the first of these tensors that the safetensors files have, float32 [rows, width]. The format:
    https://github.com/huggingface/safetensors#format. CheckpointError if there is none of them."""
    for name in names:
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)).get(name)
                if header is None:
                    continue
                width, kind = header["shape"][1], np.dtype(_DTYPES[header["dtype"]])
                values = np.empty((len(rows), width), kind)
                for place, row in enumerate(rows):
                    file.seek(8 + size + header["data_offsets"][0] + row * width * kind.itemsize)
                    values[place] = np.frombuffer(file.read(width * kind.itemsize), kind)
                widened = (values.astype("<u4") << 16).view("<f4") if header["dtype"] == "BF16" else values
                return widened.astype(np.float32)
    raise CheckpointError(f"{directory}: no safetensors file has {' or '.join(names)}")
