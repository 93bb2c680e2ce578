"""A client for the command line: httpx against a running server; options of the commands that use it."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import mimetypes
import os
import re
import signal
import ssl
import stat
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer

from service.media.file_formats import recognise
from service.settings.settings import ENV_PREFIX
from service.system.access import is_loopback


def counted(number: int, thing: str) -> str:
    """(1, "request") -> "1 request"; (2, "request") -> "2 requests"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


STDOUT = Path("-")
_STDOUT_PATHS = {STDOUT, Path("/dev/stdout"), Path("/dev/fd/1"), Path("/proc/self/fd/1")}


def is_standard_output(path: Path | None) -> bool:
    return path in _STDOUT_PATHS


def write_to_standard_output(pieces: Iterator[bytes]) -> None:
    """Each piece at once."""
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def write_audio(out: Path, chunks: Iterator[bytes], audio_format: str) -> int:
    """Number of bytes written to `out`. If the audio is cut off, a regular file is removed; what was there before stays
    until the first byte is written. Raises OSError that names `out`."""
    first = next(chunks, b"")  # nothing is written if the server refuses
    was_there = os.path.lexists(out)
    size = 0
    try:
        # Without a buffer, so that a full disk is noticed here. What is left of an older file is cut off at the end.
        with open(out, "wb", buffering=0, opener=_opened_as_it_is) as file:
            for chunk in itertools.chain((first,), chunks):
                left = memoryview(chunk)
                while left:
                    written = file.write(left)
                    left, size = left[written:], size + written
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.truncate(size)
                if audio_format == "wav":
                    _write_lengths(file, size)
    except BaseException as error:
        if (size or not was_there) and out.is_file() and not out.is_symlink():
            out.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(out)
        raise
    return size


def _opened_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _write_lengths(file: FileIO, size: int) -> None:
    """A streamed WAV header holds no real lengths, and some players trust them."""
    for at in (4, 40):
        file.seek(at)
        file.write(struct.pack("<I", size - at - 4))


MEDIA_FIELD = re.compile(r"^(?:file|messages\[\d+\]\.content\[(\d+)\]\.(?:image|video)_url(?:\.url)?)(?=:)")
"""How the server's errors name a recording, or a picture or video, by its place in the message."""


class ServerError(Exception):
    """The server's error message, or why it cannot be reached."""


class ApiClient:
    """Talks to a server's /v1. Every method but `get` raises ServerError for what the server refuses, and every one if
    it cannot be reached. key: "" sends none."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        response = self.get("/v1/models")
        _check(response)
        try:
            return list(response.json()["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{response.url} answered with no list of models: is it a server of models?") from error

    def answer(
        self,
        messages: Sequence[dict[str, Any]],
        model: str,
        max_tokens: int,
        files: Sequence[Path] = (),
        temperature: float | None = None,
    ) -> Iterator[tuple[str, str]]:
        """(reasoning, answer), piece by piece; one of them is empty. files: those of the last message, which errors
        name."""
        body = {
            "model": model or self.first("chat"),
            "messages": list(messages),
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": temperature,
        }
        with self._reaching(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response, files)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _pieces(json.loads(line.removeprefix("data: ")))

    def speech(
        self,
        text: str,
        audio_format: str,
        model: str,
        voice: str,
        instructions: str = "",
        speed: float = 1.0,
        seed: int | None = None,
    ) -> Iterator[bytes]:
        """The audio as it arrives."""
        body = {
            "model": model or self.first("speech"),
            "input": text,
            "voice": voice,
            "instructions": instructions,
            "speed": speed,
            "seed": seed,
            "response_format": audio_format,
        }
        with self._reaching(), self._http.stream("POST", "/v1/audio/speech", json=body) as response:
            _check(response)
            yield from response.iter_bytes()

    def transcript(
        self, file: Path, audio: bytes, response_format: str, model: str, language: str, prompt: str
    ) -> Iterator[str]:
        """What is said in a recording, piece by piece for the format text, else in one. file: what errors name."""
        live = response_format == "text"
        fields = {
            "model": model or self.first("transcription"),
            "response_format": response_format,
            "stream": str(live).lower(),
            "language": language,
            "prompt": prompt,
        }
        path, files = "/v1/audio/transcriptions", {"file": (file.name, audio)}
        with self._reaching(), self._http.stream("POST", path, data=fields, files=files) as response:
            _check(response, [file])
            if not live:
                yield response.read().decode()
            for line in response.iter_lines() if live else ():
                if line.startswith("data: ") and line != "data: [DONE]":
                    said = json.loads(line.removeprefix("data: "))
                    if "error" in said:
                        raise ServerError(said["error"]["message"])
                    yield said.get("delta", "")

    def get(self, path: str) -> httpx.Response:
        """A raw GET (/health, /metrics); never raises on status."""
        with self._reaching():
            return self._http.get(path)

    def first(self, kind: str) -> str:
        """Name of the first model of a kind, such as "chat" or "speech"; ServerError if there is none."""
        for card in self.models():
            if card["kind"] == kind:
                return card["id"]
        raise ServerError(f"the server has no {kind} model")

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """ServerError for a server that cannot be reached, or that goes away, and for a text that cannot be sent."""
        try:
            yield
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            if _is_of_tls(error):
                raise ServerError(
                    f"{self.url}: no TLS with this server ({error}); without TLS an address begins with http://"
                ) from error
            raise ServerError(f"no server at {self.url} ({error}); start one with `reprise serve`") from error
        except httpx.TransportError as error:
            raise ServerError(f"the connection to {self.url} broke ({error})") from error
        except UnicodeEncodeError as error:  # Python keeps other bytes of arguments and pipes as surrogates
            raise ServerError("the text is not UTF-8") from error


def _is_of_tls(error: BaseException | None) -> bool:
    """Whether a server was there, but not the encryption or the certificate that was expected."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


