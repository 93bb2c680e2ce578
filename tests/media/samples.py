"""Media made on the spot, and mutations of it with a fixed seed."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import soundfile
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.resizing import FrameResizer
from service.media.loader import Choose

T = TypeVar("T")


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, so that every codec has something to do."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    base = np.stack([x, y, 1 - x], axis=2) * 220
    return Image.fromarray((base + rng.integers(0, 30, base.shape)).astype(np.uint8))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def video(
    container: str = "mp4",
    codec: str = "libx264",
    *,
    frames: int = 30,
    size: tuple[int, int] = (64, 48),
    rate: int = 30,
    rotation: int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """Frame i is grey 8 i (mod 256), with a white upper left quarter."""
    import av  # FFmpeg's libraries are large, and most samples need none

    width, height = size
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(frames):
            pixels = np.full((height, width, 3), index * 8 % 256, np.uint8)
            pixels[: height // 2, : width // 2] = 255
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def chosen(*indices: int) -> Choose:
    """These frames, in the size of the source."""
    return lambda metadata: (indices, FrameResizer(metadata.height, metadata.width))


def every(step: int) -> Choose:
    return lambda metadata: chosen(*range(0, metadata.num_frames, step))(metadata)


def tone(frequency: float, sample_rate: int, seconds: float = 1.0, amplitude: float = 0.5) -> np.ndarray:
    """float32 [n]"""
    times = np.arange(round(seconds * sample_rate)) / sample_rate
    return (amplitude * np.sin(2 * np.pi * frequency * times)).astype(np.float32)


def sound(samples: np.ndarray, sample_rate: int, format: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, sample_rate, format=format, subtype=subtype)
    return buffer.getvalue()


def sound_by_av(
    samples: np.ndarray, sample_rate: int, container: str, codec: str, options: dict[str, str] | None = None
) -> bytes:
    """options: of FFmpeg's muxer."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options) as out:
        stream = out.add_stream(codec, rate=sample_rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = sample_rate
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def mutations(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Flipped, repeated, dropped and overwritten bytes; half of the blows fall on the first 200."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(min(200, len(mutant)) if rng.random() < 0.5 else len(mutant))
            match rng.randrange(5):
                case 0:
                    mutant[place] ^= 1 << rng.randrange(8)
                case 1:
                    mutant[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4)])
                case 2:
                    del mutant[place : place + rng.randint(1, 32)]
                case 3:
                    mutant[place:place] = mutant[place : place + rng.randint(1, 32)]
                case _:
                    mutant = mutant[: max(1, place)] if rng.random() < 0.2 else mutant
            if len(mutant) < 2:
                break
        yield bytes(mutant)


def tried(files: Iterable[bytes], decode: Callable[[bytes], T], field: str) -> tuple[list[T], int]:
    """What the accepted ones make, and how many are refused; nothing else may come of one."""
    made, refused = list[T](), 0
    for file in files:
        try:
            made.append(decode(file))
        except InputError as error:
            assert error.field == field
            refused += 1
    return made, refused
