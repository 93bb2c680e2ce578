"""How many API processes a server starts, also with `--api-processes auto`, and the share of connections of each.

On an H200 with 32 processors and one engine, four processes give the first token of 32 streams in 75 instead of 127 ms,
and make no difference to a single stream (docs/performance.md). If there are few processors, or if the engine computes
on the same ones, a second process only takes them away from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from models.interfaces import cpus
from service.processes.engine_config import engine_gpus
from service.settings.settings import Settings
from service.system.gpus import visible_gpus

PER_ENGINE = 4
MIN_PROCESSORS = 14
"""With fewer processors than this there is one API process."""
PROCESSORS_OF_EACH = 3.5
"""Processors for each API process. It keeps one of them busy; its threads and the engines use the others."""
MAX_AUTO_PROCESSES = 16


@dataclass(frozen=True)
class ApiProcessCount:
    """A number of API processes."""

    number: int
    reason: str
    """Why this number, for the log and `reprise doctor`."""

    def __str__(self) -> str:
        return f"{self.number} ({self.reason})"


def count_for(settings: Settings, processors: int, gpus: int) -> ApiProcessCount:
    """processors: number that the server may use. gpus: number of GPUs, each with an engine; 0 if engines run on the
    CPU."""
    if settings.api_processes != "auto":
        return ApiProcessCount(settings.api_processes, "the setting")
    if settings.engine == "inline":
        return ApiProcessCount(1, "--engine inline runs in it")
    if not gpus:
        return ApiProcessCount(1, "the engine computes on the same processors")
    if processors < MIN_PROCESSORS:
        return ApiProcessCount(1, f"fewer than {MIN_PROCESSORS} processors may be used: {processors}")
    number = min(PER_ENGINE * gpus, int(processors / PROCESSORS_OF_EACH), MAX_AUTO_PROCESSES)
    return ApiProcessCount(number, f"{processors} processors may be used beside {_several(gpus)}")


def api_process_count(settings: Settings) -> ApiProcessCount:
    """The number for this machine. The GPUs are looked up only if the answer depends on them. SettingsError for GPUs
    that the settings name but that do not exist."""
    processors = cpus.available()
    depends = settings.api_processes == "auto" and settings.engine == "process" and processors >= MIN_PROCESSORS
    return count_for(settings, processors, _gpus_here(settings) if depends else int(settings.device != "cpu"))


def _gpus_here(settings: Settings) -> int:
    if settings.gpus is not None:
        return len(engine_gpus(settings))
    return int(settings.device != "cpu" and settings.engines == 1 and bool(visible_gpus()))


def with_count(settings: Settings, count: ApiProcessCount) -> Settings:
    """The settings as if that number had been set."""
    return settings.model_copy(update={"api_processes": count.number})


def num_api_processes(settings: Settings) -> int:
    """Number of API processes. "auto" counts as 1: where it means more, `with_count` has replaced it."""
    return 1 if settings.api_processes == "auto" else settings.api_processes


def connections_of_each(settings: Settings) -> int:
    """Each API process's share of max_connections."""
    return ceil(settings.max_connections / num_api_processes(settings))


def _several(gpus: int) -> str:
    return "a GPU" if gpus == 1 else f"{gpus} GPUs"
