"""`reprise serve` over a simulated GPU that marks when a request comes by each point of its way (benchmarks.host_path).

    REPRISE_MARKS=/tmp/marks [REPRISE_MARKED_GPU=1] python -m benchmarks.servers.marked --port 8000 ...

With REPRISE_MARKED_GPU the engine computes on the machine's own GPU; speech is marked only there. API process and
engine append to one file: the number of a POINT and the time on the machine's monotonic clock, which both read. Whose
request it is is not told: meaningful while one is asked at a time.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.servers import simulated_gpu
from benchmarks.servers.own_engine import serve_with
from service.api.chat import route
from service.api.chat.job import ChatJob
from service.api.engines.engine_client import EngineClient
from service.api.http.connections import BoundedConnection
from service.api.http.streaming import LiveResponse
from service.api.speech import route as speech_route
from service.engine import start
from service.engine.chat import worker
from service.engine.chat.encoder import VisionStage
from service.engine.chat.runner import ChatRunner
from service.engine.chat.worker import ChatWorker
from service.engine.core.readback import Readback
from service.engine.speech import runner as speech_runner
from service.engine.speech import worker as speech_worker
from service.engine.speech.runner import SpeechRunner
from service.engine.speech.worker import SpeechWorker
from service.link.config import Channel, EngineConfig
from service.link.engine_socket import EngineSocket
from service.link.messages import ChatRequest, Command, Outputs, SpeechRequest

MARKS = "REPRISE_MARKS"
MARKED_GPU = "REPRISE_MARKED_GPU"
ENTRY = "benchmarks.servers.marked:engine"
POINTS = (
    "received",
    "parsed",
    "prepared",
    "submitted",
    "taken",
    "launched",
    "computed",
    "answered",
    "heard",
    "written",
)
"""received: by the API process, the first bytes. parsed: the body. prepared: the prompt, media and sampling, or the
text of speech. submitted: to the link. taken: by the engine. launched: the first work of the GPU. computed: the first
token or audio, on the GPU. answered: by the engine, to the link. heard: by the API process. written: the event or the
audio, to the client's socket. All but received and taken are marked just before it is done, so that they come in this
order on any machine. Of the machine's own GPU launched is when the host has launched all of an encoder pass or a step,
and computed when it sees the event of the results."""
MARK = struct.Struct("<qd")

_numbers = {point: number for number, point in enumerate(POINTS)}


def _marker() -> Callable[[str], None]:
    sink = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return lambda point: _write(sink, point, time.monotonic())


def _write(sink: int, point: str, at: float) -> None:
    os.write(sink, MARK.pack(_numbers[point], at))


def read_marks(data: bytes) -> list[tuple[str, float]]:
    """Points and times (s), in the order of the times."""
    return sorted(((POINTS[number], at) for number, at in MARK.iter_unpack(data)), key=lambda mark: mark[1])


def mark_api_process() -> None:
    mark = _marker()
    received, prepare, prepare_speech, send, hear, write = (
        BoundedConnection.data_received,
        route.prepare_job,
        speech_route._prepare,
        EngineSocket.send,
        EngineClient._on_outputs,
        LiveResponse._write,
    )

    def data_received(self: BoundedConnection, data: bytes) -> None:
        if data.startswith(b"POST"):
            mark("received")
        received(self, data)

    async def prepare_job(*arguments: Any) -> ChatJob:
        mark("parsed")
        job = await prepare(*arguments)
        mark("prepared")
        return job

    async def prepare_speech_request(*arguments: Any) -> Any:
        mark("parsed")
        speech = await prepare_speech(*arguments)
        mark("prepared")
        return speech

    def send_command(self: EngineSocket, command: Command) -> None:
        if isinstance(command, ChatRequest | SpeechRequest):
            mark("submitted")
        send(self, command)

    def on_outputs(self: EngineClient, outputs: Outputs) -> None:
        if outputs.chat or outputs.speech:
            mark("heard")
        hear(self, outputs)

    async def write_chunk(self: LiveResponse, *arguments: Any, **options: Any) -> None:
        if not self._started:
            mark("written")
        await write(self, *arguments, **options)

    BoundedConnection.data_received = data_received  # type: ignore[method-assign]
    route.prepare_job = prepare_job  # type: ignore[assignment]
    speech_route._prepare = prepare_speech_request  # type: ignore[assignment]
    EngineSocket.send = send_command  # type: ignore[method-assign]
    EngineClient._on_outputs = on_outputs  # type: ignore[method-assign]
    LiveResponse._write = write_chunk  # type: ignore[method-assign]


class _MarkedStream(simulated_gpu.Stream):
    def __init__(self, mark: Callable[[str], None]) -> None:
        super().__init__()
        self._mark = mark

    def launch(self, seconds: float) -> None:
        self._mark("launched")
        super().launch(seconds)


class _MarkedChannel:
    def __init__(self, channel: Channel, mark: Callable[[str], None]) -> None:
        self._channel = channel
        self._mark = mark

    def receive(self, timeout: float | None) -> list[Command]:
        commands = self._channel.receive(timeout)
        if any(isinstance(command, ChatRequest | SpeechRequest) for command in commands):
            self._mark("taken")
        return commands

    def send(self, outputs: Outputs) -> None:
        if outputs.chat or outputs.speech:
            self._mark("answered")
        self._channel.send(outputs)


class _SeenReadback(Readback):
    """Keeps when its results were first seen to have arrived."""

    latest = 0.0
    """When those of any were."""
    _at = 0.0

    def ready(self) -> bool:
        arrived = super().ready()
        if arrived:
            self._see()
        return arrived

    def wait(self) -> None:
        super().wait()
        self._see()

    def _see(self) -> None:
        if not self._at:
            self._at = _SeenReadback.latest = time.monotonic()


def engine(config: EngineConfig, channel: Channel) -> None:
    """An EngineEntry."""
    mark = _marker()
    sink = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND)
    mark_tokens(sink)
    if os.environ.get(MARKED_GPU):
        for module in (worker, speech_worker, speech_runner):
            module.Readback = _SeenReadback  # type: ignore[attr-defined]
        for stage, launch in ((VisionStage, "launch"), (ChatRunner, "launch"), (SpeechRunner, "launch_prefill")):
            mark_launches(stage, launch, mark)
        mark_audio(sink)
        start.serve(config, _MarkedChannel(channel, mark))
    else:
        simulated_gpu.STREAM = _MarkedStream(mark)
        simulated_gpu.engine(config, _MarkedChannel(channel, mark))


def mark_launches(stage: Any, name: str, mark: Callable[[str], None]) -> None:
    """stage: a class with a method of this name."""
    launch = getattr(stage, name)

    def launched(self: Any, *arguments: Any, **options: Any) -> Any:
        found = launch(self, *arguments, **options)
        mark("launched")
        return found

    setattr(stage, name, launched)


def mark_audio(sink: int) -> None:
    collect = SpeechWorker.collect

    def collect_outputs(self: SpeechWorker) -> Outputs:
        outputs = collect(self)
        if outputs.speech:
            _write(sink, "computed", _SeenReadback.latest)
        return outputs

    SpeechWorker.collect = collect_outputs  # type: ignore[method-assign]


def mark_tokens(sink: int) -> None:
    read = ChatWorker._read_tokens

    def read_tokens(self: ChatWorker, launch: Any) -> None:
        if launch.chunks:
            _write(sink, "computed", launch.readback._at)
        read(self, launch)

    ChatWorker._read_tokens = read_tokens  # type: ignore[method-assign]


if __name__ == "__main__":
    mark_api_process()
    serve_with(ENTRY, sys.argv[1:])
