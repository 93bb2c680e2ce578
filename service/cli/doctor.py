"""Checks what this machine has for serving, and what to do about missing parts."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from models.interfaces.errors import CheckpointError
from models.layers.kernels.gpu import LEAST_CAPABILITY, Gpu, gpu_of
from service.hub.catalog import embedded_models
from service.media.audio_formats import FORMATS, LAME
from service.processes.config import api_process_count, connections_of_each, engine_gpus, with_count
from service.settings.reading import GIB, SettingsError
from service.settings.settings import Settings, load_settings, unknown_variables
from service.system.children import attainable_limit, connections_within
from service.system.packages import PackageError, check_importable, check_installed

MIN_CACHE = 20 * GIB
"""Free space under which few of the hosted models can be downloaded."""
NVIDIA_DEVICE = Path("/dev/nvidiactl")
ENCODERS = tuple(one.codec for one in FORMATS.values() if one.codec not in ("", LAME))


@dataclass(frozen=True)
class Finding:
    """good: False if the server, or a part of it, cannot work; None for information. advice: what to do."""

    subject: str
    found: str
    good: bool | None
    advice: str = ""


def examine() -> list[Finding]:
    try:
        settings, findings = load_settings(), [Finding("settings", "fit", True)]
    except SettingsError as error:
        settings = Settings.model_construct()
        findings = [Finding("settings", str(error).replace("\n", "; "), False, "Correct the variable or the file.")]
    return [
        Finding("Python", platform.python_version(), True),
        *_torch(),
        *_processes(settings),
        _packages(),
        _codecs(),
        _embedded(),
        *findings,
        *(Finding("variable", name, None, "No setting has this name.") for name in unknown_variables(os.environ)),
        _port(settings),
        _descriptors(settings),
        _voices(settings),
        _cache(),
    ]


def verdict(findings: Sequence[Finding]) -> str:
    if missing := sum(finding.good is False for finding in findings):
        return f"{missing} missing."
    if any(finding.subject == "port" and not finding.good for finding in findings):
        return "Ready to serve, but not at this address; at a free one: reprise serve --port 0"
    return "Ready to serve: reprise serve"


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "not installed", False, "Install the package with its dependencies: make serve.")
        return
    try:
        import torch
    except Exception as error:  # whatever is called torch here
        yield Finding("torch", f"cannot be imported: {error!r}", False, "See the lines below, and reinstall torch.")
        return
    yield Finding("torch", torch.__version__, True)
    if not torch.cuda.is_available():
        yield _no_cuda(torch.version.cuda)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, CUDA {torch.version.cuda}"
        yield _gpu(index, gpu_of(properties), memory)
    has_triton = importlib.util.find_spec("triton") is not None
    advice = "" if has_triton else "Install the triton that belongs to this torch: decode kernels need it."
    yield Finding("triton", "installed" if has_triton else "not installed", has_triton, advice)
    yield _compiler()


def _processes(settings: Settings) -> Iterator[Finding]:
    """The engines, if the settings ask for several, and the API processes."""
    try:
        gpus, count = engine_gpus(settings), api_process_count(settings)
    except SettingsError as error:
        yield Finding("engines", str(error), False, "Correct --gpus or --engines.")
        return
    if settings.gpus is not None or settings.engines != 1:
        where = f"one each on GPU {', '.join(gpus)}" if settings.gpus is not None else "on the CPU"
        yield Finding("engines", f"{len(gpus)}, {where}", True)
    yield Finding("API processes", str(count), True)


def _gpu(index: int, gpu: Gpu, memory: str) -> Finding:
    found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {memory}"
    if gpu.capability >= LEAST_CAPABILITY:
        return Finding(f"GPU {index}", found, True)
    advice = "Kernels need 8.0 or later (A100, RTX 30 and newer): serve with --device cpu."
    return Finding(f"GPU {index}", found, None, advice)


def _compiler() -> Finding:
    """Triton builds a launcher in C for each kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    if compiler is None:
        advice = "Triton needs one for its kernels: install gcc and the C library's headers, or let CC name one."
        return Finding("C compiler", "none", False, advice)
    if not header.exists():
        advice = "Triton needs them for its kernels: install those of this Python (python3-dev on Debian)."
        return Finding("C compiler", f"{compiler}, but no headers of Python", False, advice)
    return Finding("C compiler", compiler, True)


