"""A configuration that the GPU does not take is asked for once, named once and counted."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from models.layers import op as ops
from models.layers.kernels import launch
from models.layers.op import FALLBACKS, CannotLaunch, Fallbacks
from service.engine.start import Compilations
from service.graphs.observations import Observations
from tests.models.kernels.test_operations import MODULES


class Kernel:
    """Stands for a kernel that takes some sizes."""

    arg_names = ("x", "BLOCK")
    __name__ = "_some_kernel"

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.asked: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run

    def _run(self, x: Tensor, BLOCK: int) -> None:
        self.asked.append(BLOCK)
        if BLOCK > 64:
            raise self._error


UNFIT = (
    OutOfResources(102_400, 101_376, "shared memory"),
    CompilationError(None, None, "no such instruction"),
    RuntimeError("PassManager::run failed"),
)


@pytest.mark.parametrize("error", UNFIT, ids=lambda error: type(error).__name__)
def test_a_configuration_that_does_not_fit_is_asked_for_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_refused", {})
    kernel, x = Kernel(error), torch.zeros(3)
    for _ in range(2):
        with pytest.raises(CannotLaunch, match="_some_kernel cannot be launched on this GPU"):
            launch.launch(kernel, (1,), x, BLOCK=128)
        launch.launch(kernel, (1,), x, BLOCK=64)
    assert kernel.asked == [128, 64, 64]


def test_a_fault_of_the_device_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_refused", {})
    kernel = Kernel(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            launch.launch(kernel, (1,), torch.zeros(3), BLOCK=128)
    assert kernel.asked == [128, 128]


def test_fallbacks_are_logged_once_for_each_kernel(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with caplog.at_level(logging.WARNING):
        for name in ("_a_kernel", "_b_kernel", "_a_kernel"):
            fallbacks.report(CannotLaunch(name, "Required: 102400, Hardware limit: 101376"))
    assert [message.split()[1] for message in caplog.messages] == ["_a_kernel", "_b_kernel"]
    assert "101376" in caplog.messages[0]


def test_the_engine_counts_fallbacks() -> None:
    observations = Observations()

    def run() -> str:
        raise CannotLaunch("_a_kernel", "too large")

    operation = ops.op(cuda="nowhere:kernel")(lambda: "reference")
    vars(operation)["kernel"] = run
    with Compilations(observations).counted(torch.device("cuda")):
        assert [operation.launch() for _ in range(2)] == ["reference"] * 2
    (event,) = observations.drain()
    assert (event.name, event.value, event.labels) == ("kernel_fallbacks_total", 2, {"kernel": "_a_kernel"})
    assert FALLBACKS.listener is None


def test_every_module_of_kernels_launches_through_the_door() -> None:
    """Nothing launches a kernel that could not be refused."""
    for module in MODULES:
        assert vars(importlib.import_module(module.__name__))["launch"] is launch.launch
