"""Pipecat's services for OpenAI as they ship: speech, three kinds of recognition, and a Realtime session that is
spoken to.

Usage: pipecat_bot.py URL CHAT_MODEL SPEECH_MODEL RECORDING. RECORDING: WAV, one turn and the silence behind it. Writes
JSON of what it saw.
"""

import loopback  # noqa: F401 I001

import asyncio
import json
import sys
import wave
from pathlib import Path

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    LLMFullResponseEndFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService

KEPT = (
    ErrorFrame,
    LLMFullResponseEndFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
)


class Listener(FrameProcessor):
    """Keeps the frames that pass, and sets `ended` with one of the kind `last`, or an error."""

    def __init__(self, last, frames, ended):
        super().__init__()
        self.last, self.frames, self.ended = last, frames, ended

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, KEPT):
            self.frames.append(frame)
        if isinstance(frame, (self.last, ErrorFrame)):
            self.ended.set()
        await self.push_frame(frame, direction)


def input_frames(path):
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    size = rate // 50 * 2
    return [InputAudioRawFrame(data[at : at + size], rate, 1) for at in range(0, len(data), size)]


async def run(service, given, last):
    """What a pipeline with the service says to the frames, in order."""
    frames, ended = [], asyncio.Event()
    listeners = [Listener(last, frames, ended) for _ in range(2)]
    parameters = PipelineParams(audio_in_sample_rate=16_000, audio_out_sample_rate=24_000)
    pipeline = Pipeline([listeners[0], service, listeners[1]])
    task = PipelineTask(pipeline, params=parameters, cancel_on_idle_timeout=False)
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    for frame in given:
        await task.queue_frame(frame)
    await ended.wait()
    await task.queue_frame(EndFrame())
    await running
    sound = [frame for frame in frames if isinstance(frame, TTSAudioRawFrame)]
    return {
        "text": " ".join(frame.text for frame in frames if isinstance(frame, TranscriptionFrame)),
        "turns": [type(frame).__name__ for frame in frames if "Proposed" in type(frame).__name__],
        "errors": [frame.error for frame in frames if isinstance(frame, ErrorFrame)],
        "seconds": sum(len(frame.audio) / 2 / frame.sample_rate for frame in sound),
    }


async def speech(url, model):
    settings = OpenAITTSService.Settings(model=model, voice="nova")
    service = OpenAITTSService(api_key="none", base_url=url, sample_rate=24000, settings=settings)
    service._sample_rate = 24000  # which the first frame of a pipeline would set
    frames = [frame async for frame in service.run_tts("Good morning, how are you today?", "context")]
    sound = [frame for frame in frames if isinstance(frame, TTSAudioRawFrame)]
    errors = [frame.error for frame in frames if isinstance(frame, ErrorFrame)]
    seconds = sum(len(frame.audio) / 2 / frame.sample_rate for frame in sound)
    return {"seconds": seconds, "errors": errors}


async def recognized(url, path):
    service = OpenAISTTService(api_key="none", base_url=url)
    frames = [frame async for frame in service.run_stt(Path(path).read_bytes())]
    return [getattr(frame, "text", repr(frame)) for frame in frames]


async def main():
    url, model, speech_model, path = sys.argv[1:]
    realtime, frames = url.replace("http", "ws", 1) + "/realtime", input_frames(path)
    committed = OpenAIRealtimeSTTService(api_key="none", base_url=realtime)
    detected = OpenAIRealtimeSTTService(api_key="none", base_url=realtime, turn_detection={"type": "server_vad"})
    audio = events.AudioInput(
        transcription=events.InputAudioTranscription(), turn_detection=events.SemanticTurnDetection()
    )
    session = events.SessionProperties(
        audio=events.AudioConfiguration(input=audio, output=events.AudioOutput(voice="marin")),
        tools=[{"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}],
    )
    talk = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=realtime,
        settings=OpenAIRealtimeLLMService.Settings(
            model=model, system_instruction="Answer in a few words.", session_properties=session
        ),
    )
    sessions, updated = [], talk._handle_evt_session_updated

    async def handle(event):
        sessions.append(event.session.model_dump(mode="json", exclude_none=True))
        await updated(event)

    talk._handle_evt_session_updated = handle
    seen = {
        "pcm": await speech(url, speech_model),
        "recognized": await recognized(url, path),
        "committed": await run(committed, [*frames, VADUserStoppedSpeakingFrame()], TranscriptionFrame),
        "detected": await run(detected, frames, TranscriptionFrame),
        "talked": await run(talk, frames, LLMFullResponseEndFrame),
    }
    seen["talked"]["session"] = sessions[-1]
    print(json.dumps(seen))


asyncio.run(main())
