"""Commands that talk to a server: ask, chat, say, hear, models, ps; and pull, which fetches what one serves."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import mimetypes
import os
import re
import shlex
import signal
import ssl
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Column, Table

from models.interfaces.errors import CheckpointError
from service.media.audio_formats import FORMATS, NAMES
from service.media.file_formats import recognise
from service.settings.reading import GIB
from service.settings.settings import ENV_PREFIX
from service.system.access import is_loopback
from service.system.children import ended_by_ctrl_c


def counted(number: int, thing: str) -> str:
    """(1, "request") -> "1 request"; (2, "request") -> "2 requests"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


STDOUT = Path("-")
_STDOUT_PATHS = {STDOUT, Path("/dev/stdout"), Path("/dev/fd/1"), Path("/proc/self/fd/1")}


def write_audio(out: Path, chunks: Iterator[bytes], audio_format: str) -> int:
    """Number of bytes written to `out`. What was there before stays until the first byte is there; if the audio is cut
    off, a regular file is removed. Raises OSError that names `out`."""
    first, size = next(chunks, b""), 0
    try:
        with open(out, "wb") as file:
            for chunk in itertools.chain((first,), chunks):
                size += len(chunk)
                file.write(chunk)
                file.flush()  # a full disk is noticed here
            for at in (4, 40) if audio_format == "wav" and out.is_file() else ():  # players may trust a header
                file.seek(at)
                file.write(struct.pack("<I", size - at - 4))
    except BaseException as error:
        if size and out.is_file() and not out.is_symlink():
            out.unlink()
        if isinstance(error, OSError):
            error.filename = error.filename or str(out)
        raise
    return size


MEDIA_FIELD = re.compile(r"^(?:file|messages\[\d+\]\.content\[(\d+)\]\.(?:image|video)_url(?:\.url)?)(?=:)")
"""How the server's errors name a recording, or a picture or video, by its place in the message."""


class ServerError(Exception):
    """The server's error message, or why it cannot be reached."""


