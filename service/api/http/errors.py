"""OpenAI error objects. Messages never contain text of the input, server paths or reprs."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from models.interfaces.errors import InputError
from service.api.engines.request_stream import EngineError
from service.system.access import no_space

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
HINTS = frozenset(
    (
        *("cache_prompt", "keep_alive", "metadata", "models", "name", "prediction", "priority", "prompt_cache_key"),
        *("prompt_cache_retention", "provider", "request_id", "route", "safety_identifier"),
        *("service_tier", "session_id", "store", "usage", "user", "verbosity"),
    )
)
"""Fields that clients send by habit and that need no warning: no model here gives another answer for them."""
MAX_NAMES = 100
"""Names that are logged in the life of a process: clients choose them."""


def unread_fields(raw: bytes, kind: Any) -> list[str]:
    """Names at the top level of a valid body that `kind` does not have and are not null."""
    fields = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"), type=dict[str, msgspec.Raw])
    known = kind.__struct_fields__
    return [
        name for name, value in fields.items() if name not in known and name not in HINTS and bytes(value) != b"null"
    ]


@dataclass(eq=False)
class FieldWarnings:
    """Logs each name once, so that a typo such as max_token is found and a busy client does not fill the log."""

    _logged: set[tuple[str, str]] = field(default_factory=set)

    def warn(self, where: str, names: Iterable[str]) -> None:
        """where: the path or event that has the fields."""
        for name in names:
            if (where, name) not in self._logged and len(self._logged) < MAX_NAMES and NAME.fullmatch(name):
                self._logged.add((where, name))
                log.warning("%s: the field %s is ignored: nothing here reads it", where, name)


MAX_MESSAGE = 500
CLIENT_CLOSED = 499
"""Status in log and metrics when the client disconnected before the response started."""
ENGINE_RETRY_AFTER = 2.0
"""Seconds after which a client may ask again where the engine starts or ends."""
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    421: "permission_error",
    503: "overloaded_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


@dataclass(eq=False)
class ApiError(Exception):
    """A response with an error object. param: path of the field in the request."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self.message = self.message[:MAX_MESSAGE]

    def __str__(self) -> str:
        return self.message

    def at(self, param: str) -> ApiError:
        if param == self.param:
            return self
        message = f"{param}: {self.message.removeprefix(f'{self.param}: ')}"
        return ApiError(self.status, message, param=param, code=self.code, retry_after=self.retry_after)

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def response(self) -> Response:
        headers = dict(self.headers or {})
        if self.retry_after is not None:
            headers["retry-after"] = str(min(120, max(1, math.ceil(self.retry_after))))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, media_type="application/json")

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject a WebSocket handshake, with the error object."""
        if scope["type"] == "websocket":
            await receive()
        await self.response()(scope, receive, send)


class ClientLeft(Exception):
    """The client disconnected before the end of its response."""


class ResponseCut(Exception):
    """A response that has started cannot be completed, so its connection is closed. The cause has been logged."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def invalid(field: str, problem: str, code: str | None = None) -> ApiError:
    """400 that names a field of the request, and what is wrong with it."""
    return bad_request(f"{field}: {problem}.", field, code)


@contextmanager
def renamed(name: Callable[[ApiError], ApiError]) -> Iterator[None]:
    """Raise the errors of a request as what `name` makes of them."""
    try:
        yield
    except (ApiError, InputError, EngineError) as error:
        raise name(as_api_error(error)) from error


def as_api_error(error: Exception) -> ApiError:
    """The error response for an exception. Unexpected exceptions are logged and become a 500."""
    match error:
        case ApiError():
            return error
        case EngineError():
            named = error.field is None or error.message.startswith(error.field)
            message = error.message if named else f"{error.field}: {error.message}"
            message = message.removesuffix(".") + "."
            return ApiError(error.status, message, param=error.field, code=error.code, retry_after=error.retry_after)
        case InputError():
            return bad_request(f"{error.field}: {error}.", error.field)
        case msgspec.ValidationError():
            path, problem = explain(str(error))
            return bad_request(f"{path}: {problem}." if path else f"The JSON {problem}.", path or None)
        case msgspec.DecodeError() | RecursionError() | UnicodeDecodeError():
            return bad_request(f"The JSON is not valid: {unreadable(error)}.", code="invalid_json")
        case OSError() if no_space(error):
            log.error("the disk is full: %s", error)
            return ApiError(507, "The server's disk is full.", code="insufficient_storage")
        case TimeoutError():
            return ApiError(504, "The request timed out (request_timeout).", code="timeout")
        case ResponseCut():
            return ApiError(500, "The response could not be completed.", code="internal_error")
        case _:
            log.error("unexpected error", exc_info=error)
            return ApiError(500, "Internal server error; the server's log has the details.", code="internal_error")


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute] = ()) -> None:
    """Answer what no route takes. routes: all routes of the application, to tell which methods a path allows."""

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return _other_method(request, routes)
        return ApiError(error.status_code, "The request cannot be processed.", headers=error.headers).response()

    async def no_path(scope: Scope, receive: Receive, send: Send) -> None:
        await _no_such_path(scope["path"], routes, socket=scope["type"] == "websocket").respond(scope, receive, send)

    app.router.default = no_path
    app.add_exception_handler(HTTPException, http)


