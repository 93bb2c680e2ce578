"""`truncation` with a retention ratio: a conversation that is too long is cut further than it must be, and stays cut.

The model's context has 4096 tokens, of which a character is one; an eighth is kept free for an answer.
"""

from __future__ import annotations

from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from service.api.context import ServerContext
from tests.api.realtime.conftest import Conversing, Event, add, answer, message, said, tell, up_to

pytestmark = pytest.mark.usefixtures("nothing_is_left", "whole_prompts")

TURN = 900
INSTRUCTIONS = "Be short."


async def configure(socket: ClientConnection, ratio: float, **limits: Any) -> Event:
    truncation = {"type": "retention_ratio", "retention_ratio": ratio, **limits}
    session = {"output_modalities": ["text"], "instructions": INSTRUCTIONS, "max_output_tokens": 1}
    await tell(socket, "session.update", session={**session, "truncation": truncation})
    shown: Event = (await said(socket))["session"]["truncation"]
    assert shown == truncation
    return shown


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


async def test_a_conversation_that_is_too_long_is_cut_once_for_several_turns(
    conversing: Conversing, socket: ClientConnection
) -> None:
    await configure(socket, 0.5)
    # 4096 - 1 - 9 tokens are allowed: a fifth turn is too much, and half of them hold two.
    for name, turns in zip("abcdef", ["a", "ab", "abc", "abcd", "de", "def"], strict=True):
        await ask(socket, name)
        assert seen(conversing) == turns
    await tell(socket, "conversation.item.retrieve", item_id="a")
    assert (await said(socket))["item"]["id"] == "a", "items stay in the conversation"


async def test_how_many_tokens_a_conversation_may_have_is_the_clients_to_say(
    conversing: Conversing, socket: ClientConnection
) -> None:
    """Without the instructions."""
    await configure(socket, 0.7, token_limits={"post_instructions": 3 * TURN})
    for name, turns in zip("abcdef", ["a", "ab", "abc", "cd", "cde", "ef"], strict=True):
        await ask(socket, name)
        assert seen(conversing) == turns


@pytest.mark.parametrize(("ratio", "turns"), [(0.0, "e"), (1.0, "cde")])
async def test_the_ends_of_the_ratio(
    conversing: Conversing, socket: ClientConnection, ratio: float, turns: str
) -> None:
    await configure(socket, ratio, token_limits={"post_instructions": 3 * TURN})
    for name in "abcd":
        await add(socket, name + "x" * (TURN - 1), id=name)
    await ask(socket, "e")
    assert seen(conversing) == turns


async def test_what_was_left_out_is_there_again_where_truncation_is_another(
    conversing: Conversing, socket: ClientConnection
) -> None:
    await configure(socket, 0.5, token_limits={"post_instructions": 2 * TURN})
    for name in "abc":
        await ask(socket, name)
    assert seen(conversing) == "c"
    await tell(socket, "session.update", session={"truncation": "auto"})
    await said(socket)
    await answer(socket, conversation="none")
    assert seen(conversing) == "abc"


async def test_a_first_system_message_stays(conversing: Conversing, socket: ClientConnection) -> None:
    await configure(socket, 0.5, token_limits={"post_instructions": 2 * TURN})
    await tell(socket, "session.update", session={"instructions": ""})
    await said(socket)
    await tell(socket, "conversation.item.create", item=message(INSTRUCTIONS, "system"))
    await up_to(socket, "conversation.item.done")
    for name, turns in zip("abcd", ["a", "ab", "c", "cd"], strict=True):
        await ask(socket, name)
        assert seen(conversing) == turns


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
