"""POST /v1/embeddings: the vector of a text, or of a conversation with pictures, by the published code of
Qwen3-VL-Embedding (scripts/qwen3_vl_embedding.py of its repository; arXiv:2601.04720): an instruction as the system's
message, the input as the user's, and the last position of the prompt after the final norm, normalised."""

from __future__ import annotations

import asyncio
import base64
import re
import unicodedata
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from msgspec import Meta

from service.api.chat.job import ChatJob, prepare_job, tried_again
from service.api.chat.schema import ChatRequestBody, Message
from service.api.context import ServerContext, post
from service.api.http.errors import ApiError, invalid, renamed
from service.api.http.middleware import record_of
from service.api.http.streaming import unless_disconnected
from service.hub.catalog import HostedModel
from service.link.messages import ChatRequest
from service.link.sampling import SamplingParams
from service.system.concurrency import all_results

router = APIRouter()

INSTRUCTION = "Represent the user's input."
"""That of the published code, where none is given."""
EMPTY = "NULL"
"""What the published code writes for an empty input."""
MOST_INPUTS = 2048
AT_ONCE = 64
"""Inputs of a request that are in the engine together."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, hidden=True)
"""The token behind the vector is not read, so it should cost as little as it can."""


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """input: a text or several; token ids, which some clients make with another model's tokenizer, are refused.
    messages: in place of it, one conversation, whose parts may be pictures and videos. instruction: what the vectors
    are for. dimensions: only the first so many numbers, normalised again."""

    model: str
    input: str | Annotated[list[str], Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    instruction: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None


class Embedding(msgspec.Struct, frozen=True):
    """embedding: numbers, or base64 of them as little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    model: str
    data: list[Embedding]
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


class Prompted(msgspec.Struct, frozen=True):
    """An input as messages. path: of the input in the request; None: that of `messages`, before which there are `added`
    ones."""

    messages: list[Message]
    path: str | None = None
    added: int = 0


def prompts_of(body: EmbeddingsBody) -> list[Prompted]:
    """ApiError 400 unless there is either `input` or `messages`, and not too much of it."""
    if (body.input is None) == (body.messages is None):
        raise invalid("input", "required, unless there are messages; both exclude each other")
    system = Message("system", instruction(body.instruction))
    if body.messages is not None:
        given = body.messages
        if len(given) > 1 and given[-1].role == "assistant" and not _said(given[-1]):
            given = given[:-1]  # vLLM's clients send it for the prompt to end where an answer would begin
        added = [] if given[0].role in ("system", "developer") else [system]
        return [Prompted([*added, *given], added=len(added))]
    inputs = [body.input] if isinstance(body.input, str) else body.input or []
    if len(inputs) > MOST_INPUTS:
        raise invalid("input", f"too many: {len(inputs)} given, at most {MOST_INPUTS} allowed")
    return [Prompted([system, Message("user", text or EMPTY)], f"input[{index}]") for index, text in enumerate(inputs)]


def _said(message: Message) -> bool:
    parts = message.content or ()
    return bool(parts) if isinstance(parts, str) else any(part.text for part in parts)


def instruction(given: str | None) -> str:
    """The instruction, with a punctuation mark at its end as the published code writes it."""
    text = (given or INSTRUCTION).strip() or INSTRUCTION
    return text if unicodedata.category(text[-1]).startswith("P") else f"{text}."


SUMMARY = "Vectors of texts, or of a conversation with images and videos."


@post(router, "/v1/embeddings", SUMMARY, EmbeddingsBody, EmbeddingList)
async def create_embeddings(request: Request, context: ServerContext, body: EmbeddingsBody) -> EmbeddingList:
    model = context.model(body.model, "embedding", record_of(request.scope))
    prompts = prompts_of(body)
    vectors, usage = await hidden_vectors(context, request, model, prompts, body.cache_salt)
    data = [Embedding(index, vector) for index, vector in enumerate(written(vectors, body))]
    return EmbeddingList(model.name, data, usage)


def written(hidden: np.ndarray, body: EmbeddingsBody) -> Sequence[list[float] | str]:
    """The vectors of hidden vectors float32 [n, hidden_size], as the request wants them."""
    most = hidden.shape[1]
    size = most if body.dimensions is None else body.dimensions
    if size > most:
        raise invalid("dimensions", f"too high: {size} given, at most {most} allowed")
    vectors = hidden[:, :size] / np.linalg.norm(hidden[:, :size], axis=1, keepdims=True).clip(1e-12)
    if body.encoding_format == "base64":
        return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    numbers: list[list[float]] = vectors.tolist()
    return numbers


async def hidden_vectors(
    context: ServerContext, request: Request, model: HostedModel, prompts: Sequence[Prompted], cache_salt: str | None
) -> tuple[np.ndarray, EmbeddingsUsage]:
    """The hidden vectors of the prompts' last positions, float32 [n, hidden_size]."""
    turns, record = asyncio.Semaphore(AT_ONCE), record_of(request.scope)
    record.ticket.grow(min(len(prompts), AT_ONCE) - 1)

    async def one(prompted: Prompted) -> tuple[np.ndarray, int]:
        asked = ChatRequestBody(model=model.name, messages=prompted.messages, max_tokens=1, cache_salt=cache_salt)
        with renamed(lambda error: _named(error, prompted)):
            async with turns:
                job = await prepare_job(context, asked, record, task=model.task)
                return await tried_again(context, job, 0, lambda: _hidden(context, job)), len(job.prompt.token_ids)

    async with asyncio.timeout(context.settings.request_timeout):
        done = await unless_disconnected(request, all_results([one(prompted) for prompted in prompts]))
    tokens = record.notes["prompt_tokens"] = sum(count for _, count in done)
    return np.stack([vector for vector, _ in done]), EmbeddingsUsage(tokens, tokens)


async def _hidden(context: ServerContext, job: ChatJob) -> np.ndarray:
    """The hidden vector of the prompt's last position, float32 [hidden_size]."""
    request = ChatRequest(f"{job.id}-0", job.model.name, job.prompt, GREEDY, job.record.arrival)
    hidden = None
    async with aclosing(context.engine.submit(request, job.group)) as deltas:
        async for delta in deltas:
            hidden = delta.hidden if hidden is None else hidden
    assert hidden is not None
    return hidden


def _named(error: ApiError, prompted: Prompted) -> ApiError:
    """The error under the path that the input has in the request."""
    if error.param is None or not error.param.startswith("messages"):
        return error
    own = re.sub(r"\d+", lambda found: str(int(found[0]) - prompted.added), error.param, count=1)
    return error.at(prompted.path or own)
