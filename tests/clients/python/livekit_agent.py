"""LiveKit's plugin for OpenAI as it ships: speech, both kinds of recognition, and a Realtime session with its
defaults that is spoken to and interrupted.

Usage: livekit_agent.py URL CHAT_MODEL SPEECH_MODEL RECORDING PROMPT. RECORDING: WAV, one turn and the silence behind
it. PROMPT: what is answered without end. Writes JSON of what it saw.
"""

import loopback  # noqa: F401 I001

import asyncio
import json
import sys
import wave

import aiohttp
from livekit import rtc
from livekit.agents import function_tool, llm, stt
from livekit.agents.utils import http_context
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


def frames_of(path):
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    size = rate // 50 * 2
    return [
        rtc.AudioFrame(data[at : at + size], rate, 1, len(data[at : at + size]) // 2)
        for at in range(0, len(data), size)
    ]


async def recognized(url, frames):
    service = openai.STT(base_url=url, api_key="none")
    event = await service.recognize(frames)
    return {"text": event.alternatives[0].text, "language": event.alternatives[0].language}


async def streamed(url, frames):
    service = openai.STT(base_url=url, api_key="none", use_realtime=True)
    stream = service.stream()
    for frame in frames:
        stream.push_frame(frame)
    kinds, text = [], None
    async for event in stream:
        kinds.append(event.type)
        if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
            text = event.alternatives[0].text
        if event.type == stt.SpeechEventType.RECOGNITION_USAGE:
            break
    await stream.aclose()
    await service.aclose()
    return {"kinds": kinds, "text": text, "seconds": event.recognition_usage.audio_duration}


async def talked(url, model, frames, prompt):
    """An answer without end is interrupted by the recording, which is answered then."""
    events, errors, heard = [], [], []
    generations, spoken = asyncio.Queue(), asyncio.Event()
    async with aiohttp.ClientSession() as http:
        service = openai.realtime.RealtimeModel(
            base_url=url, api_key="none", model=model, voice="marin", http_session=http
        )
        session = service.session()
        session.on("error", lambda error: errors.append(repr(error)[:500]))
        session.on("openai_server_event_received", events.append)
        session.on("input_speech_started", lambda _: spoken.set())
        session.on("input_audio_transcription_completed", lambda event: heard.append(event.transcript))
        session.on("generation_created", lambda event: event.user_initiated or generations.put_nowait(event))
        await session.update_instructions("Answer in a few words.")
        await session.update_tools([look_up])
        context = llm.ChatContext.empty()
        context.add_message(role="user", content=prompt)
        await session.update_chat_ctx(context)
        endless = await session.generate_reply()
        message = await anext(aiter(endless.message_stream))
        await anext(aiter(message.audio_stream))
        for frame in frames:
            session.push_audio(frame)
        await spoken.wait()
        session.interrupt()
        session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=20)
        answer = await generations.get()
        text, seconds = "", 0.0
        async for message in answer.message_stream:
            async for frame in message.audio_stream:
                seconds += frame.samples_per_channel / frame.sample_rate
            text += "".join([str(piece) async for piece in message.text_stream])
        await session.aclose()
    updated = [event for event in events if event["type"] == "session.updated"]
    return {
        "session": updated[-1]["session"],
        "unsupported": [event["unsupported"] for event in updated if "unsupported" in event],
        "errors": errors,
        "done": [event["response"]["status_details"] for event in events if event["type"] == "response.done"],
        "truncated": [event["audio_end_ms"] for event in events if event["type"] == "conversation.item.truncated"],
        "heard": heard,
        "text": text,
        "seconds": seconds,
    }


async def main():
    url, model, speech_model, path, prompt = sys.argv[1:]
    frames = frames_of(path)
    async with http_context.open():
        seen = {
            "pcm": await speech(url, speech_model, response_format="pcm"),
            "mp3": await speech(url, speech_model),
            "recognized": await recognized(url, frames),
            "streamed": await streamed(url, frames),
            "talked": await talked(url, model, frames, prompt),
        }
    print(json.dumps(seen))


asyncio.run(main())
