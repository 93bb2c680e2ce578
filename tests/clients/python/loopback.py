"""Import first: a client that reaches beyond this machine ends."""

import os
import sys

os.environ.update(OTEL_SDK_DISABLED="true", DO_NOT_TRACK="1", LIVEKIT_TELEMETRY="0")


def _check(event, arguments):
    if event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "127.0.0.1"
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if isinstance(host, bytes):
        host = host.decode()
    if host not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0"):
        os.write(2, f"\na client reached for {host}\n".encode())
        os._exit(3)


sys.addaudithook(_check)
