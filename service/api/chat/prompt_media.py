"""The pictures and videos of a chat request, or of an item of a conversation: loaded and decoded within a request's
limits, and laid out as items of the model."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem, MediaKind, VideoFrames, VideoMetadata
from models.interfaces.processor import ChatProcessor
from models.interfaces.resizing import FrameResizer
from service.api.chat.schema import MediaUrl
from service.api.chat.video_sampling import VideoSampling
from service.api.context import ServerContext
from service.api.http.admission import Ticket
from service.api.http.decoding import Decoding
from service.api.http.errors import ApiError, naming
from service.api.tracing import phase


@dataclass(frozen=True)
class MediaReference:
    """A picture or video as the request names it."""

    kind: MediaKind
    media: MediaUrl
    field: str
    """Path of the URL in the request."""
    sampling: VideoSampling
    """Which frames of a video are used."""


class PromptMedia:
    """Loads the media of one request. client: identifies the client, since clients take turns. ticket: the bytes of
    what is fetched and decoded are charged to it."""

    def __init__(
        self,
        context: ServerContext,
        processor: ChatProcessor,
        references: Sequence[MediaReference],
        client: str,
        ticket: Ticket,
    ) -> None:
        self._context = context
        self._processor = processor
        self._references = references
        self._budget = context.media.budget(client)
        self._ticket = ticket

    def loads(self) -> list[Coroutine[Any, Any, MediaItem]]:
        """A coroutine for each item, to be awaited once."""
        return [self.load(reference) for reference in self._references]

    async def load(self, reference: MediaReference) -> MediaItem:
        """One item. ApiError or InputError names the field that does not fit; ApiError 503 if the server is full."""
        load = self._load_image if reference.kind == "image" else self._load_video
        with Decoding(self._ticket) as decoding:
            try:
                with phase("media", kind=reference.kind):
                    item = await load(reference, decoding)
            except (ApiError, InputError):
                if not decoding.refused:
                    self._context.metrics.observe("media_rejections_total", kind=reference.kind, reason="refused")
                raise
            decoding.keep(sum(frame.nbytes for frame in item.frames))
        return item

    async def _load_image(self, reference: MediaReference, decoding: Decoding) -> MediaItem:
        began = time.monotonic()

        def prepare(picture: Image.Image, source: bytes) -> tuple[MediaItem, float]:
            decoded = time.monotonic()
            detail = reference.media.detail or "auto"
            item = naming(reference.field, lambda: self._processor.image(picture, detail=detail, source=source))
            return item, decoded

        item, decoded = await self._context.media.image(
            reference.media.url,
            prepare,
            field=reference.field,
            budget=self._budget,
            charge=decoding.take,
            reserve=decoding.reserve,
            fetched=decoding.fetched,
        )
        self._observe("image", began, decoded)
        return item

    async def _load_video(self, reference: MediaReference, decoding: Decoding) -> MediaItem:
        sampling, share = reference.sampling, self._frame_share
        sampling.check(reference.media.url, self._context.settings, share)
        max_frames, max_pixels = sampling.max_frames or share, self._pixel_share
        began = time.monotonic()

        def choose(metadata: VideoMetadata) -> tuple[Sequence[int], FrameResizer]:
            fitting = min(max_frames, max(1, max_pixels // max(1, metadata.height * metadata.width)))
            indices = naming(reference.field, lambda: sampling.choose(self._processor, metadata, fitting))
            return indices, naming(reference.field, lambda: self._processor.frame_resizer(metadata, len(indices)))

        async def prepare(video: VideoFrames) -> MediaItem:
            decoded = time.monotonic()
            video = replace(video, requested_fps=sampling.rate(video.metadata))
            item = await self._context.in_thread(lambda: naming(reference.field, lambda: self._processor.video(video)))
            self._observe("video", began, decoded)
            return item

        return await self._context.media.video(
            reference.media.url,
            choose,
            prepare,
            frame_list_fps=sampling.list_fps,
            frame_list_times=sampling.times,
            field=reference.field,
            budget=self._budget,
            charge=decoding.take,
            reserve=decoding.reserve,
            fetched=decoding.fetched,
        )

    @property
    def _num_videos(self) -> int:
        return sum(reference.kind == "video" for reference in self._references)

    @property
    def _frame_share(self) -> int:
        """Frames that each video of the request may have."""
        return max(1, self._context.settings.max_frames // self._num_videos)

    @property
    def _pixel_share(self) -> int:
        """Decoded pixels that each video may have: an equal share of the request's. If there are pictures, all of them
        together get one share, too."""
        shares = self._num_videos + (self._num_videos < len(self._references))
        return self._context.settings.max_request_pixels // shares

    def _observe(self, kind: MediaKind, began: float, decoded: float) -> None:
        metrics = self._context.metrics
        metrics.observe("media_decode_duration_seconds", decoded - began, kind=kind)
        metrics.observe("preprocess_duration_seconds", time.monotonic() - decoded, kind=kind)
