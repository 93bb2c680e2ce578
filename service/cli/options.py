"""Options of the client commands, and what is checked of them; which API key is sent."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import typer

from service.cli.client import ApiClient, local_server
from service.settings.settings import ENV_PREFIX
from service.system.access import is_loopback

DEFAULT_URL = "http://127.0.0.1:8000"


def _without_path(url: str) -> str:
    """The address without the /v1 that OpenAI's clients want at its end."""
    return url.rstrip("/").removesuffix("/v1")


Url = Annotated[
    str,
    typer.Option("--url", envvar=ENV_PREFIX + "URL", callback=_without_path, help="Address of the server to ask."),
]
Key = Annotated[
    str,
    typer.Option(
        "--key",
        help="API key; default: REPRISE_API_KEY, or for a server on this machine OPENAI_API_KEY.",
        show_default=False,
    ),
]
Local = Annotated[bool, typer.Option("--local", help="Start a server just for this command.")]
Model = Annotated[str, typer.Option("--model", help="Served name; default: the first model of the right kind.")]


@contextmanager
def connect(url: str, key: str, local: bool | None) -> Iterator[ApiClient]:
    """A client of the server at `url`, or of one that is started for the occasion. local: None if the command has no
    --local. SIGTERM ends what is done with it as Ctrl-C does, with all that is cleaned up then."""
    if not (local or _is_address(url)):
        raise typer.BadParameter(f"{url!r} is no address such as {DEFAULT_URL}", param_hint="--url")
    chosen = key_for(DEFAULT_URL if local else url, key)
    if not (chosen.isascii() and chosen.isprintable()):
        raise typer.BadParameter("the API key has characters other than printable ASCII", param_hint="--key")
    with _ended_by_sigterm(), local_server(chosen) if local else ApiClient(url, chosen, local is not None) as client:
        yield client


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only there signals have handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_writable(*files: Path | None) -> None:
    """Raises OSError for a file that cannot be written, before long work and not after it."""
    for path in filter(None, files):
        if path.is_dir():
            raise _error_of(errno.EISDIR, path)
        if not (path.exists() or path.parent.is_dir()):
            raise _error_of(errno.ENOTDIR if path.parent.exists() else errno.ENOENT, path)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _error_of(errno.EACCES, path)


def _error_of(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def key_for(url: str, named: str, environ: Mapping[str, str] = os.environ) -> str:
    """`named`, or the key in the environment for this server; "" for none. OPENAI_API_KEY belongs to another service,
    so it is sent only to loopback servers."""
    ours = next(iter(environ.get(ENV_PREFIX + "API_KEY", "").split()), "")
    theirs = environ.get("OPENAI_API_KEY", "") if is_loopback(urlsplit(url).hostname or "") else ""
    return named or ours or theirs


def _is_address(url: str) -> bool:
    try:
        parts = httpx.URL(url)
        named = bool(parts.host)  # decodes an internationalised name, which may be invalid
    except (httpx.InvalidURL, UnicodeError):
        return False
    return named and parts.scheme in ("http", "https") and 0 <= (parts.port or 0) < 1 << 16
