"""An operation runs its reference, what stands for it on a CPU, or its kernel, by its first argument and its choice."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from models.layers.op import op

CPU: Any = SimpleNamespace(is_cuda=False)
GPU: Any = SimpleNamespace(is_cuda=True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("kernels_of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module)["scaled"] = lambda x, factor=1: ("kernel", factor)
    return module


def test_it_runs_where_its_first_argument_lies(kernels: ModuleType) -> None:
    @op(cuda="kernels_of_this_test:scaled")
    def scaled(x: Any, factor: int = 1) -> tuple[str, int]:
        """x times factor."""
        return "reference", factor

    assert scaled(CPU, 2) == ("reference", 2)
    assert scaled(GPU, factor=3) == ("kernel", 3)
    assert scaled.reference(GPU) == ("reference", 1)
    assert scaled.kernel(CPU) == ("kernel", 1)
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "x times factor.")


def test_the_kernel_is_imported_at_its_first_use() -> None:
    scaled = op(cuda="a_module_that_is_not_there:scaled")(lambda x: "reference")
    assert scaled(CPU) == "reference"
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        scaled(GPU)


def test_a_cpu_may_have_its_own_and_a_kernel_its_limits(kernels: ModuleType) -> None:
    def small(x: Any, factor: int) -> bool:
        return factor < 5

    scaled = op(cuda="kernels_of_this_test:scaled", cpu=lambda x, factor: ("cpu", factor), takes=small)(
        lambda x, factor: ("reference", factor)
    )
    assert [scaled(CPU, 9), scaled(GPU, 4), scaled(GPU, 9)] == [("cpu", 9), ("kernel", 4), ("reference", 9)]


def test_operations_inside_one_run_as_it_does(kernels: ModuleType) -> None:
    inner = op(cuda="kernels_of_this_test:scaled", cpu=lambda x: "cpu")(lambda x: "reference")
    outer = op(cuda="kernels_of_this_test:outer")(lambda x: inner(x))
    assert (outer(CPU), outer.reference(CPU), outer.reference(GPU), inner(CPU)) == ("cpu", *["reference"] * 2, "cpu")
