"""The pictures, videos and recordings of a chat request, or of an item of a conversation: loaded and decoded within a
request's limits, and laid out as items of the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem, MediaKind, VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from models.text.processor import ChatProcessor
from service.api.chat.schema import ChatRequestBody, MediaUrl, VideoOptions
from service.api.context import ServerContext
from service.api.http.admission import Decoding, Ticket
from service.api.http.errors import ApiError, invalid
from service.api.tracing import phase

DEFAULT_FRAME_LIST_FPS = 2.0
MAX_FPS = 30.0


@dataclass(frozen=True)
class VideoSampling:
    """The request's choice of a video's frames; `field` is the path of the object that has it. fps: frames per second
    to use, or the rate of a frame list. num_frames: number of frames to use, evenly spread. max_frames: limit.
    """

    field: str
    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None

    def check(self, share: int) -> None:
        """ApiError 400 names the field that does not fit. share: frames that each video of the request may have."""
        if self.fps is not None and self.fps > MAX_FPS:
            raise invalid(f"{self.field}.fps", f"too high: {self.fps:g} given, at most {MAX_FPS:g} allowed")
        if self.num_frames is not None and self.fps is not None:
            raise invalid(f"{self.field}.num_frames", "excludes fps: give one of them")
        for name in ("num_frames", "max_frames"):
            count = getattr(self, name)
            if count is not None and count > share:
                problem = f"too many frames: {count} given, at most {share} allowed for each video of this request"
                raise invalid(f"{self.field}.{name}", problem)

    def rate(self, metadata: VideoMetadata) -> float | None:
        """Frames per second to use, None for the model's own rule. Every frame of a list is used, since its sender has
        chosen them. num_frames is spread over all frames of the source.
        """
        return metadata.fps if metadata.listed or self.num_frames is not None else self.fps

    def choose(self, processor: ChatProcessor, metadata: VideoMetadata, most: int) -> Sequence[int]:
        wanted = most if self.num_frames is None else min(most, self.num_frames)
        return processor.sample_video(metadata, fps=self.rate(metadata), max_frames=wanted)


def first_stated(*given: tuple[VideoOptions | None, str]) -> VideoSampling | None:
    """The choice of the first of these objects that has any. given: the objects and their paths."""
    for options, field in given:
        if options is not None and (options.fps or options.num_frames or options.max_frames):
            return VideoSampling(field, options.fps, options.num_frames, options.max_frames)
    return None


def of_all_videos(body: ChatRequestBody) -> VideoSampling:
    """The request's choice for videos without one of their own."""
    io = None if body.media_io_kwargs is None else body.media_io_kwargs.video
    given = (io, "media_io_kwargs.video"), (body.mm_processor_kwargs, "mm_processor_kwargs")
    return first_stated(*given) or VideoSampling("")


@dataclass(frozen=True)
class MediaReference:
    kind: MediaKind
    media: MediaUrl
    field: str
    """Path of the URL in the request."""
    sampling: VideoSampling | None = None
    """Of a video that has one of its own."""


@dataclass(eq=False)
class PromptMedia:
    """Loads the media of one request. client: identifies the client, since clients take turns. ticket: the bytes of
    what is fetched and decoded are charged to it."""

    context: ServerContext
    processor: ChatProcessor
    references: Sequence[MediaReference]
    client: str
    ticket: Ticket
    sampling: VideoSampling = VideoSampling("")
    """Of the videos that have none of their own."""

    def __post_init__(self) -> None:
        self.budget = self.context.media.budget(self.client)
        videos = sum(reference.kind == "video" for reference in self.references)
        self._frame_share = max(1, self.context.settings.max_frames // max(1, videos))
        """Frames that each video of the request may have."""
        shares = videos + (videos < len(self.references))
        self._pixel_share = self.context.settings.max_request_pixels // max(1, shares)
        """Decoded pixels that each video may have: an equal share. If there are pictures, all of them together get one
        share, too."""

    async def load(self, reference: MediaReference) -> MediaItem:
        """One item. ApiError or InputError names the field that does not fit; ApiError 503 if the server is full."""
        load = {"image": self._load_image, "video": self._load_video, "audio": self._load_audio}[reference.kind]
        with Decoding(self.ticket) as decoding:
            try:
                with phase("media", kind=reference.kind):
                    item = await load(reference, decoding)
            except (ApiError, InputError) as error:
                if not decoding.refused:
                    self.context.metrics.observe("media_rejections_total", kind=reference.kind, reason="refused")
                if isinstance(error, InputError) and not error.field.startswith(reference.field):
                    raise InputError(reference.field, str(error)) from error  # a processor knows no request
                raise
            decoding.keep(sum(array.nbytes for array in (*item.frames, *item.arrays.values())))
        return item

    async def _load_audio(self, reference: MediaReference, decoding: Decoding) -> MediaItem:
        hears, began = self.processor.audio, time.monotonic()
        assert hears is not None
        samples = await self.context.media.audio(
            reference.media.url,
            sample_rate=hears.sample_rate,
            field=reference.field,
            client=self.budget.client,
            room=decoding,
            recording=True,
        )
        decoded = time.monotonic()
        item = await self.context.in_thread(lambda: hears.item(samples))
        self._observe("audio", began, decoded)
        return item

    async def _load_image(self, reference: MediaReference, decoding: Decoding) -> MediaItem:
        began = time.monotonic()

        def prepare(picture: Image.Image, source: bytes) -> tuple[MediaItem, float]:
            decoded = time.monotonic()
            detail = reference.media.detail or "auto"
            return self.processor.image(picture, detail=detail, source=source), decoded

        item, decoded = await self.context.media.image(
            reference.media.url, prepare, field=reference.field, budget=self.budget, room=decoding
        )
        self._observe("image", began, decoded)
        return item

    async def _load_video(self, reference: MediaReference, decoding: Decoding) -> MediaItem:
        sampling, share = reference.sampling or self.sampling, self._frame_share
        sampling.check(share)
        max_frames, max_pixels = sampling.max_frames or share, self._pixel_share
        began = time.monotonic()

        def choose(metadata: VideoMetadata) -> tuple[Sequence[int], FrameResizer]:
            fitting = min(max_frames, max(1, max_pixels // max(1, metadata.height * metadata.width)))
            indices = sampling.choose(self.processor, metadata, fitting)
            return indices, self.processor.frame_resizer(metadata, len(indices))

        async def prepare(video: VideoFrames) -> MediaItem:
            decoded = time.monotonic()
            video = replace(video, requested_fps=sampling.rate(video.metadata))
            item = await self.context.in_thread(lambda: self.processor.video(video))
            self._observe("video", began, decoded)
            return item

        return await self.context.media.video(
            reference.media.url,
            choose,
            prepare,
            frame_list_fps=sampling.fps or DEFAULT_FRAME_LIST_FPS,
            field=reference.field,
            budget=self.budget,
            room=decoding,
        )

    def _observe(self, kind: MediaKind, began: float, decoded: float) -> None:
        metrics = self.context.metrics
        metrics.observe("media_decode_duration_seconds", decoded - began, kind=kind)
        metrics.observe("preprocess_duration_seconds", time.monotonic() - decoded, kind=kind)
