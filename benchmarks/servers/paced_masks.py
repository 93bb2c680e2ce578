"""Mask servers that take fixed times, without a processor: a process, which `PacedMasks` starts.

python -m benchmarks.servers.paced_masks DESCRIPTOR ...     # of the servers' ends of their connections
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from service.engine.chat.mask_server import Build, Built, Compute, Computed, MaskRequest, Ready

MASKS = 3.8e-4
"""Seconds of the masks of a server."""
SERVERS = 4
"""Mask servers, as beside one GPU with 16 processors."""


class PacedMasks:
    """A mask server's end of `hosts`, in one process for all of them, so that they need one processor: grammars are
    built at once, masks take a fixed time and are those that are there."""

    def __init__(self) -> None:
        self._ends = [Pipe() for _ in range(SERVERS)]
        theirs = [end.fileno() for _, end in self._ends]
        words = ("-m", "benchmarks.servers.paced_masks", *map(str, theirs))
        self.process = subprocess.Popen([sys.executable, *words], pass_fds=theirs, stdin=subprocess.PIPE)
        self.hosts = [_PacedHost(ours) for ours, _ in self._ends]

    def take(self, seconds: float) -> None:
        """From now on masks take this long."""
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<d", seconds))
        self.process.stdin.flush()


@dataclass(frozen=True)
class _PacedHost:
    """service.engine.chat.mask_hosts.MaskHost."""

    link: Connection
    own_interpreter: bool = True

    def start(self) -> Connection:
        return self.link

    def kill(self) -> bool:
        return False


def serve_masks(descriptors: Sequence[int]) -> None:
    """Answers what comes through these connections, until standard input ends. From there, float64 numbers set the
    seconds that masks take."""
    ctypes.CDLL(None).prctl(29, 1)  # PR_SET_TIMERSLACK: sleeps end when they should.
    requests = msgspec.msgpack.Decoder(MaskRequest)
    links, poll = {number: Connection(number) for number in descriptors}, select.poll()
    for number in (0, *links):
        poll.register(number, select.POLLIN)
    computed = msgspec.msgpack.encode(Computed({}, 0.0))
    due: deque[tuple[float, Connection]] = deque()
    seconds = MASKS
    for link in links.values():
        link.send_bytes(msgspec.msgpack.encode(Ready()))
    while True:
        for number, _ in poll.poll(None if not due else 0):
            if not number:
                if not (sent := os.read(0, 8)):
                    return
                (seconds,) = struct.unpack("<d", sent)
                continue
            match requests.decode(links[number].recv_bytes()):
                case Build(guide):
                    links[number].send_bytes(msgspec.msgpack.encode(Built(guide, "")))
                case Compute():
                    due.append((time.perf_counter() + seconds, links[number]))
        while due and due[0][0] <= time.perf_counter():
            due.popleft()[1].send_bytes(computed)


if __name__ == "__main__":
    serve_masks([int(word) for word in sys.argv[1:]])
