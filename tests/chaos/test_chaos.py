"""What the world does to a server: killed clients, a killed and a hung engine, readers that stop, peers that vanish.

Each test ends with nothing left over and with the answers that the server gave before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.servers.footprint import children, engine_pid, inspect
from tests.media.samples import sound, tone
from tests.support.endless import ENDLESS_TOKENS
from tests.support.processes import served, stand_still
from tests.support.victims import (
    Listener,
    Patient,
    SocketListener,
    chat,
    data_url,
    doomed_clients,
    endless,
    image_part,
    long_speech,
    raw_request,
    small_and_endless,
    speech,
    video_part,
)
from tests.support.waiting import GENEROUS, wait

LIMITS = (
    *("--write-timeout", "6", "--hang-timeout", "30"),
    *("--max-connections", "60"),
)
"""Long enough for good clients on a busy machine, short enough to wait for."""
CROWD = 80


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the patient keeps its voices; other files of tests have made folders of the same name."""
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, voices: Path) -> Iterator[Patient]:
    temporary = tmp_path_factory.mktemp("tmp")
    models = small_and_endless(tmp_path_factory.mktemp("models"))
    with served(*models, *LIMITS, "--voices-dir", str(voices), TMPDIR=str(temporary)) as server:
        yield Patient(server, temporary)


@pytest.fixture(autouse=True)
def ready(patient: Patient) -> None:
    """One failure must not fail the next tests."""
    patient.wait_status("/ready", 200)


@contextlib.contextmanager
def no_engine_starts(patient: Patient) -> Iterator[None]:
    """SIGSTOPs each replacement engine as soon as it appears; SIGCONT at the end."""
    first, over = engine_pid(patient.pid), threading.Event()
    stopped: set[int] = set()

    def stop() -> None:
        while not over.wait(0.01):
            with contextlib.suppress(LookupError, ProcessLookupError):
                if (pid := engine_pid(patient.pid)) != first and pid not in stopped:
                    os.kill(pid, signal.SIGSTOP)
                    stopped.add(pid)

    watcher = threading.Thread(target=stop)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_clients_killed_in_mid_stream(patient: Patient) -> None:
    requests = [
        ("/v1/chat/completions", endless()),
        ("/v1/chat/completions", endless(n=2, logprobs=True, top_logprobs=5)),
        ("/v1/audio/speech", long_speech()),
        ("/v1/audio/speech", long_speech(stream_format="sse", response_format="opus")),
    ]
    with patient.survivors(), doomed_clients(patient, requests):
        pass
    patient.assert_well()


def test_the_engine_is_killed(patient: Patient) -> None:
    """All who wait hear of it at once, each in the way of its protocol, and the server comes back by itself."""
    restarts = patient.metric("reprise_engine_restarts_total")
    streams = [Listener(patient, "/v1/chat/completions", endless()) for _ in range(2)]
    events = Listener(patient, "/v1/audio/speech", long_speech(stream_format="sse"))
    plain = Listener(patient, "/v1/audio/speech", long_speech())
    talk = SocketListener(patient, long_speech()["input"], min_len=200, max_len=200)
    for listener in (*streams, events, plain, talk):
        assert listener.begun.wait(GENEROUS)
    whole = Listener(patient, "/v1/chat/completions", {**endless(), "stream": False})
    wait(lambda: patient.metric('reprise_http_requests_in_progress{endpoint="chat"}') == 3, what="the answer runs")
    with no_engine_starts(patient):
        os.kill(engine_pid(patient.pid), signal.SIGKILL)
        for listener in (*streams, events, plain, whole, talk):
            listener.join(GENEROUS)
            assert not listener.is_alive(), "it waits for the next engine"
        assert patient.status("/ready") == 503
        refused = patient.post("/v1/chat/completions", chat())
        assert refused.status_code == 503 and refused.headers["retry-after"]
    assert [listener.told for listener in (*streams, events, whole)] == ["engine_unavailable"] * 4
    assert whole.status == 503 and whole.retry_after is not None
    assert plain.status == 200 and plain.cut, "a body that is cut off must not look complete"
    assert talk.types()[-1] == "error" and talk.code == 1013
    patient.wait_status("/ready", 200)
    assert patient.metric("reprise_engine_restarts_total") == restarts + 1
    patient.assert_well()


@pytest.mark.slow
def test_the_engine_hangs(patient: Patient) -> None:
    """Stopped, not dead: the watchdog sees it, says so, and replaces it."""
    hung = engine_pid(patient.pid)
    stream = Listener(patient, "/v1/chat/completions", endless())
    assert stream.begun.wait(GENEROUS)
    stand_still(hung)
    wait(lambda: patient.status("/health") == 503, what="liveness tells of the hung engine")
    stream.join(GENEROUS)
    assert stream.told == "engine_unavailable"
    wait(lambda: inspect(hung) is None, what="the hung engine is gone")
    patient.wait_status("/ready", 200)
    patient.assert_well()


@pytest.mark.slow
def test_readers_that_stop_reading(patient: Patient) -> None:
    before = sum('"timeout"' in line for line in patient.server.log)

    def dropped() -> int:
        return sum('"timeout"' in line for line in patient.server.log) - before

    bodies = [
        ("/v1/chat/completions", endless(logprobs=True, top_logprobs=20)),
        ("/v1/audio/speech", long_speech()),
    ]
    with patient.survivors(), contextlib.ExitStack() as stack:
        for path, body in bodies:
            connection = stack.enter_context(patient.connect(receive_buffer=2048))
            connection.sendall(raw_request(path, body))
        wait(lambda: dropped() == 2, what="both readers are dropped")
    patient.assert_well()


