"""Audio files of every format become mono samples, within limits."""

from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pytest

from models.interfaces.errors import InputError
from service.media.audio_decode import MOST_CHUNKS, decode_samples
from service.media.loader import decode_audio, decode_workers
from service.media.messages import AudioLimits
from tests.media.samples import mutations, sound, sound_by_av, tone, tried

FIELD = "ref_audio"
LIMITS = AudioLimits(max_seconds=5.0)


def decode(data: bytes, sample_rate: int = 16_000) -> np.ndarray:
    return decode_samples(data, sample_rate=sample_rate, field=FIELD, limits=LIMITS)


MADE = {
    **{name: partial(sound, tone(440, 48_000), 48_000, name.upper()) for name in ("wav", "flac", "ogg", "mp3")},
    **{
        name: partial(sound_by_av, tone(440, 48_000), 48_000, *format)
        for name, format in {
            "mp3 with tags": ("mp3", "libmp3lame"),
            "m4a": ("mp4", "aac"),
            "aac": ("adts", "aac"),
            "webm": ("webm", "libopus"),
            "mka": ("matroska", "libopus"),
        }.items()
    },
}


def refusal(data: bytes) -> str:
    with pytest.raises(InputError) as caught:
        decode(data)
    assert caught.value.field == FIELD
    return str(caught.value)


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        *(("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "DOUBLE"), ("WAV", "PCM_U8"), ("WAV", "ULAW"), ("WAV", "ALAW")),
        *(("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"), ("WAV", "PCM_24"), ("WAV", "PCM_32"), ("FLAC", "PCM_16")),
        *(("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")),
        *(("mp4", "aac"), ("adts", "aac"), ("webm", "libopus"), ("mov", "alac"), ("mp4", "libmp3lame")),
    ],
)
def test_formats(format: str, codec: str) -> None:
    if format.isupper():
        data = sound(np.stack([tone(440, 48_000), tone(440, 48_000)], axis=1), 48_000, format, codec)
    else:  # a container of video, too
        data = sound_by_av(tone(440, 48_000), 48_000, format, codec)
    samples = decode(data)
    assert samples.dtype == np.float32
    assert samples.size == pytest.approx(16_000, abs=1200)
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(samples.size)))
    assert spectrum.argmax() * 16_000 / samples.size == pytest.approx(440, abs=2)
    assert samples[4000:-4000].std() == pytest.approx(0.5 * 2**-0.5, abs=0.02)


async def test_through_a_worker() -> None:
    pool = decode_workers(1)
    data = sound(tone(440, 44_100), 44_100, "FLAC")
    samples = await decode_audio(pool, data, sample_rate=16_000, field=FIELD, limits=LIMITS)
    assert np.array_equal(samples, decode(data))
    with pytest.raises(InputError, match="too long: at most 5 seconds") as caught:
        clip = sound(tone(440, 8_000, 5.1), 8_000, "OGG", "VORBIS")
        await decode_audio(pool, clip, sample_rate=16_000, field=FIELD, limits=LIMITS)
    assert caught.value.field == FIELD
    with pytest.raises(InputError, match="at most 10 allowed"):
        await decode_audio(pool, data, sample_rate=16_000, field=FIELD, limits=AudioLimits(max_bytes=10))
    assert pool.workers_lost == 0
    pool.close()


@pytest.mark.parametrize(("channels", "format"), [(2, "FLOAT"), (8, "FLOAT"), (8, "PCM_16")])
def test_channels_are_mixed(channels: int, format: str) -> None:
    one = np.stack([tone(440, 16_000), *np.zeros((channels - 1, 16_000), np.float32)], axis=1)
    assert np.abs(decode(sound(one, 16_000, "WAV", format))).max() == pytest.approx(0.5 / channels, abs=1e-3)


def test_samples_are_counted_while_decoding() -> None:
    """Hours of silence in a few kilobytes: refused, with the clip's end never reached."""
    hour = sound(np.zeros(8000 * 3600, np.int16), 8000, "FLAC")
    assert len(hour) < 300_000
    assert "too long: at most 5 seconds" in refusal(hour)
    assert "too long: at most 5 seconds" in refusal(sound_by_av(tone(440, 48_000, 6), 48_000, "mp4", "aac"))
    assert decode(sound(tone(440, 8000, 5.0), 8000, "WAV")).size == 80_000


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(0, np.float32), "no samples"),
        (np.zeros(8000, np.float32), "silent"),
        (np.full(8000, 1e-6, np.float32), "silent"),
        (np.full(8000, np.nan, np.float32), "finite"),
        (np.r_[tone(440, 8000), np.float32("inf")], "finite"),
    ],
)
def test_nothing_to_hear(samples: np.ndarray, message: str) -> None:
    assert message in refusal(sound(samples, 16_000, "WAV", "FLOAT"))


def test_loud_samples_are_scaled_not_clipped() -> None:
    samples = decode(sound(tone(440, 16_000, amplitude=1e30), 16_000, "WAV", "FLOAT"))
    assert np.abs(samples - tone(440, 16_000, amplitude=1.0)).max() < 1e-3


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x", b"\xff", b"not audio at all", bytes(2000), b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS" + bytes(100)),
        *(b"ID3" + bytes(500), b"\xff\xfb" * 300, b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
        *(sound(tone(440, 16_000), 16_000, name) for name in ("AIFF", "AU")),
    ],
)
def test_what_is_no_audio(data: bytes) -> None:
    refusal(data)


