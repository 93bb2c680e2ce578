"""What a session.update is checked for before it is in force: what would otherwise fail at the next response."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from service.api.chat.schema import ChatRequestBody, Message
from service.api.chat.spoken import check_audio
from service.api.chat.tool_grammar import checked_tool_grammar
from service.api.chat.tools import tool_use
from service.api.context import ServerContext
from service.api.http.errors import ApiError
from service.api.realtime.session_config import RealtimeConfig, RealtimeToolChoice, SessionParams, chat_tools
from service.api.realtime.to_messages import renamed


async def check_update(context: ServerContext, given: SessionParams, config: RealtimeConfig, client: str) -> None:
    """ApiError names the field that no response could use. given: the fields that the client sets. config: with them.
    client: identifies the client, since clients take turns at the check of grammars."""
    try:
        output = None if given.audio is None else given.audio.output
        named = () if output is None else (output.model, output.voice, output.inference_timesteps)
        if any(value is not None for value in named):
            check_audio(context, config.audio, client)
        await _check_tools(context, given, config, client)
    except ApiError as error:
        raise renamed(error, "session") from error


async def _check_tools(context: ServerContext, given: SessionParams, config: RealtimeConfig, client: str) -> None:
    """A choice of the session that a later update may still provide with tools is left to the response."""
    named = given.tool_choice if isinstance(given.tool_choice, RealtimeToolChoice) else None
    if given.tools is None and named is None:
        return
    fields = chat_tools(msgspec.structs.replace(config, tool_choice=named or "auto"))
    body = ChatRequestBody(model="", messages=[Message("user", "")], **fields)
    use = await context.in_thread(partial(tool_use, body))
    if use is None or given.tools is None:
        return
    try:
        await checked_tool_grammar(context.grammars, replace(use, callable=use.tools, forced=False), client)
    except ApiError as error:
        if error.status < 500:  # if the server is busy, the response is checked
            raise
