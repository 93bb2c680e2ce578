"""Large frames of messages in shared memory: the same messages arrive as without it, and nothing is left over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from benchmarks.footprint import lent
from models.media import MediaItem, Prompt
from service.api.engine_client import EngineClient
from service.api.request_stream import EngineError, RequestStream
from service.link import arena, lending, wire
from service.link.arena import Arena, Loan
from service.link.engine_socket import EngineSocket
from service.link.messages import ChatRequest, Command, Detach, Failed, Outputs, SamplingParams
from service.link.process import ZmqChannel
from service.link.shared import SUPERVISOR, SharedChannel
from tests.support.arenas import arenas
from tests.support.engine_matrix import matrix
from tests.support.waiting import GENEROUS, until

pytestmark = pytest.mark.skipif(not arena.is_supported(), reason="memory is shared on Linux alone")

Ends = tuple[EngineSocket, ZmqChannel]


@pytest.fixture(autouse=True)
def grown_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas have memory from the beginning."""

    def grown(size: int) -> Arena:
        made = Arena(size)
        made.wait_grown()
        return made

    monkeypatch.setattr(lending, "Arena", grown)


def picture(name: str, value: int, side: int = 448) -> ChatRequest:
    pixels = np.random.default_rng(value).integers(0, 256, (side, side, 3), np.uint8)
    item = MediaItem("image", (pixels, pixels[:2]), {"grid": np.array([1, 2], np.int32)}, 4, 1, 1, bytes(32))
    ids = np.arange(9, dtype=np.int32)
    return ChatRequest(name, "tiny", Prompt(ids, ids[None], 9, (item,)), SamplingParams(5), 0.0)


def content(command: Command) -> tuple[object, ...]:
    """All of a request: msgspec encodes arrays as frames."""
    return tuple(bytes(frame) for frame in wire.encode(command))


def next_of(channel: ZmqChannel | SharedChannel) -> Command:
    commands: list[Command] = []
    while not commands:  # messages that the channel handles itself come, too
        commands = channel.receive(GENEROUS)
    (command,) = commands
    return command


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    address = f"ipc://{tmp_path}/engine"
    near = EngineSocket.bound(address)
    far = ZmqChannel(address)
    assert near.zmq.poll(int(GENEROUS * 1000), zmq.POLLOUT)  # what is sent to nobody is lost
    yield near, far
    near.close()
    far.close()


def outputs_of(near: EngineSocket) -> Outputs:
    assert near.zmq.poll(int(GENEROUS * 1000))
    return wire.outputs_decoder().decode(near.zmq.recv_multipart())


