"""Chooses the GPUs that serve. Each has one engine process, which sees no other GPU. `python -m service.system.gpus`
prints how many GPUs CUDA sees; it runs as a process of its own, since a process that asks the driver keeps the devices
open.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence

from service.system.children import python_command, python_environment

LIBRARY = "libcuda.so.1"
ASK_SECONDS = 60.0
"""Seconds to wait for the driver, which without persistence mode takes seconds to wake up several GPUs."""


class GpuError(ValueError):
    """The requested GPUs do not exist; the message names the setting."""


def engines_problem(gpus: str | None, engines: int, device: str) -> str:
    """Why these settings contradict each other; empty if they do not."""
    if gpus is not None and engines > 1:
        return "engines: is for several engines on the CPU; --gpus starts one for each GPU"
    if gpus is not None and device == "cpu":
        return "gpus: there is none with --device cpu; --engines N starts several engines there"
    if engines > 1 and device == "cuda":
        return "engines: is for several engines on the CPU; --gpus N starts one for each of N GPUs"
    return ""


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that an engine started here would see, in CUDA's order."""
    count = _ask_driver(environ)
    if (named := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(name.strip() for name in named.split(","))[:count]
    return tuple(map(str, range(count)))


def chosen_gpus(wanted: str, visible: Sequence[str]) -> tuple[str, ...]:
    """wanted: the setting `gpus`, whose indexes count the visible GPUs. GpuError for GPUs that do not exist."""
    if not visible:
        raise GpuError(
            f"gpus: {wanted.rstrip(',')} asked for, but there is no GPU here that CUDA can use (`reprise doctor` says "
            "why); --engines N starts several engines on the CPU"
        )
    if wanted == "all":
        return tuple(visible)
    if wanted.isdecimal():
        if int(wanted) > len(visible):
            raise GpuError(f"gpus: {wanted} asked for, CUDA shows {len(visible)} here")
        return tuple(visible[: int(wanted)])
    return tuple(_chosen(name, visible) for name in wanted.split(",") if name)


def _chosen(name: str, visible: Sequence[str]) -> str:
    if not name.isdecimal():  # a UUID
        return name
    if int(name) >= len(visible):
        raise GpuError(f"gpus: there is no GPU {name}; CUDA shows {len(visible)} here, counted from 0")
    return visible[int(name)]


def _ask_driver(environ: Mapping[str, str]) -> int:
    command = python_command("service.system.gpus")
    done = subprocess.run(command, env=python_environment(environ), capture_output=True, text=True, timeout=ASK_SECONDS)
    return int(done.stdout) if done.returncode == 0 else 0


def count_gpus(library: str = LIBRARY) -> int:
    """Number of GPUs according to CUDA's driver, which obeys CUDA_VISIBLE_DEVICES; 0 without a driver or a device."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


if __name__ == "__main__":
    print(count_gpus())
