"""LiveKit's plugin for OpenAI as it ships: speech, chat and a Realtime session with its defaults.

Usage: livekit_agent.py URL CHAT_MODEL SPEECH_MODEL. Writes JSON of what it saw.
"""

import loopback  # noqa: F401 I001

import asyncio
import json
import sys

import aiohttp
from livekit.agents import function_tool, llm
from livekit.plugins import openai

TEXT = "Good morning, how are you today?"


@function_tool
async def look_up(word: str) -> str:
    """What a word means."""
    return word


async def speech(url, model, **options):
    service = openai.TTS(base_url=url, api_key="none", model=model, voice="nova", **options)
    frames = [event.frame async for event in service.synthesize(TEXT)]
    await service.aclose()
    return {"rate": frames[0].sample_rate, "seconds": sum(one.samples_per_channel / one.sample_rate for one in frames)}


async def chat(url, model):
    service = openai.LLM(base_url=url, api_key="none", model=model, max_completion_tokens=12, temperature=0)
    context = llm.ChatContext.empty()
    context.add_message(role="user", content="What can you do?")
    pieces = []
    async for chunk in service.chat(chat_ctx=context):
        if chunk.delta and chunk.delta.content:
            pieces.append(chunk.delta.content)
    await service.aclose()
    return "".join(pieces)


async def realtime(url, model):
    events, errors = [], []
    async with aiohttp.ClientSession() as http:
        service = openai.realtime.RealtimeModel(
            base_url=url, api_key="none", model=model, voice="marin", http_session=http
        )
        session = service.session()
        session.on("error", lambda error: errors.append(repr(error)[:500]))
        session.on("openai_server_event_received", events.append)
        await session.update_instructions("Answer in a few words.")
        await session.update_tools([look_up])
        context = llm.ChatContext.empty()
        context.add_message(role="user", content="What can you do?")
        await session.update_chat_ctx(context)
        generation = await session.generate_reply()
        text, seconds = "", 0.0
        async for message in generation.message_stream:
            async for frame in message.audio_stream:
                seconds += frame.samples_per_channel / frame.sample_rate
            text += "".join([str(piece) async for piece in message.text_stream])
        await session.aclose()
    updated = [event for event in events if event["type"] == "session.updated"]
    unsupported = {field["param"] for event in updated for field in event.get("unsupported", ())}
    return {
        "session": updated[-1]["session"],
        "unsupported": sorted(unsupported),
        "errors": errors + [event for event in events if event["type"] == "error"],
        "text": text,
        "seconds": seconds,
    }


async def main():
    url, chat_model, speech_model = sys.argv[1:]
    seen = {
        "pcm": await speech(url, speech_model, response_format="pcm"),
        "mp3": await speech(url, speech_model),
        "chat": await chat(url, chat_model),
        "realtime": await realtime(url, chat_model),
    }
    print(json.dumps(seen))


asyncio.run(main())
