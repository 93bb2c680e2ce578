"""Bodies that are forms (multipart/form-data), read part by part.

Starlette's reader looks up whatever charset a client names, which Python remembers for ever, and accepts a body that
ends in the middle of a part. Here texts are UTF-8 (RFC 7578), and errors name the field that is meant.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection
from dataclasses import dataclass, field
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import UploadFile

from service.api.http.errors import ApiError, bad_request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

KIND = b"multipart/form-data"
DISPOSITION = b"content-disposition"
LONGEST_BOUNDARY = 256
"""Bytes. The parser takes no longer one; RFC 2046 allows 70."""
IN_MEMORY = 1 << 20
"""Bytes of a file; larger ones go to disk while they are read."""
BYTES_PER_CHARACTER = 4
"""At most, in UTF-8."""


@dataclass(frozen=True)
class FormLimits:
    """known: names of fields, which errors may repeat. file: the field that is a file; a form has one file at most.
    max_characters: of each other field."""

    known: Collection[str]
    file: str
    max_fields: int
    max_characters: int


@dataclass
class Form:
    """Of fields that are given twice, the last one counts."""

    texts: dict[str, str] = field(default_factory=dict)
    files: dict[str, UploadFile] = field(default_factory=dict)

    async def close(self) -> None:
        for file in self.files.values():
            await file.close()


def form_boundary(content_type: str) -> bytes | None:
    """The boundary that a form's Content-Type names; None for a body that is no form. ApiError for a form without a
    usable one."""
    kind, options = parse_options_header(content_type)
    if kind != KIND:
        return None
    boundary = options.get(b"boundary")
    if not boundary:
        message = "Content-Type: has no boundary; HTTP clients set this header themselves along with a form."
        raise bad_request(message)
    if len(boundary) > LONGEST_BOUNDARY:
        raise bad_request(
            f"Content-Type: the boundary is too long: {len(boundary)} bytes given, at most {LONGEST_BOUNDARY} allowed."
        )
    return boundary


async def read_form(boundary: bytes, body: AsyncIterable[bytes], limits: FormLimits) -> Form:
    """The form, with files rewound; the caller closes it. ApiError names the field that is wrong. Large files go to
    disk."""
    reader = _Reader(limits)
    parser = MultipartParser(boundary, reader.callbacks())
    try:
        async for chunk in body:
            try:
                parser.write(chunk)
            except FormParserError as error:
                raise reader.invalid() from error
            for file, data in reader.take():
                await file.write(data)
        if not reader.ended:
            raise (
                reader.invalid()
                if not reader.parts
                else bad_request("The form is not complete: the body ends before the boundary that closes it.")
            )
        for file in reader.form.files.values():
            await file.seek(0)
    except BaseException:
        for file in reader.opened:
            file.file.close()
        raise
    return reader.form


class _Reader:
    """What the parser has found so far."""

    def __init__(self, limits: FormLimits) -> None:
        self.form = Form()
        self.opened: list[UploadFile] = []
        self.parts = 0
        self.ended = False
        self._limits = limits
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._name = ""
        self._text = bytearray()
        self._file: UploadFile | None = None
        self._to_write: list[tuple[UploadFile, bytes]] = []

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._all,
        }

    def take(self) -> list[tuple[UploadFile, bytes]]:
        """What is to be written to files."""
        taken, self._to_write = self._to_write, []
        return taken

    def invalid(self) -> ApiError:
        """For a body that the parser cannot read."""
        if not self.parts:
            return bad_request("The body does not begin with the boundary that Content-Type names.")
        return bad_request(f"The form is not valid: its part {self.parts} cannot be read.")

    def _begin(self) -> None:
        self.parts += 1
        self._header = self._value = self._disposition = b""
        self._text = bytearray()
        self._file = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == DISPOSITION:
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if not (name := options.get(b"name")):
            raise bad_request(f"Part {self.parts} of the form has no name: its Content-Disposition must have one.")
        self._name = name.decode(errors="replace")
        if b"filename" not in options:
            if self.parts - len(self.opened) > self._limits.max_fields:
                most = self._limits.max_fields
                raise bad_request(f"The form has too many fields: at most {most}, and one file, are allowed.")
            return
        if self.opened:
            raise bad_request(f"The form has too many files: at most one, {self._limits.file}, is allowed.")
        self._file = UploadFile(SpooledTemporaryFile(IN_MEMORY), size=0)  # type: ignore[arg-type]  # noqa: SIM115
        self.opened.append(self._file)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self._to_write.append((self._file, data[start:end]))
            return
        if len(self._text) + end - start > self._limits.max_characters * BYTES_PER_CHARACTER:
            raise self._refused(f"too long: at most {self._limits.max_characters} characters allowed")
        self._text += data[start:end]

    def _end(self) -> None:
        if self._file is not None:
            self.form.files[self._name] = self._file
            return
        try:
            text = self._text.decode()
        except UnicodeDecodeError:
            raise self._refused("the text is not UTF-8") from None
        if len(text) > (most := self._limits.max_characters):
            raise self._refused(f"too long: {len(text)} characters given, at most {most} allowed")
        self.form.texts[self._name] = text

    def _all(self) -> None:
        self.ended = True

    def _refused(self, problem: str) -> ApiError:
        if self._name in self._limits.known:
            return bad_request(f"{self._name}: {problem}.", self._name)
        return bad_request(f"Part {self.parts} of the form, a field that is not known: {problem}.")
