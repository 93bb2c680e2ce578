"""An API process' end of the socket, with a plain socket at the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from service.link import wire
from service.link.engine_link import EngineSocket
from service.link.messages import Attach, Command, EncodeReference, Outputs
from tests.support.waiting import GENEROUS

Ends = tuple[EngineSocket, zmq.Socket]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    address = f"ipc://{tmp_path}/engine"
    near, context = EngineSocket(address, "api-1"), zmq.Context()
    far = context.socket(zmq.DEALER)  # one that need not name its only peer, as a ROUTER would
    far.bind(address)
    assert far.poll(GENEROUS * 1000)
    assert isinstance(wire.MessageDecoder(Command).decode(far.recv_multipart()), Attach)
    yield near, far
    near.close()
    far.close(linger=0)
    context.term()


def reference(values: int) -> EncodeReference:
    return EncodeReference("e", "tiny", np.arange(values, dtype=np.float32), "left", 0.0)


async def received(far: zmq.Socket) -> Command:
    assert await asyncio.to_thread(far.poll, GENEROUS * 1000)
    return wire.MessageDecoder(Command).decode(far.recv_multipart())


@pytest.mark.parametrize("values", [10, 1 << 19])
async def test_what_is_sent_may_be_overwritten_if_small_and_arrives_whole(ends: Ends, values: int) -> None:
    near, far = ends
    sent = reference(values)
    expected = sent.wave.copy()
    near.send(sent)
    small = wire.is_small(wire.encode(sent))
    assert small == (values == 10)
    if small:
        sent.wave[:] = 0
    command = await received(far)
    assert isinstance(command, EncodeReference) and np.array_equal(command.wave, expected)


async def test_a_message_that_comes_while_one_is_sent_is_read(ends: Ends) -> None:
    """The socket's descriptor tells of it no more."""
    near, far = ends
    read, arrived = [], asyncio.Event()

    def hear(outputs: Outputs) -> None:
        read.append(outputs)
        arrived.set()

    reader = asyncio.create_task(near.read(hear))
    await asyncio.sleep(0)
    for count in range(1, 21):
        arrived.clear()
        far.send_multipart(wire.encode(Outputs()))
        # In this turn of the loop, so that nobody else reads it: send finds it.
        assert near.zmq.poll(GENEROUS * 1000)
        near.send(reference(1))
        async with asyncio.timeout(GENEROUS):
            await arrived.wait()
        assert len(read) == count
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


async def test_what_reading_raises_ends_it(ends: Ends) -> None:
    near, far = ends
    far.send(b"no message")
    far.send_multipart(wire.encode(Outputs()))
    read: list[Outputs] = []
    with pytest.raises(msgspec.DecodeError):
        async with asyncio.timeout(GENEROUS):
            await near.read(read.append)
    for _ in range(10):
        await asyncio.sleep(0)
    assert read == []
