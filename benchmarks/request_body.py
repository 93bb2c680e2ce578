"""What reading the body of a chat request costs on the CPU, with msgspec as it is served and with FastAPI's own bodies.

    python -m benchmarks.request_body

An ASGI call each, without sockets: `starlette` is a plain route whose function reads with msgspec; `served` is the same
in a router of FastAPI; `fastapi` has FastAPI validate a pydantic body with the same fields and limits. Times are the
thread's own on a processor, the least mean of many rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Request
from msgspec import inspect
from pydantic import Field, create_model
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.measure.record import Row, record
from service.api.chat.schema import ChatRequestBody
from service.api.http.errors import unread_fields
from service.api.http.json_body import parse

ROUNDS = 100
PATH = "/v1/chat/completions"
ANSWER = Response(b"{}", media_type="application/json")


def conversation(size: int) -> bytes:
    """A chat request of about `size` bytes of text."""
    roles = ("user", "assistant")
    turns = [{"role": roles[turn % 2], "content": "What is it? " * 40} for turn in range(size // 520 | 1)]
    return json.dumps({"model": "m", "messages": turns, "temperature": 0.5, "max_tokens": 64, "stream": True}).encode()


def picture(size: int) -> bytes:
    """A chat request with a picture of `size` bytes of base64."""
    image = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + "QUJD" * (size // 4)}}
    content = [{"type": "text", "text": "What is it?"}, image]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


BODIES = {"10 KB of text": conversation(10_000), "picture of 3 MB": picture(3_000_000)}


async def read(request: Request) -> Response:
    raw = await request.body()
    parse(raw, ChatRequestBody)
    unread_fields(raw, ChatRequestBody)
    return ANSWER


def by_pydantic() -> Callable[..., Awaitable[Response]]:
    async def answer(body: Any) -> Response:
        return ANSWER

    answer.__annotations__["body"] = as_pydantic(inspect.type_info(ChatRequestBody))
    return answer


def as_pydantic(described: inspect.Type) -> Any:
    """The annotation with which pydantic checks the same."""
    match described:
        case inspect.StructType(cls=kind):
            return _model(kind)
        case inspect.UnionType(types=types):
            return reduce(or_, map(as_pydantic, types))
        case inspect.Metadata(type=inner):
            return as_pydantic(inner)
        case inspect.ListType(item_type=item):
            return _limited(list[as_pydantic(item)], described)  # type: ignore[misc]
        case inspect.DictType(key_type=key, value_type=value):
            return _limited(dict[as_pydantic(key), as_pydantic(value)], described)  # type: ignore[misc]
        case inspect.LiteralType(values=values):
            return Literal[tuple(values)]
        case inspect.NoneType():
            return None
        case inspect.IntType():
            return _limited(int, described)
        case inspect.FloatType():
            return _limited(float, described)
        case inspect.StrType():
            return _limited(str, described)
        case inspect.BoolType():
            return bool
    return Any


@cache
def _model(kind: type) -> Any:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    fields: dict[str, Any] = {
        # A field of the base class may not be shadowed, whatever its name in the request.
        f"{one.name}_": (as_pydantic(one.type), Field(... if one.required else None, alias=one.encode_name))
        for one in described.fields
    }
    if described.tag_field is not None:
        fields["tag_"] = (Literal[described.tag], Field(alias=described.tag_field))
    return create_model(kind.__name__, **fields)


def _limited(kind: Any, described: Any) -> Any:
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    limits = {name: value for name in names if (value := getattr(described, name, None)) is not None}
    return Annotated[kind, Field(**limits)] if limits else kind


def application(endpoint: Callable[..., Awaitable[Response]]) -> FastAPI:
    app, router = FastAPI(openapi_url=None), APIRouter()
    router.post(PATH)(endpoint)
    app.include_router(router)
    return app


async def request(app: FastAPI, body: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200, message

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b""}
    await app({**scope, "headers": headers, "root_path": "", "http_version": "1.1"}, receive, send)


async def seconds(app: FastAPI, body: bytes, count: int) -> float:
    """Mean of `count` requests."""
    began = time.thread_time()
    for _ in range(count):
        await request(app, body)
    return (time.thread_time() - began) / count


async def measured() -> list[Row]:
    ways = {
        "starlette": FastAPI(openapi_url=None, routes=[Route(PATH, read, methods=["POST"])]),
        "served": application(read),
        "fastapi": application(by_pydantic()),
    }
    rows: list[Row] = []
    for name, body in BODIES.items():
        count = 20 if len(body) < 1 << 20 else 2
        rounds = [[await seconds(app, body, count) for app in ways.values()] for _ in range(ROUNDS)]
        least = [round(min(times) * 1e6, 1) for times in zip(*rounds, strict=True)]
        rows.append({"body": name, "bytes": len(body), **dict(zip((f"{way}_us" for way in ways), least, strict=True))})
    return rows


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.request_body", description=__doc__).parse_args()
    record("request_body", ((row, {}) for row in asyncio.run(measured())), rounds=ROUNDS)
