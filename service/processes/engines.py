"""The supervisor's view of the engine processes: one for each GPU, or several on the CPU."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from service.api.engines.engine_client import EngineClient
from service.api.engines.request_stream import EngineError
from service.link.config import EngineConfig
from service.link.engine_link import EngineExit, ProcessLink
from service.link.engine_socket import OnOutputs
from service.link.messages import Command, EngineState
from service.link.silence import START_TIMEOUT
from service.link.standby import EngineStart, Standby
from service.metrics.metrics import Metrics
from service.metrics.page import Families, labelled, merged, without_engines
from service.processes.control import EngineNews
from service.processes.engine_config import configs_of_starts
from service.processes.progress import log_phase, phase_of
from service.settings.settings import Settings

log = logging.getLogger("reprise")


def shared_link(config: EngineConfig, standby: Standby | None) -> ProcessLink:
    return ProcessLink(config, shared=True, standby=standby)


class AnnouncedLink:
    """The link to a shared engine, which announces the engine's start and end. announce: called with its address when
    it is launched, and with None when it has ended."""

    def __init__(self, link: ProcessLink, announce: Callable[[str | None], None]) -> None:
        self.on_launch: Callable[[], None] = lambda: None
        self._link = link
        self._announce = announce

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        self._link.on_launch = self._launched
        try:
            return await self._link.run(on_outputs)
        finally:
            self._announce(None)

    def _launched(self) -> None:
        self._announce(self._link.address)
        self.on_launch()

    def send(self, command: Command) -> None:
        self._link.send(command)

    def kill(self) -> None:
        self._link.kill()


class EngineProcesses:
    """All engine processes; each is started, watched and restarted on its own.

    metrics: registry of the only engine. Each of several engines has its own registry, whose figures get the index of
        the engine as a label.
    kinds: kind (chat, speech) of each hosted model, by name.
    announce: called when an engine was started or has ended.
    """

    def __init__(
        self,
        starts: Sequence[EngineStart],
        settings: Settings,
        metrics: Metrics,
        kinds: Mapping[str, str],
        announce: Callable[[EngineNews], None],
    ) -> None:
        self._announce = announce
        alone = len(starts) == 1
        self._names = ["engine"] if alone else [_name(index, start.config) for index, start in enumerate(starts)]
        self._metrics = [metrics if alone else Metrics(kinds) for _ in starts]
        self._clients = [
            EngineClient(
                partial(self._link, index, configs_of_starts(start.config), start.standby),
                self._metrics[index],
                hang_timeout=settings.hang_timeout,
                start_timeout=START_TIMEOUT,
                name=self._names[index],
            )
            for index, start in enumerate(starts)
        ]
        for index, client in enumerate(self._clients):
            client.on_state = log_phase if alone else partial(_log_phase, self._names[index])

    def __len__(self) -> int:
        return len(self._clients)

    def start(self) -> None:
        for client in self._clients:
            client.start()

    def show_phases(self, on_state: Callable[[EngineState], None]) -> None:
        """Has the states of a single engine passed to `on_state` instead of logged."""
        if len(self._clients) == 1:
            self._clients[0].on_state = on_state

    async def wait_ready(self) -> None:
        """Waits until all accept requests; EngineError if one cannot be started."""
        tasks = [asyncio.ensure_future(self._wait_ready(index)) for index in range(len(self._clients))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _wait_ready(self, index: int) -> None:
        try:
            await self._clients[index].wait_ready()
        except EngineError:
            if len(self._clients) > 1:
                log.error("%s: cannot be started", self._names[index])
            raise

    @property
    def all_ready(self) -> bool:
        return all(client.phase == "ready" for client in self._clients)

    def was_ready(self, index: int) -> bool:
        """Whether that engine has been ready, since its newest start or an earlier one."""
        return self._clients[index].was_ready

    def fall_asleep(self) -> None:
        """Stops all engines until `wake`, and announces that."""
        for index, client in enumerate(self._clients):
            client.fall_asleep()
            self._tell(index, None)

    def wake(self) -> None:
        for client in self._clients:
            client.sleep.call()

    async def stop(self, grace: float) -> None:
        await asyncio.gather(*(client.stop(grace) for client in self._clients))

    def send(self, command: Command) -> None:
        """Sends a command to all engines."""
        for client in self._clients:
            client.send(command)

    @property
    def device(self) -> str:
        """The devices that they run on, such as "2 x NVIDIA H100", as far as they have reported them."""
        found = Counter(client.state.device for client in self._clients if client.state is not None)
        return ", ".join(f"{count} x {name}" if len(self._clients) > 1 else name for name, count in found.items())

    def with_metrics(self, page: Families) -> Families:
        """The page of all other processes, with the metrics of several engines."""
        if len(self._clients) == 1:
            return page
        parts = []
        for index, (client, metrics) in enumerate(zip(self._clients, self._metrics, strict=True)):
            metrics.observe("engine_up", float(client.alive))
            parts.append(labelled(metrics.registry, index))
        return merged([without_engines(page), *parts])

    def _link(self, index: int, configs: Iterator[EngineConfig], standby: Standby | None) -> AnnouncedLink:
        return AnnouncedLink(shared_link(next(configs), standby), partial(self._tell, index))

    def _tell(self, index: int, address: str | None) -> None:
        client = self._clients[index]
        self._announce(EngineNews(index, address, client.restarts, client.was_ready, client.sleep.state))


def _name(index: int, config: EngineConfig) -> str:
    return f"engine {index} on GPU {config.gpu}" if config.gpu else f"engine {index}"


def _log_phase(name: str, state: EngineState) -> None:
    log.info("%s: %s%s", name, phase_of(state), f" ({state.detail})" if state.detail else "")
