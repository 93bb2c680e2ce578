"""Commands that talk to a server: ask, chat, say, hear, models, ps; and pull, which fetches what one serves."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Column, Table

from models.interfaces.errors import CheckpointError
from service.cli.client import (
    DEFAULT_URL,
    STDOUT,
    ApiClient,
    Key,
    Model,
    ServerError,
    Url,
    connect,
    is_media_name,
    is_standard_output,
    user_message,
    write_audio,
    write_to_standard_output,
)
from service.media.audio_formats import FORMATS, NAMES
from service.settings.reading import GIB
from service.system.children import ended_by_ctrl_c

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
        pieces = client.answer([*first, user_message(question, files)], model, max_tokens, files, temperature)
        said = False
        try:
            for reasoning, answer in until_first(pieces, "waiting for the first token"):
                said = True
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
    if len(others) > 1:
        # A question has no such suffix, names no folder, and is longer than the name of a file that was mistyped.
        file = min(others, key=lambda word: (not is_media_name(word), not os.path.lexists(word), len(word)))
        advice = 'Put the question in quotes: reprise ask FILE "QUESTION"'
        raise typer.BadParameter(f"'{file}' does not exist. {advice}", param_hint="FILES")
    return others[0], [Path(word) for word in words if word != others[0]]


def say(
    text: Annotated[
        str | None, typer.Argument(help="Text to speak; read from standard input if it is missing.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write (-: standard output).", show_default=False),
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
    with connect(url, key) as client:
        chunks = client.speech(text, chosen, model, voice, instructions, speed, seed)
        chunks = until_first(chunks, "waiting for the first sound")
        if is_standard_output(out):
            write_to_standard_output(chunks)
        else:
            typer.echo(f"{out}: {write_audio(out, chunks, chosen)} bytes")


def hear(
    file: Annotated[
        Path,
        typer.Argument(help="Recording, or - for standard input: arecord -f S16_LE -r 16000 | reprise hear -"),
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
        pieces = client.transcript(file, audio, response_format, model, language, prompt)
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
        health, metrics = client.get("/health"), client.get("/metrics")
        if metrics.status_code != 200:
            hint = "; --key names an API key" if metrics.status_code in (401, 403) else ""
            raise ServerError(f"{url}/metrics answered with status {metrics.status_code}{hint}")
        try:
            said = health.json()
            phases = f"{said['engine']} ({', '.join(said['engines'])})" if "engines" in said else said["engine"]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{url}/health does not answer as Reprise does") from error
        # Names of a model share its checkpoint; metrics have the first one.
        first = {card["root"]: card for card in reversed(client.models())}.values()
        cards = {card["id"]: card for card in reversed(first)}
    found = ScrapedMetrics(metrics)
    device = found.label("reprise_engine_info", "device") or "no device yet"
    memory = f", {found.gpu_memory()}" if found.gpu_memory() else ""
    Console(soft_wrap=True).print(f"{url}: {phases}, {device}{memory}", highlight=False)
    if any(left := said.get("background", {}).values()):
        captures, voices = left
        typer.echo(f"still to do while there are no requests: {captures} captures, {voices} built-in voices")
    engines = found.engines()
    table = _table("model", "kind", *(["engine"] if engines else []), "running", "waiting", "KV cache in use")
    for (name, card), engine in itertools.product(cards.items(), engines or [""]):
        running, waiting, usage = (
            found.of("reprise_" + metric, name, engine)
            for metric in ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        )
        where = [engine] if engines else []
        table.add_row(name, card["kind"], *where, f"{running:.0f}", f"{waiting:.0f}", f"{usage:.0%}")
    Console().print(table)


def pull(
    model: Annotated[str, typer.Argument(help="Hub id, or HUB_ID@REVISION.")],
) -> None:
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
    """Samples of a server's /metrics."""

    def __init__(self, response: httpx.Response) -> None:
        families = text_string_to_metric_families(response.text)
        self._samples = [sample for family in families for sample in family.samples]

    def of(self, name: str, model: str, engine: str) -> float:
        """engine: empty if there is only one."""
        labels = (model, engine)
        found = (s for s in self._samples if s.name == name)
        return sum(s.value for s in found if (s.labels.get("model"), s.labels.get("engine", "")) == labels)

    def engines(self) -> list[str]:
        """Indexes of the engines; empty if there is only one."""
        found = {s.labels["engine"] for s in self._samples if "engine" in s.labels}
        return sorted(found, key=int)

    def label(self, name: str, label: str) -> str:
        return next((s.labels.get(label, "") for s in self._samples if s.name == name), "")

    def gpu_memory(self) -> str:
        """Memory of the devices of all engines; empty on a CPU."""
        states = [(s.labels["state"], s.value) for s in self._samples if s.name == "reprise_gpu_memory_bytes"]
        total, free = sum(value for _, value in states), sum(value for state, value in states if state == "free")
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
COMMANDS = ("/new", "/quit", "/help")


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
            for word in missing_files(question):
                typer.echo(f"there is no file {word}: it is taken as a word", err=True)
            self._turn(question, waiting)
            waiting = []

    def _command(self, line: str) -> None:
        if line == "/new":
            self._messages = list(self._begin)
        elif line == "/help":
            typer.echo(HELP, err=True)
        elif (word := line.split()[0]) in COMMANDS:
            typer.echo(f"{word} stands alone in its line", err=True)
        else:
            typer.echo(f"{word} is neither a command nor a file; /help lists the commands", err=True)

    def _turn(self, question: str, files: list[Path]) -> None:
        asked = [*self._messages, user_message(question, files)]
        said = ""
        try:
            pieces = self._client.answer(asked, self._model, self._max_tokens, files)
            for reasoning, answer in until_first(pieces, "thinking"):
                typer.echo(reasoning, nl=False, err=True)
                typer.echo(answer, nl=False)
                said += answer
        except ServerError as error:
            if said:
                typer.echo()  # ends the line of half an answer
            typer.echo(f"reprise: {error}", err=True)
            self.failed = True
            return
        except KeyboardInterrupt:
            if not said:
                typer.echo()
                return  # as if it had not been asked
            typer.echo(" ...", nl=False)
        typer.echo()
        self._messages = [*asked, {"role": "assistant", "content": said}]


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


def missing_files(question: str) -> list[str]:
    """Words at the beginning and the end of a question without files that name a picture or video, as a mistyped path
    does."""
    words = _words(question)
    return [word for word in dict.fromkeys((*words[:1], *words[-1:])) if is_media_name(word)]


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
