"""FFmpeg's encoders, muxers and filters for one audio stream, through PyAV."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, cast

import av
import av.filter
import numpy as np

from service.media.audio_formats import AudioFormat

MONO = ("aformat", "sample_fmts=flt:channel_layouts=mono")
"""Filter of audio_graph that makes mono float32."""
PADDING = 0.2
"""Seconds of silence behind a text whose tempo is changed: more than atempo holds back."""


class _Sink:
    """A write-only file object; the written bytes are taken after each step."""

    def __init__(self) -> None:
        self._written = bytearray()

    def seekable(self) -> bool:
        return False

    def write(self, data: bytes) -> int:
        self._written += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._written)
        self._written.clear()
        return taken


class Codec:
    """An encoder and its muxer: float32 samples (-1..1) in, bytes of the container out."""

    def __init__(self, chosen: AudioFormat, sample_rate: int) -> None:
        self._sink = _Sink()
        self._sample_rate = sample_rate
        self._position = 0
        options = chosen.container_options | {"flush_packets": "1"}
        self._container = av.open(self._sink, "w", format=chosen.container, options=options)
        stream = self._container.add_stream(chosen.codec, sample_rate, options=chosen.codec_options, layout="mono")
        self._stream = cast(av.AudioStream, stream)
        if chosen.codec == "aac":
            self._stream.bit_rate = 128_000 if sample_rate >= 32_000 else 64_000

    def encode(self, samples: np.ndarray) -> bytes:
        if samples.size:
            frame = audio_frame(samples, self._sample_rate, self._position)
            self._position += samples.size
            self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._sink.take()


class TempoAndRate:
    """FFmpeg's atempo filter (0.5 to 100 each, so speed 0.25 needs two) and its resampler."""

    def __init__(self, rate_in: int, rate_out: int, speed: float = 1.0, options: str = "") -> None:
        """options: of the resampler."""
        self._rate_in = rate_in
        self._changes_tempo = speed != 1.0
        self._ratio = rate_out / (rate_in * speed)
        """Samples of the output for one of the input."""
        self._position = 0
        self._given = 0
        tempos = [] if speed == 1.0 else [speed] if speed >= 0.5 else [0.5, speed / 0.5]
        resample = ("aresample", f"{rate_out}:{options}" if options else f"{rate_out}")
        self._graph = audio_graph(rate_in, *(("atempo", f"{tempo:.9f}") for tempo in tempos), resample, MONO)

    def push(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Takes samples float32 [n] at rate_in; gives those at rate_out that are complete, float32 [n] each."""
        if samples.size:
            self._graph.push(audio_frame(samples, self._rate_in, self._position))
            self._position += samples.size
        return self._pull()

    def flush(self) -> Iterator[np.ndarray]:
        """The rest of the samples, at the end."""
        # FFmpeg's buffer source fails when it ends before its first frame.
        if self._position == 0:
            return
        length = round(self._position * self._ratio)
        if self._changes_tempo:
            # At its end atempo drops what fills no window of its own, up to 70 ms of a slow voice.
            self._graph.push(
                audio_frame(np.zeros(int(PADDING * self._rate_in), np.float32), self._rate_in, self._position)
            )
        self._graph.push(None)
        for samples in self._pull():
            yield samples[: max(0, length - self._given + len(samples))] if self._changes_tempo else samples

    def _pull(self) -> Iterator[np.ndarray]:
        for frame in pulled(self._graph):
            samples = frame.to_ndarray()[0]
            self._given += len(samples)
            yield samples


def audio_graph(sample_rate: int, *filters: tuple[str, str]) -> av.filter.Graph:
    """A chain of filters, (name, arguments), for mono float32 samples."""
    graph = av.filter.Graph()
    source = graph.add_abuffer(format="flt", sample_rate=sample_rate, layout="mono", time_base=Fraction(1, sample_rate))
    nodes = [source, *(graph.add(*one) for one in filters), graph.add("abuffersink")]
    graph.link_nodes(*nodes).configure()
    return graph


def pulled(graph: av.filter.Graph) -> Iterator[Any]:
    """The frames that are complete now."""
    while True:
        try:
            yield graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return


def audio_frame(samples: np.ndarray, sample_rate: int, position: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
    frame.sample_rate = sample_rate
    frame.time_base = Fraction(1, sample_rate)
    frame.pts = position
    return frame
