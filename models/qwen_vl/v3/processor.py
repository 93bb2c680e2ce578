"""Pictures, videos and prompts of Qwen3-VL. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import ChatMessage, MediaItem, MediaKind, Prompt, TokenizedChat, VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from models.qwen_vl.items import grid_of, picture_item, vision_item
from models.qwen_vl.positions import mrope_positions
from models.qwen_vl.v3.config import Qwen3VLConfig, load_config
from models.qwen_vl.v3.videos import pair_tenths, sample_frames, time_text, video_size
from models.text.chat_template import THINKING, ChatTemplate
from models.text.placeholders import MediaTokens, join, plain, repeated
from models.text.processor import ChatProcessor, load_text
from models.text.tokenizer import Tokenizer
from models.text.tools import Turn

_OPTIONS = frozenset({"enable_thinking", "preserve_thinking", "reasoning_effort"})
_THOUGHT = "a thought to look for"


class Qwen3VLProcessor(ChatProcessor):
    """ChatProcessor of Qwen3-VL, Instruct and Thinking, and of Qwen3.5.

    Items are those of models/qwen_vl/items.py; a video has the array tenths int32 [pairs], too, the time before each
    pair in tenths of a second.
    """

    template_defaults: Mapping[str, bool] = {"add_vision_id": False}

    def __init__(
        self, config: Qwen3VLConfig, tokenizer: Tokenizer, template: ChatTemplate, generation: Mapping[str, Any]
    ) -> None:
        placeholders: dict[MediaKind, int] = {"image": config.image_token_id, "video": config.video_token_id}
        super().__init__(config.text, tokenizer, template, generation, placeholders)
        self.config = config
        self.template_options = _OPTIONS & template.variables
        thinks = "enable_thinking" in self.template_options or _prompt_of(template).rstrip().endswith(THINKING[0])
        self.reasoning_markers = THINKING if thinks else None
        # Some templates take an earlier answer's reasoning out of its text; those of 3.8 leave the text as it is.
        answer: Turn = {"role": "assistant", "content": f"{_THOUGHT}{THINKING[1]}"}
        self.divides_answers = thinks and _THOUGHT not in _prompt_of(template, answer)
        self._settings = repr((config.tower, config.images, config.videos)).encode()
        around = {config.vision_start_token_id, config.vision_end_token_id}
        if unknown := around - set(tokenizer.special_ids.values()):
            field = "vision_start_token_id or vision_end_token_id"
            raise CheckpointError(f"config.json: {field} {sorted(unknown)} is not in tokenizer.json")

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        vision = self.config.tower.vision
        return picture_item(picture, self.config.images, vision, self._settings, detail=detail, source=source)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        return sample_frames(metadata, fps=fps, max_frames=max_frames, rule=self.config.frames)

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        """All frames together stay within the checkpoint's pixel limits for videos."""
        vision, limits = self.config.tower.vision, self.config.videos
        sizes = {"pair": vision.temporal_patch_size, "factor": vision.factor}
        bounds = {"min_pixels": limits.min_pixels, "max_pixels": limits.max_pixels}
        size = video_size(num_frames, metadata.height, metadata.width, **sizes, **bounds)
        return FrameResizer(*size, may_leave=True)

    def video(self, video: VideoFrames) -> MediaItem:
        frames, to = video.resized(self.frame_resizer)
        vision = self.config.tower.vision
        tenths = np.array(pair_tenths(video, vision.temporal_patch_size), dtype=np.int32)
        size = to.height, to.width
        return vision_item("video", frames, size, vision, self._settings, arrays={"tenths": tenths})

    def template_chat(self, token_ids: Sequence[int], messages: Sequence[ChatMessage]) -> TokenizedChat:
        return super().template_chat(self._bare_videos(token_ids), messages)

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """With M-RoPE positions; those of a frame pair are like a picture's."""
        prompt = super().expand_placeholders(chat, items)
        runs = [(run.start, (1, *grid_of(items[run.item])[1:])) for run in prompt.placeholders]
        merge_size = self.config.tower.vision.merge_size
        positions, next_position = mrope_positions(len(prompt.token_ids), runs, merge_size=merge_size)
        return replace(prompt, positions=positions, next_position=next_position)

    def media_tokens(self, item: MediaItem) -> MediaTokens:
        """A video becomes its frame pairs, each with its time before it."""
        if item.kind == "image":
            return super().media_tokens(item)
        tenths = item.arrays["tenths"].tolist()
        frame = repeated(self.placeholders["video"], item.num_embeds // len(tenths))
        closing = plain([self.config.vision_end_token_id])
        parts: list[MediaTokens] = []
        for time in tenths:
            # Encoded separately, so that the ids of the text before it do not change.
            text = self.tokenizer.encode_plain(time_text(time))
            parts += [plain([*text, self.config.vision_start_token_id]), frame, closing]
        return join(parts)

    def _bare_videos(self, token_ids: Sequence[int]) -> list[int]:
        """Removes the markers that the template puts around a whole video, since each frame pair gets its own."""
        config, bare = self.config, list(token_ids)
        around = [config.vision_start_token_id, config.video_token_id, config.vision_end_token_id]
        places = [index for index, token in enumerate(bare) if token == config.video_token_id]
        for index in reversed(places):
            if bare[index - 1 : index + 2] == around:
                del bare[index + 1], bare[index - 1]
        return bare


def load_processor(directory: Path) -> Qwen3VLProcessor:
    """Reads config.json, the two preprocessor files, generation_config.json, tokenizer.json and the chat template."""
    return Qwen3VLProcessor(load_config(directory), *load_text(directory, spoken=THINKING))


def _prompt_of(template: ChatTemplate, *earlier: Turn) -> str:
    """The prompt of two questions with `earlier` turns between them; "" if it is refused. Templates of fine-tuned
    checkpoints may refuse questions without a system message, or the other way round."""
    question: Turn = {"role": "user", "content": "?"}
    turns = [question, *earlier, question] if earlier else [question]
    for opening in ([], [{"role": "system", "content": "?"}]):
        try:
            return template.render([*opening, *turns])
        except InputError:
            continue
    return ""