def test_the_same_arrives_with_shared_memory_and_without(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends
    sent = [picture(f"{n}", n, side) for n, side in enumerate((448, 448, 1024, 8, 448))]
    shared = []
    for request in sent:
        near.send(request)
        received = next_of(far)
        shared.append(near.lender.in_use)
        assert content(received) == content(request)
        del received
    assert shared == [0, 1, 1, 0, 1], "the first brings the memory, and a small one needs none"
    near.lender._works = False
    for request in sent:
        near.send(request)
        assert content(next_of(far)) == content(request)
    assert near.lender.in_use == 0


def test_a_request_that_was_sent_keeps_its_pixels_while_others_come_and_go(ends: Ends) -> None:
    near, far = ends
    near.send(picture("first", 0))
    next_of(far)
    near.send(picture("kept", 1))
    kept = next_of(far)
    for n in range(2, 6):
        near.send(picture(f"{n}", n))
        assert content(next_of(far)) == content(picture(f"{n}", n))
    assert content(kept) == content(picture("kept", 1))
    assert near.lender.in_use == 1
    del kept
    assert near.lender.in_use == 0


def test_a_full_arena_and_too_large_a_message_go_through_the_socket(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "SIZE", 1 << 20)
    near, far = ends
    held = []
    for n in range(4):
        near.send(picture(f"{n}", n))
        held.append(next_of(far))
        assert near.lender.in_use == min(n, 1)
    assert [content(each) for each in held] == [content(picture(f"{n}", n)) for n in range(4)]
    held.clear()
    monkeypatch.setattr(lending, "MOST", 448 * 448 * 3 - 1)
    near.send(picture("large", 9))
    large = next_of(far)
    assert near.lender.in_use == 0 and content(large) == content(picture("large", 9))


def test_without_an_engine_that_maps_it_nothing_is_lent(tmp_path: Path) -> None:
    near = EngineSocket.bound(f"ipc://{tmp_path}/engine")
    for n in range(3):
        near.send(picture(f"{n}", n))
    assert near.lender.in_use == 0
    near.close()


def test_a_system_without_memory_to_share_goes_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    near, far = ends
    for n in range(3):
        near.send(picture(f"{n}", n))
        assert content(next_of(far)) == content(picture(f"{n}", n))
    assert near.lender._arena is None


def test_what_nobody_received_is_free_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends
    near.send(picture("first", 0))
    next_of(far)
    far.close()
    lost = False
    while not lost:  # until the socket knows
        near.send(picture("lost", 1))
        lost = not near.zmq.poll(0, zmq.POLLOUT)
    used = near.lender.in_use
    near.send(picture("lost", 2))
    assert near.lender.in_use == used
    near.lender.close()
    assert near.lender.in_use == 0


Change = Callable[[Loan], Loan]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda loan: msgspec.structs.replace(loan, generation=loan.generation + 1), "is not of generation"),
        (lambda loan: msgspec.structs.replace(loan, offset=1 << 40), "bytes of shared memory"),
        (lambda loan: msgspec.structs.replace(loan, parts=((loan.parts[0][0], 640),)), "array frame of 640 bytes"),
        (lambda loan: ["not", "a", "loan"], "Expected"),
    ],
    ids=["generation", "offset", "length", "type"],
)
def test_a_bad_loan_fails_its_request_and_no_other(ends: Ends, change: Change, reason: str) -> None:
    near, far = ends
    for name in ("first", "good"):
        near.send(picture(name, 1))
        next_of(far)
    frames, _ = near.lender.lend(wire.encode(picture("bad", 2)))
    frames[1] = msgspec.msgpack.encode(change(msgspec.msgpack.decode(frames[1], type=Loan)))
    near.zmq.send_multipart(frames)
    near.send(picture("after", 3))
    commands: list[Command] = []
    while not commands:
        commands += far.receive(GENEROUS)
    assert [content(each) for each in commands] == [content(picture("after", 3))]
    (failed,) = outputs_of(near).failed
    assert (failed.request_id, failed.status, failed.code) == ("bad", 500, "engine_error")
    assert "did not reach the engine" in failed.message and reason in failed.message


def shared_ends(address: str, *peers: str) -> tuple[SharedChannel, list[EngineSocket]]:
    supervisor = EngineSocket.attached(address, SUPERVISOR)
    return SharedChannel(address), [supervisor, *(EngineSocket.attached(address, peer) for peer in peers)]


def detached(far: SharedChannel, peer: str) -> None:
    while peer not in far._gone:
        far.receive(GENEROUS)


def test_each_of_several_processes_has_memory_of_its_own_which_goes_with_it(tmp_path: Path) -> None:
    before = arenas()
    far, (supervisor, one, other) = shared_ends(f"ipc://{tmp_path}/engine", "api-1", "api-2")
    held = {}
    for n, near in enumerate((one, other, one, other)):
        near.send(picture(f"{n}", n))
        held[n] = next_of(far)
    assert [near.lender.in_use for near in (supervisor, one, other)] == [0, 1, 1]
    assert all(content(command) == content(picture(f"{n}", n)) for n, command in held.items())
    assert arenas() - before == 2 * 3, "two of each process and one of the engine"
    one.close()
    supervisor.send(Detach("api-1"))
    detached(far, "api-1")
    assert arenas() - before == 3 + 1, "an array still lies in it"
    assert content(held[2]) == content(picture("2", 2))
    del held[2]
    assert arenas() - before == 3
    supervisor.send(Detach("api-2"))
    detached(far, "api-2")
    held.clear()
    for near in (supervisor, other):
        near.close()
    far.close()
    assert arenas() == before


