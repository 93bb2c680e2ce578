"""Engines that several API processes use sleep and wake: the supervisor's part and the API processes' parts in one
event loop, over fake engines in processes of their own. Each API process has its own port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from benchmarks.servers.footprint import children, inspect
from service.api.app import create_context, create_metrics
from service.api.context import ServerContext
from service.api.engines import engine_client
from service.api.engines.shared_usage import UsageTable
from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import EngineExit, FollowedEngine, ProcessLink
from service.link.engine_socket import OnOutputs
from service.link.messages import Detach
from service.link.standby import EngineStart
from service.metrics.metrics import Metrics
from service.processes import engines as engines_module
from service.processes import supervisor as sleep_module
from service.processes.api_config import WORK_KINDS, ApiConfig, plain_settings
from service.processes.api_process import SupervisorConnection, attached_engines
from service.processes.api_processes import ApiProcess, ApiProcesses
from service.processes.control import ControlChannel, EngineNews, Notice, Report
from service.processes.engines import EngineProcesses
from service.processes.server import Server, server_config
from service.processes.supervisor import sleep_once, sleep_when_idle
from service.settings.settings import load_settings
from tests.support.api_processes import api_pids, only
from tests.support.fake_chat import fake_catalog
from tests.support.processes import ServerProcess, served
from tests.support.victims import SMALL, chat, speech
from tests.support.waiting import GENEROUS, until, wait

pytestmark = pytest.mark.slow

FAKE = "tests.support.fake_engine:serve"
GOOD = ModelConfig("tiny", "/nowhere")
BROKEN = ModelConfig("tiny", "/broken")


class Life(ProcessLink):
    """One life of a fake engine, which begins when `gate` is open."""

    def __init__(self, config: EngineConfig, gate: asyncio.Event) -> None:
        super().__init__(config, FAKE, shared=True)
        self._gate = gate

    async def run(self, on_outputs: OnOutputs) -> EngineExit:
        await self._gate.wait()
        return await super().run(on_outputs)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None


@dataclass
class Member:
    """An API process, but for the process."""

    url: str
    context: ServerContext
    connection: SupervisorConnection
    report: ApiProcess
    tasks: list[asyncio.Task[Any]]
    server: Server

    async def ask(self, text: str = "hello") -> str:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        async with httpx.AsyncClient(timeout=GENEROUS) as http:
            answer = await http.post(f"{self.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=GENEROUS) as http:
            return await http.get(self.url + path)

    async def phase(self) -> str:
        """As /ready tells it, which must be green."""
        answer = await self.get("/ready")
        assert answer.status_code == 200, answer.text
        assert (await self.get("/health")).status_code == 200
        return str(answer.json()["engine"])


@dataclass
class Rig:
    engines: EngineProcesses
    processes: ApiProcesses
    members: list[Member] = field(default_factory=list)
    lives: list[list[Life]] = field(default_factory=list)
    """Of each engine, one after the other."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Closed, an engine that is started does not begin."""
    broken: set[int] = field(default_factory=set)
    """Engines whose next life fails."""

    async def doze(self) -> asyncio.Task[None]:
        """Puts the engines to sleep; the task ends when they were called."""
        task = asyncio.create_task(sleep_once(self.engines, self.processes))
        await until(lambda: all(lives[-1].ended for lives in self.lives), what="the engines have ended")
        return task

    @property
    def starts(self) -> list[int]:
        return [len(lives) for lives in self.lives]

    async def metric(self, name: str, member: Member | None = None) -> float:
        """The sum of its samples on the page of one of the processes."""
        page = (await (member or self.members[0]).get("/metrics")).text
        names = (line.partition("{")[0].partition(" ")[0] for line in page.splitlines())
        lines = [line for line, found in zip(page.splitlines(), names, strict=True) if found == f"reprise_{name}"]
        assert lines, f"no {name} in the page"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def wait_awake(self) -> None:
        clients = [client for member in self.members for client in member.context.engine.clients]  # type: ignore[union-attr]
        await until(lambda: all(client.phase == "ready" for client in clients), what="all see the engines ready")
        await until(lambda: self.engines.all_ready, what="the supervisor sees the engines ready")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "HEARTBEAT_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(engine_client, "BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr(sleep_module, "LOOK_SECONDS", 0.0)


