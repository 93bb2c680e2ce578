"""The engine process, `service.link.process ADDRESS ENTRY`, the configuration as one JSON line on stdin.

engine_link.py starts and watches it. It ends when the engine returns or fails, or when its stdin closes because the
process that started it has ended.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import zmq

from models.checkpoints.registry import resolve
from models.interfaces.errors import CheckpointError
from service.link import wire
from service.link.config import ConfigurationError, EngineConfig
from service.link.engine_link import CONFIGURATION_ERROR, SUPERVISOR
from service.link.messages import (
    Abort,
    Answer,
    Attach,
    ChatDelta,
    Command,
    Control,
    Detach,
    EngineState,
    Outputs,
    Request,
    SpeechDelta,
    Stop,
)
from service.system.children import leave_signals_to_parent, wait_for_end_of_parent
from service.system.logs import configure_logging

log = logging.getLogger("reprise.engine")


class EngineChannel:
    """The engine's end: a ROUTER socket bound to `address`. The constructor returns once the supervisor has attached
    itself.

    The engine does not know its peers, the process that supervises it and any number of API processes. This channel
    remembers which peer sent each request and sends the answers there; metric events go to the supervisor, and the
    state goes to all peers. Both directions are unbounded, since API processes bound what they admit.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 1000)):
            self._socket.setsockopt(option, value)
        self._socket.bind(address)
        self._decoder: wire.MessageDecoder[Command] = wire.MessageDecoder(Command)
        self._commands: list[Command] = []
        """Commands that were received but not returned yet."""
        self._owners: dict[str, str] = {}
        """Name of the peer by request id, until the request's last answer is sent."""
        self._attached: set[str] = set()
        self._gone: set[str] = set()
        """Peers that have ended. What they sent before may be read after the report that they ended."""
        self._state: EngineState | None = None
        while SUPERVISOR not in self._attached:
            self._socket.poll()
            self._take_in()

    def receive(self, timeout: float | None) -> list[Command]:
        if self._commands or timeout == 0 or self._socket.poll(None if timeout is None else round(timeout * 1000)):
            self._take_in()
        commands, self._commands = self._commands, []
        return commands

    def send(self, outputs: Outputs) -> None:
        if outputs.state is not None:
            self._state = outputs.state
            self._take_in()  # an engine that loads does not call receive, but new peers need its state
        for peer, share in self._by_peer(outputs).items():
            self._send(peer, share)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _take_in(self) -> None:
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(peer.bytes.decode(), self._decoder.decode([frame.buffer for frame in frames]))

    def _handle(self, peer: str, command: Command) -> None:
        if peer in self._gone:
            return
        if isinstance(command, Request):
            self._owners[command.request_id] = peer
            self._commands.append(command)
        elif isinstance(command, Control):
            if self._owners.get(command.request_id) == peer:
                self._commands.append(command)
                if isinstance(command, Abort):
                    del self._owners[command.request_id]
        elif isinstance(command, Attach):
            self._attached.add(peer)
            if self._state is not None:
                self._send(peer, Outputs(state=self._state))
        elif isinstance(command, Detach) and peer == SUPERVISOR:
            self._detach(command.peer)
        elif isinstance(command, Stop) and peer == SUPERVISOR:
            self._commands.append(command)

    def _detach(self, peer: str) -> None:
        self._gone.add(peer)
        self._attached.discard(peer)
        left = [request_id for request_id, owner in self._owners.items() if owner == peer]
        for request_id in left:
            del self._owners[request_id]
            self._commands.append(Abort(request_id))

    def _by_peer(self, outputs: Outputs) -> dict[str, Outputs]:
        """Each peer's share of the outputs."""
        answers: dict[str, dict[str, list[Answer]]] = {}
        for kind in ("chat", "speech", "encoded", "failed"):
            for answer in getattr(outputs, kind):
                owner = self._owners.get(answer.request_id)
                if owner is None:  # aborted while its last answers were on their way
                    continue
                answers.setdefault(owner, {}).setdefault(kind, []).append(answer)
                if _is_last(answer):
                    del self._owners[answer.request_id]
        peers = set(answers)
        if outputs.state is not None:
            peers |= self._attached
        if outputs.observations:
            peers.add(SUPERVISOR)
        return {
            peer: Outputs(
                **{kind: tuple(found) for kind, found in answers.get(peer, {}).items()},  # type: ignore[arg-type]
                observations=outputs.observations if peer == SUPERVISOR else (),
                state=outputs.state if peer in self._attached else None,
            )
            for peer in peers
        }

    def _send(self, peer: str, outputs: Outputs) -> None:
        """Messages to a peer that has ended are dropped."""
        frames = [peer.encode(), *wire.encode(outputs)]
        self._socket.send_multipart(frames, copy=wire.is_small(frames))


def _is_last(answer: Answer) -> bool:
    if isinstance(answer, ChatDelta):
        return answer.finish_reason is not None
    return not isinstance(answer, SpeechDelta) or answer.finished


def _exit_with_parent(address: str) -> None:
    wait_for_end_of_parent()
    # A killed parent has not removed the directory of its socket. The main thread may bind the socket meanwhile, once.
    for _ in range(2):
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(0)


def main(arguments: list[str]) -> int:
    leave_signals_to_parent()
    address, entry = arguments
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_exit_with_parent, args=(address,), daemon=True).start()
    names = {} if config.index is None else {"engine": config.index}
    configure_logging(config.log_level, config.log_format, **names)
    try:
        serve = resolve(entry)  # imports torch, perhaps while the supervisor still imports the server
        with closing(EngineChannel(address)) as channel:
            serve(config, channel)
    except (CheckpointError, ConfigurationError) as error:
        log.error("%s", error)
        return CONFIGURATION_ERROR
    except ImportError as error:
        log.error("the Python package %s cannot be imported (%s); install it again", error.name, error)
        return CONFIGURATION_ERROR
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # The operating system frees memory and GPU sooner than the interpreter would.