def test_sockets_that_say_nothing_more(patient: Patient) -> None:
    """No head, half a head, half a body, half a chunk, a closed half: each is closed, in its time."""
    opened = []
    for data in (
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea",
    ):
        connection = patient.connect()
        connection.sendall(data)
        opened.append(connection)
    half = patient.connect()
    half.sendall(raw_request("/v1/chat/completions", endless()))
    assert half.recv(100)
    half.shutdown(socket.SHUT_WR)
    opened.append(half)
    for connection in opened:
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    patient.assert_well()


@pytest.mark.slow
def test_a_websocket_that_says_nothing(patient: Patient) -> None:
    """Idle, it is told to close; that it does not answer even to this costs the closing handshake's ten seconds."""
    with patient.connect() as connection:
        connection.sendall(
            b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    patient.assert_well()


def test_a_byte_now_and_then_buys_no_time(patient: Patient) -> None:
    with patient.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")

        def closed() -> bool:
            connection.sendall(b"y")
            return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(4096)

        wait(closed, what="a head without an end is cut off")
    patient.assert_well()


def test_more_connections_than_are_allowed(patient: Patient) -> None:
    crowd: list[socket.socket] = []

    def answers() -> bool:
        try:
            return patient.status("/health") == 200
        except httpx.HTTPError:
            return False

    def crowded_out() -> bool:
        """On a slow machine the first of a crowd are closed for their silence before the last have come."""
        crowd.extend(patient.connect() for _ in range(CROWD))
        return not answers()

    wait(crowded_out, what="the bound on connections holds")
    wait(answers, what="connections that say nothing are closed")
    for connection in crowd:
        connection.close()
    patient.assert_well()


def test_peers_that_vanish_are_probed(patient: Patient) -> None:
    """A lost peer sends no FIN: only the kernel's keep-alive can tell. Its timer runs on every accepted socket."""
    with patient.connect() as connection:
        ours = connection.getsockname()[1]
        theirs = f":{patient.address[1]:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (row,) = [row for row in rows if row[1].endswith(theirs) and row[2].endswith(f":{ours:04X}")]
        assert row[5].startswith("02:"), f"timer {row[5]} is not the keep-alive timer"


@pytest.mark.slow
def test_decoders_are_killed(patient: Patient) -> None:
    """A video whose decoder dies is refused or decoded by another; the next one is answered."""
    outcomes: list[httpx.Response] = []
    body = chat("Watch.", video_part(frames=60))
    thread = threading.Thread(
        target=lambda: outcomes.extend(patient.post("/v1/chat/completions", body) for _ in range(4))
    )
    thread.start()
    kills = 0
    while thread.is_alive():
        for child in children(patient.pid):
            process = inspect(child)
            if process is not None and process.role == "decoder" and kills < 3:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                    kills += 1
        time.sleep(0.05)
    assert kills and len(outcomes) == 4
    assert {response.status_code for response in outcomes} <= {200, 400}
    assert patient.post("/v1/chat/completions", body).status_code == 200
    patient.assert_well()


def test_one_bad_request_in_a_full_house(patient: Patient) -> None:
    """Hostile media and bodies beside good work: refused with a name, nobody else notices."""
    bad = [
        (
            "/v1/chat/completions",
            chat("x", {"type": "image_url", "image_url": {"url": data_url(b"\x89PNG" + bytes(99))}}),
        ),
        ("/v1/chat/completions", chat("x", {"type": "video_url", "video_url": {"url": data_url(bytes(5000))}})),
        ("/v1/chat/completions", chat("long " * (4 * ENDLESS_TOKENS))),
        ("/v1/chat/completions", chat("x", image_part(1, 600))),
        ("/v1/audio/speech", speech(ref_audio=data_url(sound(tone(200, 8000, 0.0), 8000, "WAV")))),
        ("/v1/audio/speech", speech("?!...")),
    ]
    with patient.survivors():
        for path, body in bad * 2:
            response = patient.post(path, body)
            assert response.status_code == 400 and response.json()["error"]["message"]
    patient.assert_well()


@contextlib.contextmanager
def full_disk(directory: Path, pid: int) -> Iterator[None]:
    """Nothing of any size can be written below `directory`: a full tmpfs where one can be mounted, else a limit on the
    size of files of that process."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(directory)], capture_output=True)
    if mounted.returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", str(directory)], check=True)
        return
    command = ["prlimit", "--pid", str(pid), "--fsize=1024:unlimited"]
    subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run([*command[:3], "--fsize=unlimited:unlimited"], check=True)


def test_the_disk_of_the_voices_is_full(patient: Patient, voices: Path) -> None:
    clip = sound(tone(220, 16_000, 3.0), 16_000, "WAV")
    form = {"name": "Full Moon", "consent": "I agree", "model": "voxcpm2"}

    def upload() -> httpx.Response:
        files = {"audio_sample": ("clip.wav", clip, "audio/wav")}
        return httpx.post(f"{patient.url}/v1/audio/voices", data=form, files=files, timeout=GENEROUS)

    with patient.survivors():
        with full_disk(voices, patient.pid):
            for _ in range(2):
                refused = upload()
                assert refused.status_code == 507, refused.text
                assert refused.json()["error"]["code"] == "insufficient_storage"
            assert not list(voices.iterdir()), "an unfinished voice is left on the disk"
        kept = upload()
        assert kept.status_code == 200, kept.text
        spoken = patient.post("/v1/audio/speech", speech(voice="Full Moon"))
        assert spoken.status_code == 200 and len(spoken.content) > 1000
        assert httpx.delete(f"{patient.url}/v1/audio/voices/{kept.json()['id']}").status_code == 200
    patient.assert_well()
