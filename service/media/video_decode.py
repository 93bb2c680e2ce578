"""Container bytes -> metadata and frames, with PyAV. Runs in a decode worker."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from fractions import Fraction

import av
import numpy as np
from av.error import FFmpegError

from models.interfaces import cpus
from models.interfaces.errors import InputError
from models.interfaces.media import VideoMetadata
from service.media.file_formats import Kind, readers, recognise, refusal
from service.media.messages import VideoLimits

DAV1D = "libdav1d"
CODECS = {"h264", "hevc", "vp8", "vp9", "av1", DAV1D, "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video", "mjpeg", "msmpeg4"}
KNOWN_CODECS = "AV1, H.264, H.265, VP8, VP9, MPEG-2, MPEG-4 and Motion JPEG"
DECODE_THREADS = min(8, cpus.available())
"""Frames decoded in parallel: frames of most files have a single slice, which threads cannot share."""

av.logging.set_level(None)


class FrameLost(Exception):
    """A decoder with threads left a frame out."""


class VideoSource:
    """A video with known metadata, whose frames can be read once.

    metadata.num_frames counts the packets in the file, whatever its header says. fps is the declared rate if the
    packets' times agree with it, otherwise their mean rate. height and width are those after the display rotation.
    Frames whose size differs from the first one's are scaled to it.

    One rule for all containers and codecs: of a file that is cut short or damaged, what can be decoded is read: from
    the first error on by a decoder without threads, since those lose frames around a damaged one. Raises
    InputError with `field` for data that is not a video, has no frames that can be decoded, or exceeds a limit.
    """

    def __init__(self, data: bytes, *, field: str, limits: VideoLimits) -> None:
        self._data = data
        self._field = field
        self._limits = limits
        self._times: list[int] = []
        """Presentation times of the packets, where all have one; ascending."""
        num_frames, fps, duration = self._count()
        self._decoded = self._decode()
        self._lost = 0
        """Frames before the first one that can be decoded."""
        for first in self._decoded:
            if first is not None:
                break
            self._lost += 1
        else:
            raise self._refusal("has no frames that can be decoded")
        self._first = first
        self._first_time = (first.time or 0.0) - self._lost / fps
        self._size = (first.width, first.height)
        self._fps = fps
        height, width = (first.width, first.height) if _quarter_turns(first) % 2 else (first.height, first.width)
        self.metadata = VideoMetadata(num_frames, fps, duration, height, width)

    def frames(self, indices: Sequence[int]) -> Iterator[tuple[int, float, np.ndarray]]:
        """(index, seconds from the first frame, uint8 [height, width, 3]) of each of the ascending indices that
        can be decoded."""
        wanted = iter(indices)
        target = next(wanted, None)
        for index, frame in enumerate(itertools.chain((self._first,), self._decoded), self._lost):
            while target is not None and target <= index:
                if frame is not None and target == index:
                    yield index, self._time(frame, index), self._pixels(frame)
                target = next(wanted, None)
            if target is None:
                return

    def close(self) -> None:
        """Ends the decoder and its threads now: source and generator refer to each other and would otherwise live until
        the next garbage collection."""
        self._decoded.close()

    def _refusal(self, what: str) -> InputError:
        return InputError(self._field, f"the video {what}")

    def _open(self) -> tuple[av.container.InputContainer, av.VideoStream]:
        found = recognise(self._data)
        if found is not None and "image" in found.holds:  # FFmpeg would open AVIF and HEIC as MP4
            raise InputError(self._field, refusal(self._data, "video"))
        # max_pixels is needed here, since FFmpeg decodes a few frames to find the stream's parameters.
        options = {"max_pixels": str(self._limits.max_pixels), "threads": "1"}
        container = open_container(self._data, "video", CODECS, self._field, options)
        stream = next(
            (s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic), None
        )
        if stream is None:
            raise self._refusal("file has no video stream")
        codec = stream.codec_context
        if codec is None or codec.name not in CODECS:
            given = "a codec that is not known" if codec is None else f"the codec {codec.name}"
            raise self._refusal(f"has {given}; {KNOWN_CODECS} are supported")
        self._check_size(codec.width, codec.height)
        return container, stream

    def _check_size(self, width: int, height: int) -> None:
        most = self._limits.max_pixels
        if width < 1 or height < 1:  # FFmpeg does not say which
            raise self._refusal(f"has frames without a size, or of more than {most} pixels")
        if width * height > most:
            raise self._refusal(f"has too large frames: {width} x {height} pixels given, at most {most} allowed")

    def _count(self) -> tuple[int, float, float]:
        """(frames, frames per second, seconds), measured where possible: headers may be wrong."""
        count, duration, declared = self._scan()
        if count == 0:
            raise self._refusal("has no frames")
        if duration <= 0:
            if declared <= 0:
                raise self._refusal("has no timestamps and no frame rate")
            duration = count / declared
        if duration > self._limits.max_duration:
            raise self._refusal(
                f"is too long: {duration:.0f} s given, at most {self._limits.max_duration:.0f} s allowed"
            )
        measured = count / duration
        return count, declared if abs(declared - measured) <= 0.02 * measured else measured, duration

    def _scan(self) -> tuple[int, float, float]:
        """(frames, seconds, declared frames per second) from the packets; 0 for what the file does not say."""
        container, stream = self._open()
        with container:
            count = 0
            times: list[int] = []
            ends: list[int] = []
            for packet in self._packets(container, stream):
                if packet.is_discard:
                    continue
                count += 1
                if count > self._limits.max_source_frames:
                    raise self._refusal(f"has too many frames: at most {self._limits.max_source_frames} allowed")
                if packet.pts is not None:
                    times.append(packet.pts)
                    ends.append(packet.pts + (packet.duration or 0))
            self._times = sorted(times) if len(times) == count else []
            duration = float((max(ends) - min(times)) * (stream.time_base or Fraction(0))) if times else 0.0
            return count, duration, float(stream.average_rate or 0)

    def _packets(self, container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.Packet]:
        """Whole ones with data, up to where the file ends or breaks off."""
        with contextlib.suppress(FFmpegError):
            yield from (packet for packet in container.demux(stream) if packet.size and not packet.is_corrupt)

    def _decode(self) -> Generator[av.VideoFrame | None]:
        """All frames in order; None for one that cannot be decoded."""
        count = 0
        with contextlib.suppress(FFmpegError, FrameLost):
            for frame in self._frames(DECODE_THREADS):
                yield frame
                count += 1
            return
        yield from itertools.islice(self._frames(1), count, None)

    def _frames(self, threads: int) -> Generator[av.VideoFrame | None]:
        """As _decode. FFmpegError or FrameLost for a frame that cannot be decoded, with several threads."""
        container, stream = self._open()
        # With threads, dav1d leaves some damaged frames out without an error.
        times = self._times if threads > 1 and stream.codec_context.name == DAV1D else []
        upcoming = iter(times)
        with container:
            stream.thread_type = "AUTO"  # threads for frames, or for slices if a codec has no frame threads
            stream.codec_context.thread_count = threads
            # A frame may be larger than the container says: the decoder refuses it before it allocates memory.
            stream.codec_context.options = {"max_pixels": str(self._limits.max_pixels)}
            end = av.Packet()  # makes the decoder give what it holds back
            end.time_base = stream.time_base or Fraction(1)
            for packet in itertools.chain(self._packets(container, stream), (end,)):
                try:
                    frames = stream.codec_context.decode(packet)
                except FFmpegError:
                    if threads > 1:
                        raise
                    yield None
                    continue
                for frame in frames:
                    self._check_size(frame.width, frame.height)
                    if times and frame.pts != next(upcoming, None):
                        raise FrameLost
                    yield frame

    def _pixels(self, frame: av.VideoFrame) -> np.ndarray:
        width, height = self._size
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
        # Counter-clockwise, as in np.rot90.
        return np.rot90(pixels, _quarter_turns(self._first))

    def _time(self, frame: av.VideoFrame, index: int) -> float:
        return index / self._fps if frame.time is None else frame.time - self._first_time


def open_container(
    data: bytes, kind: Kind, codecs: Iterable[str], field: str, options: dict[str, str] | None = None
) -> av.container.InputContainer:
    """Opens a file with the formats that are read as `kind` and these codecs alone. InputError if it is none."""
    allowed = {"format": readers(kind), "protocol": ["none"], "codec": codecs}
    whitelists = {f"{name}_whitelist": ",".join(values) for name, values in allowed.items()}
    try:
        return av.open(io.BytesIO(data), "r", options=whitelists | (options or {}), metadata_errors="replace")
    except FFmpegError as error:
        raise InputError(field, refusal(data, kind)) from error


def _quarter_turns(frame: av.VideoFrame) -> int:
    return round(frame.rotation / 90) % 4