OTHER_NAMES = {"/score": "/v1/rerank", "/v2/rerank": "/v1/rerank"}
"""Paths of other servers, without /v1, and what does the same here."""


def _no_such_path(path: str, routes: Sequence[BaseRoute], *, socket: bool) -> ApiError:
    """404, or 426 for the path of a WebSocket. Names the path that a client with a wrong base URL, or a slash too many,
    must have meant."""
    if any(isinstance(route, Route | WebSocketRoute) and route.path_regex.match(path) for route in routes):
        message = "This path is not a WebSocket: send an HTTP request without an upgrade."
        return ApiError(404, message, code="not_found") if socket else UPGRADE_REQUIRED
    parts = [part for part in path.split("/") if part not in ("", "v1")]
    short = "/".join(("", *parts))
    known = {getattr(route, "path", None) for route in routes if isinstance(route, WebSocketRoute) or not socket}
    meant = next((path for path in (f"/v1{short}", short, OTHER_NAMES.get(short)) if path in known), None)
    hint = f"did you mean {meant}?" if meant else "GET /docs describes the others."
    return ApiError(404, f"This server has no such path; {hint}", code="not_found")


UPGRADE_REQUIRED = ApiError(
    426,
    "This path is a WebSocket: connect with ws:// or wss:// and an HTTP/1.1 upgrade.",
    code="upgrade_required",
    headers={"upgrade": "websocket", "connection": "upgrade"},
)


def _other_method(request: Request, routes: Sequence[BaseRoute]) -> Response:
    """405 with the allowed methods."""
    path = request.scope["path"]
    matching = [route for route in routes if isinstance(route, Route) and route.path_regex.match(path)]
    allow = ", ".join(sorted(set[str]().union(*(route.methods or () for route in matching))))
    message = f"Method not allowed; this path allows {allow}."
    return ApiError(405, message, code="method_not_allowed", headers={"allow": allow}).response()


WHERE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
VALUE = "[...]"
"""The end of the path of an object's value, whose key the message leaves out."""
MISSING = re.compile(r"^Object missing required field `(\w+)`")
UNKNOWN = re.compile(r"^Object contains unknown field `(\w{1,64})`$")
LIMIT = re.compile(r"^Expected `\w+` (<=|>=|<|>) (\S+)$")
LENGTH = re.compile(r"^Expected `(\w+)` of length (<=|>=) (\d+)$")
KIND = re.compile(r"^Expected `([^`]+)`, got `(\w+)`$")
TRUNCATED = "Input data was truncated"
"""msgspec's message of a text that ends within a value."""

KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
GIVEN = KINDS | {"float": "a decimal number", "bool": "a boolean"}
OUT_OF_RANGE = "Number out of range"
UNBOUNDED = {
    "Integer value out of range": "must have at most 4300 digits",
    OUT_OF_RANGE: "must be between -1.8e+308 and 1.8e+308",
}
"""msgspec's messages of numbers that it cannot hold, whatever the field allows."""
BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
ITEMS = {"str": "character", "array": "item", "object": "entry"}
PLURAL = {"entry": "entries"}


def explain(text: str) -> tuple[str, str]:
    """The path of a value, empty for the whole body, and what is wrong with it, of a message of
    msgspec.ValidationError. Neither repeats the value."""
    where = WHERE.search(text)
    path, problem = (where["path"], text[: where.start()]) if where else ("", text)
    if named := MISSING.match(problem) or UNKNOWN.match(problem):
        words = "this field is required" if named.re is MISSING else "there is no such field"
        return (f"{path}.{named[1]}" if path else named[1]), words
    words = _words(problem)
    if path.endswith(VALUE):
        return path.removesuffix(VALUE), f"each value {words}"
    return path, f"each key {words}" if where and where["key"] else words


def _words(problem: str) -> str:
    if limit := LIMIT.match(problem):
        return f"must be {BOUNDS[limit[1]]} {limit[2].removesuffix('.0')}"
    if length := LENGTH.match(problem):
        item = ITEMS.get(length[1], "item")
        return f"must have {BOUNDS[length[2]]} {length[3]} {item if length[3] == '1' else PLURAL.get(item, item + 's')}"
    if kind := KIND.match(problem):
        return f"must be {one_of(kinds(kind[1].split(' | ')))}; {GIVEN.get(kind[2], kind[2])} was given"
    if problem.startswith("Object contains unknown field"):
        return "has a field that is not known"
    return UNBOUNDED.get(problem, problem)


def unreadable(error: msgspec.DecodeError | RecursionError | UnicodeDecodeError) -> str:
    """Why a text could not be read as JSON, and where; nothing of the text itself."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case _:
            problem = str(error)
            return "it ends too early" if problem == TRUNCATED else problem.removeprefix("JSON is malformed: ")


def kinds(names: list[str]) -> list[str]:
    """msgspec's names of types in words. null, which is the same as leaving a field out, is not offered."""
    return [KINDS.get(name, name) for name in names if name != "null" or names == ["null"]]


def one_of(choices: list[str]) -> str:
    """`a`, `a or b`, `one of a, b, c`."""
    return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
