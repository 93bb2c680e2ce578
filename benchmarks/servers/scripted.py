"""`reprise serve` with chat answers that read as SCRIPT, whatever tokens the model draws; each token is still decoded.

    python -m benchmarks.servers.scripted serve --port 8000 ...

Random weights write no sentences, and the ends of sentences decide when a spoken answer begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.hub.catalog import HostedModel

SCRIPT = (
    *("The", " picture", " shows", " three", " large", " colored", " shapes", ","),
    *(" a", " red", " circle", " at", " the", " left", " and", " a", " blue", " square", "."),
    *(" Right", " beside", " them", " there", " is", " an", " orange", " triangle", "."),
    *(" All", " of", " them", " stand", " on", " a", " plain", " white", " background", " today", ".", ""),
)
"""40 tokens: a clause of 8, then sentences."""


class Reader:
    """Text of one answer: the next token of SCRIPT for each token that it is given."""

    def __init__(self) -> None:
        self._read = 0

    def __call__(self, token_ids: Sequence[int]) -> bytes:
        begin, self._read = self._read, self._read + len(token_ids)
        return "".join(SCRIPT[begin : self._read]).encode()


class Scripted:
    """A chat processor with another `detokenize`, a new one for each answer."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    @property
    def detokenize(self) -> Reader:
        return Reader()


def main() -> None:
    from service.cli.main import app

    HostedModel.chat_processor = property(lambda model: Scripted(model.processor))  # type: ignore[assignment,method-assign]
    app()


if __name__ == "__main__":
    main()
