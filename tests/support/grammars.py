"""A grammar checked as the server does it, in this process; mask servers that are all there."""

from __future__ import annotations

from service.api.structured.grammar import check_size
from service.api.structured.grammar_worker import problem
from service.api.structured.schema_form import Unfit, shown
from service.engine.chat.guided.guidance import Guidance
from tests.support.waiting import wait


def check_grammar(grammar: str) -> None:
    """Unfit that says why it cannot be used."""
    check_size(len(grammar.encode()))
    reason, path = problem(grammar)
    if reason:
        raise Unfit(f"{shown(path)}: {reason}" if path else reason)


def with_all_servers(guidance: Guidance) -> Guidance:
    """Once all of its mask servers have read the vocabulary: from then on they share what comes."""
    for server in guidance._servers:
        assert server.start()

    def ready() -> bool:
        guidance.receive(0.05)
        return all(server.ready for server in guidance._servers)

    wait(ready, what="all mask servers")
    return guidance
