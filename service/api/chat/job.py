"""The job of a chat request: its prompt, sampling parameters and grammar, and its choices as they are generated."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from models.interfaces.media import Prompt
from models.text.processor import ChatProcessor
from service.api.chat import schema
from service.api.chat.detokenizer import TextAssembler, TextDelta
from service.api.chat.prompt import build_prompt, media_tokens, opens_reasoning
from service.api.chat.schema import ChatRequestBody
from service.api.chat.structured import answer_grammar
from service.api.chat.tools import Reasoning, ToolUse, checked_tool_grammar, reasoned_grammar, tool_use
from service.api.context import ServerContext
from service.api.engines.request_stream import RequestGroup, StepReport, step_report
from service.api.http.errors import invalid
from service.api.http.middleware import RequestRecord
from service.hub.catalog import HostedModel, Task
from service.link.messages import ChatDelta, ChatRequest, StepCounts
from service.link.sampling import MIN_TEMPERATURE, SamplingOptions, SamplingParams
from service.settings.settings import Settings


@dataclass
class ChoiceCounts:
    tokens: int = 0
    """Generated tokens, those of the reasoning included."""
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    """Prompt positions found in the prefix cache."""
    calls: int = 0
    steps: StepCounts | None = None
    """Set once the engine has ended the choice."""


@dataclass(eq=False)
class ChatJob:
    """A request that is ready for the engine, and the counts of its choices so far."""

    id: str
    created: int
    """Unix time in seconds."""
    model: HostedModel
    prompt: Prompt
    max_model_len: int
    sampling: tuple[SamplingParams, ...]
    """One for each choice."""
    stops: tuple[str, ...]
    tools: ToolUse | None
    grammar: str
    formatted: bool
    """Whether an answer that calls nothing has to match a format."""
    record: RequestRecord
    raw: bool = False
    """Whether answers are text as it was generated: reasoning is part of it."""
    live: bool = False
    counts: list[ChoiceCounts] = field(default_factory=list)
    """One for each choice."""
    group: RequestGroup = field(default_factory=RequestGroup)
    """That of the requests to the engine, one for each choice."""
    timed_out: bool = False
    """Whether the request has reached request_timeout: its choices then end with the text that they have."""

    def usage(self, audio_tokens: int = 0) -> schema.Usage:
        """audio_tokens: those of the speech of the answer."""
        prompt_tokens = len(self.prompt.token_ids)
        completion_tokens = sum(choice.tokens for choice in self.counts) + audio_tokens
        steps = [choice.steps for choice in self.counts if choice.steps is not None]
        accepted = sum(one.accepted for one in steps)
        return schema.Usage(
            prompt_tokens,
            completion_tokens,
            prompt_tokens + completion_tokens,
            schema.PromptTokensDetails(
                min(choice.cached_tokens for choice in self.counts),
                **{f"{kind}_tokens": count for kind, count in media_tokens(self.prompt).items()},
            ),
            schema.CompletionTokensDetails(
                sum(choice.reasoning_tokens for choice in self.counts),
                audio_tokens,
                accepted,
                sum(one.drafted for one in steps) - accepted,
            ),
        )

    def steps(self) -> StepReport | UnsetType:
        return step_report([choice.steps for choice in self.counts if choice.steps is not None])


def max_choices(context: ServerContext) -> int:
    settings = context.settings
    return min(settings.max_n, settings.max_waiting, context.admission.max_requests("chat"))


async def prepare_job(
    context: ServerContext,
    body: ChatRequestBody,
    record: RequestRecord,
    raw: str | list[int] | Prompt | None = None,
    task: Task = "chat",
) -> ChatJob:
    """Validate a request, load its media and build its prompt. raw: as of build_prompt.

    Raises ApiError or InputError that names the field that does not fit.
    """
    model = context.model(body.model, task, record)
    schema.refuse(body, schema.REFUSED, "by this server")
    settings = context.settings
    count, most = body.n or 1, max_choices(context)
    if count > most:
        raise invalid("n", f"too many choices: {count} given, at most {most} allowed")
    use = partial(tool_use, body, model.chat_processor.call_format)
    tools = await context.in_thread(use) if body.tools or body.tool_choice else None
    record.ticket.grow(count - 1)
    answer = ""
    if body.response_format or body.structured_outputs:
        answer = await answer_grammar(context.grammars, body, record.client)
    prompt = await build_prompt(context, model, body, tools.tools if tools else (), record, raw)
    tools, grammar = await _grammar(context, model, prompt, tools, answer, record.client)
    max_model_len = context.max_model_len(model)
    first = sampling_params(body, model.chat_processor, len(prompt.token_ids), max_model_len, settings)
    sampling = tuple(msgspec.structs.replace(first, seed=derived_seed(first.seed, index)) for index in range(count))
    record.notes["prompt_tokens"] = len(prompt.token_ids)
    return ChatJob(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        prompt=prompt,
        max_model_len=max_model_len,
        sampling=sampling,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        tools=tools,
        grammar=grammar,
        formatted=bool(answer),
        raw=raw is not None,
        record=record,
        counts=[ChoiceCounts() for _ in sampling],
    )


async def _grammar(
    context: ServerContext, model: HostedModel, prompt: Prompt, tools: ToolUse | None, answer: str, client: str
) -> tuple[ToolUse | None, str]:
    """(the tools with parameters in the form of a grammar, the grammar that the answers must match). answer: the
    grammar for answers that call nothing."""
    markers, opened = model.chat_processor.reasoning_markers, opens_reasoning(model.chat_processor, prompt)
    reasoning = None if markers is None else Reasoning(*markers, opened)
    if tools is not None:
        return await checked_tool_grammar(context.grammars, tools, client, answer=answer, reasoning=reasoning)
    if answer and reasoning is not None and opened:
        make = partial(reasoned_grammar, answer, reasoning)
        return None, await context.grammars.checked(make, "response_format", client)
    return None, answer


async def generate(context: ServerContext, job: ChatJob, index: int) -> AsyncGenerator[TextDelta]:
    """Generate the text of one choice; the last delta has a finish_reason. Closing it aborts the request. At
    request_timeout the choice ends as "length", or with TimeoutError if no choice of the request has a token."""
    processor, sampling, counts = job.model.chat_processor, job.sampling[index], job.counts[index]
    assembler = TextAssembler(
        processor.detokenize,
        job.stops,
        min_tokens=sampling.min_tokens,
        reasoning_markers=None if job.raw else processor.reasoning_markers,
        reasoning_opened=opens_reasoning(processor, job.prompt),
        calls=job.tools.parser(either=job.formatted) if job.tools else None,
    )
    slow = bool(job.grammar) and context.grammars.is_slow(job.grammar)
    request_id, arrival = f"{job.id}-{index}", job.record.arrival
    request = ChatRequest(request_id, job.model.name, job.prompt, sampling, arrival, job.grammar, slow, job.live)
    async with aclosing(context.engine.submit(request, job.group)) as stream:

        def end() -> None:
            if not stream.ended:
                job.timed_out = True
                stream.cut(ChatDelta(request_id, (), finish_reason="length"))

        limit = asyncio.get_running_loop().call_later(
            arrival + context.settings.request_timeout - time.monotonic(), end
        )
        try:
            async for delta in stream:
                text = assembler.feed(delta)
                counts.tokens = assembler.tokens
                counts.cached_tokens = max(counts.cached_tokens, delta.cached_tokens)
                counts.reasoning_tokens = assembler.reasoning_tokens
                counts.calls += sum(call.id is not UNSET for call in text.calls)
                counts.steps = delta.steps
                if job.timed_out and not any(choice.tokens for choice in job.counts):
                    raise TimeoutError
                yield text
                if text.finish_reason is not None:
                    break
        finally:
            limit.cancel()
            job.record.notes["tokens"] = sum(choice.tokens for choice in job.counts)
    _finish(context, job, index)


def _finish(context: ServerContext, job: ChatJob, index: int) -> None:
    context.metrics.observe("request_output_tokens", job.counts[index].tokens, model=job.model.name)
    if calls := job.counts[index].calls:
        context.metrics.observe("tool_calls_total", calls, model=job.model.name)
        job.record.notes["tool_calls"] = sum(choice.calls for choice in job.counts)
    if job.timed_out:
        job.record.notes["truncated"] = True


def sampling_params(
    body: ChatRequestBody, processor: ChatProcessor, prompt_tokens: int, max_model_len: int, settings: Settings
) -> SamplingParams:
    """Parameters of the first choice; max_tokens is at most what the prompt leaves of max_model_len. ApiError 400 names
    the field that does not fit."""
    room = _room(processor, prompt_tokens, max_model_len)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "requires logprobs: true")
    min_tokens = body.min_tokens or 0
    default = max(room, min_tokens)
    max_tokens = min(body.max_completion_tokens or body.max_tokens or default, room, settings.max_output_tokens or room)
    if min_tokens > max_tokens:
        problem = f"too high: {min_tokens} given, the completion can have at most {max_tokens} tokens"
        raise invalid("min_tokens", problem)
    for name, ids in (("logit_bias", body.logit_bias or {}), ("stop_token_ids", body.stop_token_ids or ())):
        if ids and max(ids) >= processor.vocab_size:
            largest = processor.vocab_size - 1
            raise invalid(name, f"token id out of range: {max(ids)} given, at most {largest} allowed")
    own_stops = frozenset() if body.ignore_eos else processor.stop_token_ids

    def value_of(name: str) -> float | None:
        """The request's value, else the checkpoint's."""
        value: float | None = getattr(body, name)
        return processor.generation_defaults.get(name) if value is None else value

    options: dict[str, Any] = {
        name: value for name in SamplingOptions.__struct_fields__ if (value := value_of(name)) is not None
    }
    if options.get("temperature", 1) < MIN_TEMPERATURE:
        options["temperature"] = 0.0
    return SamplingParams(
        max_tokens,
        **options,
        logit_bias=body.logit_bias or {},
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop_token_ids=tuple(sorted(own_stops | set(body.stop_token_ids or ()))),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _room(processor: ChatProcessor, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that are left for the completion. ApiError 400 if there is none."""
    room = max_model_len - prompt_tokens
    if room < 1:
        because = ", which is what the KV cache holds" if max_model_len < processor.context_length else ""
        raise invalid(
            "messages",
            f"the prompt is too long: this model's maximum context length is {max_model_len} tokens"
            f"{because}; the prompt takes {prompt_tokens} tokens, media included, and the answer needs at least one",
            "context_length_exceeded",
        )
    return room


def derived_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, independent ones for the others."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
