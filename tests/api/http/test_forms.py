"""Forms: read in whatever pieces they come, complete, with errors that name the fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from service.api.http import forms
from service.api.http.errors import ApiError
from service.api.http.forms import FormLimits, form_boundary, read_form

LIMITS = FormLimits({"name", "text"}, "sample", max_fields=2, max_characters=4)


def part(name: str | None, value: bytes, extra: str = "") -> bytes:
    named = "" if name is None else f'; name="{name}"'
    return f"--x\r\nContent-Disposition: form-data{named}{extra}\r\n\r\n".encode() + value + b"\r\n"


FILE = part("sample", b"\x00" * 5000, '; filename="a"')
END = b"--x--\r\n"


def read(body: bytes, size: int = 1 << 16, limits: FormLimits = LIMITS) -> tuple[dict[str, str], dict[str, bytes]]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def whole() -> tuple[dict[str, str], dict[str, bytes]]:
        form = await read_form(b"x", pieces(), limits)
        try:
            return form.texts, {name: await file.read() for name, file in form.files.items()}
        finally:
            await form.close()

    return asyncio.run(whole())


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_the_pieces_do_not_matter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "IN_MEMORY", 1000)
    body = part("name", "Änna".encode()) + FILE + part("name", b"Bert") + END
    assert read(body, size) == ({"name": "Bert"}, {"sample": b"\x00" * 5000})


@pytest.mark.parametrize("body", [part("name", b"A"), part("name", b"A") + FILE, FILE[:-100], b"--x\r\nContent-"])
def test_a_body_without_its_end_is_refused(body: bytes) -> None:
    assert "not complete" in refused(body).message


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "does not begin with the boundary", None),
        (b"--y\r\n" + part("name", b"A") + END, "does not begin with the boundary", None),
        (part(None, b"A") + END, "Part 1 of the form has no name", None),
        (part("name", b"A") + part("", b"A") + END, "Part 2 of the form has no name", None),
        (part("text", b"A" * 5) + END, "text: too long: 5 characters given, at most 4 allowed.", "text"),
        (part("text", b"A" * 5000) + END, "text: too long: at most 4 characters allowed.", "text"),
        (part("secret", b"A" * 5) + END, "Part 1 of the form, a field that is not known: too long", None),
        (part("text", b"\xed\xa0\x80") + END, "text: the text is not UTF-8.", "text"),
        (part("name", b"A") * 3 + END, "too many fields: at most 2", None),
        (FILE * 2 + END, "too many files: at most one, sample,", None),
        (b"--x\r\nno header\r\n\r\n" + END, "its part 1 cannot be read", None),
    ],
)
def test_each_fault_has_its_own_message(body: bytes, message: str, param: str | None) -> None:
    error = refused(body)
    assert message in error.message and error.param == param


def test_as_many_fields_as_allowed_and_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        read(part("name", b"A") + part("text", "\U0001f600".encode() * 4) + FILE + END)[0]["text"] == "\U0001f600" * 4
    )


def test_the_boundary_is_all_that_is_taken_from_the_header() -> None:
    assert form_boundary("multipart/form-data; charset=utf-7; boundary=abc") == b"abc"
    assert form_boundary('Multipart/Form-Data; boundary="a b"') == b"a b"
    assert form_boundary("application/json") is form_boundary("") is None
    for header in (
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 300,
    ):
        with pytest.raises(ApiError, match="boundary"):
            form_boundary(header)
