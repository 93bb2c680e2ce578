"""One replica: the server as `reprise serve` runs it, on a port of its own, and what Ray Serve asks about it."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import ray
from ray.serve.config import AutoscalingContext

from service.api.engines.request_stream import EngineError
from service.hub.catalog import load_catalog
from service.processes.listener import bind
from service.processes.server import create_server
from service.settings.settings import Settings
from service.system.children import raise_descriptor_limit
from service.system.logs import configure_logging


class Replica:
    """A Ray Serve deployment; requests reach it over HTTP, from the front."""

    async def __init__(self, settings: Settings) -> None:
        """Returns when the engine is ready. EngineError when it cannot be started."""
        settings = settings.model_copy(update={"port": 0})
        configure_logging(settings.log_level, settings.log_format)
        raise_descriptor_limit()
        listener = bind(settings)
        self._address = f"{_reachable(settings.host)}:{listener.getsockname()[1]}"
        self._server = create_server(settings, await asyncio.to_thread(load_catalog, settings))
        self._engine = self._server.context.engine
        self._life = asyncio.create_task(self._server.serve([listener]))
        ready = asyncio.create_task(self._server.wait_ready())
        await asyncio.wait({self._life, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            raise EngineError(503, "server_ended", "The server ended before it was ready.")
        await ready

    async def address(self) -> str:
        return self._address

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The gauges reprise_requests_waiting and reprise_requests_running, all models together."""
        state = self._engine.state
        models = state.models if state is not None else ()
        return {
            "waiting": float(sum(model.waiting for model in models)),
            "running": float(sum(model.running for model in models)),
        }

    async def check_health(self) -> None:
        """RuntimeError while /health is red. The server restarts a dead engine by itself: Ray asks a few times."""
        if self._life.done() or not self._engine.alive:
            raise RuntimeError("the engine is dead or hung")

    async def __del__(self) -> None:
        """Ray Serve awaits it after the last request has ended, or its time is up."""
        if not self._life.done():
            self._server.drain()
            await self._life


def _reachable(host: str) -> str:
    """Address that other machines can reach; the node's IP for a wildcard bind."""
    if host != "localhost" and ip_address(host).is_unspecified:
        host = ray.util.get_node_ip_address()
    return f"[{host}]" if ":" in host else host


def replicas_for_work(context: AutoscalingContext) -> tuple[float, dict[str, float]]:
    """Autoscaling policy: as many replicas as the waiting and running work needs, by target_ongoing_requests each."""
    gauges = context.aggregated_metrics or {}
    work = sum(sum(gauges.get(name, {}).values()) for name in ("waiting", "running"))
    queued = context.total_queued_requests or 0.0
    assert context.config is not None
    return (work + queued) / context.config.get_target_ongoing_requests(), {}
