"""`reprise doctor`: what it finds missing, and what it says to do."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import av
import pytest
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

from models.layers.kernels import gemm_store
from models.layers.kernels.gemm_types import Shape
from models.layers.kernels.gpu import Gpu
from service.cli import doctor
from service.cli.main import app
from service.hub.cache import RepositoryCache
from service.settings.settings import load_settings

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


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("LEXICON", "/nowhere/words.yaml", "no  lexicon: /nowhere/words.yaml: cannot be read (No such file"),
        ("LORA_VOICES", "/nowhere/voices", "no  adapters: lora_voices: /nowhere/voices cannot be read (No such file"),
        ("DEVICE", "cuda", "no  device: cuda, which torch cannot use here"),
        ("HOST", "192.0.2.1", "no  host: 192.0.2.1 unavailable (Cannot assign requested address)"),
    ],
)
def test_settings_that_cannot_be_met_here(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("REPRISE_INSECURE_NO_AUTH", "yes")
    monkeypatch.setenv(f"REPRISE_{variable}", value)
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and says in done.output and "1 missing" in done.output


def test_no_directory_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr("tempfile.gettempdir", none)
    found = finding("temporary files")
    assert found.good is False and "TMPDIR" in found.advice


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPRISE_VOICES_DIR", raising=False)
    monkeypatch.setattr("os.path.expanduser", os.fspath)
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and "no  settings: voices_dir: no home is known for ~/.local" in done.output
    done = CliRunner().invoke(app, ["serve", "--port", "0"])
    assert done.exit_code == 2 and "voices_dir: no home is known" in done.stderr


@pytest.mark.parametrize(("built_for", "says"), [(None, "torch with CUDA"), ("13.0", "driver must know CUDA 13.0")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device that works")
def test_a_gpu_that_torch_cannot_use(
    built_for: str | None, says: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "nvidiactl").touch()
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", home / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = finding("CUDA")
    assert found.good is False and says in found.advice


@pytest.mark.parametrize("hidden", ["", "-1"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device that works")
def test_a_gpu_that_was_hidden_is_no_fault(hidden: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "nvidiactl").touch()
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", home / "nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = finding("CUDA")
    assert found.good is None and "CUDA_VISIBLE_DEVICES" in found.found and "Unset it" in found.advice


def test_a_ffmpeg_without_its_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", {"aac", "flac"})
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


def test_the_model_cache_is_the_one_that_downloads_use(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    assert RepositoryCache("owner/name").home == home / "hub"
    assert finding("model cache").found.startswith(f"{home / 'hub'}, ")


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


@pytest.mark.parametrize(
    ("capability", "good", "advice"), [((7, 5), None, "--device cpu"), ((8, 6), True, ""), ((12, 0), True, "")]
)
def test_a_gpu_is_named_with_its_compute_capability(
    capability: tuple[int, int], good: bool | None, advice: str
) -> None:
    found = doctor._gpu(0, Gpu("a card", capability, 99 << 10, 80), "20.0 of 24.0 GiB free, CUDA 13.0")
    assert found.good is good
    assert f"compute capability {capability[0]}.{capability[1]}" in found.found
    assert advice in found.advice


def test_which_gemm_configurations_a_gpu_takes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    card = Gpu("a card", (8, 9), 99 << 10, 80)
    assert "by rule" in doctor._configurations(card).found
    assert "H100" in doctor._configurations(replace(card, capability=(9, 0))).found
    path = gemm_store.save({Shape("plain", 64, 64): ()}, card)
    assert "1 shapes" in doctor._configurations(card).found
    path.write_text("{")
    found = doctor._configurations(card)
    assert found.good is None and str(path) in found.found


def test_an_address_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("REPRISE_PORT", str(port))
        assert finding("port").good
        monkeypatch.setenv("REPRISE_HOST", "127.0.0.2")
        found = finding("port")
        assert found.good is None and f"127.0.0.2:{port} unavailable" in found.found
        done = CliRunner().invoke(app, ["doctor"])
        assert "Ready to serve, but not at this address" in done.output and "--port 0" in done.output


def test_voices_in_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    for path in (home / "file", home / "file" / "below"):
        monkeypatch.setenv("REPRISE_VOICES_DIR", str(path))
        found = finding("voices")
        assert found.good is False and found.found == f"{home / 'file'} is no directory"


def test_directories_that_cannot_be_looked_into(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those below another user's home. Here their names are too long, since root may look everywhere."""
    directory = home / ("x" * 300) / "below"
    monkeypatch.setenv("REPRISE_VOICES_DIR", str(directory))
    found = finding("voices")
    assert found.good is False and found.found == f"{directory} cannot be used (File name too long)"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(directory))
    assert finding("model cache").found.startswith(f"{directory}, ")


def test_a_file_of_python_path_that_hides_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msgspec.py").write_text("")
    (tmp_path / "tqdm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"relative:{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    hidden = finding("shadowed package")
    assert hidden.good is None and hidden.found == str(tmp_path / "msgspec.py") and "PYTHONPATH" in hidden.advice


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('not torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    broken = finding("torch")
    assert broken.good is False and "not torch" in broken.found


def test_several_engines_are_named_as_they_would_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.processes.engine_config.visible_gpus", lambda: ("0", "1", "2"))
    assert not list(doctor._engines(load_settings({})))
    (found,) = doctor._engines(load_settings({"gpus": "0,2"}))
    assert found.good and found.found == "2, one each on GPU 0, 2"
    (found,) = doctor._engines(load_settings({"gpus": "4"}))
    assert found.good is False and "CUDA shows 3 here" in found.found
    (found,) = doctor._engines(load_settings({"engines": 2, "device": "cpu"}))
    assert found.good and found.found == "2, on the CPU"


@pytest.mark.parametrize(
    ("device", "capability", "good", "says"),
    [
        ("cpu", (9, 0), None, "on the CPU"),
        ("auto", (7, 5), None, "on the CPU"),
        ("auto", (8, 6), None, "widened in the kernels"),
        ("auto", (8, 9), True, "fp8"),
    ],
)
def test_weights_in_eight_bits_where_they_help_and_where_not(
    device: str, capability: tuple[int, int], good: bool | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "current_gpu", lambda: Gpu("one", capability, 99 << 10, 80))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = load_settings({"quantization": "fp8", "device": device})
    (found,) = doctor._quantization(settings)
    assert found.good is good and says in found.found
    assert not list(doctor._quantization(load_settings()))
