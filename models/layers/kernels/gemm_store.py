"""Measured GEMM configurations on disk: one file for each GPU, compute capability and Triton, in the user's cache."""

from __future__ import annotations

import json
import logging
import os
import re
from importlib.metadata import version
from pathlib import Path

from models.layers.kernels import gemm_configs
from models.layers.kernels.gemm_configs import fits
from models.layers.kernels.gemm_tables import entries_of, table_of
from models.layers.kernels.gemm_types import Table
from models.layers.kernels.gpu import Gpu, named

log = logging.getLogger(__name__)


class TableError(Exception):
    """A stored table cannot be used."""


def path_of(gpu: Gpu) -> Path:
    """$XDG_CACHE_HOME/reprise/gemm or ~/.cache/reprise/gemm, and a name of what the table holds for."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-")
    return cache / "reprise" / "gemm" / f"{name}-{named(gpu.capability)}-triton-{version('triton')}.json"


def save(table: Table, gpu: Gpu) -> Path:
    """Adds the shapes of `table` to those that are stored for the GPU. Raises OSError, and TableError for a file that
    is there and cannot be read."""
    path = path_of(gpu)
    merged = {**(load(gpu) or {}), **table}
    document = {
        "gpu": gpu.name,
        "capability": named(gpu.capability),
        "triton": version("triton"),
        "shapes": entries_of(merged),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_text(json.dumps(document, indent=1) + "\n")
    written.replace(path)
    return path


def load(gpu: Gpu) -> Table | None:
    """What was measured on this GPU; None when nothing was. TableError names the file and what is wrong with it."""
    path = path_of(gpu)
    if not path.exists():
        return None
    try:
        return _checked(table_of(json.loads(path.read_text())["shapes"]), gpu)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TableError(f"{path}: {type(error).__name__}: {error}; remove it, or run `reprise tune` again") from error


def _checked(table: Table, gpu: Gpu) -> Table:
    """`table`, whose tiles fit the GPU and divide their shapes; ValueError for one that does not."""
    for shape, choices in table.items():
        for choice in choices:
            tile = choice.variant.tile
            if not fits(tile, gpu, gated=shape.kind == "silu_mul"):
                raise ValueError(f"tile {tile} does not fit {gpu.name}")
            if shape.outputs % tile.columns or shape.inputs % (tile.depth * choice.variant.split):
                raise ValueError(f"tile {tile} does not divide {shape.inputs} inputs and {shape.outputs} outputs")
    return table


def use_stored(gpu: Gpu) -> None:
    """This process takes the stored table where there is one, beside what comes with the package, which was chosen by
    whole stacks and stays. The log says where its GEMM configurations come from."""
    try:
        stored = load(gpu)
    except TableError as error:
        log.warning("%s", error)
        stored = None
    if stored is not None:
        gemm_configs.use({**stored, **gemm_configs.table_of(gpu)})
    log.info("GEMM configurations of %s (%s): %s", gpu.name, named(gpu.capability), source_of(gpu, stored))


def source_of(gpu: Gpu, stored: Table | None) -> str:
    """Where the configurations for a GPU come from, in words."""
    if stored is not None:
        return f"measured here by `reprise tune` for {len(stored)} shapes ({path_of(gpu)})"
    if gemm_configs.table_of(gpu):
        return "measured on an H100"
    return "by rule; `reprise tune` measures those of a model"
