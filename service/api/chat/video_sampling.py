"""Which frames of a video are used: the fields of a request for that, and the frames that they choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from models.interfaces.media import VideoMetadata
from models.interfaces.processor import ChatProcessor
from service.api.chat.schema import PIXEL_BOUNDS, ChatRequestBody, ContentPart, MediaUrl, ProcessorOptions, VideoOptions
from service.api.http.errors import bad_request
from service.media.loader import is_frame_list
from service.settings.settings import Settings

DEFAULT_FRAME_LIST_FPS = 2.0
MAX_FPS = 30.0


@dataclass(frozen=True)
class VideoSampling:
    """The request's choice of a video's frames; `field` is the path of the object that has it. fps: frames per second
    to use, or the rate of a frame list. num_frames: number of frames to use, evenly spread. max_frames: limit. times:
    seconds of the frames of a list.
    """

    field: str
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    times: tuple[float, ...] | None = None

    @property
    def says_something(self) -> bool:
        return any(value is not None for value in (self.fps, self.num_frames, self.max_frames, self.times))

    def check(self, url: str, settings: Settings, share: int) -> None:
        """ApiError 400 names the field that does not fit. share: frames that each video of the request may have."""
        if self.fps is not None and self.fps > MAX_FPS:
            self._refuse("fps", f"too high: {self.fps:g} given, at most {MAX_FPS:g} allowed.")
        if self.num_frames is not None and self.fps is not None:
            self._refuse("num_frames", "excludes fps: give one of them.")
        for name in ("num_frames", "max_frames"):
            count = getattr(self, name)
            if count is not None and count > share:
                self._refuse(
                    name,
                    f"too many frames: {count} given, at most {share} allowed for each video of this request.",
                )
        if self.times is not None:
            self._check_times(self.times, url)

    def _check_times(self, times: tuple[float, ...], url: str) -> None:
        if not is_frame_list(url):
            self._refuse("times", "only for lists of frames (data:video/jpeg); a video file has its own.")
        if self.fps is not None:
            self._refuse("times", "excludes fps: give one of them.")
        if any(later < earlier for earlier, later in pairwise(times)):
            self._refuse("times", "must be in ascending order.")
        frames = url.count(",")  # one behind each comma
        if len(times) != frames:
            self._refuse("times", f"{len(times)} given for {frames} frames; each frame has one.")

    def _refuse(self, name: str, problem: str) -> None:
        field = f"{self.field}.{name}" if self.field else name
        raise bad_request(f"{field}: {problem}", field)

    @property
    def list_fps(self) -> float:
        """Rate of the frames of a list."""
        return self.fps or DEFAULT_FRAME_LIST_FPS

    def rate(self, metadata: VideoMetadata) -> float | None:
        """Frames per second to use, None for the model's own rule. Every frame of a list is used, since its sender has
        chosen them. num_frames is spread over all frames of the source.
        """
        return metadata.fps if metadata.listed or self.num_frames is not None else self.fps

    def choose(self, processor: ChatProcessor, metadata: VideoMetadata, most: int) -> Sequence[int]:
        """Indices of at most `most` frames."""
        wanted = most if self.num_frames is None else min(most, self.num_frames)
        return processor.sample_video(metadata, fps=self.rate(metadata), max_frames=wanted)


def stated(options: MediaUrl | ContentPart | VideoOptions, field: str) -> VideoSampling:
    """The choice in the object at `field`."""
    times = getattr(options, "times", None)
    return VideoSampling(
        field, options.fps, options.num_frames, options.max_frames, None if times is None else tuple(times)
    )


def of_all_videos(body: ChatRequestBody) -> VideoSampling:
    """The request's choice for videos without one of their own."""
    io = body.media_io_kwargs.video if body.media_io_kwargs else None
    found = [stated(io, "media_io_kwargs.video")] if io else []
    if body.mm_processor_kwargs:
        refuse_pixel_bounds(body.mm_processor_kwargs, "mm_processor_kwargs")
        found.append(stated(body.mm_processor_kwargs, "mm_processor_kwargs"))
    return first_stated(found)


def first_stated(samplings: Sequence[VideoSampling]) -> VideoSampling:
    """The first choice that is not empty, else an empty one."""
    return next((sampling for sampling in samplings if sampling.says_something), VideoSampling(""))


def refuse_pixel_bounds(fields: ContentPart | MediaUrl | ProcessorOptions, at: str) -> None:
    for name in PIXEL_BOUNDS:
        if getattr(fields, name) is not None:
            raise bad_request(
                f"{at}.{name}: not supported; use detail for pictures, fps and max_frames for videos.",
                f"{at}.{name}",
                "unsupported_parameter",
            )
