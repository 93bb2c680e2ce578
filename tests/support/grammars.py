"""A grammar checked as the server does it, in this process."""

from __future__ import annotations

from service.api.chat.grammar import Unfit, check_bounds
from service.api.chat.grammar_worker import problem


def check_grammar(grammar: str) -> None:
    """Unfit that says why it cannot be used."""
    check_bounds(grammar)
    if reason := problem(grammar):
        raise Unfit(reason)
