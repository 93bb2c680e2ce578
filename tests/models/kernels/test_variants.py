"""Which compiled variants a number of rows can ask for, and whether all of them fit their GPUs."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from torch import Tensor

import models.layers.kernels
import models.voxcpm2.kernels
from benchmarks.kernels.compile import MOST_REGISTERS, OUT
from benchmarks.kernels.launch_cases import (
    CASES,
    experts,
    local_attention,
    ragged_attention,
    rotations,
    rotations_of_normed_heads,
    stack,
)
from benchmarks.kernels.offline import ARCHITECTURES
from models.layers.kernels import gpu
from models.layers.kernels.gpu import named
from service.engine.chat import step_kernels
from service.engine.core.worker import WARM_SEQUENCES, WARM_TOKENS
from service.graphs.buckets import powers_of_two
from tests.support.processes import ROOT
from tests.support.slow import slow

MOST_ROWS = 160
"""Decode rows, and prefill tokens, that are tried one by one."""
KERNEL_MODULES = [
    importlib.import_module(f"{package.__name__}.{found.name}")
    for package in (models.layers.kernels, models.voxcpm2.kernels)
    for found in pkgutil.iter_modules(package.__path__)
] + [step_kernels]


QUICK = ("Qwen2-VL-2B", "VoxCPM2 local decoder")


class Launches:
    """Stands for a kernel; keeps the variants that launches ask for."""

    def __init__(self, kernel: Any, variants: set[tuple[Any, ...]]) -> None:
        self.arg_names = kernel.arg_names
        self.__name__ = kernel.fn.__name__
        self._parameters = inspect.signature(kernel.fn).parameters
        options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
        self._plain = options.get("do_not_specialize") or ()
        self._anywhere = options.get("do_not_specialize_on_alignment") or ()
        self._variants = variants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        values = dict(zip(self._parameters, args, strict=False)) | kwargs
        kinds = tuple((name, self._kind(name, value)) for name, value in sorted(values.items()))
        self._variants.add((self.__name__, *kinds))

    def _kind(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, name in self._anywhere or value.data_ptr() % 16 == 0
        constant = name not in self._parameters or "constexpr" in str(self._parameters[name].annotation)
        if constant or not isinstance(value, int):
            return value if constant else type(value)
        size = 32 if abs(value) < 1 << 31 else 64
        return size if name in self._plain else (size, value == 1, value % 16 == 0)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, ...]]]:
    found: set[tuple[Any, ...]] = set()
    for module in KERNEL_MODULES:
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and hasattr(value, "fn"):
                monkeypatch.setattr(module, name, Launches(value, found))
    # An H100, whether this is one or not.
    monkeypatch.setattr(gpu, "probe", lambda: gpu.INTERPRETER)
    yield found


def warmed_variants(case: str, variants: set[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Those that powers of two of rows ask for, once no other number of rows has asked for more."""
    for rows in powers_of_two(MOST_ROWS):
        CASES[case](rows)
    warmed = set(variants)
    for rows in range(1, MOST_ROWS):
        CASES[case](rows)
        assert variants == warmed, f"{rows} rows: {variants - warmed}"
    return warmed


@pytest.mark.parametrize("case", [case if case in QUICK else slow(case) for case in CASES])
def test_powers_of_two_of_rows_meet_every_variant(case: str, variants: set[tuple[Any, ...]]) -> None:
    warmed = warmed_variants(case, variants)
    # Adapters in GEMMs: all of two stacks, and half of them as they are without adapters.
    assert len(warmed) <= (72 if case.endswith("in GEMMs") else 32), f"{len(warmed)} variants to compile"


@pytest.mark.slow
def test_warm_tokens_and_sequences_meet_every_variant_of_a_prefill(variants: set[tuple[Any, ...]]) -> None:
    def prefill(tokens: int, sequences: int) -> None:
        stack(tokens, 2048, 6144, 20)
        stack(5 * tokens, 1024, 4096, 20)
        local_attention(tokens, 5, 0)
        rotations(tokens)
        rotations_of_normed_heads(tokens)
        experts(tokens)
        ragged_attention(tokens, sequences)

    for tokens in powers_of_two(WARM_TOKENS):
        prefill(tokens, 1)
    prefill(WARM_SEQUENCES, WARM_SEQUENCES)
    warmed = set(variants)
    for tokens in (*range(1, 200), 1000, 1024, 2047, 2048, 8192):
        prefill(tokens, 1 + tokens % 64)
        assert variants == warmed, f"{tokens} tokens: {variants - warmed}"


RECORDED = json.loads((ROOT / OUT).read_text())
SECONDS = 1500
"""A busy machine takes many times the 6 minutes of an idle one with 2 cores."""


@pytest.mark.parametrize("version", RECORDED)
def test_everything_that_was_compiled_fits(version: str) -> None:
    limits = {named(gpu.capability): gpu.shared_memory for gpu in ARCHITECTURES}
    for name, found in RECORDED[version].items():
        assert found["shared_limit"] == limits[name]
        for kernel, made in found["by_kernel"].items():
            assert made["shared"] <= limits[name], f"{kernel} on {name}"
            assert made["registers"] <= MOST_REGISTERS, f"{kernel} on {name}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_kernels_that_changed_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    found = tmp_path / "compiled.json"
    found.write_text((ROOT / OUT).read_text())
    # Of another Triton all have changed: one configuration of each then.
    which = ["--update", "--out", found] if triton.__version__ in RECORDED else ["--changed"]
    # The others take most of an hour: `make compile-kernels`.
    command = [sys.executable, "-m", "benchmarks.kernels.compile", "--gpu", "sm_80", "sm_90", *which]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
