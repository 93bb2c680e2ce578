"""Chat and speech cannot starve each other at admission."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.sync.client import connect

from service.api.http.admission import KINDS, Admission, Ticket
from service.api.http.errors import ApiError
from service.catalog import Catalog, load_catalog
from service.hub import EMBEDDED
from service.metrics import Metrics
from service.settings import load_settings
from tests.support.fake_chat import fake_catalog
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS, until

SHARES = {"chat": 0.75, "speech": 0.5}
ENDPOINTS = ("chat", "speech", "voices")


def both_kinds() -> Catalog:
    talker = load_catalog(load_settings({"model": (str(EMBEDDED / "voxcpm2"),), "served_model_name": ("talker",)}))
    return Catalog([*fake_catalog().models, *talker.models])


def take_all(admission: Admission, endpoint: str, *, size: int = 0) -> list[Ticket]:
    """As many requests as are admitted."""
    tickets: list[Ticket] = []
    while True:
        ticket = admission.ticket(endpoint)
        try:
            ticket.grow(1, size)
        except ApiError:
            return tickets
        tickets.append(ticket)


@pytest.mark.parametrize(("first", "second", "counts"), [("chat", "speech", (75, 25)), ("speech", "chat", (50, 50))])
def test_a_flood_of_one_kind_leaves_the_rest_to_the_other(first: str, second: str, counts: tuple[int, int]) -> None:
    admission = Admission(100, 10_000, Metrics(), SHARES)
    flood = take_all(admission, first)
    assert (len(flood), len(take_all(admission, second))) == counts
    flood[0].release()
    assert len(take_all(admission, first)) == 1


def test_bytes_are_shared_likewise_and_uploads_of_voices_are_speech() -> None:
    admission = Admission(1000, 10_000, Metrics(), SHARES)
    assert len(take_all(admission, "chat", size=100)) == 75
    assert len(take_all(admission, "voices", size=100)) == 25
    assert not take_all(admission, "speech", size=100)


def test_one_request_of_any_size_is_admitted_and_starves_nobody_else() -> None:
    admission = Admission(1000, 10_000, Metrics(), SHARES)
    giant = admission.ticket("chat")
    giant.grow(1, 50_000)
    giant.grow(0, 50_000)
    assert not take_all(admission, "chat", size=1)
    assert len(take_all(admission, "speech", size=100)) == 25


def test_a_lonely_kind_may_take_everything() -> None:
    assert len(take_all(Admission(100, 10_000, Metrics()), "chat")) == 100


@given(st.lists(st.tuples(st.sampled_from(ENDPOINTS), st.integers(0, 3), st.integers(0, 400)), max_size=60))
def test_bounds_hold_and_everything_comes_back(wishes: list[tuple[str, int, int]]) -> None:
    """The only request of its kind always fits; beside such ones, the bounds are the bounds."""
    admission = Admission(20, 1000, Metrics(), SHARES)
    tickets = []
    held: dict[str, list[int]] = {}
    for endpoint, requests, size in wishes:
        ticket = admission.ticket(endpoint)
        try:
            ticket.grow(requests, size)
        except ApiError as error:
            assert error.status == 503 and error.retry_after
        else:
            tickets.append(ticket)
            if size:
                held.setdefault(KINDS.get(endpoint, endpoint), []).append(size)
        in_a_batch = sum(sum(sizes) for sizes in held.values() if len(sizes) > 1)
        assert admission.in_flight <= 20 and in_a_batch <= 1000
        assert admission.pending_bytes == sum(map(sum, held.values()))
    for ticket in tickets:
        ticket.release()
    assert admission.in_flight == admission.pending_bytes == 0


async def test_through_the_application() -> None:
    """Eight places: six that chat may take, six that speech may take."""
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "!silent"}]}
    speech = {"model": "talker", "input": "Hello.", "response_format": "pcm", "max_len": 2}
    with running_server(both_kinds(), max_in_flight=8) as server:
        socket_url = server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            flood = [asyncio.create_task(http.post("/v1/chat/completions", json=chat)) for _ in range(8)]
            await until(lambda: sum(task.done() for task in flood) == 2, what="two are refused")
            await until(lambda: server.context.engine.in_flight == 6, what="six are answered")
            done, waiting = ([task for task in flood if task.done() == ended] for ended in (True, False))
            assert [task.result().status_code for task in done] == [503, 503] and len(waiting) == 6
            assert (await http.post("/v1/audio/speech", json=speech)).status_code == 200
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.to_thread(server.wait_idle)
            with ExitStack() as sockets:
                for _ in range(6):
                    sockets.enter_context(connect(socket_url))
                refused = json.loads(sockets.enter_context(connect(socket_url)).recv(timeout=GENEROUS))
                assert refused["type"] == "error" and refused["code"] == "overloaded"
                hello = {**chat, "messages": [{"role": "user", "content": "hello"}]}
                assert (await http.post("/v1/chat/completions", json=hello)).status_code == 200


def test_every_answer_counts() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    with running_server(max_in_flight=2) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json={**body, "n": 2}).status_code == 200
        server.wait_idle()
        other = server.context.admission.ticket("chat")
        other.grow(1)
        refused = httpx.post(url, json={**body, "n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        other.release()
        server.wait_idle()
        assert httpx.post(url, json={**body, "n": 2}).status_code == 200


@pytest.mark.parametrize("limits", [{"max_in_flight": 4}, {"max_waiting": 3}], ids=str)
def test_more_answers_than_are_ever_admitted_are_no_reason_to_retry(limits: dict[str, int]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    with running_server(both_kinds(), **limits) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json={**body, "n": 3}).status_code == 200
        refused = httpx.post(url, json={**body, "n": 4})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        assert "4 given, at most 3 allowed" in refused.json()["error"]["message"]
        server.wait_idle()
