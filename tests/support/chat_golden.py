"""Golden prompts of the chat families through processor, encoder and decoder, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from models.interfaces.media import (
    ChatMessage,
    ContentPart,
    MediaItem,
    Prompt,
    Tool,
    ToolCall,
    VideoFrames,
    VideoMetadata,
)
from models.protocol import ChatModel, VisionEncoder
from models.qwen_vl.pictures import VideoLimits
from models.text.processor import ChatProcessor
from tests.support.encoder_replay import eager
from tests.support.golden import inputs, read_json
from tests.support.paged import PagedCache
from tests.support.prompts import prompt_of


def golden_prompt(processor: ChatProcessor, directory: Path, name: str, **options: Any) -> Prompt:
    """Prompt `name` of inputs.json, its pictures read from the directory."""
    messages, items = golden_messages(processor, directory, name)
    return prompt_of(processor, messages, items, options=options, tools=golden_tools(directory, name))


def golden_messages(processor: ChatProcessor, directory: Path, name: str) -> tuple[list[ChatMessage], list[MediaItem]]:
    prompt = inputs(directory)["prompts"][name]
    items: list[MediaItem] = []
    messages = []
    for message in prompt["messages"]:
        content = message["content"]
        parts = []
        for piece in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if piece["type"] == "text":
                parts.append(ContentPart(text=piece["text"]))
                continue
            if piece["type"] == "video":
                known: dict[str, Any] = {name: piece[name] for name in ("fps", "frames_indices") if name in piece}
                items.append(processor.video(golden_video(directory, piece["video"], **known)))
            else:
                items.append(processor.image(Image.open(directory / piece["image"]).convert("RGB")))
            parts.append(ContentPart(item=len(items) - 1))
        calls = tuple(ToolCall(**call["function"]) for call in message.get("tool_calls", []))
        messages.append(ChatMessage(message["role"], tuple(parts), calls, message.get("reasoning_content")))
    return messages, items


def golden_tools(directory: Path, name: str) -> tuple[Tool, ...]:
    return tuple(Tool(**tool["function"]) for tool in inputs(directory)["prompts"][name].get("tools", []))


def golden_video(
    directory: Path, files: Sequence[str], *, fps: float = 2.0, frames_indices: Sequence[int] | None = None
) -> VideoFrames:
    """A video of picture files. frames_indices: their numbers in the source, by default all of it."""
    frames = tuple(np.asarray(Image.open(directory / file).convert("RGB")) for file in files)
    height, width, _ = frames[0].shape
    indices = tuple(frames_indices or range(len(frames)))
    total = indices[-1] + 1
    metadata = VideoMetadata(total, fps, total / fps, height, width)
    return VideoFrames(frames, indices, tuple(index / fps for index in indices), metadata)


def golden_video_limits(directory: Path) -> VideoLimits:
    """The reference patched the frames of Qwen2-VL at their own size, inside the limits of pictures."""
    settings = read_json(directory, "preprocessor_config.json")
    return VideoLimits(settings["min_pixels"], settings["max_pixels"], 10**9)


@torch.inference_mode()
def encode(encoder: VisionEncoder, items: Sequence[MediaItem], device: torch.device) -> Tensor:
    """Embeddings of all items, at the exact size."""
    return eager(encoder, items, device)


@torch.inference_mode()
def prompt_rows(model: ChatModel, prompt: Prompt, device: torch.device) -> Tensor:
    """Embeddings of a prompt [n, hidden_size], those of its items in place; with items, room for their features."""
    hidden = model.decoder.embed(torch.from_numpy(prompt.token_ids).long().to(device))
    if not prompt.items:
        return hidden
    embeds = encode(model.encoder, prompt.items, device).to(hidden.dtype)
    hidden = torch.nn.functional.pad(hidden, (0, embeds.shape[1] - hidden.shape[1]))
    start = 0
    for run in sorted(prompt.placeholders, key=lambda run: (run.item, run.start)):
        hidden[run.start : run.start + run.length] = embeds[start : start + run.length]
        start += run.length
    assert start == embeds.shape[0]
    return hidden


@torch.inference_mode()
def generate(
    model: ChatModel, prompt: Prompt, tokens: int, *, chunk: int | None = None, forced: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, list[int]]:
    """Prefill (in chunks), then `tokens` greedy or forced steps: prompt logits [n, V], step logits [tokens, V], ids."""
    decoder = model.decoder
    weight = next(iter(decoder.parameters()))  # type: ignore[attr-defined]
    device = weight.device
    n = len(prompt.token_ids)
    cache = PagedCache(
        decoder.cache_specs(), n // 16 + 64, device=device, dtype=weight.dtype, state_specs=decoder.state_specs()
    )
    sequence = cache.new_sequence(n + tokens)
    hidden = prompt_rows(model, prompt, device)
    positions = torch.from_numpy(prompt.positions).to(device)
    outputs = []
    for begin in range(0, n, chunk or n):
        rows = slice(begin, min(n, begin + (chunk or n)))
        batch = cache.batch(prefills=[(sequence, rows.stop - rows.start)])
        outputs.append(decoder.forward(hidden[rows], positions[:, rows], batch))
    prompt_logits = decoder.logits(torch.cat(outputs))
    logits, ids, steps = prompt_logits[-1:], [], []
    for index in range(tokens):
        steps.append(logits)
        ids.append(int(logits[-1].argmax()) if forced is None else forced[index])
        if index + 1 == tokens:
            break
        position = torch.full((decoder.position_axes, 1), prompt.next_position + index, device=device)
        batch = cache.batch(decodes=[sequence])
        logits = decoder.logits(decoder.forward(decoder.embed(torch.tensor(ids[-1:], device=device)), position, batch))
    return prompt_logits, torch.cat(steps), ids


def rounding_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference of two tensors of one shape on any device, in float32."""
    return float((value.float().cpu() - reference).norm())


def largest_difference(actual: Tensor | np.ndarray, expected: Tensor | np.ndarray) -> float:
    """Largest absolute difference; shapes must agree."""
    actual, expected = (torch.as_tensor(value).float().cpu() for value in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual - expected).abs().max())
