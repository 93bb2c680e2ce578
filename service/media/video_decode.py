"""Container bytes -> metadata and frames, with PyAV. Runs in a decode worker."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator, Sequence
from fractions import Fraction

import av
import numpy as np
from av.error import FFmpegError

from models.errors import InputError
from models.media import VideoMetadata
from service.media.limits import VideoLimits

# Names of FFmpeg's demuxers and decoders: MP4/MOV, MKV/WebM and AVI with the codecs that occur in them.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = frozenset(
    (
        "h264",
        "hevc",
        "vp8",
        "vp9",
        "av1",
        "libdav1d",
        "libvpx",
        "libvpx-vp9",
        "mpeg4",
        "mpeg2video",
        "mjpeg",
        "msmpeg4v3",
    )
)
DECODE_THREADS = max(2, min(8, os.cpu_count() or 1))
"""Frames that are decoded side by side: most files have frames of one slice, which two threads cannot share."""

av.logging.set_level(None)


class VideoSource:
    """A video whose metadata is known and whose frames can be read once.

    metadata.num_frames counts the packets that are in the file, whatever its header says. fps is the declared rate
    where the packets' times agree with it, their mean rate otherwise. height and width are those of an upright
    frame: the display rotation is applied. Frames of another size than the first are scaled to it.

    Raises InputError with `field` for what is no video, has no frames, is damaged, or is over a limit.
    """

    def __init__(self, data: bytes, *, field: str, limits: VideoLimits) -> None:
        self._data = data
        self._field = field
        self._limits = limits
        num_frames, fps, duration = self._count()
        self._decoded = self._decode()
        first = next(self._decoded, None)
        if first is None:
            raise self._refusal("has no frames that can be decoded")
        self._first = first
        self._first_time = first.time or 0.0
        self._size = (first.width, first.height)
        self._fps = fps
        height, width = (first.width, first.height) if _quarter_turns(first) % 2 else (first.height, first.width)
        self.metadata = VideoMetadata(num_frames, fps, duration, height, width)

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, float, np.ndarray]]:
        """(index, seconds from the first frame, uint8 [height, width, 3]) of each ascending index that exists."""
        wanted = iter(indices)
        target = next(wanted, None)
        frame: av.VideoFrame | None = self._first
        index = 0
        while frame is not None and target is not None:
            if index == target:
                pixels = self._pixels(frame)
                while target == index:
                    yield index, self._time(frame, index), pixels
                    target = next(wanted, None)
            if target is not None:
                frame = next(self._decoded, None)
                index += 1

    def close(self) -> None:
        """Ends the decoder and its threads now: the source and its own generator refer to each other, so that
        otherwise they would live until the garbage collector comes."""
        self._decoded.close()

    def _refusal(self, what: str) -> InputError:
        return InputError(self._field, f"the video {what}")

    def _open(self) -> tuple[av.container.InputContainer, av.VideoStream]:
        options = {
            "format_whitelist": FORMATS,
            "protocol_whitelist": "none",
            "codec_whitelist": ",".join(sorted(CODECS)),
            # Holds while FFmpeg decodes a few frames to learn the stream's parameters, before anything can be asked.
            "max_pixels": str(self._limits.max_pixels),
            "threads": "1",
        }
        try:
            container = av.open(io.BytesIO(self._data), "r", options=options, metadata_errors="replace")
        except FFmpegError as error:
            raise self._refusal("cannot be read; MP4, MOV, WebM, MKV and AVI files are accepted") from error
        stream = next(
            (s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic), None
        )
        if stream is None:
            raise self._refusal("file has no video stream")
        codec = stream.codec_context
        if codec is None or codec.name not in CODECS:
            raise self._refusal(f"is coded in a way that is not supported; accepted: {', '.join(sorted(CODECS))}")
        self._check_size(codec.width, codec.height)
        return container, stream

    def _check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1 or width * height > self._limits.max_pixels:
            raise self._refusal(
                f"has frames of {width} x {height} pixels; at most {self._limits.max_pixels} pixels are accepted"
            )

    def _count(self) -> tuple[int, float, float]:
        """Frames, frames per second and seconds, from the packets themselves: headers may lie."""
        container, stream = self._open()
        with container:
            count, begin, end = 0, None, None
            try:
                for packet in container.demux(stream):
                    if packet.size == 0 or packet.is_discard:
                        continue
                    count += 1
                    if count > self._limits.max_source_frames:
                        raise self._refusal(f"has more than {self._limits.max_source_frames} frames")
                    if packet.pts is not None:
                        begin = packet.pts if begin is None else min(begin, packet.pts)
                        last = packet.pts + (packet.duration or 0)
                        end = last if end is None else max(end, last)
            except FFmpegError as error:
                raise self._refusal("is damaged") from error
            declared = float(stream.average_rate or 0)
            time_base = stream.time_base or Fraction(0)
            duration = 0.0 if begin is None or end is None else float((end - begin) * time_base)
        if count == 0:
            raise self._refusal("has no frames")
        if duration <= 0:
            if declared <= 0:
                raise self._refusal("does not say when its frames are shown")
            duration = count / declared
        if duration > self._limits.max_duration:
            raise self._refusal(f"lasts {duration:.0f} s; at most {self._limits.max_duration:.0f} s are accepted")
        measured = count / duration
        return count, declared if abs(declared - measured) <= 0.02 * measured else measured, duration

    def _decode(self) -> Generator[av.VideoFrame]:
        container, stream = self._open()
        with container:
            stream.thread_type = "AUTO"  # frames, and slices where a codec has no threads for frames
            stream.codec_context.thread_count = DECODE_THREADS
            # A frame may be larger than the container says; the decoder itself refuses it before it allocates.
            stream.codec_context.options = {"max_pixels": str(self._limits.max_pixels)}
            frames = container.decode(stream)
            while True:
                try:
                    frame = next(frames, None)
                except FFmpegError as error:
                    raise self._refusal("is damaged") from error
                if frame is None:
                    return
                self._check_size(frame.width, frame.height)
                yield frame

    def _pixels(self, frame: av.VideoFrame) -> np.ndarray:
        width, height = self._size
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
        # rotation counts counter-clockwise, as np.rot90 does.
        return np.rot90(pixels, _quarter_turns(self._first))

    def _time(self, frame: av.VideoFrame, index: int) -> float:
        return index / self._fps if frame.time is None else frame.time - self._first_time


def _quarter_turns(frame: av.VideoFrame) -> int:
    return round(frame.rotation / 90) % 4
