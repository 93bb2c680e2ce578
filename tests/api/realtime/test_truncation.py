"""`truncation: auto` in a KV cache that is smaller than the context; a character is a token."""

from __future__ import annotations

import pytest
from websockets.asyncio.client import ClientConnection

from service.api.context import ServerContext
from tests.api.realtime.conftest import Conversing, add, answer, said, tell, up_to

pytestmark = pytest.mark.usefixtures("nothing_is_left", "whole_prompts")

TURN = 900
INSTRUCTIONS = "Be short."


async def ask(socket: ClientConnection, name: str) -> None:
    """A turn of TURN tokens, and an answer of one that is not kept."""
    await add(socket, name + "x" * (TURN - 1), id=name)
    events = await answer(socket)
    await tell(socket, "conversation.item.delete", item_id=events[-1]["response"]["output"][0]["id"])
    await up_to(socket, "conversation.item.deleted")


def seen(conversing: Conversing) -> str:
    """The turns of the last request, by name."""
    first, *turns = conversing.seen[-1]
    assert first == ("system", INSTRUCTIONS)
    return "".join(text[0] for _, text in turns)


async def test_a_kv_cache_that_is_smaller_than_the_context_is_the_limit(
    conversing: Conversing, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerContext, "max_model_len", lambda context, model: 2 * TURN + 100)
    session = {"output_modalities": ["text"], "instructions": INSTRUCTIONS, "max_output_tokens": 1}
    await tell(socket, "session.update", session={**session, "truncation": "auto"})
    await said(socket)
    for name, turns in zip("abcd", ["a", "ab", "bc", "cd"], strict=True):
        await ask(socket, name)
        assert seen(conversing) == turns
