"""Options of the commands that talk to a server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated

import typer

from service.client import ApiClient, local_server
from service.settings import ENV_PREFIX

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", envvar=ENV_PREFIX + "URL", help="Address of the server to ask.")]
Key = Annotated[str, typer.Option("--key", envvar="OPENAI_API_KEY", help="API key of that server.")]
Local = Annotated[bool, typer.Option("--local", help="Start a server of one's own for this command.")]
Model = Annotated[str, typer.Option("--model", help="Served name; the first that fits unless given.")]


def connect(url: str, key: str, local: bool) -> AbstractContextManager[ApiClient]:
    """A client of the server at `url`, or of one that is started for the occasion."""
    return local_server() if local else ApiClient(url, key)
