"""The configuration of an API process: one JSON line on its standard input, since it holds the API keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from models.checkpoints.registry import family_of, resolve
from models.interfaces.cpus import default_threads
from service.api.app import ENDPOINTS
from service.api.http.admission import EXCESS, KINDS
from service.hub import Checkpoint
from service.hub.catalog import Catalog, HostedModel
from service.processes.api_process_count import connections_of_each, num_api_processes
from service.settings.settings import Settings, load_settings

WORK_KINDS = (*sorted({KINDS.get(endpoint, endpoint) for endpoint in ENDPOINTS.values()}), "other", EXCESS)
"""Columns of the table of admitted work."""


def engine_kinds(engines: int) -> tuple[str, ...]:
    """Columns of the table of requests in flight at each engine."""
    return tuple(map(str, range(engines)))


class LocatedModel(msgspec.Struct, frozen=True):
    """What a HostedModel is made from, as plain values: where the supervisor has located it, and its names."""

    names: tuple[str, ...]
    kind: Literal["chat", "speech"]
    source: str
    directory: str
    revision: str | None
    created: int
    demo: bool


class ApiConfig(msgspec.Struct, frozen=True):
    """What an API process needs to know at its start. listener, control, usage, loads and connections are inherited
    file descriptors."""

    index: int
    """From 0; a process that replaces another one takes over its index."""
    processes: int
    """Number of API processes."""
    peer: str
    """Name at the engines; no other process has ever had it."""
    listener: int
    """The listening socket."""
    control: int
    """The connection to the supervisor (control.py)."""
    usage: int
    """The table of admitted work (WORK_KINDS)."""
    loads: int
    """The table of requests in flight at each engine."""
    connections: int
    """The table of open connections."""
    engines: int
    """Number of engines."""
    log_format: Literal["text", "json"]
    settings: dict[str, Any]
    models: tuple[LocatedModel, ...]

    @property
    def inherited(self) -> tuple[int, ...]:
        """The file descriptors."""
        return (self.listener, self.control, self.usage, self.loads, self.connections)

    def line(self) -> bytes:
        """The configuration as the process reads it: JSON, ended by a line break."""
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    def server_settings(self) -> Settings:
        """The settings again, from their plain values."""
        return load_settings(self.settings)

    def catalog(self) -> Catalog:
        """The hosted models again, without a second look at the hub."""
        return Catalog([_hosted(model) for model in self.models])


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Settings of each API process, as plain values except for paths. They hold the API keys that the supervisor has
    read; connections and threads are divided among the processes."""
    processes = num_api_processes(settings)
    share = max(1, default_threads() // processes)
    return settings.model_dump() | {
        "api_processes": processes,
        "api_key": settings.keys(),
        "api_key_file": None,
        "max_connections": connections_of_each(settings),
        "media_threads": settings.media_threads or share,
    }


def located_models(hosted: Sequence[HostedModel]) -> tuple[LocatedModel, ...]:
    """The hosted models in the form in which an ApiConfig carries them."""
    return tuple(
        LocatedModel(
            model.names,
            model.kind,
            model.checkpoint.source,
            str(model.checkpoint.directory),
            model.checkpoint.revision,
            model.created,
            model.demo,
        )
        for model in hosted
    )


def _hosted(model: LocatedModel) -> HostedModel:
    directory = Path(model.directory)
    load = partial(resolve(family_of(directory).processor), directory)
    checkpoint = Checkpoint(model.source, directory, model.revision)
    return HostedModel(model.names, model.kind, checkpoint, load, model.created, model.demo)
