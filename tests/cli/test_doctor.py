"""`reprise doctor`: what it finds missing, and what it says to do."""

from __future__ import annotations

import resource
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from unittest.mock import ANY

import av
import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from service.cli import doctor
from service.cli.main import app

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


def test_settings_that_cannot_be_met_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("REPRISE_INSECURE_NO_AUTH", "yes")
    said = {
        ("GPUS", "2"): "no  engines: gpus: 2 asked for, but there is no GPU here",
        ("HOST", "192.0.2.1"): "no  host: 192.0.2.1 unavailable (Cannot assign requested address)",
    }
    for variable, value in said:
        monkeypatch.setenv(f"REPRISE_{variable}", value)
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and "2 missing" in done.output
    assert [line for line in said.values() if line not in done.output] == []


@pytest.mark.parametrize(("built_for", "says"), [(None, "torch with CUDA"), ("13.0", "driver must know CUDA 13.0")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device that works")
def test_an_unusable_gpu(built_for: str | None, says: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "nvidiactl").touch()
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", home / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = finding("CUDA")
    assert found.good is False and says in found.advice


def test_a_ffmpeg_without_its_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libopus"})
    found = finding("audio formats")
    assert found.good is False and found.found == "without libopus"


@pytest.mark.parametrize(("connections", "processes", "good"), [(4096, 1, True), (60000, 1, None), (60000, 2, True)])
def test_open_files_are_those_that_the_server_allows_itself(
    connections: int, processes: int, good: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1 << 20))
    monkeypatch.setenv("REPRISE_MAX_CONNECTIONS", str(connections))
    monkeypatch.setenv("REPRISE_API_PROCESSES", str(processes))
    assert finding("open files") == doctor.Finding("open files", "up to 65536", good, ANY)


def test_what_is_scarce_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 99, 1))
    assert "ulimit" in finding("open files").advice
    assert "HF_HOME" in finding("model cache").advice
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in finding("model cache").advice


def test_an_address_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:  # at this address until another one has its port, too
        port = free.getsockname()[1]
        taken = socket.create_server(("127.0.0.2", port))
    with taken:
        monkeypatch.setenv("REPRISE_PORT", str(port))
        assert finding("port").good
        monkeypatch.setenv("REPRISE_HOST", "127.0.0.2")
        found = finding("port")
        assert found.good is None and f"127.0.0.2:{port} unavailable" in found.found
        done = CliRunner().invoke(app, ["doctor"])
        assert "Ready to serve, but not at this address" in done.output and "--port 0" in done.output
