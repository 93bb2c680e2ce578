"""Chat and speech cannot starve each other at admission."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from websockets.sync.client import connect

from service.api.engines.shared_usage import UsageTable
from service.api.http.admission import EXCESS, SMALL_BYTES, Admission, Ticket, Turns
from service.api.http.errors import ApiError
from service.api.http.middleware import Guards, HostRule, RequestRecord
from service.confined.workers import FairSemaphore
from service.metrics.metrics import Metrics
from tests.support.fake_talker import talking_catalog
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS, until

SHARES = {"chat": 0.75, "speech": 0.5}
ENDPOINTS = ("chat", "speech", "voices")


def take_all(admission: Admission, endpoint: str) -> list[Ticket]:
    """As many requests as are admitted."""
    tickets: list[Ticket] = []
    while True:
        ticket = admission.ticket(endpoint)
        try:
            ticket.grow(1)
        except ApiError:
            return tickets
        tickets.append(ticket)


@pytest.mark.parametrize(("first", "second", "counts"), [("chat", "speech", (75, 25)), ("speech", "chat", (50, 50))])
def test_a_flood_of_one_kind_leaves_the_rest_to_the_other(first: str, second: str, counts: tuple[int, int]) -> None:
    admission = Admission(100, 10_000, Metrics(), SHARES)
    assert admission.largest(first) == {"chat": 5625, "speech": 3750}[first], "three quarters of its share"
    flood = take_all(admission, first)
    assert (len(flood), len(take_all(admission, second))) == counts
    flood[0].release()
    assert len(take_all(admission, first)) == 1


async def test_what_is_too_large_waits_in_order_and_shuts_nobody_out() -> None:
    """In units of LARGE: a small request has half of one. Large ones may use 30 of the 40 that chat has beside the part
    set aside."""
    large, small = 2 * SMALL_BYTES, SMALL_BYTES // 2
    admission = Admission(16, 100 * large, Metrics(), {"chat": 0.8}, excess_bytes=50 * large)
    giant, other, third = (admission.ticket("chat") for _ in range(3))
    assert giant.take_decoding(45 * large), "the part set aside is free"
    await other.wait(30 * large)
    order: list[str] = []

    async def wait(name: str, ticket: Ticket, size: int) -> None:
        await ticket.wait(size, decoding=True)
        order.append(name)

    waits = [asyncio.create_task(wait("third", third, 2 * large))]
    await until(lambda: admission.num_waiting == 1)
    waits.append(asyncio.create_task(wait("fourth", admission.ticket("chat"), large)))
    await until(lambda: admission.num_waiting == 2)
    for _ in range(8):
        await admission.ticket("chat").wait(small)
        admission.ticket("speech").grow(1, large)
    waits += [asyncio.create_task(wait("more", admission.ticket("chat"), large)) for _ in range(1)]
    await until(lambda: admission.num_waiting == 3)
    with pytest.raises(ApiError, match="Too many bytes") as refused:
        await admission.ticket("chat").wait(large)  # a quarter of chat's twelve requests may wait
    assert refused.value.retry_after
    giant.decoding = 0
    giant.adjust(-44 * large)
    assert not order and giant.excess, "it does not fit into the rest yet, so that nobody else can exceed"
    waits.append(asyncio.create_task(wait("giant", giant, large)))
    await until(lambda: order == ["giant"])
    giant.decoding = 0
    giant.release()
    await until(lambda: order == ["giant", "third"])
    other.release()
    await asyncio.gather(*waits)
    assert order == ["giant", "third", "fourth", "more"]


async def test_who_stops_waiting_holds_nothing_and_lets_the_next_one_on() -> None:
    admission = Admission(16, 8 * SMALL_BYTES, Metrics(), excess_bytes=2 * SMALL_BYTES)
    first, second, third = (admission.ticket("chat") for _ in range(3))
    await first.wait(2 * SMALL_BYTES)
    await first.wait(5 * SMALL_BYTES)
    waiting = [asyncio.create_task(ticket.wait(4 * SMALL_BYTES)) for ticket in (second, third)]
    await until(lambda: admission.num_waiting == 2)
    first.release()  # both are granted, one of them in the part set aside
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (second.size, third.size) == (0, 4 * SMALL_BYTES) and admission.pending_bytes == third.size
    third.release()
    assert admission.pending_bytes == 0 and await second.wait(9 * SMALL_BYTES) is None


def test_clients_are_told_to_come_back_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four places, requests of 20 s: every five seconds one becomes free."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    admission = Admission(4, 1000, Metrics())
    done = admission.ticket("chat")
    done.grow(1)
    now += 20
    done.release()
    take_all(admission, "chat")
    told = [admission.refusal("chat", "in_flight", "").retry_after for _ in range(20)]
    assert told[:11] == [10.0 + 5 * place for place in range(11)] and set(told[11:]) == {60.0}
    now += 100
    assert admission.refusal("chat", "in_flight", "").retry_after == 5.0


@given(st.lists(st.tuples(st.sampled_from(ENDPOINTS), st.integers(0, 3), st.integers(0, 400)), max_size=60))
def test_bounds_hold_and_everything_comes_back(wishes: list[tuple[str, int, int]]) -> None:
    admission = Admission(20, 1000, Metrics(), SHARES)
    tickets = []
    for endpoint, requests, size in wishes:
        ticket = admission.ticket(endpoint)
        try:
            ticket.grow(requests, size)
        except ApiError as error:
            assert error.status == 503 and error.retry_after
        else:
            tickets.append(ticket)
        assert admission.in_flight <= 20
        assert admission.pending_bytes == sum(ticket.size for ticket in tickets) <= 1000
    for ticket in tickets:
        ticket.release()
    assert admission.in_flight == admission.pending_bytes == 0


async def test_through_the_application() -> None:
    """Eight places: six that chat may take, six that speech may take."""
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "!silent"}]}
    text = json.dumps({"type": "input.text", "text": "and"})
    speech = {"model": "talker", "input": "Hello.", "response_format": "pcm", "max_len": 2}
    with running_server(talking_catalog(), max_in_flight=8, fixed_voices="off") as server:
        socket_url = server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
        async with httpx.AsyncClient(base_url=server.url, timeout=GENEROUS) as http:
            flood = [asyncio.create_task(http.post("/v1/chat/completions", json=chat)) for _ in range(8)]
            await until(lambda: sum(task.done() for task in flood) == 2, what="two are refused")
            await until(lambda: server.context.engine.in_flight == 6, what="six are answered")
            done, waiting = ([task for task in flood if task.done() == ended] for ended in (True, False))
            for refused in (task.result() for task in done):
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "overloaded_error"
            waiting.pop().cancel()
            await until(lambda: server.context.admission.in_flight == 5)
            two = await http.post("/v1/chat/completions", json={**chat, "n": 2})
            assert two.status_code == 503, "one place is free"
            page = (await http.get("/metrics")).text
            assert 'reprise_admission_rejections_total{endpoint="chat",reason="in_flight"} 3.0' in page
            assert 'outcome="overloaded"' in page
            assert (await http.post("/v1/audio/speech", json=speech)).status_code == 200
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.to_thread(server.wait_idle)
            with ExitStack() as sockets:
                for _ in range(8):
                    sockets.enter_context(connect(socket_url))
                assert server.context.admission.in_flight == 0, "they say nothing"
                for _ in range(6):
                    sockets.enter_context(connect(socket_url)).send(text)
                await until(lambda: server.context.admission.in_flight == 6, what="six utterances go on")
                last = sockets.enter_context(connect(socket_url))
                last.send(text)
                refused = json.loads(last.recv(timeout=GENEROUS))
                assert refused["type"] == "error" and refused["code"] == "overloaded"
                hello = {**chat, "messages": [{"role": "user", "content": "hello"}]}
                assert (await http.post("/v1/chat/completions", json=hello)).status_code == 200


@pytest.mark.parametrize("limits", [{"max_in_flight": 4}, {"max_waiting": 3}], ids=str)
def test_more_answers_than_are_ever_admitted_are_no_reason_to_retry(limits: dict[str, int]) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    with running_server(talking_catalog(), **limits) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json={**body, "n": 3}).status_code == 200
        refused = httpx.post(url, json={**body, "n": 4})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        assert "4 given, at most 3 allowed" in refused.json()["error"]["message"]
        server.wait_idle()


async def test_a_burst_passes_in_order_a_few_in_each_turn() -> None:
    turns = Turns(at_once=3)
    events: list[int | str] = []

    async def request(number: int) -> None:
        await turns.wait()
        events.append(number)

    async def other_streams() -> None:
        while len(events) < 40:
            events.append("io")
            await asyncio.sleep(0)

    await asyncio.gather(*(request(number) for number in range(10)), other_streams())
    assert [event for event in events if event != "io"] == list(range(10))
    served = "".join("." if event == "io" else "r" for event in events)
    assert "rrrr" not in served and served.count("rrr") == 3


def test_a_client_is_known_by_its_key_or_else_by_its_address() -> None:
    seen: list[str] = []
    ticket = Admission(1, 1, Metrics()).ticket("chat")
    for keys, key in ((("one", "two"), b"one"), (("one", "two"), b"two"), ((), b"one")):
        record = RequestRecord("id", "chat", ticket, "10.0.0.1")
        scope = {"type": "http", "path": "/v1/x", "headers": [(b"authorization", b"Bearer " + key)]}
        guards = Guards(HostRule("localhost", (), keyed=True), (), keys, ())
        guards.check(scope, Headers(scope=scope), record)
        seen.append(record.client)
    first, second, without = seen
    assert len({first, second, without}) == 3 and without == "10.0.0.1" and "one" not in first


async def test_a_turn_granted_to_who_is_cancelled_at_once_goes_on() -> None:
    semaphore, served, go_on = FairSemaphore(1), list[str](), asyncio.Event()

    async def hold(client: str) -> None:
        async with semaphore.acquire(client):
            served.append(client)
            await go_on.wait()

    first, second, third = (asyncio.create_task(hold(client)) for client in "abc")
    await until(lambda: served == ["a"])
    first.cancel()
    await asyncio.sleep(0)  # It is released here, and granted to the second.
    second.cancel()
    await until(lambda: len(served) == 2)
    assert served == ["a", "c"]
    go_on.set()
    await third


def test_requests_and_bytes_of_all_processes_count_and_those_of_one_that_ended_are_given_back() -> None:
    kinds = ("chat", "speech", "other", EXCESS)
    with UsageTable.make_file(2, kinds) as file:
        table = UsageTable(file.fileno(), 2, kinds)
        one, other = (Admission(4, 1000, Metrics(), None, table.row(process)) for process in range(2))
        one.ticket("chat").grow(1, 700)
        with pytest.raises(ApiError, match="Too many bytes"):
            other.ticket("chat").grow(1, 400)
        other.ticket("chat").grow(1, 300)
        for which in (one, other):
            which.ticket("chat").grow(1)
        for which in (one, other):
            with pytest.raises(ApiError, match="Too many requests"):
                which.ticket("speech").grow(1)
        table.clear(0)
        other.ticket("chat").grow(2, 700)