def user_message(question: str, files: Sequence[Path]) -> dict[str, Any]:
    """files: pictures and videos, distinguished by their contents or else by their suffixes."""
    return {"role": "user", "content": [*map(_media_part, files), {"type": "text", "text": question}]}


def is_media_name(word: str) -> bool:
    """Whether a word is the name of a picture or video, by its suffix."""
    kind = mimetypes.guess_type(word)[0] or ""
    return kind.startswith(("image/", "video/"))


def _media_part(file: Path) -> dict[str, Any]:
    data, named = file.read_bytes(), mimetypes.guess_type(file)[0] or ""
    found = recognise(data)
    kind = next((kind for kind in ("image", "video") if found and kind in found.holds), named.partition("/")[0])
    field = "video_url" if kind == "video" else "image_url"
    media_type = named if named.startswith(f"{kind}/") else {"video": "video/mp4"}.get(kind, "image/png")
    return {"type": field, field: {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}


def _pieces(chunk: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(reasoning, answer) of a chunk of a chat stream, without empty pieces. ServerError for an error in the stream."""
    if "error" in chunk:
        raise ServerError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        delta = choice["delta"]
        pieces = delta.get("reasoning_content") or "", delta.get("content") or ""
        if any(pieces):
            yield pieces


def _check(response: httpx.Response, files: Sequence[Path] = ()) -> None:
    """Raises ServerError with the server's message. files: those of the last message, named in place of its fields."""
    if response.is_success:
        return
    response.read()
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answered with status {response.status_code}"
    if response.status_code == 401:
        message = f"{message.rstrip('.')}; --key or REPRISE_API_KEY names one"
    raise ServerError(MEDIA_FIELD.sub(lambda field: _named(field, files), message))


def _named(field: re.Match[str], files: Sequence[Path]) -> str:
    place = int(field[1] or 0)
    return str(files[place]) if place < len(files) else field[0]


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
Model = Annotated[str, typer.Option("--model", help="Served name; default: the first model of the right kind.")]


@contextmanager
def connect(url: str, key: str) -> Iterator[ApiClient]:
    """A client of the server at `url`, with the key of key_for. SIGTERM ends what is done with it as Ctrl-C does, with
    all that is cleaned up then."""
    if not _is_address(url):
        raise typer.BadParameter(f"{url!r} is no address such as {DEFAULT_URL}", param_hint="--url")
    chosen = key_for(url, key)
    if not (chosen.isascii() and chosen.isprintable()):
        raise typer.BadParameter("the API key has characters other than printable ASCII", param_hint="--key")
    in_main = threading.current_thread() is threading.main_thread()  # only there signals have handlers
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number)) if in_main else None
    try:
        with ApiClient(url, chosen) as client:
            yield client
    finally:
        if in_main:
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
