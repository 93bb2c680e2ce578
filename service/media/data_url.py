"""data: URLs (RFC 2397), base64 only."""

from __future__ import annotations

import base64
import binascii

from models.interfaces.errors import InputError

SPACES = " \t\n\r\f\v"
WITHOUT_SPACES = str.maketrans("", "", SPACES)
URL_SAFE = str.maketrans("-_", "+/")
ESCAPED = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "="}
"""What clients that percent-encode a URL make of base64; anything else with a percent sign is none."""


def is_data_url(url: str) -> bool:
    return _begun(url)[:5].lower() == "data:"


def declared_type(url: str) -> str:
    """The media type that a data: URL declares, in lower case; "" for any other URL. A hint: formats are detected from
    the bytes."""
    return _begun(url)[5:256].partition(",")[0].partition(";")[0].strip().lower() if is_data_url(url) else ""


def _begun(url: str) -> str:
    """The URL without whitespace before it, which browsers ignore (https://url.spec.whatwg.org, basic URL parser)."""
    return url.lstrip(SPACES) if url[:1].isspace() else url


def payload_of(url: str, *, field: str) -> str:
    """The base64 in `data:<media type>[;param=value]*;base64,<payload>`. Raises InputError for any other form."""
    url = _begun(url)
    # Only a short prefix is searched for the comma: the URL may have megabytes.
    comma = url.find(",", 0, 256)
    header = url[5:comma] if is_data_url(url) and comma > 0 else ""
    _, *parameters = header.split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InputError(field, "a data URL must have the form data:<media type>;base64,<data>")
    return url[comma + 1 :]


def without_spaces(payload: str) -> str:
    """Base64 as one line: tools like `base64 FILE` wrap what they write."""
    return payload.translate(WITHOUT_SPACES) if any(space in payload for space in SPACES) else payload


def decode_base64(payload: str, *, field: str, max_bytes: int) -> bytes:
    """Decodes base64 of at most `max_bytes` bytes, also in the URL-safe alphabet or with percent signs. Only ASCII
    whitespace is ignored; the length is checked before decoding. InputError."""
    payload = without_spaces(payload)
    if len(payload) > (max_bytes + 2) // 3 * 4:
        raise InputError(field, f"the data is too large: at most {max_bytes} bytes allowed")
    try:
        try:
            data = base64.b64decode(payload, validate=True)
        except ValueError:  # so that the usual form costs no search
            data = base64.b64decode(_standard(payload), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(field, "the data is not valid base64") from error
    if len(data) > max_bytes:
        raise InputError(field, f"the data is too large: at most {max_bytes} bytes allowed")
    return data


def _standard(payload: str) -> str:
    """Base64 in the standard alphabet. In the URL-safe one the padding may be left out, as in tokens (RFC 7515)."""
    for escaped, character in ESCAPED.items():
        payload = payload.replace(escaped, character)
    if "-" in payload or "_" in payload:
        payload = payload.translate(URL_SAFE)
        payload += "=" * (-len(payload) % 4)
    return payload
