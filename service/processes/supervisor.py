"""The process that owns the port, the engines and the API processes, and serves no request itself. It starts them,
replaces those that end, and collects their metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from service.api.app import create_engine
from service.api.engines.engine_client import BACKOFF_SECONDS, STEADY_SECONDS
from service.api.engines.engines import Engines
from service.api.engines.request_stream import EngineError
from service.api.engines.shared_usage import UsageTable
from service.hub.catalog import Catalog
from service.link.engine_link import START_TIMEOUT, EngineStarts
from service.link.messages import Detach
from service.metrics.metrics import Metrics
from service.metrics.page import Families, families, labelled, lasting, merged, text, without_engines
from service.processes.control import (
    Accepting,
    ApiConfig,
    Collect,
    ControlChannel,
    EngineNews,
    Page,
    Report,
    Scrape,
    Snapshot,
    plain_settings,
)
from service.processes.listener import url_of
from service.processes.server import ABORT_GRACE, log_phase, print_banner
from service.settings.settings import Settings
from service.system.children import Silence, python_command, python_environment
from service.system.concurrency import all_results

log = logging.getLogger("reprise")


class EngineProcesses:
    """All engine processes: one for each GPU, or several on the CPU. Each is started, watched and restarted on its own.

    starts: of begin_engines, one of each engine.
    metrics: registry of the only engine. Each of several engines has its own registry, whose figures get the index of
        the engine as a label.
    kinds: kind (chat, speech) of each hosted model, by name.
    announce: called when an engine was started or has ended.
    """

    def __init__(
        self,
        starts: Sequence[EngineStarts],
        settings: Settings,
        metrics: Metrics,
        kinds: Mapping[str, str],
        announce: Callable[[EngineNews], None],
    ) -> None:
        self._announce = announce
        alone = len(starts) == 1
        self._metrics = [metrics if alone else Metrics(kinds) for _ in starts]
        self._clients = [
            create_engine(settings, self._metrics[index], partial(each.link, partial(self._tell, index)))
            for index, each in enumerate(starts)
        ]
        for index, client in enumerate(self._clients):
            gpu = starts[index].config.gpu
            client.name = "engine" if alone else f"engine {index} on GPU {gpu}" if gpu else f"engine {index}"
            client.on_state = partial(log_phase, name=client.name)
        self.life = Engines(self._clients, metrics)
        """Starts and stops them."""

    def detach(self, peer: str) -> None:
        """Tells all engines that an API process has ended."""
        for client in self._clients:
            client.send(Detach(peer))

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

    def _tell(self, index: int, address: str | None) -> None:
        self._announce(EngineNews(index, address, self._clients[index].restarts))


COLLECT_SECONDS = 2.0
"""Seconds that a page of metrics waits for the figures of a busy process. After that it shows the figures that the
process sent last."""


class StartError(Exception):
    """An API process ended before any of them had accepted connections; another one would probably end, too."""


class ApiProcess:
    """One API process, from its start to its end."""

    def __init__(self, peer: str, process: asyncio.subprocess.Process, control: ControlChannel[Report]) -> None:
        self.peer = peer
        self.process = process
        self.control = control
        self.accepts = False
        self.families: Families = ()
        """Metrics of the process when they were last collected."""
        self.silence = Silence(time.monotonic)
        """Time since its last report."""
        self._collected: asyncio.Future[None] | None = None

    def collect(self) -> asyncio.Future[None]:
        """Ask for its metrics, unless it has been asked and has not answered. Done when they have come, or the process
        has ended."""
        if self._collected is None:
            self._collected = asyncio.get_running_loop().create_future()
            self.control.send(Collect())
        return self._collected

    def note_collected(self) -> None:
        """Its metrics have come, or never will."""
        if self._collected is not None:
            self._collected.set_result(None)
            self._collected = None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class ApiProcesses:
    """Starts and watches the API processes, and replaces those that end.

    template: the configuration of all; index, peer and inherited descriptors differ.
    engines: add their metrics to the page.
    on_end: called with the peer's name when a process has ended.
    hang_timeout: seconds without a report after which a process that accepts connections counts as hung and is killed.
    start_timeout: the same before it accepts connections.
    """

    def __init__(
        self,
        template: ApiConfig,
        metrics: Metrics,
        engines: EngineProcesses,
        on_end: Callable[[str], None],
        *,
        hang_timeout: float,
        start_timeout: float,
    ) -> None:
        self._template = template
        self._timeouts = {True: hang_timeout, False: start_timeout}
        """Timeouts by whether a process accepts connections."""
        self._usage = UsageTable.make_file(template.processes, template.kinds)
        self._table = UsageTable(self._usage.fileno(), template.processes, template.kinds)
        self._metrics = metrics
        self._engines = engines
        self._on_end = on_end
        self._news: dict[int, EngineNews] = {}
        """The newest notice about each engine."""
        self._running: dict[int, ApiProcess] = {}
        self._peers = (f"api-{number}" for number in itertools.count(1))
        self._ended: Families = ()
        """The counts of processes that have ended."""
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._have_accepted = False
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs them until `end` was called and all have ended; StartError if the first ones cannot start."""
        await all_results([self._keep(index) for index in range(self._template.processes)])

    async def wait_accepting(self) -> None:
        """Waits until all of them accept connections."""
        while sum(process.accepts for process in self._running.values()) < self._template.processes:
            self._changed.clear()
            await self._changed.wait()

    def tell(self, news: EngineNews) -> None:
        """Tells all of them, and those that start later, about the start or end of an engine."""
        self._news[news.engine] = news
        for process in self._running.values():
            process.control.send(news)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Sends all of them a signal; from now on none is replaced."""
        self._ending.set()
        for process in self._running.values():
            process.signal(number)

    async def page(self) -> bytes:
        """The metrics of all processes, including this one, in Prometheus's text format."""
        if collected := [process.collect() for process in self._running.values() if process.accepts]:
            await asyncio.wait(collected, timeout=COLLECT_SECONDS)
        parts = [families(self._metrics.registry), self._ended]
        parts += [process.families for process in self._running.values()]
        return await asyncio.to_thread(lambda: text(self._engines.with_metrics(merged(parts))))

    async def _keep(self, index: int) -> None:
        attempt = 0
        while not self._ending.is_set():
            started = time.monotonic()
            reason = await self._run_once(index)
            if self._ending.is_set():
                return
            if not self._have_accepted:
                raise StartError(f"API process {index + 1} {reason}")
            log.error("API process %d %s; another one takes its place", index + 1, reason)
            if time.monotonic() - started > STEADY_SECONDS:
                attempt = 0
            with suppress(TimeoutError):
                pause = BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)]
                await asyncio.wait_for(self._ending.wait(), pause)
            attempt += 1
            self._metrics.observe("api_process_restarts_total")

    async def _run_once(self, index: int) -> str:
        """Runs one process to its end; returns how it ended."""
        ours, theirs = socket.socketpair()
        config = msgspec.structs.replace(
            self._template, index=index, peer=next(self._peers), control=theirs.fileno(), usage=self._usage.fileno()
        )
        control: ControlChannel[Report] = await ControlChannel.open(ours, Report)
        try:
            process = await asyncio.create_subprocess_exec(
                *python_command("service.processes.api_process"),
                env=python_environment(),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=config.inherited,
                start_new_session=True,  # Ctrl-C is for the supervisor, which tells them to drain
            )
        except OSError as error:  # e.g. out of memory: a later start may succeed
            control.close()
            return f"could not be started: {error}"
        finally:
            theirs.close()
        member = ApiProcess(config.peer, process, control)
        self._running[index] = member
        tasks = [asyncio.create_task(self._follow(member)), asyncio.create_task(self._watch(member))]
        try:
            assert process.stdin is not None
            process.stdin.write(config.line())
            for news in self._news.values():
                control.send(news)
            if self._ending.is_set():  # it was told to end while it was being started
                member.signal(signal.SIGTERM)
            status = await process.wait()
            return f"ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            for task in tasks:
                task.cancel()
            self._forget(index, member)

    def _forget(self, index: int, member: ApiProcess) -> None:
        del self._running[index]
        member.control.close()
        member.note_collected()
        self._ended = merged([self._ended, lasting(member.families)])
        self._table.clear(index)
        self._changed.set()
        self._on_end(member.peer)

    async def _watch(self, member: ApiProcess) -> None:
        seconds = await member.silence.exceeds(lambda: self._timeouts[member.accepts])
        log.error("API process: no sign of life for %.0f s; it is killed", seconds)
        member.signal(signal.SIGKILL)

    async def _follow(self, member: ApiProcess) -> None:
        """Does what its reports say; a process whose reports cannot be read is killed."""
        try:
            while (report := await member.control.receive()) is not None:
                member.silence.end()
                match report:
                    case Accepting():
                        member.accepts = self._have_accepted = True
                        self._changed.set()
                    case Snapshot():
                        member.families = report.families
                        member.note_collected()
                    case Scrape():
                        answer = asyncio.create_task(self._answer(member))
                        self._answers.add(answer)
                        answer.add_done_callback(self._answers.discard)
        except msgspec.DecodeError as error:
            log.error("API process: its reports could not be read and it is killed: %s", error)
            member.signal(signal.SIGKILL)

    async def _answer(self, member: ApiProcess) -> None:
        member.control.send(Page(await self.page()))


