"""Formats of media files, recognised by their first bytes. The names in messages, what the libraries may read and
docs/formats.md come from this table."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["image", "video", "audio", "text"]

HEAD_BYTES = 1024
MP4_READERS: dict[Kind, str] = {"video": "mov,mp4,m4a,3gp,3g2,mj2", "audio": "mov,mp4,m4a,3gp,3g2,mj2"}
MKV_READERS: dict[Kind, str] = {"video": "matroska,webm", "audio": "matroska,webm"}


@dataclass(frozen=True)
class Format:
    """head: pattern of the first bytes. holds: what such files hold. readers: for what they are read, with Pillow's or
    FFmpeg's name of the format. confined: read as an image in a worker process alone. accept: of an <input>."""

    name: str
    holds: tuple[Kind, ...]
    head: bytes
    readers: dict[Kind, str] = field(default_factory=dict)
    accept: str = ""
    confined: bool = False


IMAGE: tuple[Kind, ...] = ("image",)
VIDEO: tuple[Kind, ...] = ("video",)
AUDIO: tuple[Kind, ...] = ("audio",)
TEXT: tuple[Kind, ...] = ("text",)
BRANDS = rb".{4}ftyp(?:.{8})?(?:.{4}){0,15}?"
"""Of ISO base media: the major one, or one of those behind the minor version."""
FORMATS: tuple[Format, ...] = (
    Format("JPEG", IMAGE, rb"\xff\xd8\xff", {"image": "JPEG"}, "image/jpeg"),
    Format("PNG", IMAGE, rb"\x89PNG", {"image": "PNG"}, "image/png"),
    Format("WebP", IMAGE, rb"RIFF.{4}WEBP", {"image": "WEBP"}, "image/webp"),
    Format("GIF", IMAGE, rb"GIF8", {"image": "GIF"}, "image/gif"),
    Format("a run-length BMP", IMAGE, rb"BM.{28}[\x01\x02]\0{3}"),  # Pillow decodes them in Python
    Format("BMP", IMAGE, rb"BM.{4}(?:\0{4}|.{8}[\x0c(48@l|]\0{3})", {"image": "BMP"}, "image/bmp"),
    Format("a camera's raw file", IMAGE, rb"II\*\0.{4}CR|II(?:RO|RS|U\0)|FUJIFILMCCD|.{4}ftypcrx "),
    Format("TIFF", IMAGE, rb"II\*\0|MM\0\*", {"image": "TIFF"}, "image/tiff", confined=True),
    Format("AVIF", IMAGE, BRANDS + rb"avi[fs]", {"image": "AVIF"}, "image/avif", confined=True),
    Format("HEIC", IMAGE, BRANDS + rb"he(?:i[cxms]|v[cxms])"),
    Format("HEIF", IMAGE, BRANDS + rb"(?:mi[fa][1f]|msf1)"),
    Format("BigTIFF", IMAGE, rb"II\+\0|MM\0\+"),
    Format("JPEG XL", IMAGE, rb"\xff\x0a|.{4}JXL "),
    Format("JPEG 2000", IMAGE, rb".{4}jP  |\xff\x4f\xff\x51"),
    Format("SVG", IMAGE, rb"(?:\xef\xbb\xbf)?\s*<(?:svg|\?xml.*?<svg|!doctype svg|!--.*?<svg)"),
    Format("PDF", IMAGE, rb"%PDF"),
    Format("EPS or PostScript", IMAGE, rb"%!PS|\xc5\xd0\xd3\xc6"),
    Format("ICO", IMAGE, rb"\0\0[\x01\x02]\0[^\0]"),
    Format("PSD", IMAGE, rb"8BPS"),
    Format("PPM, PGM or PBM", IMAGE, rb"P[1-7Ff][\s#]"),
    Format("M4A", AUDIO, rb".{4}ftypM4[AB]", {"audio": MP4_READERS["audio"]}, "audio/mp4"),
    Format(
        "MP4/MOV", VIDEO, rb"[\0-\x0f].{3}(?:ftyp|moov|mdat|wide|free|skip)", MP4_READERS, "video/mp4,video/quicktime"
    ),
    Format("MKV/WebM", VIDEO, rb"\x1a\x45\xdf\xa3", MKV_READERS, "video/webm,video/x-matroska,.mkv"),
    Format("AVI", VIDEO, rb"RIFF.{4}AVI ", {"video": "avi"}, "video/x-msvideo,.avi"),
    Format("FLV", VIDEO, rb"FLV\x01"),
    Format("WMV or WMA (ASF)", ("video", "audio"), rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
    Format("MPEG-TS", VIDEO, rb"(?:.{4})?\x47.{187}(?:.{4})?\x47"),
    Format("MPEG-PS", VIDEO, rb"\0\0\x01[\xba\xb3]"),
    Format("WAV", AUDIO, rb"(?:RIFF|RF64).{4}WAVE", {"audio": "wav"}, "audio/wav"),
    Format("FLAC", AUDIO, rb"fLaC", {"audio": "flac"}, "audio/flac"),
    Format("Ogg", ("video", "audio"), rb"OggS", {"audio": "ogg"}, "audio/ogg"),
    Format("AAC", AUDIO, rb"\xff[\xf0\xf1\xf8\xf9]", {"audio": "aac"}, "audio/aac"),
    Format("MP3", AUDIO, rb"ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa\xfb]", {"audio": "mp3"}, "audio/mpeg"),
    Format("AIFF", AUDIO, rb"FORM.{4}AIF[FC]"),
    Format("AU", AUDIO, rb"\.snd"),
    Format("CAF", AUDIO, rb"caff"),
    Format("AMR", AUDIO, rb"#!AMR"),
    Format("MIDI", AUDIO, rb"MThd"),
    Format("a ZIP archive", TEXT, rb"PK\x03\x04"),
    Format("an HTML page", TEXT, rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)*<(?:!doctype html|html|head|body)"),
    Format("XML text", TEXT, rb"(?:\xef\xbb\xbf)?\s*<\?xml"),
    Format("JSON text", TEXT, rb"\s*(?:\{\s*[\"}]|\[\s*[\[{\"\]])"),
    Format("text", TEXT, rb"(?:\xef\xbb\xbf)?[\t\n\r -~]{16}"),
)
_HEADS = [(one, re.compile(one.head, re.DOTALL | (re.IGNORECASE if b"<" in one.head else 0))) for one in FORMATS]

NOUNS = {"image": "picture", "video": "video", "audio": "sound"}
ARTICLES: dict[Kind, str] = {"image": "an ", "video": "a ", "audio": ""}
CONVERT = {
    "image": "convert it to PNG or JPEG",
    "video": "convert it to MP4 with H.264",
    "audio": "convert it to WAV or FLAC",
}
SEND: dict[tuple[Kind, Kind], str] = {
    ("video", "image"): "send it as image_url, or several JPEGs as data:video/jpeg;base64,FRAME,FRAME",
    ("image", "video"): "send it as video_url",
}


def recognise(data: bytes) -> Format | None:
    head = data[:HEAD_BYTES]
    return next((one for one, pattern in _HEADS if pattern.match(head)), None)


def is_confined(data: bytes) -> bool:
    """Whether a picture may only be decoded in a worker process: its library is large, or its decoder slow."""
    found = recognise(data)
    return found is not None and found.confined


def readers(kind: Kind) -> list[str]:
    """The libraries' names of the formats that are read as `kind`."""
    return list(dict.fromkeys(one.readers[kind] for one in FORMATS if kind in one.readers))


def supported(kind: Kind) -> str:
    """The formats that are read as `kind`: "JPEG, PNG and GIF are supported"."""
    *names, last = dict.fromkeys(one.name for one in FORMATS if kind in one.readers)
    return f"{', '.join(names)} and {last} are supported"


def refusal(data: bytes, kind: Kind) -> str:
    """What is wrong with data that cannot be opened as `kind`, and what to do."""
    found = recognise(data)
    if not data:
        return f"the {kind} is empty"
    if found is None:
        return f"not readable as {ARTICLES[kind]}{kind}; {supported(kind)}"
    if kind in found.readers:
        return f"the {kind} is damaged or truncated"
    if kind in found.holds:
        return f"the {kind} is {found.name}; {CONVERT[kind]}"
    if found.holds == TEXT:
        return f"the {kind} is {found.name}, not a {NOUNS[kind]}; a download may have failed"
    holds = found.holds[0]
    send = SEND.get((kind, holds), "") if holds in found.readers else ""
    return f"the {kind} is a {NOUNS[holds]} ({found.name}); {send or f'send a {NOUNS[kind]}'}"
