"""Pipecat's services for OpenAI as they ship: speech, chat and a Realtime session.

Usage: pipecat_bot.py URL CHAT_MODEL SPEECH_MODEL. Writes JSON of what it saw.
"""

import loopback  # noqa: F401 I001

import asyncio
import json
import sys

from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.frames.frames import EndFrame, ErrorFrame, LLMContextFrame, LLMFullResponseEndFrame, TTSAudioRawFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.tts import OpenAITTSService

QUESTION = [{"role": "user", "content": "What can you do?"}]


class Listener(FrameProcessor):
    """Keeps all frames that come out of a pipeline, and ends it after an answer or an error."""

    def __init__(self):
        super().__init__()
        self.frames = []
        self.ended = asyncio.Event()

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        if isinstance(frame, LLMFullResponseEndFrame | ErrorFrame):
            self.ended.set()
        await self.push_frame(frame, direction)


async def speech(url, model):
    settings = OpenAITTSService.Settings(model=model, voice="nova")
    service = OpenAITTSService(api_key="none", base_url=url, sample_rate=24000, settings=settings)
    service._sample_rate = 24000  # which the first frame of a pipeline would set
    frames = [frame async for frame in service.run_tts("Good morning, how are you today?", "context")]
    sound = [frame for frame in frames if isinstance(frame, TTSAudioRawFrame)]
    errors = [frame.error for frame in frames if isinstance(frame, ErrorFrame)]
    seconds = sum(len(frame.audio) / 2 / frame.sample_rate for frame in sound)
    return {"seconds": seconds, "errors": errors}


async def chat(url, model):
    service = OpenAILLMService(
        api_key="none", base_url=url, settings=OpenAILLMService.Settings(model=model, temperature=0)
    )
    return await service.run_inference(LLMContext(QUESTION), max_tokens=12)


async def realtime(url, model):
    session = events.SessionProperties(
        audio=events.AudioConfiguration(
            input=events.AudioInput(
                transcription=events.InputAudioTranscription(), turn_detection=events.SemanticTurnDetection()
            ),
            output=events.AudioOutput(voice="marin"),
        )
    )
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url.replace("http", "ws", 1) + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(
            model=model, system_instruction="Answer in a few words.", session_properties=session
        ),
    )
    seen = []
    updated = service._handle_evt_session_updated

    async def handle(event):
        seen.append(event.session.model_dump(mode="json", exclude_none=True))
        await updated(event)

    service._handle_evt_session_updated = handle
    listener = Listener()
    tools = [FunctionSchema("look_up", "What a word means.", {"word": {"type": "string"}}, ["word"])]
    task = PipelineTask(
        Pipeline([service, listener]), params=PipelineParams(audio_out_sample_rate=24000), cancel_on_idle_timeout=False
    )
    running = asyncio.create_task(PipelineRunner(handle_sigint=False).run(task))
    await task.queue_frame(LLMContextFrame(LLMContext(QUESTION, tools)))
    await listener.ended.wait()
    await task.queue_frame(EndFrame())
    await running
    sound = [frame for frame in listener.frames if isinstance(frame, TTSAudioRawFrame)]
    return {
        "session": seen[-1] if seen else None,
        "errors": [frame.error for frame in listener.frames if isinstance(frame, ErrorFrame)],
        "seconds": sum(len(frame.audio) / 2 / frame.sample_rate for frame in sound),
    }


async def main():
    url, chat_model, speech_model = sys.argv[1:]
    seen = {
        "pcm": await speech(url, speech_model),
        "chat": await chat(url, chat_model),
        "realtime": await realtime(url, chat_model),
    }
    print(json.dumps(seen))


asyncio.run(main())
