"""A peer's end of the ZeroMQ connection to an engine process (process.py has the other one)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress

import zmq

from service.link import wire
from service.link.messages import Attach, Command, Outputs

SUPERVISOR = "supervisor"
"""Name of the peer that started the engine: only it may stop the engine or report that a peer is gone."""
_MESSAGES_A_TURN = 16
"""Number of messages that are read before other tasks of the event loop run, if the engine sends faster than they are
read."""
_RECONNECT_MS = 10
"""Milliseconds between two attempts to connect to an engine process that has not bound its socket yet."""

_DESCRIPTORS = 16
"""Descriptors that must be free; a socket and its context open about ten."""

OnOutputs = Callable[[Outputs], None]


def discard(command: Command) -> None:
    """The `send` of an engine that has no socket, since it has not been started or has ended: does nothing."""


def _nothing() -> None:
    """The callback of a socket that nobody reads."""


def _require_descriptors() -> None:
    """Raises OSError if there are too few free descriptors, for which ZeroMQ would end the whole process."""
    with ExitStack() as opened:
        for _ in range(_DESCRIPTORS):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))


class EngineSocket:
    """Sends commands, which never blocks, and reads outputs in an event loop. OSError without enough descriptors."""

    def __init__(self, address: str, peer: str) -> None:
        """address: the engine binds it, now or later. peer: name of this end."""
        _require_descriptors()
        self._context = zmq.Context()
        self.zmq: zmq.Socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, _RECONNECT_MS)):
            self.zmq.setsockopt(option, value)
        self.zmq.setsockopt(zmq.ROUTING_ID, peer.encode())
        self._look: Callable[[], None] = _nothing
        """Has messages read in the next turn of the reader's event loop, if there is a reader."""
        self.zmq.connect(address)
        self.send(Attach())

    def send(self, command: Command) -> None:
        frames = wire.encode(command)
        with suppress(zmq.Again):  # nobody at the other end: not yet, or not any more
            self.zmq.send_multipart(frames, zmq.NOBLOCK, copy=wire.is_small(frames))
        # The socket's descriptor is edge-triggered, and send has consumed its event: check for messages here.
        if int(self.zmq.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._look()

    async def read(self, on_outputs: OnOutputs) -> None:
        """Reads messages until cancelled; raises what reading a message raises.

        A message is read in the turn of the event loop in which it arrives. zmq.asyncio would need several futures and
        callbacks per message, and a waiting task one more turn.
        """
        decoder = wire.outputs_decoder()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def take() -> None:
            if ended.done():  # after this call was scheduled
                return
            try:
                for _ in range(_MESSAGES_A_TURN):
                    frames = self.zmq.recv_multipart(zmq.NOBLOCK, copy=False)
                    on_outputs(decoder.decode([frame.buffer for frame in frames]))
            except zmq.Again:
                return
            except Exception as error:
                ended.set_exception(error)
                return
            look()

        def look() -> None:
            loop.call_soon(take)

        descriptor: int = self.zmq.FD
        self._look = look
        loop.add_reader(descriptor, take)
        look()
        try:
            await ended
        finally:
            self._look = _nothing
            loop.remove_reader(descriptor)
            ended.cancel()

    def close(self) -> None:
        self.zmq.close()
        self._context.term()