class ApiClient:
    """Talks to a server's /v1. Every method but `get` raises ServerError for what the server refuses, and every one if
    it cannot be reached. key: "" sends none."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url, self.key = url, key
        self._http = httpx.Client(base_url=url, headers=headers, timeout=600, trust_env=False)

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        response = self.get("/v1/models")
        _check(response)
        try:
            return list(response.json()["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{response.url} answered with no list of models: is it a server of models?") from error

    def answer(
        self, messages: Sequence[dict[str, Any]], model: str, files: Sequence[Path], **fields: Any
    ) -> Iterator[tuple[str, str]]:
        """(reasoning, answer), piece by piece; one of them is empty. files: those of the last message, which errors
        name. fields: others of the request."""
        body = {"model": model or self.first("chat"), "messages": list(messages), "stream": True, **fields}
        with self._reaching(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response, files)
            for event in _events(response):
                for choice in event["choices"]:
                    delta = choice["delta"]
                    pieces = delta.get("reasoning_content") or "", delta.get("content") or ""
                    if any(pieces):
                        yield pieces

    def speech(self, text: str, model: str, **fields: Any) -> Iterator[bytes]:
        """The audio as it arrives. fields: others of the request."""
        body = {"model": model or self.first("speech"), "input": text, **fields}
        with self._reaching(), self._http.stream("POST", "/v1/audio/speech", json=body) as response:
            _check(response)
            yield from response.iter_bytes()

    def transcript(self, file: Path, audio: bytes, model: str, **fields: str) -> Iterator[str]:
        """What is said in a recording, piece by piece for the format text, else in one. file: what errors name. fields:
        others of the request, response_format among them."""
        live = fields["response_format"] == "text"
        fields |= {"model": model or self.first("transcription"), "stream": str(live).lower()}
        path, files = "/v1/audio/transcriptions", {"file": (file.name, audio)}
        with self._reaching(), self._http.stream("POST", path, data=fields, files=files) as response:
            _check(response, [file])
            if live:
                yield from (event.get("delta", "") for event in _events(response))
            else:
                yield response.read().decode()

    def get(self, path: str) -> httpx.Response:
        """A raw GET (/health, /metrics); never raises on status."""
        with self._reaching():
            return self._http.get(path)

    def metrics(self) -> ScrapedMetrics:
        response = self.get("/metrics")
        if response.status_code != 200:
            hint = "; --key names an API key" if response.status_code in (401, 403) else ""
            raise ServerError(f"{self.url}/metrics answered with status {response.status_code}{hint}")
        return ScrapedMetrics(response)

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


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The server-sent events of an answer. ServerError for an error among them."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(event["error"]["message"])
            yield event


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
    str, typer.Option("--url", envvar=ENV_PREFIX + "URL", callback=_without_path, help="Address of the server to ask.")
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
        raise typer.BadParameter(f"{url!r} is not a URL such as {DEFAULT_URL}", param_hint="--url")
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


T = TypeVar("T")

EXTENSIONS = {one.extension: name for name, one in FORMATS.items() if one.extension}


def ask(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="QUESTION|FILE",
            help="The question, and picture and video files that it is about, if any. A question that is - or missing "
            "is read from standard input.",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    model: Model = "",
    system: Annotated[str, typer.Option(help="System message before the question.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Limit of tokens of the answer.")] = 256,
) -> None:
    """Ask a server, about pictures and videos if you like, and print the answer as it comes; reasoning goes to standard
    error."""
    question, files = _question_and_files(words or [])
    with connect(url, key) as client:
        first = [{"role": "system", "content": system}] if system else []
        messages = [*first, user_message(question, files)]
        pieces = client.answer(messages, model, files, max_tokens=max_tokens, temperature=temperature)
        show(pieces, "waiting for the first token", [])


def show(pieces: Iterator[tuple[str, str]], what: str, said: list[str]) -> None:
    """Print an answer as it comes, its reasoning to standard error. said: gets the pieces of the answer."""
    try:
        for reasoning, answer in until_first(pieces, what):
            said.append(answer)
            typer.echo(reasoning, nl=False, err=True)
            typer.echo(answer, nl=False)
    except ServerError:
        if said:
            typer.echo()  # an error is not the end of half an answer's line
        raise
    typer.echo()


def _question_and_files(words: list[str]) -> tuple[str, list[Path]]:
    """The one of the words that names no file, wherever it stands, and the others. For none, or -, the question is read
    from a pipe."""
    # For a text that is too long for a path, os.path answers no, while pathlib raises an error.
    others = [word for word in words if not os.path.isfile(word)]
    if not others or others == [str(STDOUT)]:
        if question := _standard_input("the question is missing", "QUESTION"):
            return question, [Path(word) for word in words if word not in others]
        others = []
    if not any(others):
        raise typer.BadParameter("the question is missing", param_hint="QUESTION")
    if len(others) > 1 or (is_media_name(others[0]) and len(_words(others[0])) == 1):
        # A question has no such suffix, names no folder, and is longer than the name of a file that was mistyped.
        file = min(others, key=lambda word: (not is_media_name(word), not os.path.lexists(word), len(word)))
        problem = "is a directory" if os.path.isdir(file) else "does not exist"
        advice = 'Put the question in quotes: reprise ask FILE "QUESTION"'
        raise typer.BadParameter(f"'{file}' {problem}. {advice}", param_hint="FILES")
    return others[0], [Path(word) for word in words if word != others[0]]


def say(
    text: Annotated[
        str | None, typer.Argument(help="Text to speak; read from standard input if it is missing.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write (-: standard output).", show_default=False)
    ] = None,
    audio_format: Annotated[
        str, typer.Option("--format", help=f"{NAMES}; default: by the file's suffix, or wav.")
    ] = "",
    voice: Annotated[str, typer.Option(help="Name of a voice.")] = "default",
    instructions: Annotated[str, typer.Option(help="Description of the voice, or of how it speaks.")] = "",
    speed: Annotated[float, typer.Option(help="Tempo, 0.25 to 4; 1 is the model's own.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same audio.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    model: Model = "",
) -> None:
    """Speak a text into a file or a pipe."""
    text = _standard_input("what to say is missing", "TEXT") if text is None else text
    if not text.strip():
        raise typer.BadParameter("there is nothing to say", param_hint="TEXT")
    if out is None:
        raise typer.BadParameter("name a file, or - to pipe the audio into a player: | aplay", param_hint="-o")
    chosen = audio_format or _format_of(out)
    if out not in _STDOUT_PATHS:
        check_writable(out)
    with connect(url, key) as client:
        manner: dict[str, Any] = {"voice": voice, "instructions": instructions, "speed": speed, "seed": seed}
        chunks = client.speech(text, model, response_format=chosen, **manner)
        chunks = until_first(chunks, "waiting for the first sound")
        if out in _STDOUT_PATHS:
            for chunk in chunks:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        else:
            typer.echo(f"{out}: {write_audio(out, chunks, chosen)} bytes")


def hear(
    file: Annotated[
        Path, typer.Argument(help="Recording, or - for standard input: arecord -f S16_LE -r 16000 | reprise hear -")
    ],
    language: Annotated[str, typer.Option(help="Code such as en; default: the model tells which it hears.")] = "",
    prompt: Annotated[str, typer.Option(help="Names and words that may occur.")] = "",
    response_format: Annotated[str, typer.Option("--format", help="text, json, verbose_json, srt or vtt.")] = "text",
    url: Url = DEFAULT_URL,
    key: Key = "",
    model: Model = "",
) -> None:
    """Print what is said in a recording."""
    audio = sys.stdin.buffer.read() if file == STDOUT else file.read_bytes()
    with connect(url, key) as client:
        pieces = client.transcript(
            file, audio, model, response_format=response_format, language=language, prompt=prompt
        )
        for piece in until_first(pieces, "listening"):
            typer.echo(piece, nl=False)
        typer.echo()


def _table(*headings: str) -> Table:
    """A table that breaks words where the terminal is narrow: cut names and numbers are of no use."""
    return Table(*(Column(heading, overflow="fold") for heading in headings))


def models(url: Url = DEFAULT_URL, key: Key = "") -> None:
    """List the models of a server."""
    table = _table("name", "kind", "context", "notice")
    with connect(url, key) as client:
        for card in client.models():
            table.add_row(card["id"], card["kind"], str(card["max_model_len"]), card.get("notice", ""))
    Console().print(table)


def ps(url: Url = DEFAULT_URL, key: Key = "") -> None:
    """Show what a server is doing: its models, their requests and caches, the memory of its device."""
    with connect(url, key) as client:
        found, health = client.metrics(), client.get("/health")
        try:
            said = health.json()
            phases = f"{said['engine']} ({', '.join(said['engines'])})" if "engines" in said else said["engine"]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{url}/health does not answer as Reprise does") from error
        # Names of a model share its checkpoint; metrics have the first one.
        first = {card["root"]: card for card in reversed(client.models())}.values()
        cards = {card["id"]: card for card in reversed(first)}
    device = found.label("reprise_engine_info", "device") or "no device yet"
    memory = f", {found.gpu_memory()}" if found.gpu_memory() else ""
    Console(soft_wrap=True).print(f"{url}: {phases}, {device}{memory}", highlight=False)
    if any(left := said.get("background", {}).values()):
        captures, voices = left
        typer.echo(f"still to do while there are no requests: {captures} captures, {voices} built-in voices")
    engines = sorted(found.sums("reprise_requests_running", "engine"), key=lambda index: int(index or 0)) or [""]
    column = ["engine"] if engines != [""] else []
    table = _table("model", "kind", *column, "running", "waiting", "KV cache in use")
    shown = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    for name, card in cards.items():
        sums = [found.sums(f"reprise_{metric}", "engine", model=name) for metric in shown]
        for engine in engines:
            running, waiting, usage = (by_engine.get(engine, 0.0) for by_engine in sums)
            where = [engine] if column else []
            table.add_row(name, card["kind"], *where, f"{running:.0f}", f"{waiting:.0f}", f"{usage:.0%}")
    Console().print(table)


def pull(model: Annotated[str, typer.Argument(help="Hub id, or HUB_ID@REVISION.")]) -> None:
    """Download a model, so that `serve --model` needs no network."""
    from models.checkpoints.registry import family_of
    from service.hub import locate

    try:
        with ended_by_ctrl_c():
            checkpoint = locate(model, report=lambda line: typer.echo(line, err=True))
        family_of(checkpoint.directory)  # a directory of this machine may hold no model
    except CheckpointError as error:
        raise ServerError(str(error)) from error
    typer.echo(checkpoint.directory)


class ScrapedMetrics:
    def __init__(self, response: httpx.Response) -> None:
        families = text_string_to_metric_families(response.text)
        self._samples = [sample for family in families for sample in family.samples]

    def sums(self, name: str, label: str = "", **wanted: str) -> dict[str, float]:
        """Sums of the samples with the wanted labels, by the values of `label`."""
        sums: dict[str, float] = {}
        for sample in self._samples:
            if sample.name == name and wanted.items() <= sample.labels.items():
                value = sample.labels.get(label, "")
                sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def label(self, name: str, label: str) -> str:
        return next((s.labels.get(label, "") for s in self._samples if s.name == name), "")

    def gpu_memory(self) -> str:
        """Memory of the devices of all engines; empty on a CPU."""
        states = self.sums("reprise_gpu_memory_bytes", "state")
        total, free = sum(states.values()), states.get("free", 0.0)
        return f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB used" if total else ""


def until_first(pieces: Iterator[T], what: str) -> Iterator[T]:
    """Passes `pieces` on; on a terminal a line shows `what` until the first one arrives."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        first = next(pieces, None)
    if first is not None:
        yield first
        yield from pieces


