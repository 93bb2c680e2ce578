"""data: URLs and their base64."""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.media.fetch import declared_type, decode_base64, is_data_url, payload_of


@given(st.binary(max_size=200))
def test_round_trip(data: bytes) -> None:
    url = "data:image/PNG;charset=x;base64," + base64.b64encode(data).decode()
    assert declared_type(url) == "image/png"
    assert decode_base64(payload_of(url, field="f"), field="f", max_bytes=200) == data


@pytest.mark.parametrize(
    "url", ["data:", "data:image/png,abc", "data:base64,abc", "data:;base64" + "x" * 300 + ",", "https://x/y,z"]
)
def test_other_forms_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="data URL") as caught:
        payload_of(url, field="f")
    assert caught.value.field == "f"


@pytest.mark.parametrize("payload", ["ab", "ab=c", "a b=", "ab\n=", "äöü=", "????", "a-b-c", "%41AAA", "AA%3", "%"])
def test_base64_is_strict(payload: str) -> None:
    with pytest.raises(InputError, match="base64"):
        decode_base64(payload, field="f", max_bytes=100)


@pytest.mark.parametrize("size", [198, 199, 200])
def test_other_spellings_of_base64_are_taken(size: int) -> None:
    """Python's urlsafe_b64encode, JavaScript's base64url without padding, and URLs that were percent-encoded."""
    data = bytes(range(255, 255 - size, -1))
    standard = base64.b64encode(data).decode()
    safe = base64.urlsafe_b64encode(data).decode()
    escaped = quote(standard, safe="")
    assert len({standard, safe, escaped}) == 3
    for spelling in (safe, safe.rstrip("="), escaped, re.sub("%..", lambda code: code[0].lower(), escaped)):
        assert decode_base64(spelling, field="f", max_bytes=len(spelling)) == data


def test_length_is_checked_before_decoding() -> None:
    assert decode_base64("AAAA", field="f", max_bytes=3) == bytes(3)
    with pytest.raises(InputError, match="at most 3 bytes"):
        decode_base64("AAAAAAA!", field="f", max_bytes=3)
    with pytest.raises(InputError, match="at most 2 bytes"):
        decode_base64("AAAA", field="f", max_bytes=2)


def test_scheme_in_any_case() -> None:
    assert is_data_url("DATA:image/png;base64,")
    assert not is_data_url("https://data:")


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t", "\f", "\v"])
def test_wrapped_base64_is_taken(space: str) -> None:
    data = bytes(range(200))
    encoded = base64.b64encode(data).decode()
    wrapped = space + "".join(encoded[at : at + 76] + space for at in range(0, len(encoded), 76))
    payload = payload_of("data:image/png;base64," + wrapped, field="f")
    assert decode_base64(payload, field="f", max_bytes=len(data)) == data
