"""What this machine has for serving, and what to do about what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from models.errors import CheckpointError
from service.catalog import embedded_models
from service.settings import Settings, unknown_variables

GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """good None: neither right nor wrong."""

    subject: str
    found: str
    good: bool | None
    advice: str = ""


def examine() -> list[Finding]:
    return [_python(), *_torch(), _embedded(), _port(), _cache(), *_variables()]


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding("Python", platform.python_version(), good, "" if good else "Python 3.11 or newer is needed.")


def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", "not installed", False, "Install it: see the first section of the README.")]
    import torch

    findings = [Finding("torch", torch.__version__, True)]
    if not torch.cuda.is_available():
        advice = "Models run on the CPU: fine for the embedded ones, slow for real ones."
        return [*findings, Finding("CUDA", "no device", None, advice)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, CUDA {torch.version.cuda}"
        findings.append(Finding(f"GPU {index}", found, True))
    has_triton = importlib.util.find_spec("triton") is not None
    advice = "" if has_triton else "Install the triton that belongs to this torch: decode kernels need it."
    findings.append(Finding("triton", "installed" if has_triton else "not installed", has_triton, advice))
    return findings


def _embedded() -> Finding:
    try:
        names = ", ".join(Path(directory).name for directory in embedded_models())
    except CheckpointError as error:
        return Finding("embedded models", "missing", False, str(error))
    return Finding("embedded models", names, True)


def _port() -> Finding:
    port = int(os.environ.get("REPRISE_PORT", Settings.model_fields["port"].get_default()))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Finding("port", f"{port} is taken", None, "Another server may be running; choose one with --port.")
    return Finding("port", f"{port} is free", True)


def _cache() -> Finding:
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    offline = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    return Finding("model cache", f"{free / GIB:.0f} GiB free{offline}", True)


def _variables() -> list[Finding]:
    return [
        Finding("variable", variable, None, "No setting has this name.") for variable in unknown_variables(os.environ)
    ]