def _format_of(out: Path) -> str:
    """The format by the file's suffix. BadParameter for a suffix that is no format."""
    ending = out.suffix.removeprefix(".").lower()
    chosen = EXTENSIONS.get(ending, ending) or "wav"
    if chosen not in FORMATS:
        known = ", ".join(f".{name}" for name in (*FORMATS, *EXTENSIONS))
        raise typer.BadParameter(
            f".{ending} names no audio format; known are {known}; or add --format", param_hint="-o"
        )
    return chosen


def _standard_input(missing: str, name: str) -> str:
    """Reads a text from a pipe, as in `reprise ask picture.png "What is it?" | reprise say`. BadParameter for a
    terminal."""
    if sys.stdin.isatty():
        raise typer.BadParameter(missing, param_hint=name)
    return sys.stdin.read().strip()


# `reprise chat`: a conversation in the terminal, with pictures and videos by their paths.

PROMPT = "> "
HELP = """\
A path in a line, typed or dropped into the window, adds a picture or video.
/new     begins another conversation
/quit    leaves, as Ctrl-D does; Ctrl-C stops an answer"""


def chat(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pictures and videos to talk about.", exists=True, dir_okay=False)
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    model: Model = "",
    system: Annotated[str, typer.Option(help="System message before the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Limit of tokens of an answer.")] = 512,
) -> None:
    """Talk with a model, line by line; lines may hold paths of pictures and videos. Reads a pipe as well."""
    with connect(url, key) as client:
        name = model or client.first("chat")
        if sys.stdin.isatty():
            with suppress(ImportError):  # gives input() line editing and history
                import readline  # noqa: F401
            typer.echo(f"{name} at {client.url}; /help says what you can do", err=True)
        conversation = Conversation(client, name, max_tokens, system)
        conversation.run(files or [])
        if conversation.failed and not sys.stdin.isatty():  # nobody was there to read the errors
            raise typer.Exit(1)


