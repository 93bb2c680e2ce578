"""Every format, through two decoders that share nothing with the encoder's settings: libsndfile and FFmpeg's."""

from __future__ import annotations

import io
import math
import struct

import av
import numpy as np
import pytest
import soundfile
from av.error import FFmpegError

from models.interfaces.errors import InputError
from service.media.audio_formats import FORMATS
from service.media.audio_out import StreamingEncoder, wav_header
from tests.media.samples import tone
from tests.support.slow import slow

RATE = 48_000
PATCH = 7680
LOSSLESS = ("flac", "wav", "pcm")
LAWS = {"ulaw": ("mulaw", "ULAW"), "alaw": ("alaw", "ALAW")}
"""Names of raw G.711 in FFmpeg and in libsndfile."""


def rate_of(name: str, wanted: int = 24_000) -> int:
    return wanted if wanted in FORMATS[name].rates else FORMATS[name].rates[0]


def by_soundfile(data: bytes, name: str, rate: int) -> tuple[np.ndarray, int]:
    if name == "pcm":
        return np.frombuffer(data, "<i2") / 32768, rate
    if name in LAWS:
        raw = {"samplerate": rate, "channels": 1, "format": "RAW", "subtype": LAWS[name][1]}
        return soundfile.read(io.BytesIO(data), **raw)
    if name == "flac":
        # libsndfile cannot read a FLAC whose length is unknown, as that of every stream is: 36 bits of STREAMINFO.
        length = by_av(data, name, rate)[0].size
        data = data[:18] + (int.from_bytes(data[18:26], "big") | length).to_bytes(8, "big") + data[26:]
    parts = []
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        while len(part := file.read(PATCH, dtype="float32")):
            parts.append(part)
        return np.concatenate(parts), file.samplerate


