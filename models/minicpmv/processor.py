"""Pictures, videos and prompts of MiniCPM-V. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

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
from models.minicpmv.config import MiniCPMVConfig, load_config
from models.minicpmv.slicing import SlicedPicture, slice_picture, slice_sizes
from models.minicpmv.tokens import PictureTokens
from models.minicpmv.video import fused_pack, sample_fused, sample_unfused, temporal_ids
from models.text.chat_template import THINKING, ChatTemplate
from models.text.placeholders import MediaTokens, join, repeated
from models.text.processor import ChatProcessor, load_text
from models.text.tokenizer import Tokenizer
from models.text.tools import Escape

REFUSED_OPTIONS = {"add_vision_id": "MiniCPM-V numbers pictures by a rule of its own"}
NO_TIME = -1
"""Temporal id of a slice without a time: pictures, and frames that are not fused."""
_PLACEHOLDER = "<image>"
"""The text that the template is given for an item of each kind."""
_STOP_TOKENS = {
    "2.5": ("<|eot_id|>", "<|end_of_text|>"),
    "2.6": ("<|im_end|>", "<|endoftext|>"),
    "4.0": ("<|im_end|>", "</s>"),
    "4.5": ("<|im_end|>", "<|endoftext|>"),
}
_SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 100}
"""The defaults of the published `chat`, used if the files name no sampling."""


class MiniCPMVProcessor(ChatProcessor):
    """ChatProcessor of MiniCPM-V 2.5, 2.6, 4.0 and 4.5.

    An item's frames are its slices in the order of the encoder. Its arrays: group_sizes int32 [groups], slices that
    share one set of queries; temporal_ids int32 [slices]; grid int32 [2], columns and rows of crops, 0 without.
    """

    refused_options = REFUSED_OPTIONS
    template_defaults: Mapping[str, bool] = {"enable_thinking": False}

    def __init__(
        self, config: MiniCPMVConfig, tokenizer: Tokenizer, template: ChatTemplate, generation: Mapping[str, Any]
    ) -> None:
        self._tokens = PictureTokens(tokenizer, as_2_5=config.version == "2.5")
        placeholders: dict[MediaKind, int] = dict.fromkeys(("image", "video"), tokenizer.special_ids[_PLACEHOLDER])
        stops, penalty = _STOP_TOKENS[config.version], 1.03 if config.version == "4.5" else 1.05
        sampling = {**_SAMPLING, "repetition_penalty": penalty}
        super().__init__(config.text, tokenizer, template, generation, placeholders, stops, sampling)
        self.config = config
        self.reasoning_markers = THINKING if set(THINKING) <= tokenizer.special_ids.keys() else None
        self.divides_answers = self.reasoning_markers is not None
        self._picture_rule = config.slicing
        self._overview_rule = replace(config.slicing, max_slices=1)
        self._settings = repr((config.version, config.slicing, config.num_queries)).encode()
        queries = repeated(tokenizer.special_ids["<unk>"], config.num_queries)
        self._picture_tokens = cache(partial(self._tokens.picture, queries, queries))

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """With detail "low" only the overview is used."""
        rule = self._overview_rule if detail == "low" else self._picture_rule
        sliced = slice_picture(picture, rule, may_leave=True)
        count = len(slice_sizes(sliced.slices, sliced.arrays))
        return self._item("image", sliced, [1] * count, [NO_TIME] * count, source)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        if self.config.fuses_frames:
            return sample_fused(metadata, fps, max_frames)[0]
        return sample_unfused(metadata, fps, max_frames)

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        """Frames are not cut into slices."""
        width, height = self._overview_rule.overview_size(metadata.width, metadata.height, enlarge=True)
        self._overview_rule.check_side(max(width, height), metadata.width, metadata.height)
        return FrameResizer(height, width)

    def video(self, video: VideoFrames) -> MediaItem:
        """4.5 fuses neighbouring frames if the video has more frames than groups, by the rule that sampled them."""
        frames, _ = video.resized(self.frame_resizer)
        if not self.config.fuses_frames:
            return self.video_item(frames, [[NO_TIME]] * len(frames))
        pack = fused_pack(video.metadata, video.requested_fps, len(video.frames))
        ids = temporal_ids(video.times, video.metadata).tolist()
        return self.video_item(frames, [ids[i : i + pack] for i in range(0, len(ids), pack)])

    def video_item(self, frames: Sequence[np.ndarray], groups: Sequence[Sequence[int]]) -> MediaItem:
        """Resized frames with the temporal ids of each group."""
        times = [time for ids in groups for time in ids]
        return self._item("video", SlicedPicture(tuple(frames), None), [len(ids) for ids in groups], times)

    def template_content(self, parts: Sequence[ContentPart], kinds: Sequence[MediaKind], escaped: Escape) -> str:
        """The template takes one text; the parts of a content are joined by line breaks."""
        return "\n".join(_PLACEHOLDER if part.item is not None else escaped(part.text or "") for part in parts)

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """Pictures are numbered as they come, videos are not."""
        media: list[MediaTokens] = []
        pictures = 0
        for _, index in chat.placeholders:
            item = items[index]
            columns, rows = item.arrays["grid"].tolist()
            tokens = self._picture_tokens((columns, rows))
            if item.kind == "video":  # each frame, or group of fused frames, on a line of its own
                tokens = self._tokens.lines(tokens, len(item.arrays["group_sizes"]))
            elif self.config.use_image_id:
                tokens = join([self._tokens.number(pictures), tokens])
            media.append(tokens)
            pictures += item.kind == "image"
        return self.plain_prompt(chat, media, items)

    def _item(
        self,
        kind: MediaKind,
        sliced: SlicedPicture,
        group_sizes: Sequence[int],
        times: Sequence[int],
        source: bytes | None = None,
    ) -> MediaItem:
        arrays = {
            "group_sizes": np.array(group_sizes, dtype=np.int32),
            "temporal_ids": np.array(times, dtype=np.int32),
            "grid": np.array(sliced.grid or (0, 0), dtype=np.int32),
            **sliced.arrays,
        }
        sizes = slice_sizes(sliced.slices, arrays)
        return MediaItem(
            kind=kind,
            frames=sliced.slices,
            arrays=arrays,
            num_patches=sum(high * wide for high, wide in sizes) // self.config.vision.patch_size**2,
            num_sequences=len(sizes),
            num_embeds=len(group_sizes) * self.config.num_queries,
            digest=media_digest(kind, sliced.slices, arrays, self._settings, source),
        )


def load_processor(directory: Path) -> MiniCPMVProcessor:
    """Reads config.json, preprocessor_config.json, generation_config.json, tokenizer.json and the chat template."""
    return MiniCPMVProcessor(load_config(directory), *load_text(directory, spoken=THINKING))
