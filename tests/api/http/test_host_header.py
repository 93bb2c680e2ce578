"""Which names a server answers to: web pages that point their own name at it get nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.api.http.errors import ApiError
from service.api.http.middleware import HostRule
from tests.api.http.raw import parse, read_to_end, send
from tests.support.servers import RunningServer, running_server


def answered(rule: HostRule, host: str | None) -> bool:
    try:
        rule.check(Headers({} if host is None else {"host": host}))
    except ApiError as error:
        assert error.status == 421 and error.code == "host_not_allowed" and "allowed_host" in error.message
        return False
    return True


LOOPBACK = ("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "127.9.8.7", "[::1]:8000", "[::1]")
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "[evil]:1",
    "a:b:c",
)
ADDRESSES = ("192.168.1.5:8000", "[fe80::1]:8000", "8.8.8.8")


@pytest.mark.parametrize(
    ("bound", "allowed", "keyed", "yes", "no"),
    [
        ("127.0.0.1", (), False, LOOPBACK, (*FOREIGN, *ADDRESSES)),
        ("::1", (), False, LOOPBACK, (*FOREIGN, *ADDRESSES)),
        ("localhost", (), False, LOOPBACK, (*FOREIGN, *ADDRESSES)),
        ("192.168.1.5", (), False, (*LOOPBACK, "192.168.1.5:8000"), (*FOREIGN, "8.8.8.8")),
        ("gpu.lan", (), False, (*LOOPBACK, "GPU.lan:8000"), (*FOREIGN, *ADDRESSES)),
        ("0.0.0.0", (), False, (*LOOPBACK, *ADDRESSES), FOREIGN),
        ("::", (), False, (*LOOPBACK, *ADDRESSES), FOREIGN),
        ("127.0.0.1", ("app.example", "B.example:1"), False, (*LOOPBACK, "app.example:80", "b.example"), FOREIGN),
        ("127.0.0.1", ("*",), False, (*LOOPBACK, *FOREIGN, *ADDRESSES), ()),
        ("0.0.0.0", (), True, (*LOOPBACK, *FOREIGN, *ADDRESSES), ()),
        ("0.0.0.0", ("app.example",), True, (*LOOPBACK, *ADDRESSES, "app.example"), FOREIGN),
    ],
)
def test_the_rule(bound: str, allowed: tuple[str, ...], keyed: bool, yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    rule = HostRule(bound, allowed, keyed=keyed)
    assert [host for host in yes if not answered(rule, host)] == []
    assert [host for host in no if answered(rule, host)] == []
    assert answered(rule, None)


@pytest.fixture(scope="module")
def open_server() -> Iterator[RunningServer]:
    with running_server(allowed_host=("proxy.example",), cors_origin=("http://page.example",)) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/models", "/v1/audio/voices", "/health", "/metrics", "/docs", "/nope"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000"])
def test_a_page_that_rebinds_its_name_reads_nothing(server: RunningServer, path: str, host: str) -> None:
    refused = httpx.get(f"{server.url}{path}", headers={"host": host, "origin": f"http://{host}"})
    assert refused.status_code == 421 and refused.json()["error"]["code"] == "host_not_allowed"
    assert refused.headers["x-request-id"] and "evil" not in refused.text


def test_nor_does_it_make_anything_happen(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"host": "evil.example", "origin": "http://evil.example"}
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    assert refused.status_code == 421
    assert httpx.delete(f"{server.url}/v1/audio/voices/x", headers=headers).status_code == 421


def test_nor_opens_it_a_socket(server: RunningServer) -> None:
    head = (
        b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: evil.example\r\norigin: http://evil.example\r\n"
        b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with send(server, head) as connection:
        answer = parse(read_to_end(connection))
    assert answer.status == 421 and answer.error["code"] == "host_not_allowed"


def test_a_page_of_another_origin_is_told_of_the_setting(open_server: RunningServer) -> None:
    refused = httpx.post(f"{open_server.url}/v1/models", headers={"origin": "http://localhost:3000"})
    assert refused.status_code == 403 and "cors_origin" in refused.json()["error"]["message"]
    url = open_server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    with pytest.raises(InvalidStatus) as socket, connect(url, origin="http://localhost:3000"):
        pass
    assert socket.value.response.status_code == 403
    assert json.loads(socket.value.response.body)["error"]["code"] == "origin_not_allowed"


def test_keys_guard_by_themselves() -> None:
    with running_server(api_key=("k",)) as server:
        headers = {"host": "any.example", "authorization": "Bearer k"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    with running_server(api_key=("k",), allowed_host=("app.example",)) as server:
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 421
        headers["host"] = "app.example"
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
