"""What z.toJSONSchema of Zod 4 writes for strings: the schema, answers that fit, and answers that do not."""

from __future__ import annotations

from typing import Any

_HEX = "[0-9a-fA-F]"
_PART = f"{_HEX}{{1,4}}"
_IPV6 = (
    f"(({_PART}:){{7}}{_PART}|({_PART}:){{1,7}}:|({_PART}:){{1,6}}:{_PART}|({_PART}:){{1,5}}(:{_PART}){{1,2}}"
    f"|({_PART}:){{1,4}}(:{_PART}){{1,3}}|({_PART}:){{1,3}}(:{_PART}){{1,4}}|({_PART}:){{1,2}}(:{_PART}){{1,5}}"
    f"|{_PART}:((:{_PART}){{1,6}})|:((:{_PART}){{1,7}}|:))"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_DATE = (
    r"(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1[02])-"
    r"(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?"
_UUID = "123e4567-e89b-12d3-a456-426614174000"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"


def _string(pattern: str = "", **more: str) -> dict[str, Any]:
    return {"type": "string", **more, **({"pattern": pattern} if pattern else {})}


FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "email": (
        _string(
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
            format="email",
        ),
        ["a@b.cd", "first.last+tag@mail.example.org", "o'neil@x-y.com"],
        [".a@b.cd", "a..b@c.de", "a.@b.cd", "a@b", "a@b.c", "a b@c.de", "a@-b.cd"],
    ),
    "uuid": (
        _string(
            f"^({_HEX}{{8}}-{_HEX}{{4}}-[1-8]{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"
            "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
            format="uuid",
        ),
        [_UUID, "00000000-0000-0000-0000-000000000000"],
        [_UUID.replace("-12d3", "-92d3"), _UUID[:-1]],
    ),
    "datetime": (
        _string(f"^{_DATE}T(?:{_TIME}(?:Z))$", format="date-time"),
        ["2024-02-29T12:34:56Z", "2026-01-31T00:00:00.123Z"],
        ["2023-02-29T12:34:56Z", "2026-01-31T00:00:00+01:00", "2026-01-31"],
    ),
    "datetime with offset": (
        _string(f"^{_DATE}T(?:{_TIME}(?:Z|([+-](?:[01]\\d|2[0-3]):[0-5]\\d)))$", format="date-time"),
        ["2026-01-31T00:00:00+01:00", "2026-01-31T00:00:00Z"],
        ["2026-01-31T00:00:00"],
    ),
    "date": (_string(f"^{_DATE}$", format="date"), ["2024-02-29"], ["2023-02-29", "2026-02-30"]),
    "time": (_string(f"^{_TIME}$"), ["12:34", "23:59:59.5"], ["24:00", "12:34Z"]),
    "duration": (
        _string(
            r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            format="duration",
        ),
        ["P3W", "P1Y2M3D", "PT5M", "P1DT2H"],
        ["P", "PT", "P1DT", "P1W2D", "P1.5D"],
    ),
    "ipv4": (_string(rf"^(?:{_BYTE}\.){{3}}{_BYTE}$", format="ipv4"), ["10.0.0.255"], ["10.0.0.256", "1.2.3"]),
    "ipv6": (_string(f"^{_IPV6}$", format="ipv6"), ["::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1::2::3", "1:2"]),
    "cidrv4": (
        _string(
            rf"^({_BYTE[3:-1].join('()')}\.){{3}}{_BYTE[3:-1].join('()')}\/([0-9]|[1-2][0-9]|3[0-2])$", format="cidrv4"
        ),
        ["10.0.0.0/8"],
        ["10.0.0.0/33", "10.0.0.0"],
    ),
    "cidrv6": (
        _string(rf"^{_IPV6}\/(12[0-8]|1[01][0-9]|[1-9]?[0-9])$", format="cidrv6"),
        ["fe80::/10", "::/0", "1:2:3:4:5:6:7:8/128", "1::3:4/9"],
        ["fe80::/129", "::1"],
    ),
    "cuid": (_string("^[cC][0-9a-z]{6,}$", format="cuid"), ["cjld2cjxh0000"], ["x123456"]),
    "cuid2": (_string("^[0-9a-z]+$", format="cuid2"), ["tz4a98xxat96"], ["", "A"]),
    "ulid": (
        _string("^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$", format="ulid"),
        ["01ARZ3NDEKTSV4RRFFQ69G5FAV"],
        ["01ARZ3NDEKTSV4RRFFQ69G5FAU", "01ARZ3NDEK"],
    ),
    "xid": (_string("^[0-9a-vA-V]{20}$", format="xid"), ["9m4e2mr0ui3e8a215n4g"], ["9m4e2mr0ui3e8a215n4z"]),
    "ksuid": (_string("^[A-Za-z0-9]{27}$", format="ksuid"), ["0ujtsYcgvSTl8PAuAdqWYSMnLOv"], ["0ujtsYcg"]),
    "nanoid": (_string("^[a-zA-Z0-9_-]{21}$", format="nanoid"), ["V1StGXR8_Z5jdHi6B-myT"], ["V1StGXR8"]),
    "emoji": (
        _string(r"^[\p{Extended_Pictographic}\p{Emoji_Component}]+$", format="emoji"),
        ["😀", "👍🏽"],
        ["a", "", "😀a"],
    ),
    "emoji, earlier": (
        _string(r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$", format="emoji"),
        ["😀"],
        ["a"],
    ),
    "base64": (
        _string(
            "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
            format="base64",
            contentEncoding="base64",
        ),
        ["", "YQ==", "YWJj", "YWI="],
        ["YQ", "YQ=", "YQ==YQ==", "Y-=="],
    ),
    "base64url": (
        _string("^[A-Za-z0-9_-]*$", format="base64url", contentEncoding="base64url"),
        ["", "YQ", "YWI", "YW-_"],
        ["Y", "YQ==", "YWJjY"],
    ),
    "e164": (_string(r"^\+[1-9]\d{6,14}$", format="e164"), ["+14155552671"], ["+0415555", "4155552671"]),
    "lowercase": (_string("^[^A-Z]*$", format="lowercase"), ["aé1"], ["aB"]),
    "uppercase": (_string("^[^a-z]*$", format="uppercase"), ["AB1"], ["aB"]),
    "url": (_string(format="uri"), ["https://example.org/a?b#c"], ["not a url"]),
    "hostname": (
        _string(
            rf"^(?=.{{1,253}}\.?$){_LABEL}(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{{0,61}}[0-9a-zA-Z])?)*\.?$",
            format="hostname",
        ),
        ["example.org", "a", "a." * 126 + "a"],
        ["-a", "a..b", "a." * 127 + "a"],
    ),
    "domain": (
        _string(rf"^(?=.{{1,253}}$)({_LABEL}\.)+[a-zA-Z]{{2,63}}$"),
        ["example.org", "ab." * 83 + "org"],
        ["example", "ab." * 84 + "org"],
    ),
}