ENGINE_GRACE = 10.0
"""Seconds that an engine may take to stop."""
DRAIN_MARGIN = 10.0
"""Seconds after the longest possible drain after which an API process is killed."""


class Supervisor:
    """Owns the listening socket, which it passes on to the API processes, and starts and watches all other processes.
    starts: of begin_engines."""

    def __init__(
        self, settings: Settings, catalog: Catalog, listener: socket.socket, starts: Sequence[EngineStarts]
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._listener = listener
        kinds = {model.name: model.kind for model in catalog.models}
        metrics = Metrics(kinds)
        self._engines = EngineProcesses(starts, settings, metrics, kinds, lambda news: self._processes.tell(news))
        template = ApiConfig(
            index=0,
            processes=settings.num_api_processes,
            peer="",
            listener=listener.fileno(),
            control=-1,
            usage=-1,
            engines=len(starts),
            log_format=settings.log_format,
            settings=plain_settings(settings),
            models=catalog.models,
        )
        self._processes = ApiProcesses(
            template,
            metrics,
            self._engines,
            self._engines.detach,
            hang_timeout=settings.hang_timeout,
            start_timeout=START_TIMEOUT,
        )
        self._draining: asyncio.Task[None] | None = None
        self._forced = False

    async def run(self) -> int:
        """Serves until a signal; returns the exit status, 1 if an engine or the API processes cannot be started."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._engines.life.start()
        starting = asyncio.create_task(self._wait_started())
        serving = asyncio.create_task(self._processes.run())
        try:
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
            failed = starting.done() and starting.exception() is not None
            if failed:
                self._processes.end(signal.SIGKILL)
            elif starting.done():
                print_banner(self._catalog, self._engines.device, url_of(self._listener), self._settings.page)
            await serving
            if failed:
                await starting
            return 0
        except (EngineError, StartError) as error:
            log.error("%s", error)
            return 1
        finally:
            for task in (starting, serving, self._draining):
                if task is not None:
                    task.cancel()
            await self._engines.life.stop(0.0 if self._forced else ENGINE_GRACE)

    async def _wait_started(self) -> None:
        await self._engines.life.wait_ready()
        await self._processes.wait_accepting()

    def _on_signal(self) -> None:
        """Drains all processes at the first signal; ends them at once at the second."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._forced = True
            self._processes.end(signal.SIGKILL)

    async def _drain(self) -> None:
        """Drains the API processes, which stop accepting connections by themselves, and kills those that take longer
        than a drain can."""
        settings = self._settings
        self._listener.close()
        self._processes.end()
        await asyncio.sleep(settings.drain_delay + settings.drain_timeout + 2 * ABORT_GRACE + DRAIN_MARGIN)
        log.error("an API process does not end; it is killed")
        self._processes.end(signal.SIGKILL)
