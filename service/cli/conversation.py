"""`reprise chat`: a conversation in the terminal, with pictures and videos by their paths."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from service.cli.client import ApiClient, ServerError, is_media_name, user_message
from service.cli.commands import until_first
from service.cli.options import DEFAULT_URL, Key, Local, Model, Url, connect
from service.cli.playback import PlaybackError, play, require_playback

PROMPT = "> "
HELP = """\
A path in a line, typed or dropped into the window, adds a picture or video.
/new     begins another conversation
/speak   speaks answers from now on, or no longer
/quit    leaves, as Ctrl-D does; Ctrl-C stops an answer"""
COMMANDS = ("/new", "/speak", "/quit", "/help")


def chat(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pictures and videos to talk about.", exists=True, dir_okay=False)
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    model: Model = "",
    speak: Annotated[bool, typer.Option("--speak", help="Speak the answers, too.")] = False,
    voice: Annotated[str, typer.Option(help="Name of the voice that speaks.")] = "default",
    system: Annotated[str, typer.Option(help="System message before the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Limit of tokens of an answer.")] = 512,
    local: Local = False,
) -> None:
    """Talk with a model, line by line; lines may hold paths of pictures and videos. Reads a pipe as well."""
    if speak:
        require_playback()
    with connect(url, key, local) as client:
        name = model or client.first("chat")
        if sys.stdin.isatty():
            with suppress(ImportError):  # gives input() line editing and history
                import readline  # noqa: F401
            typer.echo(f"{name} at {client.url}; /help says what you can do", err=True)
        conversation = Conversation(client, name, max_tokens, system, voice, speak)
        conversation.run(files or [])
        if conversation.failed and not sys.stdin.isatty():  # nobody was there to read the errors
            raise typer.Exit(1)


class Conversation:
    """Turns with one model. A refused turn is reported and left out of the history. failed: a turn had no answer, or
    half of one."""

    def __init__(self, client: ApiClient, model: str, max_tokens: int, system: str, voice: str, speaking: bool) -> None:
        self._client, self._model, self._max_tokens = client, model, max_tokens
        self._voice, self._speaking = voice, speaking
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
        elif line == "/speak":
            self._switch_speech()
        elif line == "/help":
            typer.echo(HELP, err=True)
        elif (word := line.split()[0]) in COMMANDS:
            typer.echo(f"{word} stands alone in its line", err=True)
        else:
            typer.echo(f"{word} is neither a command nor a file; /help lists the commands", err=True)

    def _switch_speech(self) -> None:
        if not self._speaking:
            try:
                require_playback()
            except PlaybackError as error:
                typer.echo(f"reprise: {error}", err=True)
                return
        self._speaking = not self._speaking
        typer.echo(f"answers are {'spoken' if self._speaking else 'written only'}", err=True)

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
        if self._speaking and said.strip():
            self._speak(said)

    def _speak(self, text: str) -> None:
        try:
            play(self._client.speech(text, "wav", "", self._voice))
        except (ServerError, PlaybackError) as error:
            typer.echo(f"reprise: {error}", err=True)
        except KeyboardInterrupt:
            typer.echo(err=True)


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