def _no_cuda(built_for: str | None) -> Finding:
    if not NVIDIA_DEVICE.exists():
        advice = "Models run on the CPU: fine for the embedded ones, slow for real ones."
        return Finding("CUDA", "no device", None, advice)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None and visible.strip() in ("", "-1"):
        advice = "Models run on the CPU. Unset it, or name devices in it, to use the GPU."
        return Finding("CUDA", f'hidden by CUDA_VISIBLE_DEVICES="{visible}"', None, advice)
    if built_for is None:
        advice = "Install a torch with CUDA: make clean, then make serve without TORCH_INDEX or with one that has it."
        return Finding("CUDA", "there is a device, but this torch is built for the CPU", False, advice)
    advice = f"The driver must know CUDA {built_for}: update it, or install a torch for an older CUDA. See nvidia-smi."
    return Finding("CUDA", "there is a device that torch cannot use", False, advice)


def _packages() -> Finding:
    try:
        check_installed()
        check_importable()
    except PackageError as error:
        return Finding("packages", str(error).partition(";")[0], False, str(error).partition("; ")[2])
    return Finding("packages", "can be imported", True)


def _codecs() -> Finding:
    """Speech but for MP3 is encoded, and videos are decoded, by the FFmpeg inside PyAV."""
    try:
        import av
    except ImportError as error:
        return Finding("audio formats", f"none ({error})", False)

    missing = [name for name in ENCODERS if name not in av.codecs_available]
    if missing:
        advice = "Install PyAV from its own wheel: pip install --force-reinstall --only-binary av av"
        return Finding("audio formats", f"without {', '.join(missing)}", False, advice)
    return Finding("audio formats", f"all (PyAV {av.__version__})", True)


def _embedded() -> Finding:
    try:
        names = ", ".join(Path(directory).name for directory in embedded_models())
    except CheckpointError as error:
        return Finding("embedded models", "missing", False, str(error))
    return Finding("embedded models", names, True)


def _port(settings: Settings) -> Finding:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                advice = "Let --host name an address of this machine."
                return Finding("host", f"{settings.host} unavailable ({error.strerror})", False, advice)
            advice = "Another server may be running; choose with --host and --port."
            return Finding("port", f"{settings.host}:{settings.port} unavailable ({error.strerror})", None, advice)
    return Finding("port", f"{settings.port} is free", True)


def _descriptors(settings: Settings) -> Finding:
    with suppress(SettingsError):  # _processes reports it
        settings = with_count(settings, api_process_count(settings))
    limit, connections = attainable_limit(), connections_of_each(settings)
    if connections_within(limit, connections) == connections:
        return Finding("open files", "unlimited" if limit == resource.RLIM_INFINITY else f"up to {limit}", True)
    advice = f"Allow more (ulimit -n), or lower --max-connections ({settings.max_connections})."
    return Finding("open files", f"up to {limit}", None, advice)


def _voices(settings: Settings) -> Finding:
    directory = Path(os.path.expanduser(settings.voices_dir))
    advice = "Speech models cannot be served with it; let --voices-dir name a directory."
    if not _existing(directory).is_dir():
        return Finding("voices", f"{_existing(directory)} is no directory", False, advice)
    try:
        os.listdir(directory)
    except FileNotFoundError:
        pass  # it is created when it is needed
    except OSError as error:
        return Finding("voices", f"{directory} cannot be used ({error.strerror})", False, advice)
    if os.access(_existing(directory), os.W_OK):
        return Finding("voices", f"{directory}", True)
    return Finding("voices", f"{directory} cannot be written to", None, "Uploads will fail; choose --voices-dir.")


def _cache() -> Finding:
    from huggingface_hub import constants

    cache = Path(os.path.expanduser(constants.HF_HUB_CACHE))
    free = shutil.disk_usage(_existing(cache)).free
    found = f"{cache}, {free / GIB:.0f} GiB free"
    if constants.HF_HUB_OFFLINE:
        return Finding("model cache", found, None, "HF_HUB_OFFLINE is set: only cached models can be served.")
    if free < MIN_CACHE:
        return Finding("model cache", found, None, "Real models need more: let HF_HOME name a larger disk.")
    return Finding("model cache", found, True)


def _existing(path: Path) -> Path:
    """The path or its nearest parent that exists, as far as this user may look."""
    return next(parent for parent in (path, *path.parents) if os.path.exists(parent))  # Path.exists() may raise