@asynccontextmanager
async def rig(monkeypatch: pytest.MonkeyPatch, engines: int = 1, processes: int = 2) -> AsyncIterator[Rig]:
    flags: dict[str, Any] = {"api_processes": processes, "engines": engines, "sleep_after": 60, "hang_timeout": 600}
    settings = load_settings({"device": "cpu", **flags})
    metrics = Metrics({"tiny": "chat"})
    several = engines > 1
    configs = [EngineConfig((GOOD,), index=index if several else None) for index in range(engines)]
    made: list[Rig] = []

    def shared_link(config: EngineConfig, standby: object) -> ProcessLink:
        index = config.index or 0
        failing = index in made[0].broken
        made[0].broken.discard(index)
        life = Life(EngineConfig((BROKEN if failing else GOOD,), index=config.index), made[0].gate)
        made[0].lives[index].append(life)
        return life

    def announce(news: EngineNews) -> None:
        made[0].processes.tell(news)

    monkeypatch.setattr(engines_module, "shared_link", shared_link)
    starts = [EngineStart(config, None) for config in configs]
    engine_processes = EngineProcesses(starts, settings, metrics, {"tiny": "chat"}, announce)
    template = ApiConfig(0, processes, "", -1, -1, -1, -1, -1, engines, "text", plain_settings(settings), ())
    apis = ApiProcesses(
        template,
        metrics,
        engine_processes,
        lambda peer: engine_processes.send(Detach(peer)),
        hang_timeout=600,
        start_timeout=600,
    )
    made.append(Rig(engine_processes, apis, lives=[[] for _ in configs]))
    made[0].gate.set()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"voices_dir": folder, "port": 0, "sleep_after": 60}
        try:
            engine_processes.start()
            for index in range(processes):
                made[0].members.append(await _join(made[0], index, flags))
            async with asyncio.timeout(GENEROUS):
                await engine_processes.wait_ready()
                for member in made[0].members:
                    await member.server.wait_ready()
                    member.connection.accepts()
            await made[0].wait_awake()
            await until(lambda: all(member.report.accepts for member in made[0].members), what="all accept")
            yield made[0]
        finally:
            made[0].gate.set()
            for member in made[0].members:
                await _leave(member)
            await engine_processes.stop(5.0)


async def _join(made: Rig, index: int, flags: dict[str, Any], peer: str = "") -> Member:
    """What service.processes.api_process and ApiProcesses do, in this process. peer: a name that no other has had."""
    apis = made.processes
    ours, theirs = socket.socketpair()
    process = cast(Any, SimpleNamespace(returncode=None))
    report = ApiProcess(peer or f"api-{index}", process, await _channel(ours, Report))
    apis._running[index] = report
    tasks = [asyncio.create_task(apis._read(report))]
    for news in apis.known():
        report.control.send(news)
    control = await _channel(theirs, Notice)
    settings, catalog = load_settings(flags), fake_catalog()
    config = ApiConfig(
        index,
        apis._template.processes,
        report.peer,
        -1,
        -1,
        -1,
        apis._loads.fileno(),
        -1,
        apis._template.engines,
        "text",
        {},
        (),
    )
    followed = [FollowedEngine() for _ in range(config.engines)]
    metrics = create_metrics(catalog)
    engines = attached_engines(config, settings, metrics, followed)
    usage = UsageTable(apis._usage.fileno(), config.processes, WORK_KINDS).row(index)
    context = create_context(settings, catalog, engines, metrics, others=usage)
    connection = SupervisorConnection(control, context, engines, followed)
    context.scrape, context.makes_voices = connection.scrape, False
    server = Server(server_config(context), context)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    listener = socket.create_server(("127.0.0.1", 0))
    tasks += [asyncio.create_task(connection.follow()), asyncio.create_task(server.serve([listener]))]
    return Member(f"http://127.0.0.1:{listener.getsockname()[1]}", context, connection, report, tasks, server)


async def _channel(end: socket.socket, kind: Any) -> ControlChannel[Any]:
    return await ControlChannel.open(end, kind)


