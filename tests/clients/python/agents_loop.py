"""OpenAI's agents package with a tool, over /v1/responses. Arguments: URL, model, what the user says."""

import asyncio
import json
import sys

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

calls = []


@function_tool
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    calls.append([a, b])
    return f"It is {a + b}."


async def main(url: str, model: str, said: str) -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        agent = Agent(
            name="adder", instructions="Add.", tools=[add], model=OpenAIResponsesModel(model, openai_client=client)
        )
        whole = await Runner.run(agent, said)
        streamed = Runner.run_streamed(agent, said)
        events = [event.type async for event in streamed.stream_events()]
    items = [[item.type for item in result.new_items] for result in (whole, streamed)]
    usage = whole.context_wrapper.usage
    seen = {"calls": calls, "said": [whole.final_output, streamed.final_output], "items": items}
    print(json.dumps({**seen, "events": events, "requests": usage.requests, "tokens": usage.output_tokens}))


asyncio.run(main(*sys.argv[1:]))
