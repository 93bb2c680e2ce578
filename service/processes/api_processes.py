"""The supervisor's side of the API processes: starts them, replaces those that end, and collects their metrics."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from service.api.engines.engine_client import BACKOFF_SECONDS, STEADY_SECONDS
from service.api.engines.shared_usage import UsageTable
from service.api.engines.transcripts import Transcripts
from service.link.silence import Silence
from service.metrics.metrics import Metrics
from service.metrics.page import Families, families, lasting, merged, text
from service.processes.api_config import WORK_KINDS, ApiConfig, engine_kinds
from service.processes.control import (
    ALIVE_SECONDS,
    Accepting,
    Collect,
    ControlChannel,
    Doze,
    Dozing,
    EngineNews,
    FindTranscript,
    KeepTranscript,
    Page,
    Report,
    Scrape,
    Snapshot,
    StayAwake,
    Transcript,
    Wake,
)
from service.processes.engines import EngineProcesses
from service.processes.listener import CONNECTIONS
from service.system.children import python_command, python_environment
from service.system.concurrency import shielded

log = logging.getLogger("reprise")

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

    @property
    def asked(self) -> bool:
        """Whether it was asked for its metrics and has not answered."""
        return self._collected is not None

    def collect(self) -> asyncio.Future[None]:
        """Asks for its metrics. Done when they have come, or the process has ended."""
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
        self._usage = UsageTable.make_file(template.processes, WORK_KINDS)
        self._loads = UsageTable.make_file(template.processes, engine_kinds(template.engines))
        self._connections = UsageTable.make_file(template.processes, (CONNECTIONS,))
        self._tables = (
            UsageTable(self._usage.fileno(), template.processes, WORK_KINDS),
            UsageTable(self._loads.fileno(), template.processes, engine_kinds(template.engines)),
        )
        self._open = UsageTable(self._connections.fileno(), template.processes, (CONNECTIONS,))
        self._transcripts = Transcripts()
        self._metrics = metrics
        self._engines = engines
        self._on_end = on_end
        self._news: dict[int, EngineNews] = {}
        """The newest notice about each engine."""
        self._running: dict[int, ApiProcess] = {}
        self._peers = (f"api-{number}" for number in itertools.count(1))
        self._ended: Families = ()
        """The counts of processes that have ended."""
        self._collecting = asyncio.Lock()
        self._next_page: asyncio.Task[bytes] | None = None
        """The page that is collected after the one in progress."""
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._have_accepted = False
        self.called = asyncio.Event()
        """Set when a process has a request for engines that sleep, or cannot let them sleep now."""
        self._doze = Doze(-1)
        """The newest one."""
        self._not_dozing: set[str] = set()
        """Peers that have not answered it yet."""
        self._changes: list[int] = []
        """The counters of the usage tables when `worked` was last called."""
        self._answers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs them until `end` was called and all have ended; StartError if the first ones cannot start."""
        tasks = [asyncio.create_task(self._keep(index)) for index in range(self._template.processes)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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

    def known(self) -> list[EngineNews]:
        """What a process that starts now has to know of the engines. They may have become ready since their notices,
        and one that hangs cannot say so itself."""
        return [
            msgspec.structs.replace(news, was_ready=self._engines.was_ready(index))
            for index, news in self._news.items()
        ]

    def worked(self) -> bool:
        """Whether any process has a request, or has had one since the last call, or is still starting."""
        changes, self._changes = self._changes, [table.changes() for table in self._tables]
        starting = sum(process.accepts for process in self._running.values()) < self._template.processes
        return starting or changes != self._changes or any(table.requests() for table in self._tables)

    async def doze(self) -> bool:
        """Asks all processes to hold their requests. True once all of them do; False if one of them has a request or
        has to hold one in the meantime, or if another process is started."""
        self.called.clear()
        self._doze = Doze(self._doze.number + 1)
        self._not_dozing = {process.peer for process in self._running.values()}
        for process in self._running.values():
            process.control.send(self._doze)
        while self._not_dozing and not self.called.is_set():
            self._changed.clear()
            await self._changed.wait()
        self._not_dozing = set()
        return not self.called.is_set()

    def stay_awake(self) -> None:
        """Tells all processes to send the requests that they hold, since the engines do not stop."""
        for process in self._running.values():
            process.control.send(StayAwake())

    def end(self, number: int = signal.SIGTERM) -> None:
        """Sends all of them a signal; from now on none is replaced."""
        self._ending.set()
        for process in self._running.values():
            process.signal(number)

    async def page(self) -> bytes:
        """The metrics of all processes, including this one, in Prometheus's text format. All who ask while one page is
        collected get the next one, so that none waits for those of all others."""
        if self._next_page is None:
            self._next_page = asyncio.create_task(self._collected_page())
        return await shielded(self._next_page)

    async def _collected_page(self) -> bytes:
        async with self._collecting:
            self._next_page = None
            # One that has not answered the last time is not waited for again: it is hung, or its answer is on its way.
            asked = [process for process in self._running.values() if process.accepts and not process.asked]
            waited = [process.collect() for process in asked]
            if waited:
                await asyncio.wait(waited, timeout=COLLECT_SECONDS)
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
            self._template,
            index=index,
            peer=next(self._peers),
            control=theirs.fileno(),
            usage=self._usage.fileno(),
            loads=self._loads.fileno(),
            connections=self._connections.fileno(),
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
        if self._not_dozing:  # this process was not asked to doze
            self._call()
        tasks = [asyncio.create_task(self._read(member)), asyncio.create_task(self._watch(member))]
        try:
            assert process.stdin is not None
            process.stdin.write(config.line())
            for news in self.known():
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

    def _call(self) -> None:
        self.called.set()
        self._changed.set()

    def _forget(self, index: int, member: ApiProcess) -> None:
        del self._running[index]
        member.control.close()
        member.note_collected()
        self._ended = merged([self._ended, lasting(member.families)])
        for table in (*self._tables, self._open):
            table.clear(index)
        self._not_dozing.discard(member.peer)
        self._changed.set()
        self._on_end(member.peer)

    async def _read(self, member: ApiProcess) -> None:
        try:
            await self._follow(member)
        except msgspec.DecodeError as error:
            log.error("API process: its reports could not be read and it is killed: %s", error)
            member.signal(signal.SIGKILL)

    async def _watch(self, member: ApiProcess) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            if (seconds := member.silence.look()) > self._timeouts[member.accepts]:
                log.error("API process: no sign of life for %.0f s; it is killed", seconds)
                member.signal(signal.SIGKILL)
                return

    async def _follow(self, member: ApiProcess) -> None:
        while (report := await member.control.receive()) is not None:
            member.silence.end()
            match report:
                case Accepting():
                    member.accepts = self._have_accepted = True
                    self._changed.set()
                case Snapshot():
                    member.families = report.families
                    member.note_collected()
                case KeepTranscript():
                    self._transcripts.add(report.id, report.text)
                    member.control.send(Transcript(report.number, None))
                case FindTranscript():
                    member.control.send(Transcript(report.number, self._transcripts.find(report.id)))
                case Dozing():
                    if report.number == self._doze.number:
                        self._not_dozing.discard(member.peer)
                        self._changed.set()
                case Wake():
                    self._call()
                case Scrape():
                    answer = asyncio.create_task(self._answer(member, report.number))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)

    async def _answer(self, member: ApiProcess, number: int) -> None:
        member.control.send(Page(number, await self.page()))
