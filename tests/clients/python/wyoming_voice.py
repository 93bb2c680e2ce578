"""wyoming-openai as it ships, as Home Assistant asks it to speak: a whole text, and one that comes in chunks.

Usage: wyoming_voice.py URL SPEECH_MODEL. Writes JSON of what it saw.
"""

import loopback  # noqa: F401 I001

import asyncio
import json
import socket
import sys
from pathlib import Path

from wyoming.audio import AudioChunk, AudioStart
from wyoming.client import AsyncTcpClient
from wyoming.info import Describe, Info
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeVoice

RUN = "import loopback, runpy; runpy.run_module('wyoming_openai', run_name='__main__')"
VOICE = SynthesizeVoice(name="nova")
TEXT = "Good morning. How are you today?"


async def heard(port, events, last):
    async with AsyncTcpClient("127.0.0.1", port) as client:
        for event in events:
            await client.write_event(event.event())
        seconds, rates = 0.0, set()
        while (event := await client.read_event()) is not None:
            if AudioStart.is_type(event.type):
                rates.add(AudioStart.from_event(event).rate)
            elif AudioChunk.is_type(event.type):
                chunk = AudioChunk.from_event(event)
                seconds += chunk.samples / chunk.rate
            elif event.type == "error":
                return {"error": event.data}
            elif event.type == last:
                break
    return {"seconds": seconds, "rates": sorted(rates)}


async def described(port):
    async with AsyncTcpClient("127.0.0.1", port) as client:
        await client.write_event(Describe().event())
        info = Info.from_event(await client.read_event())
    return [voice.name for program in info.tts for voice in program.voices]


async def listening(ask, port):
    """What `ask` returns once the proxy listens."""
    for _ in range(600):
        try:
            return await ask(port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.1)
    raise SystemExit("wyoming-openai does not listen")


async def main():
    url, model = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--uri", f"tcp://127.0.0.1:{port}", "--tts-openai-url", url, "--tts-openai-key", "none"]
    flags += ["--tts-models", model, "--tts-voices", "nova", "--tts-streaming-models", model]
    command = [sys.executable, "-c", RUN, *flags]
    proxy = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parent)
    try:
        chunks = [SynthesizeChunk(piece) for piece in ("Good morn", "ing. How are", " you today?")]
        seen = {
            "voices": await listening(described, port),
            "whole": await heard(port, [Synthesize(TEXT, VOICE)], "audio-stop"),
            "chunks": await heard(port, [SynthesizeStart(VOICE), *chunks, SynthesizeStop()], "synthesize-stopped"),
        }
    finally:
        if proxy.returncode is None:
            proxy.kill()
        await proxy.wait()
    print(json.dumps(seen))


asyncio.run(main())
