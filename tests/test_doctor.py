"""`reprise doctor`: what it finds missing, and what it says to do."""

from __future__ import annotations

import resource
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import av
import pytest
import torch
from typer.testing import CliRunner

from service import doctor
from service.cli import app

Usage = namedtuple("Usage", "total used free")


def finding(subject: str) -> doctor.Finding:
    return next(found for found in doctor.examine() if found.subject == subject)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    return tmp_path


def test_a_machine_that_has_everything() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0 and "Ready to serve" in done.output
    assert all(found.advice for found in doctor.examine() if not found.good)


def test_settings_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_PORT", "abc")
    monkeypatch.setenv("REPRISE_MAX_IMAGEZ", "1")
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and "no  settings: port" in done.output and "1 missing" in done.output
    assert "did you mean REPRISE_MAX_IMAGES" in done.output


@pytest.mark.parametrize(("built_for", "says"), [(None, "torch with CUDA"), ("13.0", "driver must know CUDA 13.0")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device that works")
def test_a_gpu_that_torch_cannot_use(
    built_for: str | None, says: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "nvidiactl").touch()
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", home / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    found = finding("CUDA")
    assert found.good is False and says in found.advice


def test_a_ffmpeg_without_its_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", {"aac", "flac"})
    found = finding("audio formats")
    assert found.good is False and found.found == "without libmp3lame, libopus"


def test_what_is_scarce_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 99, 1))
    assert "ulimit" in finding("open files").advice
    assert "HF_HOME" in finding("model cache").advice
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in finding("model cache").advice


def test_a_gpu_without_a_compiler_for_its_kernels(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(home))
    found = finding("C compiler")
    assert found.good is False and "install gcc" in found.advice
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(home))
    assert finding("C compiler").good is False and "python3-dev" in finding("C compiler").advice
    (home / "Python.h").touch()
    assert finding("C compiler").good


def test_an_address_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("REPRISE_PORT", str(port))
        assert finding("port").good
        monkeypatch.setenv("REPRISE_HOST", "127.0.0.2")
        found = finding("port")
        assert found.good is None and f"127.0.0.2:{port} cannot be had" in found.found
