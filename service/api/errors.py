"""OpenAI error objects. Messages are ours: nothing of the input, no path and no repr gets into an answer."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from models.errors import InputError
from service.engine.client import EngineError
from service.voices import DISK_FULL

log = logging.getLogger(__name__)

MAX_MESSAGE = 500
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
WHERE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
MISSING = re.compile(r"^Object missing required field `(\w+)`")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """An answer with an error object. `param` names the request's field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, kind, self.param, self.code)))

    def headers(self) -> dict[str, str]:
        headers = (
            {} if self.retry_after is None else {"retry-after": str(min(120, max(1, math.ceil(self.retry_after))))}
        )
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers(), media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception; those that are nobody's known fault become a 500 and are logged."""
    match error:
        case ApiError():
            return error
        case EngineError():
            return ApiError(
                error.status, error.message, param=error.field, code=error.code, retry_after=error.retry_after
            )
        case InputError():
            return bad_request(f"{error.field}: {error}", error.field)
        case msgspec.ValidationError():
            return _describe(str(error))
        case msgspec.DecodeError() | RecursionError() | UnicodeDecodeError():
            return bad_request("The body is not valid JSON.", code="invalid_json")
        case OSError() if error.errno in DISK_FULL:
            log.error("the disk is full: %s", error)
            return ApiError(507, "The server's disk is full.", code="insufficient_storage")
        case TimeoutError():
            return ApiError(504, "The request took too long.", code="timeout")
        case _:
            log.error("unexpected error", exc_info=error)
            return ApiError(500, "The server failed on this request; its log says why.", code="internal_error")


def _describe(text: str) -> ApiError:
    """msgspec's one-line account, split into message and param."""
    where = WHERE.search(text)
    problem = text[: where.start()] if where else text
    param = where[1] if where else ""
    if missing := MISSING.match(problem):
        param = f"{param}.{missing[1]}" if param else missing[1]
        problem = "This field is required"
    return bad_request(f"{param}: {problem}." if param else f"{problem}.", param or None)


def install_error_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers: Mapping[str, str] = error.headers or {}
        answer = ApiError(error.status_code, _http_message(error.status_code), code=_http_code(error.status_code))
        response = answer.response()
        response.headers.update(headers)
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fields = ", ".join(".".join(str(part)[:40] for part in problem["loc"][1:]) for problem in error.errors()[:5])
        return bad_request(f"These fields do not fit: {fields}.", fields.split(",")[0] or None).response()

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (
        ApiError,
        EngineError,
        InputError,
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
        TimeoutError,
        OSError,
        Exception,
    ):
        app.add_exception_handler(kind, known)


def _http_message(status: int) -> str:
    return {404: "There is no such path here.", 405: "This path does not take this method."}.get(
        status, "The request cannot be answered."
    )


def _http_code(status: int) -> str | None:
    return {404: "not_found", 405: "method_not_allowed"}.get(status)
