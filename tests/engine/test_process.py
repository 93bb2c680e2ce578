"""The engine process: what it says about itself, GPUs that it refuses, and which errors of a launch end it."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from service.engine.core.faults import launch_errors
from service.engine.memory import process_age, process_usage
from service.engine.start import resolve_device
from service.link.config import ConfigurationError, EngineConfig


def test_usage_is_that_of_the_process() -> None:
    before = process_usage()
    assert before is not None
    used = time.process_time()
    while time.process_time() < used + 0.2:
        pass
    block, over = bytearray(os.urandom(1 << 16) * 512), threading.Event()
    waiting = threading.Thread(target=over.wait)
    waiting.start()
    after = process_usage()
    over.set()
    waiting.join()
    assert after is not None
    assert after.cpu_seconds - before.cpu_seconds > 0.15
    assert after.resident_bytes >= len(block)
    assert after.threads > before.threads
    age = process_age()
    assert age is not None and age > 0 and process_age() >= age  # type: ignore[operator]


def test_a_name_with_brackets_is_read_over_and_a_system_without_proc_says_nothing(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    stat.write_text(f"7 (a ) b) S 1 7 7 0 -1 0 0 0 0 0 {3 * ticks} {ticks} 0 0 20 0 9 0 500 1000 11 0\n")
    usage = process_usage(stat)
    assert usage is not None and (usage.cpu_seconds, usage.threads, usage.resident_bytes) == (4, 9, 11 * page)
    assert process_usage(tmp_path / "none") is None and process_age(tmp_path / "none") is None


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("turing")
def test_an_old_gpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"Tesla T4 has compute capability 7\.5; 8\.0 is the least"):
        resolve_device(EngineConfig(models=(), device="cuda"))


@pytest.mark.usefixtures("turing")
def test_auto_takes_the_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_device(EngineConfig(models=(), device="auto")).type == "cpu"
    assert "Tesla T4" in caplog.text and "CPU" in caplog.text


def test_a_fault_of_the_device_is_passed_on() -> None:
    with pytest.raises(torch.AcceleratorError), launch_errors():
        raise torch.AcceleratorError("an illegal memory access was encountered")
