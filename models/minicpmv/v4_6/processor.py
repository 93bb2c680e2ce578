"""Pictures, videos and prompts of MiniCPM-V 4.6 and 4.7. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import (
    ContentPart,
    MediaItem,
    MediaKind,
    Prompt,
    TokenizedChat,
    VideoFrames,
    VideoMetadata,
    media_digest,
)
from models.interfaces.resizing import FrameResizer
from models.minicpmv.processor import REFUSED_OPTIONS
from models.minicpmv.slicing import Cut, SlicedPicture, SliceRule, slice_picture, slice_sizes
from models.minicpmv.tokens import PictureTokens
from models.minicpmv.v4_6.config import MODES, MiniCPMV46Config, load_config
from models.minicpmv.v4_6.positions import Frame, canvas_positions
from models.text.chat_template import THINKING, ChatTemplate
from models.text.placeholders import MediaTokens, join, repeated
from models.text.processor import ChatProcessor, load_text, template_parts
from models.text.tokenizer import Tokenizer
from models.text.tools import Escape

MAX_VIDEO_EMBEDS = 16_384
"""Tokens of a video. One of so many frames of so many crops that it would take more is read in fewer frames."""
FINE_RATE = 10
"""Frames a second of which those of a long video are chosen."""


@dataclass(frozen=True)
class FrameSlicer(FrameResizer):
    """Cuts a frame: uint8 [h, w, 3] -> [1, pixels, 3], the pixels of all slices one after the other. height, width: of
    the overview; grid: (columns, rows) of the crops, None without."""

    rule: SliceRule | None = None
    cuts: tuple[Cut, ...] = ()
    grid: tuple[int, int] | None = None

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        assert self.rule is not None
        slices = slice_picture(Image.fromarray(frame), self.rule).slices
        return np.concatenate([one.reshape(1, -1, 3) for one in slices], axis=1)

    @property
    def num_pixels(self) -> int:
        return sum(high * wide for *_, high, wide in self.cuts)

    @property
    def num_bytes(self) -> int:
        return 3 * self.num_pixels

    def slices(self, cut: np.ndarray) -> list[np.ndarray]:
        """The slices of what a call returned."""
        ends = np.cumsum([high * wide for *_, high, wide in self.cuts])
        parts = zip(self.cuts, np.split(cut[0], ends[:-1]), strict=True)
        return [part.reshape(high, wide, 3) for (*_, high, wide), part in parts]


class MiniCPMV46Processor(ChatProcessor):
    """ChatProcessor of MiniCPM-V 4.6 and 4.7.

    An item's frames are its slices: of each picture or frame the overview, then the crops row by row. Its array: grid
    int32 [2], rows and columns of crops, 0 without.
    """

    refused_options = REFUSED_OPTIONS
    divides_answers = True

    def __init__(
        self, config: MiniCPMV46Config, tokenizer: Tokenizer, template: ChatTemplate, generation: Mapping[str, Any]
    ) -> None:
        placeholders: dict[MediaKind, int] = {"image": config.image_token_id, "video": config.video_token_id}
        super().__init__(config.text, tokenizer, template, generation, placeholders)
        self.template_options = frozenset({"enable_thinking"}) & template.variables
        self.reasoning_markers = THINKING if self.template_options else None
        self._tokens = PictureTokens(tokenizer)
        self._frame_tokens = lru_cache(maxsize=256)(self._tokens_of)
        self.configure(config)
        self.modes = {mode: copy(self).configure(config.in_mode(mode)) for mode in MODES}

    def configure(self, config: MiniCPMV46Config) -> MiniCPMV46Processor:
        self.config = config
        self._settings = repr((config.merge, config.vision, config.pixel_mean, config.pixel_std)).encode()
        return self

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """With detail "low" only the overview is used."""
        rule = self.config.images.slicing
        sliced = slice_picture(picture, replace(rule, max_slices=1) if detail == "low" else rule, may_leave=True)
        return self._item("image", sliced, source)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        rule = self.config.videos
        affordable = MAX_VIDEO_EMBEDS * rule.slicing.unit**2 // self._slicer(metadata).num_pixels
        most = max(1, min(rule.max_frames, max_frames, affordable))
        return sample_frames(metadata, fps=fps, max_frames=most)

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameSlicer:
        slicer = self._slicer(metadata)
        tokens = num_frames * slicer.num_pixels // self.config.videos.slicing.unit**2
        if tokens > MAX_VIDEO_EMBEDS:
            raise InputError(
                "video_url",
                f"{num_frames} frames take {tokens} tokens, at most {MAX_VIDEO_EMBEDS} are allowed: send fewer or "
                "smaller frames",
            )
        return slicer

    def _slicer(self, metadata: VideoMetadata) -> FrameSlicer:
        rule, width, height = self.config.videos.slicing, metadata.width, metadata.height
        cuts = rule.cuts(width, height)
        return FrameSlicer(*cuts[0][:2], False, rule, tuple(cuts), rule.grid(width, height))

    def video(self, video: VideoFrames) -> MediaItem:
        frames, slicer = video.resized(self.frame_resizer)
        assert isinstance(slicer, FrameSlicer)
        slices = tuple(one for frame in frames for one in slicer.slices(frame))
        return self._item("video", SlicedPicture(slices, slicer.grid))

    def template_content(self, parts: Sequence[ContentPart], kinds: Sequence[MediaKind], escaped: Escape) -> Any:
        """The template joins the parts of a content by line breaks, so texts stay parts."""
        return template_parts(parts, kinds, escaped) or ""

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """Numbers pictures, and in 4.6 videos apart from them, as they come; each becomes its frames one by one."""
        counts = {"image": 0, "video": 0}
        media: list[MediaTokens] = []
        frames: list[tuple[int, Frame]] = []
        grown = 0
        for index, number in chat.placeholders:
            item, frame = items[number], self.frame(items[number])
            parts = [self._tokens.number(counts[item.kind])] if self._numbered(item.kind) else []
            counts[item.kind] += 1
            one = self._frame_tokens(item.kind, frame)
            per_frame = 1 + frame.grid[0] * frame.grid[1]
            start = index + grown + sum(len(part.token_ids) for part in parts)
            for position in range(item.num_sequences // per_frame):
                frames.append((start + position * len(one.token_ids), frame))
                parts.append(one)
            media.append(join(parts))
            grown += len(media[-1].token_ids) - 1
        prompt = self.plain_prompt(chat, media, items)
        if not self.config.canvas:
            return replace(prompt, positions=prompt.positions.repeat(3, axis=0))
        positions, following = canvas_positions(prompt.token_ids, frames, self._tokens.structural)
        return replace(prompt, positions=positions, next_position=following)

    def frame(self, item: MediaItem) -> Frame:
        """The layout that all frames of an item have."""
        rows, columns = item.arrays["grid"].tolist()
        size = self.config.vision.patch_size * self.config.merge
        sides = [(high // size, wide // size) for high, wide in slice_sizes(item.frames, item.arrays)]
        return Frame(sides[0], (rows, columns), sides[-1] if rows else (0, 0))

    def _numbered(self, kind: MediaKind) -> bool:
        """Pictures; in 4.6 videos, too."""
        if kind == "image":
            return self.config.images.use_image_id
        return self.config.videos.use_image_id and not self.config.canvas

    def _tokens_of(self, kind: MediaKind, frame: Frame) -> MediaTokens:
        overview, crop = (repeated(self.placeholders[kind], high * wide) for high, wide in (frame.overview, frame.crop))
        return self._tokens.picture(overview, crop, frame.grid[::-1])

    def _item(self, kind: MediaKind, sliced: SlicedPicture, source: bytes | None = None) -> MediaItem:
        """sliced: a picture, or all frames, whose grid is that of each."""
        arrays = {"grid": np.array((sliced.grid or (0, 0))[::-1], dtype=np.int32), **sliced.arrays}
        sizes = slice_sizes(sliced.slices, arrays)
        pixels, patch = sum(high * wide for high, wide in sizes), self.config.vision.patch_size
        return MediaItem(
            kind=kind,
            frames=sliced.slices,
            arrays=arrays,
            num_patches=pixels // patch**2,
            num_sequences=len(sizes),
            num_embeds=pixels // (patch * self.config.merge) ** 2,
            digest=media_digest(kind, sliced.slices, arrays, self._settings, source),
        )


def sample_frames(metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
    """Frames to read: one a second (or `fps`); where these are more than `max_frames`, some of them or of ten a second,
    evenly spaced; of a list all, thinned evenly. Source: the published video processor, which asks for a rate of 1."""
    last, rate = metadata.num_frames - 1, fps or 1.0
    if metadata.listed:
        indices = list(range(metadata.num_frames))
    elif rate < FINE_RATE and metadata.duration * rate > max_frames:
        steps = range(int(metadata.duration / (1 / FINE_RATE)))
        indices = [min(int(step / FINE_RATE * metadata.fps), last) for step in steps]
    else:
        count = max(1, int(np.ceil(metadata.duration * rate)))
        indices = [min(int(index * metadata.fps / rate), last) for index in range(count)]
    if len(indices) > max_frames:
        indices = [indices[i] for i in np.linspace(0, len(indices) - 1, max_frames, dtype=int)]
    return indices


def load_processor(directory: Path) -> MiniCPMV46Processor:
    """Reads config.json, processor_config.json, generation_config.json, tokenizer.json and the chat template."""
    return MiniCPMV46Processor(load_config(directory), *load_text(directory, spoken=THINKING))