class Conversation:
    """Turns with one model. A refused turn is reported and left out of the history. failed: a turn had no answer, or
    half of one."""

    def __init__(self, client: ApiClient, model: str, max_tokens: int, system: str) -> None:
        self._client, self._model, self._max_tokens = client, model, max_tokens
        self._begin: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._begin)
        self.failed = False

    def run(self, files: list[Path]) -> None:
        """Runs until the input ends or /quit. files: for the first question."""
        waiting = [path.absolute() for path in files]
        for line in _lines():
            paths, question = split_line(line)
            if line.startswith("/") and question.startswith("/"):
                if line == "/quit":
                    return
                if line == "/new":
                    waiting = []
                self._command(line)
                continue
            waiting += paths
            if not question:
                them = "it" if len(waiting) == 1 else "them"
                typer.echo(f"{', '.join(path.name for path in waiting)}: now ask about {them}", err=True)
                continue
            for word in filter(is_media_name, question.split()):
                typer.echo(f"there is no file {word}: it is taken as a word", err=True)
            self._turn(question, waiting)
            waiting = []

    def _command(self, line: str) -> None:
        if line == "/new":
            self._messages = list(self._begin)
        elif line == "/help":
            typer.echo(HELP, err=True)
        else:
            typer.echo(f"{line.split()[0]} is neither a command nor a file; /help lists the commands", err=True)

    def _turn(self, question: str, files: list[Path]) -> None:
        asked, said = [*self._messages, user_message(question, files)], list[str]()
        try:
            show(self._client.answer(asked, self._model, files, max_tokens=self._max_tokens), "thinking", said)
        except ServerError as error:
            typer.echo(f"reprise: {error}", err=True)
            self.failed = True
            return
        except KeyboardInterrupt:
            typer.echo(" ..." if said else "")
            if not said:
                return  # as if it had not been asked
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def _lines() -> Iterator[str]:
    """Non-empty lines from a terminal (with a prompt) or a pipe."""
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                typer.echo()
            return
        except KeyboardInterrupt:  # forgets the line
            typer.echo()
            continue
        if line:
            yield line


def split_line(line: str) -> tuple[list[Path], str]:
    """Files at the beginning or end of a line, and the words between. A terminal that a file is dropped into types its
    path in quotes, with backslashes, or as a file:// address."""
    words = _words(line)
    first, last = 0, len(words)
    while first < last and _is_file(words[first]):
        first += 1
    while last > first and _is_file(words[last - 1]):
        last -= 1
    files = [_path(word) for word in (*words[:first], *words[last:])]
    return files, (" ".join(words[first:last]) if files else line)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an apostrophe
        return line.split()


def _is_file(word: str) -> bool:
    try:
        return _path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or a character that names cannot have
        return False


def _path(word: str) -> Path:
    return Path(os.path.expanduser(unquote(urlsplit(word).path) if word.startswith("file://") else word))
