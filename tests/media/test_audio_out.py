"""Every format, through two decoders that share nothing with the encoder's settings: libsndfile and FFmpeg's."""

from __future__ import annotations

import asyncio
import io
import math
import struct
import subprocess
import sys

import av
import numpy as np
import pytest
import soundfile
from av.error import FFmpegError
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.media import lame
from service.media.audio_formats import FORMATS, content_type
from service.media.audio_out import EncoderPool, StreamingEncoder, wav_header
from tests.media.samples import tone

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


def syllables(seconds: float, rate: int) -> np.ndarray:
    """Overtones of a voice's pitch under moving formants, in turn with hissing, as in speech."""
    time = np.arange(int(seconds * rate)) / rate
    pitch = 110 + 25 * np.sin(2 * np.pi * 0.7 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    second = 1400 + 500 * np.sin(2 * np.pi * 2 * time)
    formants = ((1.0, 550.0, 120.0), (0.5, second, 150.0), (0.2, 2700.0, 250.0), (0.05, 3800.0, 400.0))
    voiced = np.zeros_like(time)
    for overtone in range(1, min(rate // 2, 8000) // 140):
        gain = sum(height / (1 + ((overtone * pitch - at) / width) ** 2) for height, at, width in formants)
        voiced += gain * np.sin(overtone * phase)
    white = np.random.default_rng(2).standard_normal(time.size)
    shape = np.exp(-(((np.fft.rfftfreq(time.size, 1 / rate) - 6000) / 2500) ** 2))
    hiss = np.fft.irfft(np.fft.rfft(white) * shape, time.size)
    turn = 0.5 - 0.5 * np.cos(2 * np.pi * 3 * time)
    both = 0.1 * turn * voiced + 0.045 * (1 - turn) ** 4 * hiss / hiss.std()
    return (both + 1e-4 * white).astype(np.float32)


def noise_in_bands(noise: np.ndarray, samples: np.ndarray, rate: int) -> float:
    """Mean of noise to signal in dB, over frames and the bands (Bark) in which the signal has any power."""
    size = 2048
    bark = 13 * np.arctan(0.00076 * (f := np.fft.rfftfreq(size, 1 / rate))) + 3.5 * np.arctan((f / 7500) ** 2)

    def power(signal: np.ndarray) -> np.ndarray:
        frames = signal[: signal.size // size * size].reshape(-1, size) * np.hanning(size)
        spectrum = np.abs(np.fft.rfft(frames)) ** 2
        return np.stack([spectrum[:, bark.astype(int) == band].sum(1) for band in range(int(bark[-1]))])

    signal = power(samples)
    present = signal > 1e-6 * signal.max()
    return float(10 * np.log10(power(noise)[present] / signal[present]).mean())


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


@pytest.mark.parametrize(("name", "rate"), [(name, rate) for name in FORMATS for rate in FORMATS[name].rates])
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


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.5, 4.0])
def test_speed_changes_the_tempo_and_keeps_the_pitch(speed: float) -> None:
    samples = tone(440, RATE, 2.0)
    result = by_soundfile(b"".join(stream(StreamingEncoder("pcm", RATE, RATE, speed), samples)), "pcm", RATE)[0]
    assert result.size == round(2.0 * RATE / speed)
    spectrum = np.abs(np.fft.rfft(result * np.hanning(result.size)))
    assert spectrum.argmax() * RATE / result.size == pytest.approx(440, rel=0.01)


@pytest.mark.parametrize("rate", [RATE, 22_050, 8_000])
@pytest.mark.parametrize("speed", [0.25, 0.3, 0.7, 1.1, 3.0, 4.0])
def test_nothing_of_the_end_is_lost_with_a_speed(rate: int, speed: float) -> None:
    for seconds in (0.16, 0.64, 2.0):
        samples = tone(440, RATE, seconds)
        result = by_soundfile(b"".join(stream(StreamingEncoder("pcm", RATE, rate, speed), samples)), "pcm", rate)[0]
        assert result.size == round(seconds * rate / speed)
        heard = np.flatnonzero(np.abs(result) > 0.01)[-1] / rate
        assert heard == pytest.approx(seconds / speed, abs=0.03)


def test_speed_in_every_format() -> None:
    samples = speech(1.0)
    for name in FORMATS:
        rate = rate_of(name)
        result, rate = by_av(b"".join(stream(StreamingEncoder(name, RATE, rate, 2.0), samples)), name, rate)
        assert result.size / rate == pytest.approx(0.5, abs=0.15)


def test_wav_header() -> None:
    header = wav_header(24_000)
    assert len(header) == 44 and header[:4] == b"RIFF" and header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    rate, bytes_a_second, bytes_a_sample, bits = struct.unpack("<IIHH", header[24:36])
    assert (rate, bytes_a_second, bytes_a_sample, bits) == (24_000, 48_000, 2, 16)
    data = b"".join(stream(StreamingEncoder("wav", RATE, 24_000), speech(0.5)))
    assert data[:44] == header
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        assert (file.samplerate, file.channels, file.subtype) == (24_000, 1, "PCM_16")


@pytest.mark.parametrize("rate", FORMATS["flac"].rates)
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
    with pytest.raises(ValueError, match="before finish"):
        encoder.complete(data)
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
def test_wild_samples_are_clipped(name: str) -> None:
    wild = speech(0.5) * 30
    wild[1000:1100] = np.nan
    wild[2000] = np.float32("inf")
    result, _ = by_av(b"".join(stream(StreamingEncoder(name, RATE, rate_of(name)), wild)), name, rate_of(name))
    assert np.isfinite(result).all() and 0.5 < np.abs(result).max() < 2.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_an_empty_stream_ends_well(name: str, speed: float) -> None:
    encoder = StreamingEncoder(name, RATE, rate_of(name), speed)
    data = encoder.encode(np.zeros(0, np.float32)) + encoder.finish()
    assert by_av(data, name, rate_of(name))[0].size < 2500
    for call in (encoder.finish, lambda: encoder.encode(np.zeros(4, np.float32))):
        with pytest.raises(ValueError):
            call()


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


def test_content_types() -> None:
    assert content_type("mp3", RATE) == "audio/mpeg"
    assert StreamingEncoder("pcm", RATE, 24_000).content_type == "audio/pcm;rate=24000;channels=1"
    assert StreamingEncoder("ulaw", RATE, 8_000).content_type == "audio/pcmu;rate=8000;channels=1"


@given(st.lists(st.integers(0, 9000), max_size=8), st.sampled_from(list(FORMATS)))
@settings(max_examples=25, deadline=None)
def test_chunks_of_any_size(sizes: list[int], name: str) -> None:
    rate = rate_of(name, RATE)
    encoder = StreamingEncoder(name, RATE, rate)
    samples = speech(0.2 * len(sizes) + 0.1)
    data, start = b"", 0
    for size in sizes:
        data += encoder.encode(samples[start : start + size])
        start += size
    data += encoder.finish()
    fed = min(start, samples.size) * rate // RATE
    assert fed <= by_av(data, name, rate)[0].size + (1 if name in LOSSLESS else 400)


async def test_pool_encodes_many_streams_at_once() -> None:
    pool = EncoderPool(2)
    samples = speech(0.5)

    async def one(name: str) -> bytes:
        encoder = StreamingEncoder(name, RATE, rate_of(name))
        pieces = [await pool.encode(encoder, samples[start : start + PATCH]) for start in range(0, samples.size, PATCH)]
        return b"".join([*pieces, await pool.finish(encoder)])

    names = [name for name in FORMATS if name != "opus"] * 3
    for name, data in zip(names, await asyncio.gather(*map(one, names)), strict=True):
        assert data == b"".join(stream(StreamingEncoder(name, RATE, rate_of(name)), samples))
    pool.close()


def test_the_server_is_importable_without_ffmpeg() -> None:
    """Raw samples and pictures need none of its libraries."""
    code = "import sys; sys.modules['av'] = None; import service.api.app, service.media.decode_worker"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_mp3_at_the_models_rate_needs_no_ffmpeg() -> None:
    code = (
        "import sys, numpy; sys.modules['av'] = None\n"
        "from service.media.audio_out import StreamingEncoder\n"
        f"encoder = StreamingEncoder('mp3', {RATE}, {RATE})\n"
        f"assert encoder.encode(numpy.zeros({PATCH}, numpy.float32)) and encoder.finish()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_mp3_is_encoded_with_one_call_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes the interpreter lock once, for which the threads of many streams wait."""
    calls: list[int] = []
    encoder = StreamingEncoder("mp3", RATE, RATE)
    lame = encoder._codec._encoder  # type: ignore[union-attr]

    class Counting:
        def encode(self, samples: bytes) -> bytes:
            calls.append(len(samples) // 2)
            return bytes(lame.encode(samples))

    monkeypatch.setattr(encoder._codec, "_encoder", Counting())
    data = encoder.encode(tone(440, RATE)[:PATCH]) + encoder.encode(tone(440, RATE)[PATCH:]) + bytes(lame.flush())
    assert calls == [PATCH, RATE - PATCH] and by_av(data, "mp3", RATE)[0].size >= RATE


@pytest.mark.parametrize("rate", [48_000, 24_000])
def test_mp3_of_speech_has_no_more_noise_than_at_lames_own_level(rate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = syllables(4.0, rate)

    def noise() -> tuple[float, float]:
        """Of the whole signal, and behind the signal in the critical bands of hearing on average, in dB."""
        data = b"".join(stream(StreamingEncoder("mp3", rate, rate), samples))
        decoded = by_av(data, "mp3", rate)[0]
        delay, error = delay_and_error(decoded, samples)
        heard = decoded[delay : delay + samples.size]
        return 10 * math.log10(error), noise_in_bands(heard - samples[: heard.size], samples[: heard.size], rate)

    ours = noise()
    monkeypatch.setattr(lame, "LEVEL", 3)
    theirs = noise()
    assert ours[0] < theirs[0] + 0.2 and ours[1] < theirs[1] + 0.2
