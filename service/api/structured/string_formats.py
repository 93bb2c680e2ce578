"""Formats and patterns of strings, as JSON Schema, pydantic and Zod have them, in patterns that llguidance compiles."""

from __future__ import annotations

import re

LIBRARY_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""What llguidance has patterns for."""
LONGEST = {"date-time": 35, "time": 24, "duration": 32, "email": 254, "hostname": 253, "uri": 2048}
"""Characters of the longest answer, where the pattern has no end: fractions of a second could go on for ever."""
FREE_FORMATS = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""What pydantic and OpenAPI say of strings that may be any."""
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:", f":(?::{_H16}){{1,7}}", "::"]
    + [f"(?:{_H16}:){{1,{before}}}(?::{_H16}){{1,{7 - before}}}" for before in range(1, 7)]
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$"
PATTERNED_FORMATS = {
    "base64": "^(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?$",
    "base64url": "^(?:[0-9a-zA-Z_-]{4})*(?:[0-9a-zA-Z_-]{2,3})?$",
    "cidrv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}/(?:[12]?[0-9]|3[0-2])$",
    "cidrv6": f"^(?:{_IPV6})/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])$",
    "cuid": "^[cC][0-9a-z]{6,31}$",
    "cuid2": "^[0-9a-z]{1,32}$",
    "e164": r"^\+[1-9][0-9]{6,14}$",
    "emoji": r"^[\p{Extended_Pictographic}\p{Emoji_Component}]{1,64}$",
    "guid": _UUID.format("[0-9a-fA-F]").replace("[89abAB]", "[0-9a-fA-F]"),
    "ksuid": "^[0-9A-Za-z]{27}$",
    "lowercase": "^[^A-Z]*$",
    "nanoid": "^[0-9A-Za-z_-]{21}$",
    "ulid": "^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$",
    "uppercase": "^[^a-z]*$",
    "xid": "^[0-9a-vA-V]{20}$",
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
"""Formats of Zod, as it checks them, of pydantic (uuid1 to uuid8) and of .NET (guid). base64url: Zod's own pattern
allows lengths that its check does not."""

LOOK_AROUND = "look-ahead and look-behind are not supported"
_ZOD_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_WITHOUT_LOOK_AHEAD = {
    # Zod's email and duration, pydantic's Decimal.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_ZOD_TIME})?|{_ZOD_TIME})$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d{1,20}\.?\d{0,20}|\.\d{1,20})$",
}
"""The patterns with look-ahead that generators are known to write -> the same, or less, without it."""
_LENGTH = re.compile(r"\^\(\?=\.\{(\d+),(\d+)\}(?:\\\.\?)?\$\)")
"""A length said by look-ahead, as Zod's hostname does."""
_SIGN = re.compile(r"\\.?|\[\^?(?:\\.|[^\]\\])*\]?|\(\?<?[=!]", re.DOTALL)
_NEGATED = re.compile(r"(\\.)|\[\^(?!\\x00)", re.DOTALL)


def known_pattern(pattern: str) -> tuple[str, int, int | None]:
    """(pattern that the library can compile, least and most characters). ValueError for look-around and
    back-references."""
    pattern, least, most = _WITHOUT_LOOK_AHEAD.get(pattern, pattern), 0, None
    if length := _LENGTH.match(pattern):
        pattern, least, most = f"^{pattern[length.end() :]}", int(length[1]), int(length[2])
    for sign in _SIGN.findall(pattern):
        if sign[0] == "(":
            raise ValueError(LOOK_AROUND)
        if sign[0] == "\\" and sign[1:] in tuple("123456789k"):
            raise ValueError("back-references are not supported")
    # Inside a JSON string, the library lets quotation marks and backslashes through a class that excludes them if it
    # holds all control characters. No answer needs NUL.
    return _NEGATED.sub(lambda found: found[1] or r"[^\x00", pattern), least, most