async def _leave(member: Member) -> None:
    member.server.should_exit = True
    reading, following, serving = member.tasks
    await asyncio.wait({serving}, timeout=GENEROUS)
    for task in (reading, following, serving):
        task.cancel()
    await asyncio.gather(*member.tasks, return_exceptions=True)
    member.report.control.close()
    member.connection._control.close()


@pytest.mark.parametrize(("engines", "processes"), [(1, 2), (2, 1), (2, 2)])
async def test_every_process_says_that_it_sleeps_and_wakes_it(
    monkeypatch: pytest.MonkeyPatch, engines: int, processes: int
) -> None:
    async with rig(monkeypatch, engines, processes) as made:
        for turn, member in enumerate(made.members):
            called = await made.doze()
            for other in made.members:
                assert await other.phase() == "asleep"
                assert await made.metric("engine_asleep", other) == engines
                assert await made.metric("ready", other) == 1
                assert await made.metric("engine_up", other) == engines
            assert await member.ask("good morning") == "good morning"
            await asyncio.wait_for(called, GENEROUS)
            await made.wait_awake()
            assert made.starts == [turn + 2] * engines, "each was started once"
            for other in made.members:
                assert await other.phase() == "ready"
                assert await made.metric("engine_asleep", other) == 0
        assert await made.metric("engine_wake_duration_seconds_count") == processes * engines
        assert await made.metric("engine_restarts_total") == 0


async def test_requests_to_all_processes_wait_and_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch, engines=2) as made:
        made.gate.clear()
        await made.doze()
        texts = [f"request {number}" for number in range(12)]
        waiting = [asyncio.create_task(made.members[number % 2].ask(text)) for number, text in enumerate(texts)]
        held = [member.context.engine for member in made.members]
        await until(lambda: sum(engine.in_flight for engine in held) == len(texts), what="all of them are held")
        for member in made.members:
            assert await member.phase() == "asleep"
        made.gate.set()
        assert await asyncio.gather(*waiting) == texts
        await made.wait_awake()
        assert made.starts == [2, 2]


async def test_a_process_with_a_request_keeps_the_engines_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        one, other = made.members
        body = {"model": "tiny", "messages": [{"role": "user", "content": "!endless"}], "stream": True}
        async with (
            httpx.AsyncClient(timeout=GENEROUS) as http,
            http.stream("POST", f"{other.url}/v1/chat/completions", json=body) as stream,
        ):
            pieces = stream.aiter_bytes()
            await anext(pieces)
            await asyncio.wait_for(sleep_once(made.engines, made.processes), GENEROUS)
            await made.wait_awake()
            assert await one.phase() == "ready"  # it had agreed
            assert await one.ask("still here") == "still here"
            await anext(pieces)
        await until(lambda: not other.context.admission.in_flight, what="the stream's end was seen")
        await made.doze()
        assert made.starts == [1]


async def test_a_request_before_all_have_agreed_cancels_the_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        one, other = made.members
        asked: list[int] = []
        monkeypatch.setattr(other.connection, "_doze", asked.append)
        falling = asyncio.create_task(sleep_once(made.engines, made.processes))
        await until(lambda: bool(asked) and one.context.engine.phase == "asleep", what="one has agreed")
        assert await one.ask("just now") == "just now"
        await asyncio.wait_for(falling, GENEROUS)
        assert await other.ask("and I") == "and I" and made.starts == [1]


async def test_a_wake_that_fails_is_said_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        made.gate.clear()
        called = await made.doze()
        made.broken.add(0)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "unlucky"}]}
        async with httpx.AsyncClient(timeout=GENEROUS) as http:
            asked = [
                asyncio.create_task(http.post(f"{member.url}/v1/chat/completions", json=body))
                for member in made.members
            ]
            await asyncio.wait_for(called, GENEROUS)
            held = [member.context.engine for member in made.members]
            await until(lambda: all(engine.in_flight for engine in held), what="both are held")
            made.gate.set()
            for answer in await asyncio.gather(*asked):
                assert answer.status_code == 503 and answer.headers["retry-after"]
                assert "could not be started for the request" in answer.json()["error"]["message"]
        await made.wait_awake()
        assert [await member.ask("again") for member in made.members] == ["again", "again"]
        assert await made.metric("engine_asleep") == 0 and await made.metric("engine_restarts_total") == 1