def test_memory_of_a_process_that_ended_before_the_engine_looked_is_not_kept(tmp_path: Path) -> None:
    before = arenas()
    far, (supervisor, one, other) = shared_ends(f"ipc://{tmp_path}/engine", "api-1", "api-2")
    assert one.lender._offered() is not None
    one.close()
    supervisor.send(Detach("api-1"))
    detached(far, "api-1")
    assert arenas() == before
    other.send(picture("other", 1))
    next_of(far)  # the engine has looked at its socket
    assert arenas() - before == 3, "two of the process that goes on and one of the engine"
    for near in (supervisor, other):
        near.close()
    far.close()


def test_a_process_cannot_name_the_memory_of_another(tmp_path: Path) -> None:
    far, (supervisor, one, other) = shared_ends(f"ipc://{tmp_path}/engine", "api-1", "api-2")
    for name in ("a", "b"):
        one.send(picture(name, 1))
        next_of(far)
    frames, _ = one.lender.lend(wire.encode(picture("stolen", 2)))
    other.zmq.send_multipart(frames)
    while not other.zmq.poll(0, zmq.POLLIN):
        far.receive(0)
    (failed,) = outputs_of(other).failed
    assert failed == Failed("stolen", 500, "engine_error", failed.message)
    assert "no shared memory of this process" in failed.message
    for near in (supervisor, one, other):
        near.close()
    far.close()


# Whole processes


async def ask(client: EngineClient, name: str, text: str, value: int) -> RequestStream:
    """A request with a picture, once its first token has come."""
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    prompt = msgspec.structs.replace(picture(name, value), prompt=with_ids(picture(name, value).prompt, ids))
    stream = client.submit(prompt)
    await anext(stream)
    return stream


def with_ids(prompt: Prompt, ids: np.ndarray) -> Prompt:
    return replace(prompt, token_ids=ids, positions=np.arange(len(ids), dtype=np.int32)[None])


def lender(client: EngineClient) -> lending.Lender:
    socket: EngineSocket = client._link.send.__self__  # type: ignore[union-attr]
    return socket.lender


async def test_memory_goes_with_its_request_its_process_and_its_engine() -> None:
    before = arenas()
    async with matrix() as shared:
        one, other = shared.clients
        engine = shared.supervisor._link._link._process.pid  # type: ignore[union-attr]
        for client in shared.clients:
            await (await ask(client, f"first-{id(client)}", "!endless", 0)).aclose()
        assert (arenas() - before, arenas(engine)) == (2 * 2, 2)
        kept, left = [await ask(client, f"{id(client)}", "!endless", 1) for client in shared.clients]
        assert [lender(client).in_use for client in shared.clients] == [1, 1]
        assert lent(engine) == 2
        await left.aclose()
        await until(lambda: lender(other).in_use == 0, what="the aborted request's region is free")
        early = other.submit(picture("early", 2))
        await early.aclose()  # before the engine has read it
        await until(lambda: lender(other).in_use == 0, what="that of one which was aborted earlier is free")
        assert lender(one).in_use == 1
        shared.supervisor.send(Detach("api-1"))  # its process was killed
        await until(lambda: arenas(engine) == 1, what="the engine has left its memory")
        await kept.aclose()
        with pytest.raises(EngineError):
            async for _ in await ask(other, "crash", "!crash please", 3):
                pass
        await until(lambda: arenas() == before, what="the memory has gone with the engine")
        await shared.wait_ready()
        for value in (4, 5):
            again = await ask(other, f"again-{value}", "!endless", value)
        assert lender(other).in_use == 1
        await again.aclose()
    assert arenas() == before
