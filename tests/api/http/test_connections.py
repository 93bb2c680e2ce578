"""Bodies that are framed past h11's state machine are those that h11 frames."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.http.connections import FastBodyConnection

REQUESTS = {
    "1.1": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    "1.0": b"POST / HTTP/1.0\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    "head": b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n",
}


def _answered(connection: h11.Connection, request: bytes, pieces: list[bytes], *, sized: bool) -> list[bytes]:
    """What goes out for each of two answers on one connection, as far as it is kept open."""
    answers: list[bytes] = []
    for _ in range(2):
        connection.receive_data(request)
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        headers = [(b"Date", b"today"), (b"x-request-id", b"1")]
        headers += [(b"content-length", str(sum(map(len, pieces))).encode())] if sized else []
        sent = [connection.send(h11.Response(status_code=200, headers=headers))]
        sent += [connection.send(h11.Data(data=piece)) for piece in pieces]
        sent.append(connection.send(h11.EndOfMessage()))
        answers.append(b"".join(data or b"" for data in sent))
        if connection.our_state is not h11.DONE:
            break
        connection.start_next_cycle()
    return answers


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("sized", [False, True])
@settings(deadline=None)
@given(pieces=st.lists(st.binary(max_size=40) | st.just(bytes(70_000)), max_size=4))
def test_framing_is_that_of_h11(request_name: str, sized: bool, pieces: list[bytes]) -> None:
    request = REQUESTS[request_name]
    pieces = [b""] if request_name == "head" else pieces
    expected = _answered(h11.Connection(h11.SERVER), request, pieces, sized=sized)
    assert _answered(FastBodyConnection(h11.SERVER, draining=lambda: False), request, pieces, sized=sized) == expected


def test_the_head_goes_out_with_the_first_piece() -> None:
    connection = FastBodyConnection(h11.SERVER, draining=lambda: False)
    connection.receive_data(REQUESTS["1.1"])
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    assert connection.send(h11.Response(status_code=200, headers=[])) == b""
    first = connection.send(h11.Data(data=b"x"))
    assert first is not None and first.startswith(b"HTTP/1.1 200") and first.endswith(b"\r\n\r\n1\r\nx\r\n")
    assert connection.send(h11.Data(data=b"y")) == b"1\r\ny\r\n"
