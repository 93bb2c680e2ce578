"""Bodies of multipart/form-data: one file, and fields of text."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from service.api.http.errors import bad_request, invalid
from service.api.http.json_body import of_texts

T = TypeVar("T", bound=msgspec.Struct)

MAX_FIELDS, MAX_CHARACTERS = 16, 4096
"""Of a form: fields beside the file, and characters of each."""


class _FormParser(MultiPartParser):
    """starlette's parser takes a body that ends within a part, without that part."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


async def _parsed(request: Request, needed: str, max_fields: int) -> FormData:
    """The parsed body; max_body limits it. needed: the fields that it must have, for the error about another body."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"").decode("latin-1")
    if kind != b"multipart/form-data" or not re.fullmatch(r'[^"\\]{1,256}', boundary):
        raise bad_request(f"The body must be multipart/form-data with a boundary, with {needed}.")

    async def whole() -> AsyncGenerator[bytes, None]:
        async for chunk in request.stream():
            yield chunk
        if not parser.complete:
            raise bad_request("The form is not complete: the body ends before the boundary that closes it.")

    parser = _FormParser(
        # Python remembers for ever whatever name of a charset it looks up. Forms are UTF-8 (RFC 7578), as read_form
        # reads.
        Headers({"content-type": f'multipart/form-data; charset=latin-1; boundary="{boundary}"'}),
        whole(),
        max_files=1,
        max_fields=max_fields,
        max_part_size=4 * MAX_CHARACTERS,
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise bad_request(f"The form is not valid: {error.message}") from error


async def read_form(
    request: Request, kind: type[T], file: str, needed: str, lists: Collection[str] = (), max_fields: int = MAX_FIELDS
) -> tuple[T, bytes | None, set[str]]:
    """The texts of a form as a `kind`, the bytes of its file if it has one, and the names that `kind` does not have.
    file: the field of the file, "" in the struct. needed: the fields that it must have, for the error about another
    body.

    An empty text is none. Of several the last one counts, but for the fields in `lists`, which may end in []. ApiError
    or a msgspec error names the field that does not fit."""
    form = await _parsed(request, needed, max_fields)
    try:
        sample, values = form.get(file) or None, dict[str, Any]()
        if isinstance(sample, str):
            raise invalid(file, "must be a file")
        for name in dict.fromkeys(form):
            key, bracket, _ = name.partition("[")
            texts = [text for value in form.getlist(name) if name != file and (text := _text(name, value))]
            if key in lists:
                values[key] = [*values.get(key, ()), *texts]
            elif texts or (name == file and sample is not None):
                values[key] = {} if bracket else "".join(texts[-1:])
        data = None if sample is None else await sample.read()
        return of_texts(values, kind), data, values.keys() - set(kind.__struct_fields__)
    finally:
        await form.close()


def _text(name: str, value: UploadFile | str) -> str:
    if isinstance(value, UploadFile):
        raise invalid(name, "must be text, not a file")
    try:
        text = value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise invalid(name, "the text is not UTF-8") from None
    if len(text) > MAX_CHARACTERS:
        raise invalid(name, f"too long: {len(text)} characters given, at most {MAX_CHARACTERS} allowed")
    return text.strip()