@pytest.mark.parametrize("kind", ["m4a", "webm", "wav", "flac", "ogg"])
def test_one_that_was_cut_short_is_not_taken_for_something_else(kind: str) -> None:
    assert refusal(MADE[kind]()[:24]) == "the audio is damaged or truncated"


@pytest.mark.parametrize("kind", ["wav", "mp3", "mp3 with tags", "webm", "mka"])
def test_what_is_left_of_one_that_breaks_off_is_heard(kind: str) -> None:
    """As of a video; what was streamed may end anywhere."""
    data = MADE[kind]()
    assert len(decode(data)) == pytest.approx(16_000, abs=1200)
    assert 3_000 < len(decode(data[: len(data) // 2])) < 13_000


@pytest.mark.parametrize("kind", ["flac", "m4a", "aac"])
def test_one_that_breaks_off_in_a_frame_is_refused(kind: str) -> None:
    data = MADE[kind]()
    assert refusal(data[: int(len(data) * 0.3)]) in ("the audio is damaged", "the audio is damaged or truncated")


def test_what_stands_behind_the_audio_does_not_matter() -> None:
    assert len(decode(MADE["mp3"]() + b"TAG" + bytes(125))) == 16_000  # ID3v1


@pytest.mark.parametrize("size", [44, 0x7FFFF000, 0xFFFFFFFF])
def test_a_wav_whose_header_does_not_know_its_length_is_read_to_its_end(size: int) -> None:
    data = bytearray(sound(tone(440, 16_000), 16_000, "WAV"))
    place = data.index(b"data") + 4
    data[place : place + 4] = struct.pack("<I", size if size != 44 else len(data) - place - 4 + 44)
    assert len(decode(bytes(data))) == 16_000


def test_a_wav_of_16_bits_is_what_ffmpeg_reads_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, (99_999, 2))
    data = sound(noise, 44_100, "WAV", "PCM_16")
    files = (data, data[:40] + b"\xff" * 4 + data[44:], data[:-5])
    found = [decode(file) for file in files]
    monkeypatch.setattr("service.media.audio_decode._pcm_of_wav", lambda data: None)
    for file, samples in zip(files, found, strict=True):
        assert np.array_equal(decode(file), samples)
    monkeypatch.undo()
    monkeypatch.setattr("service.media.audio_decode.open_container", None)
    assert np.array_equal(decode(data), found[0])
    with pytest.raises(TypeError):  # one with many chunks is left to FFmpeg, which is gone
        decode(data[:36] + 2 * MOST_CHUNKS * struct.pack("<2I", 1, 0) + data[36:])


def test_files_that_were_joined() -> None:
    """The number of channels may change, the sample rate may not."""
    kinds = (48_000, 1), (48_000, 2), (24_000, 1), (24_000, 2)
    mono, stereo, *slower = (sound(np.stack([tone(440, rate)] * n, axis=1), rate, "MP3") for rate, n in kinds)
    assert decode(mono + stereo).size == pytest.approx(32_000, abs=2_400)
    assert all("changes its sample rate" in refusal(mono + other) for other in slower)


@pytest.mark.parametrize(("channels", "rate"), [(1000, 16_000), (1, 3_999), (1, 200_000), (1, 0x7FFFFFFF)])
def test_attacker_sized_format(channels: int, rate: int) -> None:
    data = bytearray(sound(tone(440, 16_000), 16_000, "WAV"))
    data[22:24] = struct.pack("<H", channels)
    data[24:28] = struct.pack("<I", rate)
    data[28:34] = struct.pack("<IH", 2 * channels * rate & 0xFFFFFFFF, 2 * channels)
    refusal(bytes(data))


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "mp4"])
def test_mutants_are_clips_or_refused(kind: str) -> None:
    samples = tone(440, 16_000, 0.4)
    data = sound_by_av(samples, 16_000, kind, "aac") if kind == "mp4" else sound(samples, 16_000, kind)
    clips, refused = tried(mutations(data, 80, seed=11), decode, FIELD)
    assert clips and refused
    assert all(np.isfinite(clip).all() and np.abs(clip).max() <= 1.0 and 0 < clip.size <= 80_001 for clip in clips)


RECORDING = AudioLimits(max_seconds=5.0, recording=True)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
def test_a_recording_keeps_its_time_its_band_and_its_silence(rate: int) -> None:
    def recorded(samples: np.ndarray) -> np.ndarray:
        data = sound(samples.astype(np.float32), rate, "WAV", "FLOAT")
        return decode_samples(data, sample_rate=16_000, field=FIELD, limits=RECORDING)

    click = np.zeros(2 * rate)
    click[rate] = 1.0
    assert recorded(click).size == 32_000 and np.abs(recorded(click)).argmax() == 16_000
    high = recorded(tone(7_000 if rate > 16_000 else 3_500, rate, amplitude=0.5))
    assert np.abs(high[4000:-4000]).max() == pytest.approx(0.5, abs=0.01)
    assert not recorded(np.zeros(rate)).any() and recorded(np.zeros(rate)).size == 16_000
    assert np.abs(recorded(4 * click)).max() == pytest.approx(1.0, abs=0.05 if rate == 8_000 else 1e-6)
    few = np.zeros(0 if rate == 16_000 else 1)  # one cannot be resampled
    refused = [(np.zeros(6 * rate), "at most 5 seconds"), (np.full(rate, np.nan), "finite"), (few, "no samples")]
    for samples, told in refused:
        with pytest.raises(InputError, match=told):
            recorded(samples)
