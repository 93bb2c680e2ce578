"""The engine's process: the GPU's driver starts beside its imports, and its end waits for nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from typing import Any

import msgspec
import pytest

from service.link import gpu_context
from service.link.config import EngineConfig, ModelConfig
from service.system.children import python_command, python_environment
from tests.support.processes import ROOT
from tests.support.waiting import GENEROUS


class Driver:
    """Whose start lasts until `allowed`. status: what cuInit returns."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.allowed = threading.Event()
        self.calls: list[str] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append(f"init {flags} {os.environ.get('CUDA_MODULE_LOADING')}")
        assert self.allowed.wait(GENEROUS)
        return self.status

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        self.calls.append(f"device {ordinal}")
        device._obj.value = 7
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.calls.append(f"retain {device.value}")
        return 0


@pytest.mark.parametrize("status", [0, 100])
def test_the_context_is_made_while_other_work_goes_on(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    driver = Driver(status)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    thread = gpu_context.begin_context("auto")
    assert thread is not None and thread.is_alive()
    driver.allowed.set()
    thread.join(GENEROUS)
    assert driver.calls == ["init 0 LAZY", *([] if status else ["device 0", "retain 7"])]


def test_the_cpu_needs_no_driver_and_none_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_context, "DRIVER", "libnosuch.so.1")
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    assert gpu_context.begin_context("cpu") is None
    thread = gpu_context.begin_context("cuda")
    assert thread is not None
    thread.join(GENEROUS)
    assert not raised


ENTRY = """
import atexit, logging, sys, threading
from models.interfaces.errors import CheckpointError

def serve(config, channel):
    threading.Thread(target=threading.Event().wait).start()
    atexit.register(threading.Event().wait)
    logging.getLogger("reprise.engine").error("said last")
    print("printed last", end="")
    if config.models[0].name == "bad":
        raise CheckpointError("what is bad")
"""


@pytest.mark.parametrize(("model", "status", "said"), [("good", 0, "said last"), ("bad", 3, "what is bad")])
def test_an_engine_process_exits_without_waiting_for_threads_and_loses_no_output(
    tmp_path: Any, model: str, status: int, said: str
) -> None:
    """Of a thread and of a handler at exit that never end."""
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
    config = EngineConfig((ModelConfig(model, "/nowhere"),), device="cpu")
    process = subprocess.Popen(
        python_command("service.link.process", f"ipc://{tmp_path}/engine", "entry_of_test:serve"),
        env=python_environment(os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        # Standard input stays open: the end of the parent would end it, too.
        assert process.wait(GENEROUS) == status
        output = process.stdout.read().decode()
        assert said in output and "printed last" in output
    finally:
        process.kill()
        process.communicate()
