"""Starts the GPU's driver and creates the CUDA context while torch is imported; together that takes nearly a second."""

from __future__ import annotations

import ctypes
import os
import threading

DRIVER = "libcuda.so.1"


def begin_context(device: str) -> threading.Thread | None:
    """Creates the primary context of the first visible GPU, which torch will use, in a thread. Returns the thread at
    once; None for the CPU. Errors are ignored here, since torch will meet and report them. device: as configured."""
    if device == "cpu":
        return None
    # torch sets this before it starts the driver, which reads it once.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    thread = threading.Thread(target=_retain_context, name="gpu-context", daemon=True)
    thread.start()
    return thread


def _retain_context() -> None:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:  # no driver is installed
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
