"""The formats of speech: their names in requests, sample rates and codecs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

ALL_RATES = (48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000)
# The codec delay is a fixed number of samples: at lower rates it is more than 100 ms.
MP3_RATES = ALL_RATES[:6]
AAC_RATES = ALL_RATES[:4]
OPUS_RATES = (48_000, 24_000, 16_000, 12_000, 8_000)
G711_RATE = 8_000
LAME = "lame"
"""A codec of its own (audio_out.Mp3), not FFmpeg's."""


@dataclass(frozen=True)
class AudioFormat:
    """codec and container are FFmpeg's names but for LAME; empty for raw samples. rates: supported sample rates, the
    default of a model that has none of them first. bits: of a sample. extension: of files, if it is not the name.
    chat_name: in a chat request, if it is another. has_header: without one, pieces can be played as they come, and
    nothing in them says their rate."""

    content_type: str
    rates: tuple[int, ...]
    codec: str = ""
    container: str = ""
    codec_options: dict[str, str] = field(default_factory=dict)
    container_options: dict[str, str] = field(default_factory=dict)
    bits: int = 16
    extension: str = ""
    chat_name: str = ""
    has_header: bool = True


FORMATS = {
    "mp3": AudioFormat("audio/mpeg", MP3_RATES, LAME),
    # Without page_duration (microseconds) the muxer buffers a whole second of audio.
    "opus": AudioFormat("audio/ogg", OPUS_RATES, "libopus", "ogg", {}, {"page_duration": "20000"}, extension="ogg"),
    "aac": AudioFormat("audio/aac", AAC_RATES, "aac", "adts"),
    # Up to level 2 the encoder uses blocks of 27 ms, above it 105 ms.
    "flac": AudioFormat("audio/flac", ALL_RATES, "flac", "flac", {"compression_level": "2"}),
    "wav": AudioFormat("audio/wav", ALL_RATES),
    "pcm": AudioFormat("audio/pcm", ALL_RATES, chat_name="pcm16", has_header=False),
    "ulaw": AudioFormat("audio/pcmu", (G711_RATE,), "pcm_mulaw", "mulaw", bits=8, has_header=False),
    "alaw": AudioFormat("audio/pcma", (G711_RATE,), "pcm_alaw", "alaw", bits=8, has_header=False),
}
NAMES = f"{', '.join(list(FORMATS)[:-1])} or {list(FORMATS)[-1]}"
CHAT_FORMATS = {one.chat_name or name: name for name, one in FORMATS.items()}
REALTIME_FORMATS = {one.content_type: one.chat_name or name for name, one in FORMATS.items() if not one.has_header}
"""Names in a chat request of formats without a header, by their types in the Realtime protocol."""

if TYPE_CHECKING:
    ResponseFormat = str
    ChatFormat = str
    RealtimeType = str
else:
    ResponseFormat = Literal[tuple(FORMATS)]
    ChatFormat = Literal[tuple(CHAT_FORMATS)]
    RealtimeType = Literal[tuple(REALTIME_FORMATS)]


def content_type(name: str, sample_rate: int) -> str:
    chosen = FORMATS[name]
    return chosen.content_type if chosen.has_header else f"{chosen.content_type};rate={sample_rate};channels=1"