def engine_pids(server: ServerProcess) -> set[int]:
    found = ((pid, inspect(pid)) for pid in children(server.process.pid))
    return {pid for pid, process in found if process is not None and process.role == "engine"}


def test_a_server_of_two_engines_and_two_processes_sleeps_and_is_woken_by_each(tmp_path: Path) -> None:
    """Also by one that took the place of another while they slept."""
    flags = ("--engines", "2", "--device", "cpu", "--api-processes", "2", "--sleep-after", "0.5", "--voices-at-start")
    with served(*SMALL, *flags, "none", "--hang-timeout", "600", "--voices-dir", str(tmp_path)) as server:

        def call(method: str, path: str, **more: Any) -> httpx.Response:
            return httpx.request(
                method, server.url + path, headers={"connection": "close"}, timeout=2 * GENEROUS, **more
            )

        for index in range(3):
            wait(lambda: not engine_pids(server), what="the engines' processes have ended")
            if index == 2:
                killed = api_pids(server.process.pid)[0]
                os.kill(killed, signal.SIGKILL)
                wait(lambda: call("GET", "/metrics").text.count("reprise_api_process_restarts_total 1.0") == 1)
            page = call("GET", "/metrics").text
            assert all(f'reprise_engine_asleep{{engine="{engine}"}} 1.0' in page for engine in range(2))
            with only(api_pids(server.process.pid)[-1 if index else 0], server.process.pid):
                ready = call("GET", "/ready")
                assert ready.status_code == 200 and ready.json()["engines"] == ["asleep", "asleep"]
                path, body = ("/v1/audio/speech", speech()) if index else ("/v1/chat/completions", chat())
                answer = call("POST", path, json=body)
                assert answer.status_code == 200 and answer.content
        restarts = [line for line in call("GET", "/metrics").text.splitlines() if "engine_restarts_total" in line]
        assert sum(float(line.split()[-1]) for line in restarts if not line.startswith("#")) == 0
        wait(lambda: not engine_pids(server), what="the engines' processes have ended")
        assert server.stop() == 0, "a server stops while its engines sleep"


class FakeProcesses:
    """API processes that agree to everything."""

    def __init__(self, looks: list[bool]) -> None:
        self.called = asyncio.Event()
        self.dozed = 0
        self._looks = iter(looks)

    def worked(self) -> bool:
        return next(self._looks)

    async def doze(self) -> bool:
        self.dozed += 1
        self.called.set()
        return True

    def stay_awake(self) -> None:
        raise AssertionError("nobody objected")


@dataclass
class FakeEngines:
    all_ready: bool = True
    slept: int = 0

    def fall_asleep(self) -> None:
        self.slept += 1

    def wake(self) -> None:
        assert self.slept


async def look(looks: list[bool], engines: FakeEngines | None = None) -> int:
    """How often engines fell asleep while so many looks told of work, a second apart, with `after` of three seconds."""
    seconds: Iterator[int] = iter(range(10**6))
    processes, engines = FakeProcesses(looks), engines or FakeEngines()
    with pytest.raises(RuntimeError):  # no look is left
        await sleep_when_idle(engines, processes, 3.0, clock=lambda: float(next(seconds)))
    assert processes.dozed == engines.slept
    return engines.slept


async def test_engines_sleep_after_the_set_seconds_without_a_request() -> None:
    assert await look([False] * 2) == 0
    assert await look([False] * 3) == 1
    assert await look([False, False, True, False, False]) == 0
    assert await look([False] * 9, FakeEngines(all_ready=False)) == 0


async def test_a_request_between_two_checks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(monkeypatch) as made:
        made.processes.worked()
        assert not made.processes.worked()
        assert await made.members[1].ask("short") == "short"
        await until(lambda: not made.members[1].context.admission.in_flight, what="it has ended")
        assert made.processes.worked() and not made.processes.worked()
        made.members[0].report.accepts = False
        assert made.processes.worked(), "a process that starts is not left without engines"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
async def test_probes_and_metrics_do_not_keep_the_engines_awake(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    async with rig(monkeypatch) as made:
        made.processes.worked()
        for member in made.members:
            assert (await member.get(path)).status_code == 200
        assert not made.processes.worked()