def by_av(data: bytes, name: str, rate: int) -> tuple[np.ndarray, int]:
    """What a player has of a file that may end anywhere."""
    if name == "pcm":
        return np.frombuffer(data[: len(data) // 2 * 2], "<i2") / 32768, rate
    parts = [np.zeros(0, np.float32)]
    try:
        # FFmpeg's guess needs more than the two frames that 20 ms of AAC are.
        raw = {"sample_rate": str(rate)} if name in LAWS else {}
        format = "aac" if name == "aac" else LAWS[name][0] if name in LAWS else None
        with av.open(io.BytesIO(data), format=format, options=raw) as container:
            rate = container.streams.audio[0].sample_rate
            for frame in container.decode(audio=0):
                samples = frame.to_ndarray().reshape(-1)
                parts.append(samples / 32768 if samples.dtype == np.int16 else samples)
    except FFmpegError:
        pass
    return np.concatenate(parts), rate


def stream(encoder: StreamingEncoder, samples: np.ndarray, chunk: int = PATCH) -> list[bytes]:
    pieces = [encoder.encode(samples[start : start + chunk]) for start in range(0, samples.size, chunk)]
    return [*pieces, encoder.finish()]


def speech(seconds: float, rate: int = RATE) -> np.ndarray:
    """A tone that swells and falls, with overtones and some noise."""
    envelope = 0.5 + 0.5 * tone(1.5, rate, seconds, 1.0)
    noise = np.random.default_rng(0).standard_normal(envelope.size).astype(np.float32)
    return (envelope * (tone(220, rate, seconds, 0.4) + tone(1100, rate, seconds, 0.2) + 0.01 * noise)).astype(
        np.float32
    )


def delay_and_error(result: np.ndarray, expected: np.ndarray) -> tuple[int, float]:
    """Samples by which result lags behind, and the energy of the difference against the signal's."""
    size = 1 << math.ceil(math.log2(result.size + expected.size))
    correlation = np.fft.irfft(np.fft.rfft(result, size) * np.conj(np.fft.rfft(expected, size)), size)
    delay = int(correlation[:8192].argmax())
    aligned = result[delay : delay + expected.size]
    reference = expected[: aligned.size]
    return delay, float(((aligned - reference) ** 2).sum() / (reference**2).sum())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rate", [48_000, 24_000])
def test_stream_decodes_to_what_was_encoded(name: str, rate: int) -> None:
    rate = rate_of(name, rate)
    samples = speech(1.3)
    data = b"".join(stream(StreamingEncoder(name, RATE, rate), samples))
    decoders = [by_av] if name == "aac" else [by_av, by_soundfile]
    for decode in decoders:
        result, decoded_rate = decode(data, name, rate)
        expected = speech(1.3, decoded_rate) if decoded_rate == RATE else samples[:: RATE // decoded_rate]
        delay, error = delay_and_error(result, expected)
        assert result.size >= expected.size  # the tail is there
        assert delay < 0.06 * decoded_rate
        assert error < (1e-3 if name in LOSSLESS else 0.05)
        if name in LOSSLESS:
            assert delay == 0 and result.size == expected.size


@pytest.mark.parametrize(
    ("name", "rate"),
    [(n, rate) if rate == FORMATS[n].rates[-1] else slow(n, rate) for n in FORMATS for rate in FORMATS[n].rates],
)
def test_less_than_100_ms_are_held_back(name: str, rate: int) -> None:
    encoder = StreamingEncoder(name, RATE, rate)
    samples = speech(0.96)
    received = b""
    for start in range(0, samples.size, PATCH):
        received += encoder.encode(samples[start : start + PATCH])
        playable, decoded_rate = by_av(received, name, rate)
        assert (start + PATCH) / RATE - playable.size / decoded_rate < 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_is_rewritten_and_the_pieces_do_not_matter(name: str) -> None:
    """The bytes depend on the samples, not on how they were cut: an Ogg stream's random serial number apart."""
    samples = speech(0.7)
    whole = b"".join(stream(StreamingEncoder(name, RATE, rate_of(name)), samples, samples.size))
    pieces = b"".join(stream(StreamingEncoder(name, RATE, rate_of(name)), samples, 997))
    if name == "opus":
        assert np.array_equal(by_av(whole, name, 24_000)[0], by_av(pieces, name, 24_000)[0])
    else:
        assert whole == pieces


@pytest.mark.parametrize("rate", [RATE, 22_050, 8_000])
@pytest.mark.parametrize("speed", [0.25, 0.8, 1.1, 4.0])
def test_a_speed_changes_the_tempo_keeps_the_pitch_and_loses_nothing_of_the_end(rate: int, speed: float) -> None:
    for seconds in (0.16, 0.64, 2.0):
        samples = tone(440, RATE, seconds)
        result = by_soundfile(b"".join(stream(StreamingEncoder("pcm", RATE, rate, speed), samples)), "pcm", rate)[0]
        assert result.size == round(seconds * rate / speed)
        heard = np.flatnonzero(np.abs(result) > 0.01)[-1] / rate
        assert heard == pytest.approx(seconds / speed, abs=0.03)
    spectrum = np.abs(np.fft.rfft(result * np.hanning(result.size)))
    assert spectrum.argmax() * rate / result.size == pytest.approx(440, rel=0.01)


def test_wav_header() -> None:
    header = wav_header(24_000)
    assert len(header) == 44 and header[:4] == b"RIFF" and header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    assert struct.unpack("<IIHH", header[24:36]) == (24_000, 48_000, 2, 16)
    data = b"".join(stream(StreamingEncoder("wav", RATE, 24_000), speech(0.5)))
    assert data[:44] == header
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.samplerate, file.channels, file.subtype) == (24_000, 1, "PCM_16")


@pytest.mark.parametrize("rate", [48_000, *(slow(rate) for rate in FORMATS["flac"].rates if rate != 48_000)])
@pytest.mark.parametrize("speed", [0.25, 1.0, 1.3, 4.0])
def test_a_whole_flac_says_its_length(rate: int, speed: float) -> None:
    encoder = StreamingEncoder("flac", RATE, rate, speed)
    streamed = b"".join(stream(encoder, speech(1.1)))
    data = bytearray(streamed)
    encoder.complete(data)
    assert len(data) == len(streamed) and data[:20] == streamed[:20] and data[26:] == streamed[26:]
    length = soundfile.info(io.BytesIO(data)).frames
    samples, read_rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert (len(samples), read_rate) == (length, rate)
    assert np.array_equal(samples, by_av(streamed, "flac", rate)[0])
    assert length == round(1.1 * rate / speed)
    with av.open(io.BytesIO(data)) as container:
        assert container.duration is not None
        assert container.duration / av.time_base == pytest.approx(length / rate, abs=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_headers_of_wav_and_flac_are_completed(name: str) -> None:
    encoder = StreamingEncoder(name, RATE, rate_of(name))
    data = bytearray(encoder.encode(speech(0.5)))
    data += encoder.finish()
    before = bytes(data)
    encoder.complete(data)
    changed = {at for at, (old, new) in enumerate(zip(before, data, strict=True)) if old != new}
    headers = {"wav": {*range(4, 8), *range(40, 44)}, "flac": set(range(21, 26))}
    assert changed <= headers.get(name, set()) and bool(changed) == (name in headers)


def test_pcm_is_16_bit_little_endian() -> None:
    encoder = StreamingEncoder("pcm", RATE, RATE)
    samples = np.array([0, 1, -1, 0.5, 2, -2, np.nan, np.inf, -np.inf], np.float32)
    values = np.frombuffer(encoder.encode(samples) + encoder.finish(), "<i2")
    assert values.tolist() == [0, 32767, -32767, 16384, 32767, -32767, 0, 0, 0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_an_empty_stream_ends_well(name: str, speed: float) -> None:
    encoder = StreamingEncoder(name, RATE, rate_of(name), speed)
    data = encoder.encode(np.zeros(0, np.float32)) + encoder.finish()
    assert by_av(data, name, rate_of(name))[0].size < 2500


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("ogg", RATE, RATE), "response_format"),
        (("opus", RATE, 44_100), "sample_rate"),
        (("mp3", RATE, 96_000), "sample_rate"),
        (("pcm", RATE, 0), "sample_rate"),
        (("pcm", RATE, RATE, 0.2), "speed"),
        (("pcm", RATE, RATE, 4.1), "speed"),
        (("pcm", RATE, RATE, math.nan), "speed"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, field: str) -> None:
    with pytest.raises(InputError) as caught:
        StreamingEncoder(*arguments)
    assert caught.value.field == field
