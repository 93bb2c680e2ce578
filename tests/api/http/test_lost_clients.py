"""Clients that disconnect before the request is complete, and truncated answers: one log line each."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from socket import SHUT_RDWR

import httpx
import pytest
from websockets.sync.client import connect

from tests.api.http.raw import chat_request, read_to_end, send
from tests.support.fake_engine import MUTE, FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, wait


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    gc.collect()  # or asyncio complains later of what other tests left
    with caplog.at_level(logging.INFO):
        yield caplog


def access_line(log: pytest.LogCaptureFixture, path: str) -> logging.LogRecord:
    def lines() -> list[logging.LogRecord]:
        return [one for one in log.records if one.name == "reprise.access" and path in one.getMessage()]

    wait(lambda: bool(lines()), what="the request is logged")
    return lines()[0]


def complaints(log: pytest.LogCaptureFixture) -> list[str]:
    return [
        f"{record.name}: {record.getMessage()}" for record in log.records if record.exc_info or record.levelno >= 40
    ]


def counted(server: RunningServer, **labels: str) -> bool:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    return any(line.startswith("reprise_requests_total{") and all(part in line for part in wanted) for line in lines)


def in_progress(server: RunningServer) -> bool:
    """Whether a request is being answered, also one whose body has not come."""
    name = "reprise_http_requests_in_progress"
    families = server.context.metrics.registry.collect()
    return any(sample.name == name and sample.value for family in families for sample in family.samples)


@pytest.mark.parametrize(
    ("path", "head", "endpoint"),
    [
        ("/v1/chat/completions", "content-length: 100\r\n\r\n{", "chat"),
        ("/v1/chat/completions", "transfer-encoding: chunked\r\n\r\n9\r\n{", "chat"),
        ("/v1/audio/speech", "content-length: 100\r\n\r\n{", "speech"),
        (
            "/v1/audio/voices",
            "content-type: multipart/form-data; boundary=b\r\ncontent-length: 500\r\n\r\n"
            '--b\r\ncontent-disposition: form-data; name="audio_sample"; filename="a"\r\n\r\nabc',
            "voices",
        ),
    ],
)
def test_a_client_that_leaves_while_it_sends(
    log: pytest.LogCaptureFixture, path: str, head: str, endpoint: str
) -> None:
    with running_server(talking_catalog()) as server:
        with send(server, f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{head}".encode()):
            wait(lambda: in_progress(server), what="the request is being answered")
        line = access_line(log, path)
        assert line.getMessage().endswith(" 499") and vars(line)["outcome"] == "aborted"
        assert counted(server, endpoint=endpoint, outcome="aborted", status="499")
        assert not counted(server, endpoint=endpoint, outcome="error")
        server.wait_idle()
    assert complaints(log) == []


def test_a_body_that_has_not_come_when_the_server_ends(log: pytest.LogCaptureFixture) -> None:
    with running_server() as server:
        server.server.config.timeout_graceful_shutdown = 0
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
        connection = send(server, head.encode())
        wait(lambda: in_progress(server), what="the request is being answered")
    with connection:
        assert not read_to_end(connection)
    assert vars(access_line(log, "/v1/chat/completions"))["outcome"] == "aborted"
    assert not [record for record in log.records if record.exc_info]


def test_speech_that_is_cut_leaves_no_traceback(log: pytest.LogCaptureFixture) -> None:
    body = b'{"input": "One. %s", "response_format": "pcm", "split_granularity": "sentence"}' % MUTE.encode()
    head = b"POST /v1/audio/speech HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with running_server(talking_catalog(), engine=FakeEngine().serve, fixed_voices="off") as server:
        with send(server, head + body) as connection:
            data = read_to_end(connection)
        assert data.startswith(b"HTTP/1.1 200") and not data.endswith(b"0\r\n\r\n")
        assert vars(access_line(log, "/v1/audio/speech"))["outcome"] == "error"
        assert counted(server, endpoint="speech", outcome="error")
    assert complaints(log) == []


def test_nor_does_a_client_that_reads_nothing(log: pytest.LogCaptureFixture) -> None:
    with running_server(write_timeout=0.3) as server:
        request = chat_request("!endless", stream=True, max_tokens=4000, logprobs=True, top_logprobs=20)
        with send(server, request):
            assert vars(access_line(log, "/v1/chat/completions"))["outcome"] == "timeout"
        server.wait_idle()
    assert complaints(log) == []


def test_the_line_of_a_chat_that_was_left_has_its_tokens(log: pytest.LogCaptureFixture) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "!endless"}], "stream": True}
    with running_server() as server:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS) as answer:
            next(answer.iter_raw())
        line = vars(access_line(log, "/v1/chat/completions"))
        assert line["outcome"] == "aborted" and line["tokens"] > 0


@pytest.mark.parametrize(
    ("path", "endpoint"), [("/v1/realtime?model=tiny", "realtime"), ("/v1/audio/speech/stream", "speech")]
)
@pytest.mark.parametrize("leave", ["without a code", "with a code", "lost"])
def test_a_websocket_that_its_client_closes_when_nothing_goes_on_was_not_left_early(
    log: pytest.LogCaptureFixture, path: str, endpoint: str, leave: str
) -> None:
    with running_server() as server:
        with connect(server.url.replace("http", "ws") + path) as socket:
            if leave == "without a code":
                with socket.protocol_mutex:
                    socket.protocol.send_close()
                    socket.send_data()
            elif leave == "lost":
                socket.socket.shutdown(SHUT_RDWR)
            line = None if leave == "with a code" else access_line(log, path.partition("?")[0])
        line = line or access_line(log, path.partition("?")[0])
        assert vars(line)["outcome"] == ("aborted" if leave == "lost" else "ok")
        assert counted(server, endpoint=endpoint, outcome=vars(line)["outcome"], status="101")
    assert complaints(log) == []


def test_a_websocket_that_its_client_closes_in_the_middle_of_an_answer_was(log: pytest.LogCaptureFixture) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "!endless"}]}
    with running_server() as server:
        with connect(server.url.replace("http", "ws") + "/v1/realtime?model=tiny") as socket:
            socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            socket.send(json.dumps({"type": "response.create"}))
            while "response.output_text.delta" not in str(socket.recv(GENEROUS)):
                pass
        assert vars(access_line(log, "WEBSOCKET /v1/realtime"))["outcome"] == "aborted"
        server.wait_idle()
