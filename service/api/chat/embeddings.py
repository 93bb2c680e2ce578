"""POST /v1/embeddings and /v1/rerank, by the published code of Qwen3-VL-Embedding and Qwen3-VL-Reranker
(scripts/qwen3_vl_embedding.py and scripts/qwen3_vl_reranker.py of their repositories; arXiv:2601.04720)."""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType

from models.checkpoints.rows import tensor_rows
from service.api.chat.job import ChatJob, prepare_job
from service.api.chat.schema import ChatRequestBody, ContentPart, MediaUrl, Message
from service.api.context import ServerContext, post
from service.api.engines.request_stream import answered
from service.api.http.errors import ApiError, invalid, renamed
from service.api.http.middleware import record_of
from service.api.http.streaming import unless_disconnected
from service.hub.catalog import HostedModel
from service.link.messages import ChatRequest
from service.link.sampling import SamplingParams
from service.system.concurrency import all_results

router = APIRouter()

# The vector of a text, or of a conversation with pictures: an instruction as the system's message, the input as the
# user's, and the last position of the prompt after the final norm, normalised.

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
                return await _hidden(context, job), len(job.prompt.token_ids)

    done = await unless_disconnected(
        request, all_results([one(prompted) for prompted in prompts]), context.settings.request_timeout
    )
    tokens = record.notes["prompt_tokens"] = sum(count for _, count in done)
    return np.stack([vector for vector, _ in done]), EmbeddingsUsage(tokens, tokens)


async def _hidden(context: ServerContext, job: ChatJob) -> np.ndarray:
    """The hidden vector of the prompt's last position, float32 [hidden_size]."""
    request = ChatRequest(f"{job.id}-0", job.model.name, job.prompt, GREEDY, job.record.arrival)
    deltas = await answered(context.engine.submit(request, job.group))
    return next(delta.hidden for delta in deltas if delta.hidden is not None)


def _named(error: ApiError, prompted: Prompted) -> ApiError:
    """The error under the path that the input has in the request."""
    if error.param is None or not error.param.startswith("messages"):
        return error
    own = re.sub(r"\d+", lambda found: str(int(found[0]) - prompted.added), error.param, count=1)
    return error.at(prompted.path or own)


# How well documents answer a query: the sigmoid of the logit of "yes" less that of "no" behind a question about both.

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
RERANK_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
HEADS = ("lm_head.weight", "model.language_model.embed_tokens.weight")
"""The head, or the embeddings that it is tied to."""


class Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """text, image (a data: or https: URL), or both, as Jina's clients send them; content: parts of a chat message."""

    text: str | None = None
    image: str | None = None
    content: list[ContentPart] | None = None


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of Jina's and Cohere's API. instruction: what makes a document relevant."""

    model: str
    query: str | Content
    documents: Annotated[list[str | Content], Meta(min_length=1, max_length=MOST_INPUTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class RerankResult(msgspec.Struct, frozen=True):
    """index: of the document in the request. relevance_score: 0 to 1."""

    index: int
    relevance_score: float
    document: Content | UnsetType = UNSET


class RerankAnswer(msgspec.Struct, frozen=True):
    """results: the best ones first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingsUsage


def _parts(given: Content) -> list[ContentPart]:
    if given.content:
        return given.content
    parts = [] if given.image is None else [ContentPart(type="image_url", image_url=MediaUrl(given.image))]
    return [*parts, ContentPart(type="text", text=given.text or EMPTY)] if given.text or not parts else parts


def _asked(query: Content, document: Content, instruction: str | None, path: str) -> Prompted:
    texts = (f"<Instruct>: {instruction or RERANK_INSTRUCTION}", "<Query>:", "\n<Document>:")
    instruct, asks, shows = (ContentPart(type="text", text=text) for text in texts)
    parts = [instruct, asks, *_parts(query), shows, *_parts(document)]
    return Prompted([Message("system", SYSTEM), Message("user", parts)], path=path)


@cache
def _direction(directory: Path, yes: int, no: int) -> np.ndarray:
    """What a hidden vector is multiplied with, float32 [hidden_size]."""
    head = tensor_rows(directory, HEADS, (yes, no))
    direction: np.ndarray = head[0] - head[1]
    return direction


RERANK_SUMMARY = "Order documents, texts or images, by how well they answer a query."


@post(router, "/v1/rerank", RERANK_SUMMARY, RerankBody, RerankAnswer)
async def rerank(request: Request, context: ServerContext, body: RerankBody) -> RerankAnswer:
    model = context.model(body.model, "rerank", record_of(request.scope))
    query, *documents = (Content(one) if isinstance(one, str) else one for one in (body.query, *body.documents))
    prompts = [_asked(query, one, body.instruction, f"documents[{index}]") for index, one in enumerate(documents)]
    hidden, usage = await hidden_vectors(context, request, model, prompts, None)
    (yes,), (no,) = map(model.chat_processor.tokenize, ("yes", "no"))
    logits = hidden @ await context.in_thread(lambda: _direction(model.checkpoint.directory, yes, no))
    scores: list[float] = (1 / (1 + np.exp(-logits.astype(np.float64)))).tolist()
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [RerankResult(at, scores[at], documents[at] if body.return_documents else UNSET) for at in best]
    return RerankAnswer(f"rerank-{secrets.token_hex(12)}", model.name, results, usage)
