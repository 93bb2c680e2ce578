"""POST /v1/rerank and /v1/score: how well documents answer a query, by the published code of Qwen3-VL-Reranker
(scripts/qwen3_vl_reranker.py of its repository; arXiv:2601.04720): the sigmoid of the logit of "yes" less that of "no"
behind a question about the pair."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType

from models.checkpoints.rows import tensor_rows
from service.api.chat.embeddings import EMPTY, MOST_INPUTS, EmbeddingsUsage, Prompted, hidden_vectors
from service.api.chat.schema import ContentPart, MediaUrl, Message
from service.api.context import ServerContext, post
from service.api.http.errors import invalid
from service.api.http.middleware import record_of

router = APIRouter()

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
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


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of vLLM's API: one text_1 for all of text_2, or one for each."""

    model: str
    text_1: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_INPUTS)]
    text_2: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_INPUTS)]
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


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


def _parts(given: Content) -> list[ContentPart]:
    if given.content:
        return given.content
    parts = [] if given.image is None else [ContentPart(type="image_url", image_url=MediaUrl(given.image))]
    return [*parts, ContentPart(type="text", text=given.text or EMPTY)] if given.text or not parts else parts


def _asked(query: Content, document: Content, instruction: str | None, path: str) -> Prompted:
    texts = (f"<Instruct>: {instruction or INSTRUCTION}", "<Query>:", "\n<Document>:")
    instruct, asks, shows = (ContentPart(type="text", text=text) for text in texts)
    parts = [instruct, asks, *_parts(query), shows, *_parts(document)]
    return Prompted([Message("system", SYSTEM), Message("user", parts)], path=path)


@cache
def _direction(directory: Path, yes: int, no: int) -> np.ndarray:
    """What a hidden vector is multiplied with, float32 [hidden_size]."""
    head = tensor_rows(directory, HEADS, (yes, no))
    direction: np.ndarray = head[0] - head[1]
    return direction


async def _scores(
    request: Request, context: ServerContext, name: str, prompts: Sequence[Prompted]
) -> tuple[str, list[float], EmbeddingsUsage]:
    """The name of the model, and the score of each prompt."""
    model = context.model(name, "rerank", record_of(request.scope))
    hidden, usage = await hidden_vectors(context, request, model, prompts, None)
    (yes,), (no,) = map(model.chat_processor.tokenize, ("yes", "no"))
    logits = hidden @ await context.in_thread(lambda: _direction(model.checkpoint.directory, yes, no))
    scores: list[float] = (1 / (1 + np.exp(-logits.astype(np.float64)))).tolist()
    return model.name, scores, usage


SUMMARY = "Order documents, texts or images, by how well they answer a query."


@post(router, "/v1/rerank", SUMMARY, RerankBody, RerankAnswer)
async def rerank(request: Request, context: ServerContext, body: RerankBody) -> RerankAnswer:
    query, *documents = (Content(one) if isinstance(one, str) else one for one in (body.query, *body.documents))
    prompts = [_asked(query, one, body.instruction, f"documents[{index}]") for index, one in enumerate(documents)]
    name, scores, usage = await _scores(request, context, body.model, prompts)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [RerankResult(at, scores[at], documents[at] if body.return_documents else UNSET) for at in best]
    return RerankAnswer(f"rerank-{secrets.token_hex(12)}", name, results, usage)


@post(router, "/v1/score", "Scores of pairs of texts, in their order.", ScoreBody, ScoreList)
async def score(request: Request, context: ServerContext, body: ScoreBody) -> ScoreList:
    first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise invalid("text_1", f"must be one text, or as many as text_2 has: {len(second)}")
    pairs = zip(first * (len(second) // len(first)), second, strict=True)
    prompts = [
        _asked(Content(query), Content(text), body.instruction, f"text_2[{index}]")
        for index, (query, text) in enumerate(pairs)
    ]
    name, scores, usage = await _scores(request, context, body.model, prompts)
    data = [Score(*each) for each in enumerate(scores)]
    return ScoreList(f"score-{secrets.token_hex(12)}", int(time.time()), name, data, usage)
