"""GPUs older than kernels are made for: refused when they are asked for, else left alone."""

from __future__ import annotations

import logging

import pytest
import torch

from service.engine.start import resolve_device
from service.link.config import ConfigurationError, EngineConfig


@pytest.fixture(autouse=True)
def turing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_an_old_gpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"Tesla T4 has compute capability 7\.5; 8\.0 is the least"):
        resolve_device(EngineConfig(models=(), device="cuda"))


def test_auto_takes_the_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_device(EngineConfig(models=(), device="auto")).type == "cpu"
    assert "Tesla T4" in caplog.text and "CPU" in caplog.text
